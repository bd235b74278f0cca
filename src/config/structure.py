# SPDX-License-Identifier: Apache-2.0
"""Keys, types and class paths of a run, checked part by part so that every fault is found, not only the first.

One key at a time is given to a parser of the same classes that the run itself uses; where a value holds classes
(`class_path` with `init_args`), each class is opened and its arguments are checked one by one in turn.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, final

from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, LRSchedulerTypeTuple
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer

from stratagem.config.classes import find_class
from stratagem.config.messages import understand
from stratagem.config.sources import KeyPath, Settings
from stratagem.errors import ConfigError, UserError
from stratagem.registry import near, strategies

_BASES: dict[KeyPath, type] = {
    ("model",): LightningModule,
    ("data",): LightningDataModule,
    ("trainer", "strategy"): Strategy,
    ("trainer", "callbacks"): Callback,
    ("trainer", "logger"): Logger,
}
_SHOWN_IN_FULL = 16


@final
@dataclass(frozen=True)
class ClassNode:
    """One class, or function that builds an object, that the run names; and its written arguments, converted."""

    path: KeyPath
    cls: Any
    init_args: dict[str, Any]


@final
@dataclass
class Structure:
    """What the check found.

    Attributes:
        errors: every fault of keys, types and class paths.
        refusals: what settings dataclasses refuse, though its keys and types are right.
        classes: the classes without a fault of their own, in the order of the run.
    """

    settings: Settings
    errors: list[UserError] = field(default_factory=list)
    refusals: list[UserError] = field(default_factory=list)
    classes: list[ClassNode] = field(default_factory=list)

    def fault(self, path: KeyPath, what: str, *, allowed: str = "", do: str = "") -> None:
        """Remember one fault at a key path."""
        self.errors.append(ConfigError(what, where=self.settings.where(path), allowed=allowed, do=do))

    def open_class(self, path: KeyPath, name: str) -> None:
        """Check a class that is named without arguments."""
        _open_class(self, path, {"class_path": name}, _BASES.get(path))

    def unknown_key(self, path: KeyPath, known: Iterable[str], of: str) -> None:
        """Remember a key that its class or group does not know."""
        names = sorted(known)
        close = near(path[-1], names)
        hint = f" (did you mean {' or '.join(close)}?)" if close else ""
        many = f"one of the {len(names)} keys that --help lists"
        allowed = many if len(names) > _SHOWN_IN_FULL else ", ".join(names) or "no key at all"
        self.fault(path, f"{of} has no key {path[-1]!r}{hint}", allowed=allowed)


def check(settings: Settings, verb: str) -> Structure:
    """Check every key of a run.

    Args:
        settings: what the run asks for.
        verb: `fit`, `validate`, `test` or `predict`; decides which further options exist.
    """
    structure = Structure(settings)
    parser, known = _run_parser(verb)
    tops = {key.partition(".")[0] for key in known}
    for key, value in settings.values.items():
        if key not in tops:
            structure.unknown_key((key,), tops, "a run")
        elif key != "trainer":
            _check_value(structure, parser, (key,), value)
        elif not isinstance(value, dict):
            structure.fault(("trainer",), f"got {value!r}", allowed="keys such as max_steps and devices")
        else:
            arguments = {name.partition(".")[2] for name in known if name.startswith("trainer.")}
            for name, inner in value.items():
                if name not in arguments:
                    structure.unknown_key(("trainer", name), arguments, "the trainer")
                else:
                    _check_value(structure, parser, ("trainer", name), inner)
    return structure


def _check_value(structure: Structure, parser: ArgumentParser, path: KeyPath, value: Any) -> None:
    base = _BASES.get(path)
    before = len(structure.errors)
    if path == ("trainer", "devices") or (path == ("trainer", "strategy") and isinstance(value, str)):
        return  # numbers and names whose meaning is checked, which is stricter
    if path[0] in ("model", "data") and isinstance(value, str):
        value = {"class_path": value}
    _open_classes(structure, path, value, base)
    bad = [tuple(key.split(".")) for key in _places(structure, before)]
    if (*path, "class_path") in bad:
        return  # without its class there is nothing to hold the rest against
    _narrow(structure, parser, path, _without(value, path, bad), blamed=bad)


def _open_classes(structure: Structure, path: KeyPath, value: Any, base: type | None) -> None:
    """Check every class below a value, each argument by itself."""
    if isinstance(value, list):
        for index, inner in enumerate(value):
            _open_classes(structure, (*path, str(index)), inner, base)
    elif isinstance(value, dict) and "class_path" in value:
        _open_class(structure, path, value, base)
    elif isinstance(value, dict):
        for key, inner in value.items():
            _open_classes(structure, (*path, key), inner, None)


def _open_class(structure: Structure, path: KeyPath, node: dict[str, Any], base: type | None) -> None:
    before = len(structure.errors)
    for key in node.keys() - {"class_path", "init_args", "dict_kwargs"}:
        structure.unknown_key((*path, key), {"class_path", "init_args"}, "a class entry")
    name, arguments = node["class_path"], node.get("init_args") or {}
    if not isinstance(name, str) or not isinstance(arguments, dict):
        structure.fault(
            path, "this is not a class entry", allowed="class_path: package.module.Class, init_args: {KEY: VALUE}"
        )
        return
    try:
        if path in structure.settings.named and name in strategies():
            cls = strategies()[name].load()
        else:
            cls = find_class(name, base)
    except UserError as error:
        structure.fault((*path, "class_path"), error.what, allowed=error.allowed, do=error.do)
        return
    if not (inspect.isclass(cls) or inspect.isfunction(cls)):
        return  # a bare name that jsonargparse may know: its check comes last
    node["class_path"] = f"{cls.__module__}.{cls.__qualname__}" if "." not in name else name
    known, converted = _parameters(cls), {}
    for key in list(arguments):
        here = (*path, "init_args", key)
        if known is not None and key not in known:
            if here in structure.settings.carried:
                del arguments[key]
            else:
                structure.unknown_key(here, known, cls.__name__)
            continue
        inner_before = len(structure.errors)
        _open_classes(structure, here, arguments[key], None)
        if known is not None and len(structure.errors) == inner_before:
            one = ArgumentParser(exit_on_error=False)
            _add_arguments(one, cls, known - {key})
            parsed = _narrow(structure, one, (*path, "init_args", key), arguments[key], root=len(path) + 1)
            if parsed is not None:
                converted[key] = parsed.as_dict()[key]
                _build_settings(structure, one, (*path, "init_args", key), parsed, arguments[key])
    if len(structure.errors) == before:
        structure.classes.append(ClassNode(path, cls, converted))


def _build_settings(structure: Structure, parser: ArgumentParser, path: KeyPath, parsed: Namespace, value: Any) -> None:
    """Build a settings dataclass, whose own checks know more than types do; classes of the run are not built."""
    if not isinstance(value, dict) or _names_classes(value):
        return
    try:
        parser.instantiate(parsed)
    except Exception as error:  # jsonargparse wraps what a constructor raises
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, UserError):
            cause = cause.__cause__
        if isinstance(cause, UserError):
            key = cause.where.rpartition(".")[2]
            where = structure.settings.where((*path, key) if key in value else path)
            structure.refusals.append(type(cause)(cause.what, where=where, allowed=cause.allowed, do=cause.do))


def _names_classes(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (isinstance(value, dict) and "class_path" in value) or any(map(_names_classes, inner))


def _narrow(
    structure: Structure,
    parser: ArgumentParser,
    path: KeyPath,
    value: Any,
    *,
    root: int = 0,
    blamed: Iterable[KeyPath] = (),
) -> Namespace | None:
    """Parse one value; on an error remember it, take the key at fault away, and parse the rest again.

    Args:
        root: how many leading keys of `path` the parser does not know.
        blamed: keys that were at fault before, and whose absence is therefore no news.

    Returns:
        What the parser made of the value if it was without fault at once, else None.
    """
    blamed, shorter = list(blamed), None
    while True:
        nested = value
        for key in reversed(path[root:]):
            nested = {key: nested}
        try:
            parsed = parser.parse_object(nested)
            return parsed if shorter is None else None
        except ArgumentError as error:
            fault = understand(str(error))
        except Exception as error:  # a default or a type that jsonargparse cannot digest is not the user's fault
            structure.fault(path, f"{type(error).__name__}: {error}".split("\n")[0])
            return None
        if fault.missing:
            absent = [key for key in fault.missing if not _explained(key, blamed)]
            if absent and not isinstance(value, dict):
                structure.fault(path, f"got {value!r}", allowed=f"keys with values, {absent[0]} among them")
            elif absent:
                structure.fault(path, f"required and absent: {', '.join(absent)}")
            return None
        here = _locate(value, path, path[:root], fault.keys)
        if here == path or fault.unknown is False:
            structure.fault(here, fault.what, allowed=fault.allowed)
        else:
            structure.unknown_key(
                here, _fields(fault.owner, parser, here, root), fault.owner.rpartition(".")[2] or here[-2]
            )
        blamed.append(here)
        shorter = _without(value, path, [here])
        if here == path or shorter == value:
            return None
        value = shorter


def _locate(value: Any, path: KeyPath, root: KeyPath, keys: tuple[str, ...]) -> KeyPath:
    """The key path below `path` that a message means by its chain of keys, as far as it exists in the value."""
    chain = [part for key in keys for part in key.split(".")]
    tail = [*root, *chain]
    rest = tail[len(path) :] if tuple(tail[: len(path)]) == path else []
    here, found = value, list(path)
    for part in rest:
        if isinstance(here, dict) and part not in here and isinstance(here.get("init_args"), dict):
            here, found = here["init_args"], [*found, "init_args"]
        if not (isinstance(here, dict) and part in here):
            break
        here, found = here[part], [*found, part]
    return tuple(found)


def _explained(key: str, blamed: Iterable[KeyPath]) -> bool:
    parts = key.split(".")
    return any(path[-1] in parts or near(path[-1], parts[-1:]) for path in blamed)


def _places(structure: Structure, since: int) -> list[str]:
    return [error.where.partition(" (")[0] for error in structure.errors[since:]]


def _without(value: Any, path: KeyPath, faulty: Iterable[KeyPath]) -> Any:
    """A copy of the value at `path` without the faulty keys below it; list elements at fault go as a whole."""
    below = [place[len(path) :] for place in faulty if place[: len(path)] == path and len(place) > len(path)]
    if isinstance(value, dict):
        gone = {place[0] for place in below if len(place) == 1 or place[1:] == ("class_path",)}
        return {
            key: _without(inner, (key,), [place for place in below if place[0] == key])
            for key, inner in value.items()
            if key not in gone
        }
    if isinstance(value, list):
        gone = {place[0] for place in below if len(place) == 1 or place[1:] == ("class_path",)}
        return [
            _without(inner, (str(index),), [place for place in below if place[0] == str(index)])
            for index, inner in enumerate(value)
            if str(index) not in gone
        ]
    return value


def _parameters(cls: Any) -> set[str] | None:
    try:
        return set(_add_arguments(ArgumentParser(exit_on_error=False), cls, set()))
    except Exception:  # jsonargparse cannot read this signature; the real parser will say so if it matters
        return None


def _add_arguments(parser: ArgumentParser, cls: Any, skip: Iterable[str]) -> list[str]:
    """Add the parameters of a class, or of a function that builds the object, all but some."""
    add = parser.add_class_arguments if inspect.isclass(cls) else parser.add_function_arguments
    return add(cls, None, fail_untyped=False, sub_configs=True, skip=set[str | int](skip))


def _fields(owner: str, parser: ArgumentParser, path: KeyPath, root: int) -> set[str]:
    if owner:
        module, _, name = owner.rpartition(".")
        return _parameters(getattr(importlib.import_module(module), name)) or set()
    prefix, keys = ".".join(path[root:-1]) + ".", list(parser.get_defaults().keys())
    return {key.removeprefix(prefix).partition(".")[0] for key in keys if key.startswith(prefix)}


def _run_parser(verb: str) -> tuple[LightningArgumentParser, set[str]]:
    """A parser of everything a run may say, with nothing required; and the keys it knows."""
    parser = LightningArgumentParser(exit_on_error=False)
    known = set(parser.add_lightning_class_args(Trainer, "trainer"))
    parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True, required=False)
    parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True, required=False)
    parser.add_optimizer_args((Optimizer,))
    parser.add_lr_scheduler_args(LRSchedulerTypeTuple)
    parser.add_argument("--seed_everything", type=bool | int, default=True)
    skip: set[str | int] = set(LightningCLI.subcommands()[verb])
    known |= set(parser.add_method_arguments(Trainer, verb, skip=skip))
    return parser, known | {"model", "data", "optimizer", "lr_scheduler", "seed_everything"}
