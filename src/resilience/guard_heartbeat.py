# SPDX-License-Identifier: Apache-2.0
"""Heartbeats: each rank writes where it is to a file, and reads those of the others, in a thread of its own.

    rank 0   [data|forward|backward . . waits in all_reduce over dp_replicate . . . . . . . . .
    rank 1   [data|forward at model.py:31 in training_step . . . . . . . . . . . . . . . . . .
                                                     hang_after ^  "rank 1 hangs: forward of step 3, at model.py:31"

Nothing here is a collective: a rank that hangs keeps the others from one, but not from reading a file. The thread of
the hanging rank itself says on which line its main thread stands. A rank whose thread is silent, too (stopped by a
signal, swapped out, on a machine that is gone), is named by its last beat.

Note [who hangs]: when one rank hangs, the others soon stand still as well: they wait for it in a collective. So a
rank that stands still outside of any collective is named, and of several the one that had come least far. If all stand
still in collectives, those that had come least far are named: they have entered another one than the rest, or none.
A wait in C++ cannot always be seen: so nobody is named while another rank that has come no farther stands as well, and
not yet for long enough.

Note [the end]: the guard sends SIGUSR2 to its own process, whose handler raises in the main thread: `HangError` in the
rank that is named, `CommunicationError` in those that waited, so that whoever watches the ranks finds the cause. This
wakes Python from a sleep, a lock, a future and our own collectives. A rank that cannot be woken leaves after `grace`
with code 75, the named one first. So the run ends everywhere in bounded time; with the warm launcher the supervisor
ends the last rank a few seconds after the first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from stratagem.errors import CommunicationError, HangError
from stratagem.resilience.guard_pulse import Pulse
from stratagem.resilience.guard_settings import Heartbeat
from stratagem.resilience.guard_where import standing

EXIT_CODE = 75
"""Of a rank that hung and could not be woken (`EX_TEMPFAIL` of sysexits.h: try again)."""


@final
@dataclass(frozen=True)
class Beat:
    """What a rank says of itself.

    Attributes:
        rank: which.
        host: of the process.
        pid: of the process.
        at: when it said this (`time.time`).
        phase: what it is doing.
        since: since when.
        step: optimizer steps made before.
        batch: index of the batch in its epoch.
        marks: how far it has come.
        line: where its main thread stands; empty as long as nothing is suspicious.
        collective: in which collective; empty if in none.
        stack: its innermost frames.
    """

    rank: int
    host: str
    pid: int
    at: float
    phase: str
    since: float
    step: int
    batch: int
    marks: int
    line: str = ""
    collective: str = ""
    stack: list[str] = field(default_factory=list)

    def age(self, now: float) -> float:
        """Seconds without a mark."""
        return now - self.since

    def words(self, now: float) -> str:
        """Where it is, in words."""
        place = f", at {self.line}" if self.line else ""
        waits = f", waits in {self.collective}" if self.collective else ""
        return f"{self.phase} of step {self.step} (batch {self.batch}) for {self.age(now):.1f} s{waits}{place}"


def hanging(beats: Sequence[Beat | None], now: float, hang_after: float, born: float) -> list[int]:
    """The ranks to blame, none if nothing hangs: see Note [who hangs].

    Args:
        beats: by rank; None for one that was never heard.
        now: `time.time()`.
        hang_after: seconds.
        born: when this rank began to listen.

    Example:
        >>> def beat(rank, since, marks, collective=""):
        ...     return Beat(rank, "host", 1, 100.0, "forward", since, 3, 3, marks, collective=collective)
        >>> hanging([beat(0, 90.5, 12, "all_reduce"), beat(1, 90.0, 11)], 100.0, 10.0, 0.0)
        [1]
        >>> hanging([beat(0, 90.0, 12, "all_reduce"), beat(1, 99.0, 11)], 100.0, 10.0, 0.0)
        []
        >>> hanging([beat(0, 90.0, 12), beat(1, 90.1, 11)], 100.0, 10.0, 0.0)
        []
        >>> hanging([beat(0, 90.0, 12, "all_reduce"), beat(1, 90.0, 11, "all_gather")], 100.0, 10.0, 0.0)
        [1]
    """
    unheard = [rank for rank, beat in enumerate(beats) if beat is None and now - born >= hang_after]
    mute = [beat.rank for beat in beats if beat is not None and now - beat.at >= hang_after]
    if unheard or mute:
        return sorted([*unheard, *mute])
    still = [beat for beat in beats if beat is not None and beat.age(now) >= hang_after]
    suspects = [beat for beat in still if not beat.collective]
    if not suspects and len(still) == len(beats):
        suspects = still
    least = min((beat.marks for beat in suspects), default=0)
    behind = [
        beat
        for beat in beats
        if beat is not None and hang_after / 2 <= beat.age(now) < hang_after and beat.marks <= least
    ]
    if any(not beat.collective for beat in behind):
        return []
    return [beat.rank for beat in suspects if beat.marks == least]


@final
class Monitor:
    """The thread that beats and listens. Made on every rank; `close` ends it.

    Args:
        pulse: of this rank.
        rank: of this process.
        size: ranks of the world.
        folder: for the beats; all ranks see the same one. Emptied of older beats by their owners.
        settings: see `Heartbeat`.
        token: of this run, equal on all ranks; beats of another run are not heard.
        on_hang: is told the report once, from the thread, before the end.
    """

    def __init__(
        self,
        pulse: Pulse,
        rank: int,
        size: int,
        folder: Path,
        settings: Heartbeat,
        *,
        token: str,
        on_hang: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self._pulse, self._rank, self._size, self._settings = pulse, rank, size, settings
        self._folder, self._token, self._on_hang = folder, token, on_hang
        self._born, self._host = time.time(), socket.gethostname()
        self._named: set[tuple[int, int]] = set()
        self._error: BaseException | None = None
        self._end = threading.Event()
        self._handler = self._install()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._run, name="stratagem-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and takes this rank's beat away."""
        self._end.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        with contextlib.suppress(OSError):
            self._file(self._rank).unlink()
        if self._handler is not None:
            signal.signal(signal.SIGUSR2, self._handler)
            self._handler = None

    def _install(self) -> Any:
        """The handler of SIGUSR2 that wakes the main thread; None where somebody else has one, or this is no main
        thread. What was there before is returned."""
        if threading.current_thread() is not threading.main_thread():
            return None
        if signal.getsignal(signal.SIGUSR2) != signal.SIG_DFL:
            return None
        return signal.signal(signal.SIGUSR2, self._wake)

    def _wake(self, signum: int, frame: Any) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _file(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.json"

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        every = self._settings.every.total_seconds()
        while not self._end.is_set():
            with contextlib.suppress(OSError):  # a full or slow disk must not end the watch
                self._beat()
            self._judge()
            self._end.wait(every)

    def _mine(self) -> Beat:
        pulse, now = self._pulse, time.time()
        beat = Beat(
            self._rank, self._host, os.getpid(), now, pulse.phase, pulse.since, pulse.step, pulse.batch, pulse.marks
        )
        if beat.age(now) < self._settings.hang_after.total_seconds() / 2:
            return beat
        where = standing()
        return Beat(**{**asdict(beat), "line": where.line, "collective": where.collective, "stack": where.stack})

    def _beat(self) -> None:
        target = self._file(self._rank)
        draft = target.with_suffix(".draft")
        draft.write_text(json.dumps({"token": self._token, **asdict(self._mine())}))
        draft.replace(target)

    def _heard(self, rank: int) -> Beat | None:
        try:
            found = json.loads(self._file(rank).read_text())
        except (OSError, ValueError):
            return None
        return Beat(**found) if found.pop("token", None) == self._token else None

    def _judge(self) -> None:
        beats = [self._heard(rank) for rank in range(self._size)]
        now, hang_after = time.time(), self._settings.hang_after.total_seconds()
        blamed = hanging(beats, now, hang_after, self._born)
        places = {(rank, beat.marks if (beat := beats[rank]) is not None else -1) for rank in blamed}
        if not places - self._named:
            return
        self._named |= places
        report = describe(beats, blamed, now)
        print("\n".join(report["words"]), file=sys.stderr, flush=True)
        self._write(report)
        with contextlib.suppress(Exception):  # whoever listens must not keep the run from ending
            self._on_hang(report)
        if self._settings.end:
            self._finish(blamed, report)

    def _write(self, report: dict[str, Any]) -> None:
        """All ranks write the same; the last one's stays."""
        draft = self._folder / f"hang.{self._rank}.draft"
        with contextlib.suppress(OSError):
            draft.write_text(json.dumps(report, indent=1))
            draft.replace(self._folder.parent / "hang.json")

    def _finish(self, blamed: list[int], report: dict[str, Any]) -> None:
        """See Note [the end]."""
        if self._end.wait(3 * self._settings.every.total_seconds()):  # the others must hear it as well
            return
        guilty = self._rank in blamed
        text = report["words"][0]
        self._error = HangError(text) if guilty else CommunicationError(f"gave up waiting: {text}")
        if self._handler is not None:
            os.kill(os.getpid(), signal.SIGUSR2)
        grace = self._settings.grace.total_seconds() + (0.0 if guilty else 1.0)
        if not self._end.wait(grace):
            print(f"rank {self._rank} could not be woken and leaves", file=sys.stderr, flush=True)
            with contextlib.suppress(Exception):  # stderr may be no file
                faulthandler.dump_traceback()
            os._exit(EXIT_CODE)


def describe(beats: Sequence[Beat | None], blamed: Sequence[int], now: float) -> dict[str, Any]:
    """The report: lines for people, and everything that is known for programs."""
    words = []
    for rank in blamed:
        beat = beats[rank]
        words.append(f"rank {rank} hangs: " + ("it was never heard" if beat is None else beat.words(now)))
    for rank, beat in enumerate(beats):
        if rank not in blamed and beat is not None:
            words.append(f"    rank {rank}: {beat.words(now)}")
    known = [None if beat is None else {**asdict(beat), "age": beat.age(now)} for beat in beats]
    return {"at": now, "hanging": list(blamed), "words": words, "ranks": known}
