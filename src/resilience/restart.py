# SPDX-License-Identifier: Apache-2.0
"""`Restarts`: a run that loses a rank comes back by itself, from its newest checkpoint.

    attempt returned                        the run is done
    Ctrl-C, SIGTERM, exit by a duration     the run is over; its exit code is the attempt's
    ConfigError and its like                nothing to try again: raised here
    a rank died, raised or hung             another attempt, unless `judge` has had enough

Under torchrun nothing here runs: it restarts by itself, and each start finds the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, final

from stratagem.errors import ConfigError, RankError
from stratagem.resilience import restart_report as report
from stratagem.resilience import restart_search as search
from stratagem.resilience.restart_attempt import Attempt, Begun, Ended, Slots, number_for_ranks, outcome
from stratagem.resilience.restart_policy import Failure, fewer, judge

_PASSED_ON = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGTERM,  # in forked ranks it asks where they hang
    signal.SIGUSR2: signal.SIGTERM,
}
_GRACE = 5.0  # seconds that ranks started afresh have to end by themselves, after the attempt that started them
_REASONS = {
    "none": "No further attempt: --max-restarts is 0.",
    "loop": "the same failure at the same step twice, with no newer checkpoint in between",
    "exhausted": "so many restarts without a newer checkpoint are allowed: --max-restarts",
}


@dataclass(frozen=True)
class Resume:
    """What the user asks for.

    Args:
        source: `auto`, or a checkpoint to begin from.
        max_restarts: restarts without a newer checkpoint in between, at most; 0 for none at all.
        min_devices: with how few devices to go on after ranks have died; 0 for always the same number.
    """

    source: str = "auto"
    max_restarts: int = 3
    min_devices: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (("--max-restarts", self.max_restarts, 0), ("--min-devices", self.min_devices, 0)):
            if value < least:
                raise ConfigError(f"it is {value}", where=name, allowed="whole numbers, not negative")
        if self.source != "auto" and not Path(self.source).exists():
            raise ConfigError(
                "there is no such checkpoint",
                where=f"--resume {self.source}",
                allowed="auto, or the folder of a checkpoint",
            )

    @property
    def named(self) -> str:
        """The checkpoint that the user names; empty for `auto`."""
        return "" if self.source == "auto" else self.source


@final
class Restarts:
    """Attempts of one run, each in a process of its own that is forked from this one.

    This process must be able to fork: no CUDA, no threads of a computation. It builds nothing itself.

    Args:
        options: what the user asks for.
        work: the run, from building to the end; called in the attempt's process.
    """

    def __init__(self, options: Resume, work: Callable[[Attempt], Any]) -> None:
        self._options, self._work = options, work
        self._slots = Slots()
        self._began = (time.monotonic(), time.time())
        self._signals: list[int] = []
        self._child = 0
        self._records: list[report.Record] = []
        self._failures: list[Failure] = []
        self._before: dict[int, Any] = {}
        self._first: Begun | None = None
        self._pause = 0.0
        self._open: tuple[report.Record, float] | None = None  # a failure whose cost is not known yet, and since when

    def run(self) -> int:
        """Attempt after attempt; the exit code of the last one.

        Raises:
            UserError: what the user wrote is wrong; no attempt follows.
            RankError: a rank failed, and no attempt follows, with the reason.
        """
        devices, reason = 0, ""
        with self._heeding_signals():
            while True:
                begun, ended = self._attempt(devices)
                if ended.kind != "failed" or self._signals:
                    break
                if begun is None or ended.hopeless:
                    break
                reason = self._reason_to_end()
                if reason or not self._wait(ended.drifted):
                    break
                if begun.fitting:
                    devices = fewer(begun.devices, ended.died, begun.fitting)
        if len(self._records) > 1:
            print(f"\nRestarts: {report.line(self._records)}.", flush=True)
        if ended.kind == "failed":
            rank, num_ranks = ended.rank
            raise RankError(rank, num_ranks, ended.cause, f"{ended.details}\n\n{reason}".strip())
        if ended.error is not None:
            raise ended.error
        return ended.code

    # -- one attempt -----------------------------------------------------------------------------------------------

    def _attempt(self, devices: int) -> tuple[Begun | None, Ended]:
        started = time.time()
        self._slots.clear()
        attempt = Attempt(
            number=len(self._records),
            began=self._began,
            named=self._options.named,
            devices=devices,
            min_devices=self._options.min_devices if not devices else 0,
            slots=self._slots,
        )
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=self._be_attempt, args=(attempt, ours, theirs, os.getpid()), name="attempt")
        sys.stdout.flush()
        process.start()
        theirs.close()
        self._child = process.pid or 0
        for signum in self._signals:  # one that came while it was not there yet
            self._pass_on(signum)
        begun, ended = _listen(ours)
        process.join()
        self._child, group = 0, process.pid or 0
        ours.close()
        if ended is None:
            how = f"it was ended by signal {-(process.exitcode or 0)}" if (process.exitcode or 0) < 0 else "it left"
            ended = Ended("failed", 1, cause=f"the process that holds the ranks is gone: {how}")
        if ended.kind == "failed" or self._signals:
            _clear(group)
        process.close()
        if begun is not None and self._first is not None and not begun.fitting:
            begun = replace(begun, fitting=self._first.fitting)
        self._first = self._first or begun
        self._note(begun, ended, started)
        return begun, ended

    def _be_attempt(self, attempt: Attempt, ours: Connection, theirs: Connection, parent: int) -> None:
        """In the attempt's process: die with the parent, hear Ctrl-C from it alone, work, say what became of it."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        ours.close()
        os.setpgid(0, 0)
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a background group may still write to the terminal
        number_for_ranks(attempt.number)
        told: list[Begun] = []

        def tell(begun: Begun) -> None:
            told.append(begun)
            theirs.send_bytes(pickle.dumps(begun))

        attempt.tell = tell
        ended = outcome(lambda: self._work(attempt), lambda: told[0] if told else None)
        with contextlib.suppress(OSError):
            theirs.send_bytes(_pickled(ended))

    # -- what follows ----------------------------------------------------------------------------------------------

    def _note(self, begun: Begun | None, ended: Ended, started: float) -> None:
        """Writes down the attempt, and what the failure before has cost now that training goes on again."""
        reached, resumed = self._slots.reached(), begun.step if begun is not None else -1
        if self._open is not None:
            record, since = self._open
            record.lost = max(0.0, (self._slots.began() or time.time()) - since)
            record.redone = max(0, record.reached - max(0, resumed)) if begun is not None else 0
            self._open = None
        cause = ""
        if ended.kind == "failed":
            cause = f"rank {ended.rank[0]} of {ended.rank[1]}: {ended.cause}".split("\n")[0]
        self._records.append(
            report.Record(
                attempt=len(self._records),
                devices=begun.devices if begun is not None else 0,
                resumed=begun.resumed if begun is not None else "",
                step=max(0, resumed),
                reached=max(0, reached, resumed),
                cause=cause,
                seconds=time.time() - started,
            )
        )
        if ended.kind == "failed" and begun is not None:
            found = search.newest(begun.places)
            # A checkpoint of this attempt is where the loss begins; without one all of it is lost.
            since = found.created if found is not None and found.created > started else started
            self._open = (self._records[-1], since)
            newest = found.step if found is not None else -1
            self._failures.append(Failure(ended.cause, reached, newest, ended.died))
        if begun is not None and len(self._records) > 1:
            report.write(Path(begun.folder), self._records)

    def _reason_to_end(self) -> str:
        """Why there is no further attempt; empty if there is one."""
        assert self._first is not None
        verdict = judge(self._failures, self._first.step, self._options.max_restarts)
        if verdict.go_on or not self._options.max_restarts:
            self._pause = verdict.wait
            return "" if verdict.go_on else _REASONS["none"]
        causes = [f"{each.cause} (at step {each.reached})" for each in self._records if each.cause][-2:]
        return f"No further attempt: {_REASONS[verdict.reason]}. The last causes: {'; '.join(causes)}."

    def _wait(self, drifted: bool) -> bool:
        """Says what has happened and waits; False if a signal came meanwhile."""
        record, newest = self._records[-1], self._failures[-1].newest
        where = f"from step {newest}" if newest >= 0 else "from the beginning"
        print(f"\n{record.cause} (at step {record.reached}). Attempt {record.attempt + 2} goes on {where}.", flush=True)
        if drifted and newest >= 0:
            print(
                f"A checkpoint since the last comparison that passed may hold the drift, that of step {newest} too. To "
                "go on from an older one, end this run, move the newer ones away, and start it again.",
                flush=True,
            )
        until = time.monotonic() + self._pause
        while not self._signals and time.monotonic() < until:
            time.sleep(0.05)
        return not self._signals

    # -- signals ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _heeding_signals(self) -> Iterator[None]:
        """Until the end of all attempts, signals are the attempt's; after one there is no further attempt."""
        for signum in _PASSED_ON:
            if signal.getsignal(signum) not in (None, signal.SIG_IGN):
                self._before[signum] = signal.signal(signum, self._heed)
        try:
            yield
        finally:
            before, self._before = self._before, {}
            for number, handler in before.items():
                signal.signal(number, handler)

    def _heed(self, signum: int, frame: FrameType | None) -> None:
        self._signals.append(signum)
        self._pass_on(signum)

    def _pass_on(self, signum: int) -> None:
        if self._child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, _PASSED_ON[signal.Signals(signum)])


def _clear(group: int) -> None:
    """Ends what an attempt has left behind in its process group: ranks that it has not forked but started afresh."""
    until = time.monotonic() + _GRACE
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.killpg(group, 0)
            time.sleep(0.05)
        os.killpg(group, signal.SIGKILL)


def _listen(pipe: Connection) -> tuple[Begun | None, Ended | None]:
    """What an attempt says until it has ended."""
    begun: Begun | None = None
    while True:
        try:
            message = pickle.loads(pipe.recv_bytes())  # written by our own child
        except (EOFError, OSError):
            return begun, None
        if isinstance(message, Ended):
            return begun, message
        begun = message


def _pickled(ended: Ended) -> bytes:
    """As bytes; an error that does not travel is told in words."""
    try:
        data = pickle.dumps(ended)
        pickle.loads(data)
    except Exception:
        data = pickle.dumps(replace(ended, error=ConfigError(str(ended.error).rstrip("."))))
    return data
