# SPDX-License-Identifier: Apache-2.0
"""The best schedule for a model: all that are legal are simulated, and the shortest that fits in memory wins.

There is no rule of thumb in here. Which schedule is best depends on how uneven the stages are, on what a message costs
and on how much memory is left, and simulating all of them takes less time than one training step.

    unequal stages       the V of zb_v puts first and last stage on one rank, which may make that rank the slowest
    dear messages        more chunks mean less bubble, but v times as many messages to wait for
    tight memory         gpipe and looped_bfs hold all micro-batches, interleaved_1f1b more than 1f1b
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

from stratagem.errors import ConfigError
from stratagem.plugins.pipeline.messages import links
from stratagem.plugins.pipeline.schedules import NAMES, build_schedule
from stratagem.plugins.pipeline.simulate import Costs, Pairs, Timeline, check_costs, simulate


@final
@dataclass(frozen=True)
class Candidate:
    """One schedule that was looked at.

    Args:
        name: of the schedule.
        num_chunks: stages per rank.
        timeline: how it went; None if there is no such schedule for these numbers.
        refused: why it is out; empty if it is not.
    """

    name: str
    num_chunks: int
    timeline: Timeline | None = None
    refused: str = ""

    @property
    def title(self) -> str:
        """Name and chunks per rank."""
        return f"{self.name} (v={self.num_chunks})"

    @property
    def makespan(self) -> float:
        """Of the simulation; infinite without one."""
        return self.timeline.makespan if self.timeline else float("inf")

    @property
    def peak(self) -> float:
        """Micro-batches in flight on the worst rank; infinite without a simulation."""
        return max(self.timeline.schedule.peak_in_flight()) if self.timeline else float("inf")

    @property
    def num_messages(self) -> int:
        """Messages of one step over all links."""
        return sum(links(self.timeline.schedule).values()) if self.timeline else 0

    def __str__(self) -> str:
        numbers = f"makespan {self.makespan:g}, peak {self.peak:g}, {self.num_messages} messages"
        parts = [numbers] if self.timeline else []
        return f"{self.title}: " + "; ".join([*parts, *filter(None, [self.refused])])


@final
@dataclass(frozen=True)
class Choice:
    """What was chosen.

    Args:
        best: the winner.
        candidates: all that were looked at, the winner too.
        why: in words, with the numbers of the next best and of those that memory ruled out.
    """

    best: Candidate
    candidates: tuple[Candidate, ...]
    why: str


def choose(
    num_ranks: int,
    num_micro_batches: int,
    costs: Mapping[int, Costs],
    *,
    max_in_flight: float | None = None,
    can_split: bool = True,
    pairs: Pairs = "joined",
) -> Choice:
    """Simulate every schedule there is and take the shortest. Pure.

    Of equally short ones the one with the lower peak wins, then the one with fewer messages, then the simpler one.

    Args:
        num_ranks: p.
        num_micro_batches: m.
        costs: by chunks per rank, for the p times as many stages into which the model would be cut; only those numbers
            of chunks are tried.
        max_in_flight: how many micro-batches a rank has memory for, see `Schedule.peak_in_flight`.
        can_split: whether the engine can compute I and W apart for this model.
        pairs: how the engine takes pairs, see `simulate`.

    Raises:
        ConfigError: none is left; says which came closest to the bound.

    Example:
        >>> print(choose(4, 8, {1: Costs(), 2: Costs.even(2)}, max_in_flight=4).why)
        zb_v (v=2): makespan 25.5, peak 4, 96 messages. Next: zb_interleaved (v=2): makespan 25.5, peak 4, 112 messages.
        Too large for 4 in flight: gpipe (v=1) holds 8, interleaved_1f1b (v=2) holds 5.5, looped_bfs (v=1) holds 8,
        looped_bfs (v=2) holds 8, dual_pipe_v (v=2) holds 4.5.
    """
    for num_chunks, given in costs.items():
        check_costs(given, num_ranks * num_chunks)
    found = tuple(_candidates(num_ranks, num_micro_batches, costs, max_in_flight, can_split, pairs))
    # Floating point must not tell equals apart.
    fitting = sorted(
        (c for c in found if not c.refused), key=lambda c: (float(f"{c.makespan:.9g}"), c.peak, c.num_messages)
    )
    ruled_out = [c for c in found if c.refused and c.timeline and max_in_flight is not None and c.peak > max_in_flight]
    if not fitting:
        least = min(ruled_out, key=lambda c: c.peak, default=None)
        raise ConfigError(
            "no schedule is left: " + "; ".join(map(str, found)) if found else "there are no costs for any cut",
            where="schedule",
            allowed=f"{least.peak:g} micro-batches in flight or more ({least.name})" if least else "",
            do="change the numbers of micro-batches or chunks, make micro-batches smaller, or recompute activations",
        )
    parts = [str(fitting[0])] + [f"Next: {other}" for other in fitting[1:2]]
    if ruled_out:
        names = ", ".join(f"{c.title} holds {c.peak:g}" for c in ruled_out)
        parts.append(f"Too large for {max_in_flight:g} in flight: {names}")
    return Choice(fitting[0], found, ".\n".join(parts) + ".")


def _candidates(
    num_ranks: int,
    num_micro_batches: int,
    costs: Mapping[int, Costs],
    max_in_flight: float | None,
    can_split: bool,
    pairs: Pairs,
) -> Iterator[Candidate]:
    for name in NAMES:
        for num_chunks, given in sorted(costs.items()):
            try:
                schedule = build_schedule(name, num_ranks, num_micro_batches, num_chunks)
            except ConfigError as error:
                yield Candidate(name, num_chunks, refused=error.what)
                continue
            timeline, refused = simulate(schedule, given, pairs=pairs), ""
            if schedule.splits_backward and not can_split:
                refused = "the backward of this model cannot be split"
            elif max_in_flight is not None and max(schedule.peak_in_flight()) > max_in_flight:
                refused = f"of {max_in_flight:g} allowed in flight"
            yield Candidate(name, num_chunks, timeline, refused)
