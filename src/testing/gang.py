# SPDX-License-Identifier: Apache-2.0
"""The watch over one gang of processes: start them, hear them, find out who hangs, end them all, and report.

`run_ranks` (in `ranks.py`) is the door to this file.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, final

from stratagem.testing.rank import RANK_FILE, Job, Report, log_file, main, stack_file

_STACK_PATIENCE = 1.0  # seconds that a hanging rank gets to write its stack; it needs about a millisecond
_TAIL = 20  # lines of output shown for a rank that died without a word


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed.

    Attributes:
        rank: which one.
        summary: one line.
        details: the traceback, the stack in which it hangs, or the tail of its output.
        exception: what the body raised, if it did and if it pickles.
        exitcode: the exit code, or minus the signal; None if the rank was hanging and was ended by the harness.
        seconds: when, after the start of the gang.
    """

    rank: int
    summary: str
    details: str
    exception: BaseException | None
    exitcode: int | None
    seconds: float


class RanksFailed(Exception):
    """Some ranks of a gang failed; `failures` says how, by rank, and `str()` shows one block per rank."""

    def __init__(self, message: str, failures: Mapping[int, RankFailure]) -> None:
        super().__init__(message, failures)
        self.failures = dict(failures)

    def __str__(self) -> str:
        return str(self.args[0])


class HarnessError(RuntimeError):
    """The gang itself is broken: it could not be started, or its ranks did not inherit what they should."""


@dataclass
class _Rank:
    """The parent's view of one rank."""

    process: ForkServerProcess
    pipe: Connection
    report: Report | None = None
    exitcode: int | None = None
    ended: float = math.inf
    released: bool = False  # its body returned, and it was told to end
    stack: str | None = None  # set if it was hanging: where

    def look(self) -> None:
        """Take in what there is to know now."""
        code = self.process.exitcode  # before the pipe: what an ended process wrote is then all there
        if self.report is None and not self.pipe.closed and self.pipe.poll():
            try:
                self.report = pickle.loads(self.pipe.recv_bytes())
            except (EOFError, OSError):
                self.pipe.close()
        if code is not None:
            self.exitcode, self.ended = code, time.monotonic()

    def release(self) -> None:
        """Let a rank whose body returned end."""
        self.released = True
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(b"")


@final
@dataclass
class Gang:
    """The processes of one `run_ranks`, in the order `run`, `close`, `print_output`, `results`.

    Attributes:
        job: what the ranks are told.
        context: starts them.
        dies: the ranks that must die, each with its exit code or minus its signal.
    """

    job: Job
    context: ForkServerContext
    dies: dict[int, int]
    ranks: list[_Rank] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def run(self, deadline: timedelta, grace: timedelta) -> None:
        """Start all ranks and wait until each has ended or hangs."""
        self._start()
        self.started = time.monotonic()  # not before: the first gang waits for the server's imports
        end = self.started + deadline.total_seconds()
        failed = False
        while running := [number for number, rank in enumerate(self.ranks) if rank.exitcode is None]:
            left = end - time.monotonic()
            if left <= 0:
                # A rank that returned and waits for the others does not hang.
                self._ask_where([n for n in running if self.ranks[n].report is None or self.ranks[n].released])
                break
            signs: list[Any] = []
            for rank in (self.ranks[number] for number in running):
                signs.append(rank.process.sentinel)
                if rank.report is None and not rank.pipe.closed:
                    signs.append(rank.pipe)
            connection.wait(signs, timeout=left)
            for number in running:
                self.ranks[number].look()
            if all(rank.report is not None or rank.exitcode is not None for rank in self.ranks):
                for rank in self.ranks:
                    if rank.exitcode is None and not rank.released:
                        rank.release()
            if not failed and any(self._failed(number) for number in running):
                failed = True
                end = min(end, time.monotonic() + grace.total_seconds())

    def close(self) -> None:
        """End every process of the gang and give back what it held."""
        for rank in self.ranks:
            pid = rank.process.pid
            if pid is None:  # it never started
                continue
            rank.process.kill()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # what the rank itself started
        for rank in self.ranks:
            if rank.process.pid is not None:
                rank.process.join()
            rank.process.close()
            rank.pipe.close()

    def print_output(self) -> None:
        """Print what the ranks wrote, each line behind its rank."""
        for number in range(len(self.ranks)):
            for line in self._written(log_file(self.job.folder, number)).splitlines():
                print(f"[rank {number}] {line}")

    def results(self) -> list[Any]:
        """Return what the bodies returned, or raise the one report of all failures."""
        __tracebackhide__ = True
        for number, rank in enumerate(self.ranks):
            if rank.report is not None and rank.report.kind == "harness":
                raise HarnessError(f"rank {number} of the gang did not inherit what it needs.\n{rank.report.text}")
        failures = {number: self._failure(number) for number in range(len(self.ranks)) if self._failed(number)}
        if failures:
            first = min(failures.values(), key=lambda failure: failure.seconds)
            raise RanksFailed(self._message(failures, first), failures) from first.exception
        reports = [rank.report for rank in self.ranks]
        return [None if report is None else pickle.loads(report.value) for report in reports]

    def _start(self) -> None:
        for number in range(self.job.num_ranks):
            ours, theirs = self.context.Pipe(duplex=True)
            # Not a daemon: those may start no workers for a DataLoader.
            process = self.context.Process(target=main, args=(number, self.job, theirs), daemon=False)
            self.ranks.append(_Rank(process, ours))
            try:
                process.start()
            finally:
                theirs.close()

    def _failed(self, number: int) -> bool:
        rank = self.ranks[number]
        if rank.stack is not None or (rank.report is not None and rank.report.kind != "returned"):
            return True
        if number in self.dies:
            return rank.report is not None or (rank.exitcode is not None and rank.exitcode != self.dies[number])
        return rank.exitcode is not None and (rank.report is None or rank.exitcode != 0)

    def _ask_where(self, hanging: list[int]) -> None:
        """Have ranks that still run write the stacks of their threads."""
        for number in hanging:
            rank = self.ranks[number]
            rank.ended = time.monotonic()
            assert rank.process.pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.process.pid, signal.SIGUSR1)
        patience = time.monotonic() + _STACK_PATIENCE
        for number in hanging:
            text = ""
            while time.monotonic() < patience:
                time.sleep(0.02)
                before, text = text, self._written(stack_file(self.job.folder, number))
                if text and text == before:
                    break
            self.ranks[number].stack = _without_harness(text)

    def _written(self, path: str) -> str:
        with contextlib.suppress(FileNotFoundError), open(path, errors="replace") as file:
            return file.read()
        return ""

    def _failure(self, number: int) -> RankFailure:
        rank = self.ranks[number]
        report, exception = rank.report, None
        at, exitcode = rank.ended, rank.exitcode
        if report is not None and report.kind == "raised":
            at, details = report.at, report.text
            exception = pickle.loads(report.value) if report.value else None
            summary = details.strip().splitlines()[-1]
            if exception is not None:
                summary = f"{type(exception).__name__}: {exception}".strip().splitlines()[0]
        elif rank.stack is not None:
            where = "after its body returned" if report is not None else "in its body"
            summary = f"still running after {at - self.started:.1f} s, {where}"
            details = rank.stack or "(it did not answer SIGUSR1, so where it waits is unknown)\n"
        elif report is not None and number in self.dies:
            summary, details = f"lived, but must die: {_death(self.dies[number])}", ""
        else:
            assert exitcode is not None
            summary = f"{_death(exitcode)} {'after' if report is not None else 'before'} its body returned"
            if number in self.dies:
                summary += f", but must die otherwise: {_death(self.dies[number])}"
            lines = self._written(log_file(self.job.folder, number)).splitlines()[-_TAIL:]
            details = self._written(stack_file(self.job.folder, number)) + "".join(f"  | {line}\n" for line in lines)
        return RankFailure(number, summary, details, exception, exitcode, at - self.started)

    def _message(self, failures: Mapping[int, RankFailure], first: RankFailure) -> str:
        total = len(self.ranks)
        lines = [f"{len(failures)} of {total} ranks failed; rank {first.rank} first: {first.summary}"]
        for number, rank in enumerate(self.ranks):
            failure = failures.get(number)
            if failure is not None:
                lines.append(f"--- rank {number}, after {failure.seconds:.2f} s: {failure.summary}")
                lines += [f"    {line}" for line in failure.details.rstrip().splitlines()]
            elif rank.report is not None:
                lines.append(f"--- rank {number}: returned after {rank.report.at - self.started:.2f} s")
            else:
                lines.append(f"--- rank {number}: {_death(self.dies[number])}, as it must")
        return "\n".join(lines)


def _without_harness(stack: str) -> str:
    """Drop the frames below the body: the harness and the fork server, the same in every rank."""
    kept, dropping = [], False
    for line in stack.splitlines():
        if not line.startswith("  File"):
            dropping = False
        elif f'"{RANK_FILE}"' in line:
            dropping = True
        if not dropping:
            kept.append(line)
    return "\n".join(kept)


def _death(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
