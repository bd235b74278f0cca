# SPDX-License-Identifier: Apache-2.0
"""Strategies as `compare` and `check` take them from a command line, and every fault of their configs at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from lightning.pytorch.strategies import StrategyRegistry

from stratagem import config
from stratagem.cli._quiet import quiet
from stratagem.cli._run import RunCLI, check_words
from stratagem.comparison.contender import Built, Candidate, Change
from stratagem.errors import ConfigError, UserError
from stratagem.registry import strategies


@final
@dataclass(frozen=True)
class Contestant:
    """One strategy, as the command line names it.

    Attributes:
        name: in the report: the registered name, or the stem of its config file.
        words: of a `fit` under it.
        overlay: its config file; empty for a name.
    """

    name: str
    words: tuple[str, ...]
    overlay: str = ""

    @classmethod
    def of(cls, word: str, run: Sequence[str]) -> Contestant:
        """From a word of `--strategies` and the words of the run.

        Example:
            >>> Contestant.of("zero_1", ["--config", "a.yaml"]).words
            ('--config', 'a.yaml', '--trainer.strategy', 'zero_1')
            >>> Contestant.of("tuned/small_buckets.yaml", []).name
            'small_buckets'
        """
        if word.endswith((".yaml", ".yml")):
            return cls(Path(word).stem, (*run, "--config", word), word)
        return cls(word, (*run, "--trainer.strategy", word))

    @property
    def strategy(self) -> Any:
        """What its settings write for `trainer.strategy`; None where they write nothing."""
        trainer = config.read(self.words).values.get("trainer")
        return trainer.get("strategy") if isinstance(trainer, dict) else None

    @property
    def candidate(self) -> Candidate:
        """For the comparison; its plugin is imported here, so that every process inherits it."""
        return Candidate(self.name, self._build, self._about())

    def _build(self, change: Change) -> Built:
        """As `fit` builds the run; in the contender's own process."""
        with quiet():
            cli = RunCLI(["fit", *self.words], change=change)
        arguments = cli._prepare_subcommand_kwargs("fit")
        return Built(cli.trainer, arguments.pop("model"), arguments)

    def _about(self) -> str:
        """The first line of what the strategy says about itself."""
        named = self.strategy
        if not isinstance(named, str):
            return f"{(named or {}).get('class_path')}, from {self.overlay or 'the config'}"
        ours = strategies()
        theirs: Any = dict(StrategyRegistry).get(named.lower(), {})  # its `get` would build the strategy
        cls: Any = ours[named].load() if named in ours else theirs.get("strategy")
        return (getattr(cls, "__doc__", None) or "").strip().split("\n")[0].rstrip(".")


def check_all(
    contestants: Sequence[Contestant], files: Iterable[Path | None], faults: Sequence[UserError] = ()
) -> None:
    """Raise every fault of every contestant at once; no process is started.

    Args:
        contestants: whose configs are checked; a fault of the run that they share is told once.
        files: that are to be written.
        faults: what is known already.

    Raises:
        ConfigErrors: at least one.
    """
    found: dict[str, UserError] = {str(fault): fault for fault in faults}
    for file in files:
        if file is not None and (unwritable := _unwritable(file)) is not None:
            found.setdefault(str(unwritable), unwritable)
    for number, each in enumerate(contestants):
        if each.overlay and Path(each.overlay).is_file():
            alone = Contestant(each.name, ("--config", each.overlay))
            if not alone.strategy:
                fault = ConfigError("it sets no trainer.strategy", where=each.overlay, do="name one there")
                found.setdefault(str(fault), fault)
        for problem in check_words(list(each.words), confirm=number == 0 or bool(each.overlay)):
            found.setdefault(str(problem), problem)
    if found:
        raise config.ConfigErrors(list(found.values()))


def _unwritable(file: Path) -> ConfigError | None:
    """Why this file cannot be written, tried before the work; what was not there is not there afterwards."""
    if not file.absolute().parent.is_dir():
        return ConfigError(f"there is no folder {file.parent}", where=str(file), do="make it first")
    existed = file.exists()
    if existed and not file.is_file() and not file.is_dir():
        return None  # a pipe or a device: opening it may wait for a reader
    try:
        file.open("ab").close()
        if not existed:
            file.unlink()
    except OSError as error:
        return ConfigError(f"it cannot be written: {error.strerror}", where=str(file), do="name another file")
    return None


def write_all(writers: Iterable[tuple[Path | None, Callable[[Path], object]]]) -> None:
    """Write every file that is asked for; one that fails keeps no other from being written.

    Args:
        writers: files, None for one that is not asked for, and what writes each.

    Raises:
        ConfigErrors: files that could not be written, each with its path.
    """
    faults: list[UserError] = []
    for file, write in writers:
        if file is None:
            continue
        try:
            write(file)
        except OSError as error:
            faults.append(ConfigError(f"it could not be written: {error.strerror or error}", where=str(file)))
    if faults:
        raise config.ConfigErrors(faults)
