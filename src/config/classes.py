# SPDX-License-Identifier: Apache-2.0
"""From a `class_path` to the class that it names, or to the reason why there is none."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from lightning.pytorch.strategies import Strategy

from stratagem.errors import ConfigError
from stratagem.registry import extra_that_brings, near, strategies


def find_class(name: str, base: type | None) -> Any:
    """What a `class_path` names: a full import path, or the bare name of a class that is imported or registered.

    Raises:
        ConfigError: there is no such module or class, or its import fails; the message has no place yet.
    """
    if "." not in name:
        return _short_name(name, base)
    module_name, _, attribute = name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
        if hasattr(module, attribute):  # may import in its turn: packages may load their classes lazily
            return getattr(module, attribute)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise ConfigError(f"there is no module {missing}", do=_install(missing, name)) from error
        raise ConfigError(
            f"{name} needs the module {missing}, which is not installed", do=_install(missing, name)
        ) from error
    except Exception as error:  # whatever a stranger's module raises while it is imported
        raise ConfigError(f"the import of {module_name} failed with {type(error).__name__}: {error}") from error
    public = [key for key, value in vars(module).items() if inspect.isclass(value)]
    close = near(attribute, [*public, *getattr(module, "__all__", ())])
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    raise ConfigError(f"the module {module_name} has no class {attribute!r}{hint}")


def _short_name(name: str, base: type | None) -> Any:
    for entry in strategies().values() if base is Strategy else ():
        if entry.value.rpartition(":")[2] == name:
            return entry.load()
        if entry.name == name:
            full = entry.value.replace(":", ".")
            raise ConfigError(
                f"{name!r} is a registered name, not a class", do=f"write strategy: {name}, or class_path: {full}"
            )
    below = {cls.__name__: cls for cls in _subclasses(base)} if base else {}
    if name in below or base is None:
        return below.get(name)
    close = near(name, below)
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    raise ConfigError(
        f"no {base.__name__} is called {name!r}{hint}", do="write its full import path, package.module.Class"
    )


def _install(module: str, class_path: str) -> str:
    top = class_path.partition(".")[0]
    extra = extra_that_brings(module, distribution="stratagem")
    if extra:
        return f"pip install 'stratagem[{extra}]'"
    return "check the spelling" if module.partition(".")[0] == top else f"pip install {module.partition('.')[0]}"


def _subclasses(base: type) -> set[type]:
    direct: set[type] = set(base.__subclasses__())
    return direct.union(*(_subclasses(cls) for cls in direct))
