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
from stratagem.config.sources import Settings
from stratagem.errors import ConfigError, UserError

__all__ = ["ConfigErrors", "Preflight", "Settings", "check", "num_cpu_ranks", "read"]

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
    return form, found.errors


def _preflight(found: structure.Structure, node: structure.ClassNode) -> None:
    preflight = getattr(node.cls, "preflight", None)
    if not callable(preflight):
        return
    prefix = (*node.path, "init_args")
    try:
        problems = preflight(node.init_args)
    except UserError as error:
        problems = [error]
    for problem in problems:
        inner = problem.where.removeprefix(f"{node.path[0]}.").split(".")
        path = (*prefix, *inner) if problem.where else node.path
        where = found.settings.where(path)
        found.errors.append(type(problem)(problem.what, where=where, allowed=problem.allowed, do=problem.do))
