# SPDX-License-Identifier: Apache-2.0
"""What a rank is doing: its phase, since when, and how long each kind of phase has taken in all.

    data | forward | backward | step | data | forward ...        save and validation interrupt

The main thread marks; other threads read. A mark is a few assignments, so it costs nothing worth measuring.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from typing import Literal, final

from stratagem.resilience.guard_where import collective_of

Phase = Literal["start", "data", "forward", "backward", "step", "save", "validation", "end"]

TRAINING: tuple[Phase, ...] = ("data", "forward", "backward", "step")
"""Phases of training itself."""


@final
class Pulse:
    """The phases of this rank; the time of the one that is on belongs to it from its next mark on.

    Attributes:
        phase: the one that is on.
        since: when it began (`time.time`, which other processes can compare).
        marks: how many marks there were; a rank that has fewer than another is behind.
        step: optimizer steps made before it.
        batch: index of the batch in its epoch.
        seconds: by phase, without the one that is on.
        waiting: seconds of the training phases that passed in waiting for other ranks.

    Example:
        >>> pulse = Pulse()
        >>> pulse.mark("forward", step=3, batch=7)
        >>> pulse.phase, pulse.step, pulse.marks
        ('forward', 3, 1)
    """

    def __init__(self) -> None:
        self.phase: Phase = "start"
        self.since = time.time()
        self.marks = self.step = self.batch = 0
        self.seconds: dict[str, float] = defaultdict(float)
        self.waiting = 0.0
        self._clock = time.perf_counter()

    def mark(self, phase: Phase, *, step: int | None = None, batch: int | None = None) -> None:
        """A phase begins, and the one before it ends."""
        now = time.perf_counter()
        self.seconds[self.phase] += now - self._clock
        self._clock, self.since, self.phase = now, time.time(), phase
        self.step = self.step if step is None else step
        self.batch = self.batch if batch is None else batch
        self.marks += 1

    @property
    def training(self) -> float:
        """Seconds of the training phases that are over."""
        return sum(self.seconds[phase] for phase in TRAINING)


@final
class Sampler:
    """A thread that looks a hundred times a second whether the main thread waits for other ranks, and adds that up.

    A look reads one stack (some 20 microseconds). What cannot be seen so is a wait inside torch's C++ reducer, at the
    end of the backward of Lightning's `ddp`: there the guard adds the time from the last gradient to the end.

    Args:
        pulse: whose `waiting` is counted.
        period: seconds between two looks.
    """

    def __init__(self, pulse: Pulse, period: float = 0.01) -> None:
        self._pulse, self._period = pulse, period
        self._end = threading.Event()
        self._main = threading.main_thread().ident or 0
        self._thread = threading.Thread(target=self._look, name="stratagem-sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        before = time.perf_counter()
        while not self._end.wait(self._period):
            frames = sys._current_frames()
            frame, now = frames.get(self._main), time.perf_counter()
            if frame is not None and self._pulse.phase in TRAINING and collective_of(frame, frames):
                self._pulse.waiting += now - before
            before = now
            del frames, frame  # they would keep what hangs on the frames
