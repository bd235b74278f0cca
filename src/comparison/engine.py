# SPDX-License-Identifier: Apache-2.0
"""`compare`: several strategies beside one process, in one go.

    1. start      one contender after the other, each in a process of its own; its start-up is measured
    2. observe    one after the other takes all its steps, and tells of each; then the reference does
    3. time       rounds: every contender takes a short turn, and the next round begins with another one
    4. judge      pure functions, `stratagem.comparison.judge`

A contender that is not at turn waits without using the machine. With `sequential` one contender is started, watched,
timed and ended before the next begins: the memory of one, and a timing that a slower minute of the machine can tilt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import platform
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, final

import lightning
import torch

from stratagem.comparison.assembly import contender, reference
from stratagem.comparison.conductor import Place
from stratagem.comparison.contender import Candidate, Override, fit
from stratagem.comparison.protocol import Turn
from stratagem.comparison.results import Comparison, Contender
from stratagem.comparison.running import Running
from stratagem.errors import ConfigError, RankError
from stratagem.strategy.fork_safety import fork_obstacle

_TO_LEAVE = 3.0  # seconds for contenders that are ended before their time


@final
@dataclass(frozen=True)
class Options:
    """How candidates are compared.

    Args:
        steps: optimizer steps that are held against the reference.
        rounds: turns at full speed of every contender; 0 for no timing.
        turn: counted steps of such a turn.
        tolerance: relative difference that counts as equal; None for what the precision allows.
        baseline: the contender whose step time is 1; None for the last one.
        sequential: one contender after the other, where memory is short.
        precision: the Trainer's word in place of the run's own.
        optimizer: `sgd` in place of the run's own.
        patience: how long a contender may be silent in its turn.
    """

    steps: int = 50
    rounds: int = 3
    turn: int = 3
    tolerance: float | None = None
    baseline: str | None = None
    sequential: bool = False
    precision: str | None = None
    optimizer: Literal["own", "sgd"] = "own"
    patience: timedelta = timedelta(minutes=10)

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("rounds", 0), ("turn", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"got {getattr(self, name)}", where=f"--{name}", allowed=f"{least} or more")
        if self.tolerance is not None and not 0 <= self.tolerance < 1:
            raise ConfigError(f"got {self.tolerance}", where="--tolerance", allowed="0 or more and below 1")


def compare(
    candidates: Sequence[Candidate],
    options: Options = Options(),  # frozen
    *,
    alone: Candidate | None = None,
    config: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Train every candidate and one process, and hold them against each other. Call it from the main thread.

    Args:
        candidates: at least one; their names differ.
        options: how.
        alone: builds the reference; the first candidate's run, on one device, where left out.
        config: what is compared, in words, for the report.
        say: told in a line what happens now.

    Returns:
        What was found; a candidate that failed is in it as such.

    Raises:
        ConfigError: no candidates, two of one name, or an unknown baseline; or this process cannot be forked.
        RankError: the reference failed, so that there is nothing to compare with.
    """
    baseline = _baseline([candidate.name for candidate in candidates], options.baseline)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a process with a pool of threads cannot be forked safely
    obstacle = fork_obstacle(1)
    if obstacle is not None:
        raise ConfigError(f"contenders cannot be forked: {obstacle}", where="compare")
    began, created = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    with _folder() as folder, _terminable():
        arena = _Arena(folder, options, say)
        try:
            arena.run(candidates, alone or candidates[0])
            expected = reference(arena.alone[0], arena.alone[1], options.tolerance)
            found = [contender(each, arena.running[each.name], expected, options.steps) for each in candidates]
        finally:
            arena.close()
            torch.set_num_threads(num_threads)
    medians = {each.name: each.median_s for each in found}
    found = [_with_ratio(each, medians[baseline]) for each in found]
    return Comparison(
        tuple(config),
        max((len(running.ready) for running in arena.running.values()), default=0),
        options.steps,
        expected.trace.precision,
        expected.tolerance,
        baseline,
        expected.result,
        tuple(found),
        _machine(),
        created,
        time.monotonic() - began,
    )


def _baseline(names: Sequence[str], asked: str | None) -> str:
    """Raises `ConfigError` if these cannot be compared."""
    baseline = asked or (names[-1] if names else "")
    if not names or len(set(names)) < len(names) or baseline not in names:
        raise ConfigError(
            f"{', '.join(names) or 'no strategy'}, and {baseline!r} for a baseline",
            where="the contenders",
            allowed="at least one strategy, each once, and a baseline among them",
        )
    return baseline


@final
class _Arena:
    """Every process of one comparison."""

    def __init__(self, folder: Path, options: Options, say: Callable[[str], None]) -> None:
        self._folder, self._options, self._say = folder, options, say
        needed = options.steps + options.rounds * (options.turn + 1) + 1
        self._override = Override(needed, options.precision, options.optimizer)
        self.running: dict[str, Running] = {}
        self.alone: list[Running] = []

    def run(self, candidates: Sequence[Candidate], alone: Candidate) -> None:
        """All phases. Raises `RankError` if the reference fails."""
        for candidate in candidates:
            running = self._start(candidate)
            self.running[candidate.name] = running
            running.await_ready()
            if self._options.sequential:
                self._observe(running)
                for _ in range(self._options.rounds):
                    running.turn(Turn("time", self._options.turn + 1))
                running.stop()
        if not self._options.sequential:
            for running in self.running.values():
                self._observe(running)
        self._run_reference(alone)
        if not self._options.sequential:
            self._time(list(self.running.values()))
            self._say("all: the end")
            for running in self.running.values():
                running.begin_stop()
            for running in self.running.values():
                running.await_stop()

    def close(self) -> None:
        """End every process."""
        everyone = [*self.running.values(), *self.alone]
        for running in everyone:
            running.let_go()
        end = time.monotonic() + _TO_LEAVE
        for running in everyone:
            running.close(max(0.0, end - time.monotonic()))

    def _start(self, candidate: Candidate, **place: Any) -> Running:
        self._say(f"{candidate.name}: starts")
        others = [*self.running.values(), *self.alone]
        running = Running(candidate.name, self._folder / str(len(others)), self._options.patience)
        work = functools.partial(fit, candidate, self._override, Place(running.address, running.final, **place))
        running.start(work, others)
        return running

    def _observe(self, running: Running) -> None:
        self._say(f"{running.name}: {self._options.steps} steps")
        running.turn(Turn("observe", self._options.steps))

    def _run_reference(self, alone: Candidate) -> None:
        """One process that reads what the first contender's ranks read, and its twin beside it."""
        first = next((ready for running in self.running.values() for ready in running.ready.values()), None)
        ranks, mode = (first.num_data_ranks, first.mode) if first is not None else (1, "per_rank")
        for name, nudged in (("one process", False), ("its twin", True)):
            candidate = Candidate(name, alone.build)
            self.alone.append(self._start(candidate, stands_for=ranks, mode=mode, nudged=nudged))
        self._say(f"one process, and its twin: {self._options.steps} steps")
        for running in self.alone:
            running.await_ready()
        for running in self.alone:
            running.begin(Turn("observe", self._options.steps))
        for running in self.alone:
            running.await_end()
            running.begin_stop()
        for running in self.alone:
            running.await_stop()
            if running.error or not running.has_final:
                raise RankError(0, 1, f"{running.name}, the reference, failed: {running.error or 'it ended early'}")

    def _time(self, running: list[Running]) -> None:
        for number in range(self._options.rounds):
            self._say(f"round {number + 1} of {self._options.rounds} at full speed")
            first = number % len(running)
            for each in [*running[first:], *running[:first]]:  # nobody always comes first
                each.turn(Turn("time", self._options.turn + 1))


def _with_ratio(found: Contender, baseline_s: float | None) -> Contender:
    own = found.median_s
    return dataclasses.replace(found, ratio=own / baseline_s) if own and baseline_s else found


def _machine() -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _processor(),
        "cores": str(cores),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "lightning": str(lightning.__version__),
    }


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="stratagem-") as name:
        yield Path(name)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the comparison as an exception does, so that nothing is left behind."""

    def leave(signum: int, frame: Any) -> None:
        raise SystemExit(128 + signum)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
