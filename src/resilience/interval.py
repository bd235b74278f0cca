# SPDX-License-Identifier: Apache-2.0
"""How often to save: a save costs time, and a failure costs what was done since the last one.

    overhead per unit of time     stall / T  +  T / (2 MTBF)          least where both are equal

With `stall` the time in which training stands for a save and T the time between two saves, this is least at Young's
`sqrt(2 stall MTBF)`. If the time to come back after a failure, R, counts as well, and saves themselves may be hit, the
share of useful time is largest at `stall + sqrt(2 (MTBF + R) stall + stall^2)` (arXiv 2410.18124), which is what is
used. Near the optimum the curve is flat: an interval that is off by 30 % costs a few per cent of the overhead.

An asynchronous save stalls for its copy only; but two of them never overlap, so the time to persist is a lower bound
of the interval.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal, final

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from stratagem.errors import ConfigError
from stratagem.strategy.checkpoint_io import FaultTolerantCheckpointIO

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: str, where: str = "duration") -> float:
    """A duration in words: a number and `s`, `m`, `h` or `d`, several of them added.

    Example:
        >>> seconds("6h"), seconds("1d 2h"), seconds("3.1h")
        (21600.0, 93600.0, 11160.0)
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([smhd])", text)
    if not parts or re.sub(r"(\d+(?:\.\d+)?)\s*([smhd])\s*", "", text).strip():
        raise ConfigError(f"{text!r}", where=where, allowed="numbers with s, m, h or d, like 6h or 1d 12h")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def young(stall: float, mtbf: float) -> float:
    """Seconds between saves by Young: `sqrt(2 stall MTBF)`.

    Example:
        >>> young(10.0, 6000.0) / 15  # in steps of 15 s
        23.09...
    """
    return math.sqrt(2 * stall * mtbf)


def best_interval(stall: float, mtbf: float, recovery: float = 0.0) -> float:
    """Seconds from one save to the next with the largest share of useful time.

    Args:
        stall: seconds in which training stands for a save.
        mtbf: seconds between two failures of the whole run, on average.
        recovery: seconds from a failure until training goes on.

    The published example: a save of 10 s, a failure every 6000 s, 600 s to come back, steps of 15 s. Without the save
    itself, 24.2 steps; with it, 24.9 from save to save.

    Example:
        >>> round(young(10.0, 6000.0 + 600.0) / 15, 1), round(best_interval(10.0, 6000.0, 600.0) / 15, 1)
        (24.2, 24.9)
    """
    return stall + math.sqrt(2 * (mtbf + recovery) * stall + stall**2)


def overhead(interval: float, stall: float, mtbf: float) -> float:
    """The share of time that saves and redone work take, to first order.

    Example:
        >>> round(overhead(young(10.0, 6000.0), 10.0, 6000.0), 4)
        0.0577
    """
    return stall / interval + interval / (2 * mtbf)


@dataclass(frozen=True)  # not @final: jsonargparse takes no default value of a final class
class FailureRate:
    """How often the run is expected to fail, and what a failure costs.

    Args:
        mtbf: mean time between failures of the whole run, like `6h`; or
        per_device_day: failures per device and day, from which it follows with the number of devices. (Llama 3's 405B
            run: 419 in 54 days on 16384 devices, 0.00047.)
        recovery: from a failure until training goes on.
    """

    mtbf: str | None = None
    per_device_day: float | None = None
    recovery: str = "2m"

    def __post_init__(self) -> None:
        if (self.mtbf is None) == (self.per_device_day is None):
            raise ConfigError(
                "give one of mtbf and per_device_day", where="failures", do="set mtbf: 6h, or per_device_day: 0.0005"
            )
        if self.per_device_day is not None and not self.per_device_day > 0:
            raise ConfigError(f"it is {self.per_device_day}", where="failures.per_device_day", allowed="more than 0")
        if self.mtbf is not None and not seconds(self.mtbf, "failures.mtbf") > 0:
            raise ConfigError(f"it is {self.mtbf}", where="failures.mtbf", allowed="more than 0")
        seconds(self.recovery, "failures.recovery")

    def between(self, num_devices: int) -> float:
        """Seconds between two failures on so many devices.

        Example:
            >>> round(FailureRate(per_device_day=0.000474).between(16384) / 3600, 2)
            3.09
        """
        if self.mtbf is not None:
            return seconds(self.mtbf)
        assert self.per_device_day is not None
        return _UNITS["d"] / (self.per_device_day * num_devices)


@final
@dataclass(frozen=True)
class Choice:
    """An interval and why.

    Attributes:
        steps: from save to save.
        step: seconds of a step.
        stall: seconds in which training stands for a save.
        persist: seconds until it is committed; not shorter than `stall`.
        mtbf: seconds.
        recovery: seconds.
    """

    steps: int
    step: float
    stall: float
    persist: float
    mtbf: float
    recovery: float

    @classmethod
    def of(cls, *, step: float, stall: float, persist: float, mtbf: float, recovery: float) -> Choice:
        """The best whole number of steps; at least one, and long enough for a save in the background to end.

        Example:
            >>> Choice.of(step=15.0, stall=10.0, persist=10.0, mtbf=6000.0, recovery=600.0).steps
            24
        """
        training = best_interval(stall, mtbf, recovery) - stall  # steps are made in what lies between two saves
        steps = max(1, round(training / step), math.ceil(max(persist - stall, 0.0) / step))
        return cls(steps, step, stall, persist, mtbf, recovery)

    def words(self) -> str:
        """Three lines: what was measured, what follows, what it costs."""
        interval = self.steps * self.step + self.stall
        share = overhead(interval, self.stall, self.mtbf)
        background = f", committed after {self.persist:.3g} s" if self.persist > self.stall else ""
        return (
            f"Measured: a step takes {self.step:.3g} s, a save stops it for {self.stall:.3g} s{background}; stated: a "
            f"failure every {self.mtbf:.4g} s, {self.recovery:.3g} s to come back.\n"
            f"Young: {young(self.stall, self.mtbf):.4g} s; with saves and recovery: "
            f"{best_interval(self.stall, self.mtbf, self.recovery):.4g} s from save to save.\n"
            f"So every {self.steps} steps ({interval:.4g} s): {self.stall / interval:.2%} of the time for saves, "
            f"{interval / (2 * self.mtbf):.2%} for steps made again, {share:.2%} in all."
        )


@final
class IntervalCheckpoint(ModelCheckpoint):
    """A `ModelCheckpoint` that finds out how often to save.

        trainer:
          callbacks:
            - class_path: stratagem.resilience.interval.IntervalCheckpoint
              init_args: {every: auto, failures: {mtbf: 6h}}

    With `auto` the first save is made after `probe` steps. Then, and again after the second, fourth, eighth ... save,
    rank 0 computes the interval from the medians of what it has measured since, prints why, and tells all ranks. A
    save at the end of the fit is made, too, if the last one is not of that step.

    Args:
        every: steps between two saves, or `auto`.
        failures: what `auto` needs to know.
        probe: steps before the first save.
        dirpath: as ModelCheckpoint's.
        filename: as ModelCheckpoint's.
        keep: how many of the newest to keep; -1 for all.
        save_last: as ModelCheckpoint's.

    Raises:
        ConfigError: `auto` without a failure rate.
    """

    def __init__(
        self,
        every: int | Literal["auto"] = "auto",
        failures: FailureRate | None = None,
        *,
        probe: int = 10,
        dirpath: str | None = None,
        filename: str | None = None,
        keep: int = 2,
        save_last: bool | None = None,
    ) -> None:
        if every == "auto" and failures is None:
            raise ConfigError(
                "auto needs to know how often the run fails",
                where="IntervalCheckpoint.failures",
                do="set failures.mtbf: 6h, or failures.per_device_day, or every: 100",
            )
        for name, value in (("every", 1 if every == "auto" else every), ("probe", probe)):
            if value < 1:
                raise ConfigError(f"it is {value}", where=f"IntervalCheckpoint.{name}", allowed="1 or more")
        if keep == 0 or keep < -1:
            raise ConfigError(f"it is {keep}", where="IntervalCheckpoint.keep", allowed="1 or more, or -1")
        newest: dict[str, Any] = {"monitor": "step", "mode": "max"} if keep > 1 else {}
        super().__init__(
            dirpath=dirpath,
            filename=filename,
            save_top_k=keep,
            save_last=save_last,
            every_n_train_steps=1,  # constant: Lightning finds a callback's state again by it
            save_on_train_epoch_end=False,
            **newest,
        )
        self.every, self.failures, self.probe = every, failures, probe
        self.choice: Choice | None = None
        """What `auto` has found; equal on all ranks."""
        self._steps: deque[float] = deque(maxlen=200)
        self._stalls: deque[float] = deque(maxlen=8)
        self._persists: deque[float] = deque(maxlen=8)
        self._num_saves, self._last_save, self._began = 0, 0, 0.0

    @property
    def interval(self) -> int:
        """Steps between two saves as it stands."""
        if self.every != "auto":
            return self.every
        return self.probe if self.choice is None else self.choice.steps

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._last_save, self._began = trainer.global_step, 0.0

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._began = self._began or time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves when one is due. Every rank comes to the same answer; what is measured is told once per estimate."""
        if trainer.fit_loop._should_accumulate():
            return
        now = time.perf_counter()
        if self._began:
            self._steps.append(now - self._began)
        if trainer.global_step - self._last_save >= self.interval:
            self._save(trainer)
            self._stalls.append(time.perf_counter() - now)
            self._watch_persist(trainer, now)
            self._num_saves += 1
            if self.every == "auto" and self._num_saves & (self._num_saves - 1) == 0:
                self._estimate(trainer)
        self._began = time.perf_counter()  # loading the next batch belongs to the next step

    def _save(self, trainer: Trainer) -> None:
        """At once, also where validation follows: what is newest does not depend on it."""
        self._last_save = trainer.global_step
        if not self._should_skip_saving_checkpoint(trainer):
            candidates = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)

    def _watch_persist(self, trainer: Trainer, began: float) -> None:
        io = trainer.strategy.checkpoint_io
        flying = io._flying if isinstance(io, FaultTolerantCheckpointIO) else None
        if flying is None:
            self._persists.append(self._stalls[-1])
        else:
            persists = self._persists
            flying.add_done_callback(lambda _: persists.append(time.perf_counter() - began))

    def _estimate(self, trainer: Trainer) -> None:
        """Rank 0 measures and computes; all ranks get its answer. Collective over the world, one small object."""
        assert self.failures is not None
        found: Choice | None = None
        if trainer.is_global_zero:
            stall = statistics.median(self._stalls)
            found = Choice.of(
                step=max(statistics.median(self._steps or [1e-6]), 1e-6),
                stall=stall,
                persist=max(stall, statistics.median(self._persists or [stall])),
                mtbf=self.failures.between(trainer.world_size),
                recovery=seconds(self.failures.recovery),
            )
        self.choice = trainer.strategy.broadcast(found)
        _say(self.choice)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation is no step, and no reason to save."""
        self._began = 0.0

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The end of an epoch is no reason to save."""
        self._began = 0.0

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves what the last save has not."""
        if trainer.global_step > self._last_save:
            self._save(trainer)


@rank_zero_only
def _say(choice: Choice | None) -> None:
    if choice is not None:
        print(choice.words(), flush=True)
