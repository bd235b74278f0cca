# SPDX-License-Identifier: Apache-2.0
"""A run file, checked whole: every error at once, each with its key, file and line, before any process starts.

    files and options -> sources    merged values, and where each was written
                      -> structure  keys, types and class paths, one by one
                      -> meaning    strategy names, devices, checkpoint files
                      -> preflight  what the named classes themselves can tell before they are built

Building the Trainer and running it stay with LightningCLI; nothing here builds an object of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final, runtime_checkable

from stratagem.config import meaning, sources, structure
from stratagem.config.sources import KeyPath, Settings
from stratagem.errors import ConfigError, UserError

__all__ = ["ConfigErrors", "Preflight", "PreflightData", "Settings", "check", "num_cpu_ranks", "read"]

read = sources.read
num_cpu_ranks = meaning.num_cpu_ranks


@runtime_checkable
class Preflight(Protocol):
    """What a model, data module, callback or strategy may offer so that its faults are found before the run starts."""

    @classmethod
    def preflight(cls, init_args: Mapping[str, Any]) -> list[UserError]:
        """Look at the arguments that a run file gives to this class, cheaply and without building anything.

        Args:
            init_args: those that are written, converted to their types; a nested class is a mapping with `class_path`.

        Returns:
            One error per fault, its `where` the argument at fault (`path` or `data.path`); an empty list if there is
            none. Raising one says the same.
        """
        ...


@runtime_checkable
class PreflightData(Protocol):
    """What a model may offer so that data that does not fit it is found before the run starts."""

    @classmethod
    def preflight_data(
        cls, init_args: Mapping[str, Any], data: type, data_args: Mapping[str, Any], /
    ) -> list[UserError]:
        """Hold the data's arguments against the model's own, cheaply and without building anything.

        Args:
            init_args: those that are written for the model, as in `Preflight`.
            data: the class of the data module.
            data_args: those that are written for it.

        Returns:
            One error per fault, its `where` a key of the run such as `data.seq_len`.
        """
        ...


@final
class ConfigErrors(ConfigError):
    """Every error of one configuration.

    Attributes:
        errors: at least one.
    """

    def __init__(self, errors: Sequence[UserError]) -> None:
        assert errors, "a configuration without errors raises nothing"
        super().__init__(
            f"{len(errors)} errors in the configuration" if len(errors) > 1 else str(errors[0]).rstrip(".")
        )
        self.errors = tuple(errors)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by the list of errors."""
        return ConfigErrors, (self.errors,)

    def __str__(self) -> str:
        """One line for one error, a numbered list for several."""
        if len(self.errors) == 1:
            return str(self.errors[0])
        lines = [f"  {number}. {error}" for number, error in enumerate(self.errors, 1)]
        return "\n".join([f"{len(lines)} errors in the configuration:", *lines])


def check(settings: Settings, verb: str) -> tuple[list[UserError], list[UserError]]:
    """Every fault of a run's settings, in two lists.

    Args:
        settings: from `read`.
        verb: `fit`, `validate`, `test` or `predict`.

    Returns:
        Faults of form (sources, keys, types, class paths), which jsonargparse must confirm since it has the last word
        on its own grammar; and faults of meaning (names, devices, files, preflight), which stand by themselves.
    """
    found = structure.check(settings, verb)
    form = [*settings.problems, *found.errors]
    found.errors = found.refusals
    meaning.check(found)
    for node in found.classes:
        _preflight(found, node)
    _preflight_data(found)
    return form, found.errors


def _preflight(found: structure.Structure, node: structure.ClassNode) -> None:
    preflight = getattr(node.cls, "preflight", None)
    if not callable(preflight):
        return
    try:
        problems = preflight(node.init_args)
    except UserError as error:
        problems = [error]
    _place(found, node.path, problems)


def _preflight_data(found: structure.Structure) -> None:
    """Let the model look at the data, where both are without a fault of their own."""
    nodes = {node.path[0]: node for node in found.classes if len(node.path) == 1}
    if {"model", "data"} <= nodes.keys():
        model, data = nodes["model"], nodes["data"]
        look = getattr(model.cls, "preflight_data", None)
        if callable(look):
            _place(found, data.path, look(model.init_args, data.cls, data.init_args))


def _place(found: structure.Structure, at: KeyPath, problems: Sequence[UserError]) -> None:
    """Remember what a class has said about itself, with the place of the argument it means."""
    for problem in problems:
        inner = problem.where.removeprefix(f"{at[0]}.").split(".")
        where = found.settings.where((*at, "init_args", *inner) if problem.where else at)
        found.errors.append(type(problem)(problem.what, where=where, allowed=problem.allowed, do=problem.do))
