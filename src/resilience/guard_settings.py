# SPDX-License-Identifier: Apache-2.0
"""What one may choose about the guard, one dataclass per piece."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from stratagem.errors import ConfigError


def _at_least(where: str, value: float, least: float) -> None:
    if not value >= least:
        raise ConfigError(f"it is {value}", where=where, allowed=f"{least} or more")


def _more_than(where: str, value: float | None, bound: float) -> None:
    if value is not None and not value > bound:
        raise ConfigError(f"it is {value}", where=where, allowed=f"more than {bound}, or null")


@dataclass(frozen=True)  # none of these is @final: jsonargparse takes no default value of a final class
class Heartbeat:
    """Who hangs, and where.

    Args:
        hang_after: a rank that has been in one phase for so long is hung. Longer than the longest step, save or wait
            for data that is in order; shorter than the strategy's `run.timeout`, which would end the run unexplained.
        every: how often a rank writes its beat and reads those of the others.
        end: end the run on every rank once a rank is hung; otherwise it is only named, once for each place.
        grace: a rank that cannot be woken leaves the process by itself so long after the hang was named.
    """

    hang_after: timedelta = timedelta(minutes=10)
    every: timedelta = timedelta(seconds=1)
    end: bool = True
    grace: timedelta = timedelta(seconds=10)

    def __post_init__(self) -> None:
        _more_than("heartbeat.every", self.every.total_seconds(), 0)
        _at_least("heartbeat.grace", self.grace.total_seconds(), 0)
        if self.hang_after < 2 * self.every:
            raise ConfigError(
                f"it is {self.hang_after}",
                where="heartbeat.hang_after",
                allowed=f"twice `every` ({self.every}) or more",
            )


@dataclass(frozen=True)
class Stragglers:
    """Who is slower than the others.

    Args:
        every: steps between two exchanges of one number per rank.
        threshold: a rank is slow if its own time is so many times the median of all ranks' (of two: the smaller).
        in_a_row: it is named when it was slow at so many exchanges in a row.
        slack: it is not slow if it loses less than this per step.
    """

    every: int = 20
    threshold: float = 1.5
    in_a_row: int = 3
    slack: timedelta = timedelta(milliseconds=5)

    def __post_init__(self) -> None:
        _at_least("stragglers.every", self.every, 1)
        _at_least("stragglers.in_a_row", self.in_a_row, 1)
        _more_than("stragglers.threshold", self.threshold, 1)


@dataclass(frozen=True)
class BadSteps:
    """What to do about a step whose loss or gradient is not finite, or far above what it was.

    Args:
        action: `stop` ends the run with `DivergedError`; `skip` makes no step; `roll_back` makes none and takes model
            and optimizer back to the newest checkpoint that is at least `back` steps old.
        spike_factor: a loss above so many times the median of the last `window` ones is a spike; null: none is.
        gradient: whether the norm of the gradient is looked at, too.
        gradient_factor: as `spike_factor`, for the norm of the gradient.
        window: how many good steps the median is taken over.
        warmup: no step is a spike before there were so many good ones.
        back: see `action`.
        limit: after so many bad steps in a row the run ends all the same.
    """

    action: Literal["stop", "skip", "roll_back"] = "skip"
    spike_factor: float | None = None
    gradient: bool = True
    gradient_factor: float | None = None
    window: int = 50
    warmup: int = 10
    back: int = 1
    limit: int = 10

    def __post_init__(self) -> None:
        if self.action not in ("stop", "skip", "roll_back"):
            raise ConfigError(f"{self.action!r}", where="bad_steps.action", allowed="stop, skip, roll_back")
        _more_than("bad_steps.spike_factor", self.spike_factor, 1)
        _more_than("bad_steps.gradient_factor", self.gradient_factor, 1)
        for name in ("window", "warmup", "limit"):
            _at_least(f"bad_steps.{name}", getattr(self, name), 1)
        _at_least("bad_steps.back", self.back, 0)
        if self.warmup > self.window:
            raise ConfigError(
                f"it is {self.warmup}", where="bad_steps.warmup", allowed=f"window ({self.window}) or less"
            )
        if self.gradient_factor is not None and not self.gradient:
            raise ConfigError(
                "it is set, and gradient is false", where="bad_steps.gradient_factor", do="set gradient: true"
            )


@dataclass(frozen=True)
class Drift:
    """Whether replicas still are replicas.

    Args:
        every: steps between two comparisons.
        action: `stop` ends the run with `DriftError` on every rank; `report` goes on.
        moments: compare the optimizer's whole state, not its step counts alone; for Adam three times the reading.
        ignore: patterns (`fnmatch`) of names that need not be equal.
    """

    every: int = 100
    action: Literal["stop", "report"] = "stop"
    moments: bool = False
    ignore: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        _at_least("drift.every", self.every, 1)
        if self.action not in ("stop", "report"):
            raise ConfigError(f"{self.action!r}", where="drift.action", allowed="stop, report")
