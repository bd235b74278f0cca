# SPDX-License-Identifier: Apache-2.0
"""What one strategy does, costs and cannot do; its options; how a config names it."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import docstring_parser
from lightning.pytorch.strategies import StrategyRegistry

import stratagem
from stratagem.registry import strategies, unknown
from stratagem.strategy.lightning_registry import lightning_conflict, lightning_names, names_to_show

_ARGUMENTS = re.compile(r"^Args:\n(?: +.*\n|\n)*", re.MULTILINE)  # told below, with types and defaults


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("name", help="a registered name, as `stratagem strategies` lists them")


def run(options: argparse.Namespace) -> int:
    """Print the page; returns 0.

    Raises:
        PluginError: nobody registered the name, or its plugin cannot be imported.
    """
    ours = strategies()
    name = options.name if options.name in ours else options.name.lower()
    if name in ours and not lightning_conflict(ours[name]):
        entry = ours[name]
        cls, origin, fixed = entry.load(), f"{entry.distribution} {entry.version}", {}
        class_path = entry.value.replace(":", ".")
    elif name in lightning_names():
        data: dict[str, Any] = StrategyRegistry[name]
        cls, origin, fixed = data["strategy"], "Lightning's own", data["init_params"]
        class_path = f"lightning.pytorch.strategies.{cls.__name__}"
    else:
        raise unknown(options.name, names_to_show(), kind="strategy")
    print(f"{name}  ({class_path}, {origin})\n")
    print(_ARGUMENTS.sub("", f"{inspect.getdoc(cls) or 'It has no docstring.'}\n").rstrip())
    package = sys.modules.get(cls.__module__.rpartition(".")[0]) if name in ours else None
    if package is not None and package.__doc__:
        print(f"\n{inspect.cleandoc(package.__doc__)}")
    print("\nOptions" + (f", where this name sets {fixed}:" if fixed else ":"))
    print("\n".join(f"  {line}" for line in _options(cls)) or "  none")
    print(f"\n{_overlay(name, class_path)}")
    return 0


def _options(cls: Any, prefix: str = "") -> Iterator[str]:
    """One line per option, as a config writes it: name, type, default, and what its docstring says."""
    try:
        hints = typing.get_type_hints(cls.__init__ if inspect.isclass(cls) else cls)
    except (NameError, TypeError):
        hints = {}
    texts = _texts(cls)
    for parameter in inspect.signature(cls).parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        hint = hints.get(parameter.name, parameter.annotation)
        name, text = f"{prefix}{parameter.name}", texts.get(parameter.name, "")
        settings = [kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind)]
        kind = "" if hint is parameter.empty else f": {_written(hint)}"
        default = " (required)" if parameter.default is parameter.empty else f" = {_value(parameter.default)}"
        yield f"{name}: {text}" if settings else f"{name}{kind}{default}" + (f"\n      {text}" if text else "")
        for group in settings:
            yield from (f"  {line}" for line in _options(group, f"{name}."))


def _written(hint: Any) -> str:
    """A type as a config knows it: choices as the words to choose among."""
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return " | ".join(_value(member) for member in hint)
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(_value, typing.get_args(hint)))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " | ".join("null" if part is types.NoneType else _written(part) for part in typing.get_args(hint))
    return inspect.formatannotation(hint).replace("typing.", "")


def _value(value: Any) -> str:
    """A value as a config writes it."""
    if isinstance(value, enum.Enum):
        return str(value.value if isinstance(value.value, str) else value.name)
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    return value if isinstance(value, str) and value else str(value) if isinstance(value, timedelta) else repr(value)


def _texts(cls: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for documented in (cls, getattr(cls, "__init__", None)):
        for parameter in docstring_parser.parse(inspect.getdoc(documented) or "").params:
            found.setdefault(parameter.arg_name, " ".join((parameter.description or "").split()))
    return found


def _overlay(name: str, class_path: str) -> str:
    """The config file of the name where this installation has one, else the lines to write."""
    here = Path(stratagem.__file__).parent.parent / "configs" / "strategy" / f"{name}.yaml"
    if here.is_file():
        shown = here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here
        head, text = f"Config: --config {shown}", here.read_text(encoding="utf-8").rstrip()
    else:
        head, text = "Config:", f"trainer:\n  strategy: {name}"
    body = "\n".join(f"  {line}" for line in text.splitlines())
    return (
        f"{head}\n{body}\nWith options, `--trainer.strategy.OPTION VALUE`, or class_path: {class_path} with init_args."
    )
