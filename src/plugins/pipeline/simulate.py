# SPDX-License-Identifier: Apache-2.0
"""When everything happens: a schedule run on paper, with what each action costs.

A rank starts its next action as soon as it is free and has what the action needs; what comes from another rank arrives
`latency` after it was ready. A rank that sends goes on with its work. B sends its input gradient when all of it is
done; I sends it before W has begun, and that is all the advantage that zero bubble has.

The order is fixed, so there is nothing to choose: every start is the latest of a few ends, and the result is exact and
the same every time.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

from stratagem.errors import ConfigError
from stratagem.plugins.pipeline.actions import Action, Schedule

Pairs = Literal["joined", "in_turn"]


@final
@dataclass(frozen=True)
class Costs:
    """What actions cost, in any one unit of time.

    Args:
        forward: of F at every stage, or one number for all stages.
        input_grad: of I, likewise.
        weight_grad: of W, likewise. B costs I and W together.
        latency: from the end of an action to its result on another rank.
    """

    forward: float | tuple[float, ...] = 1.0
    input_grad: float | tuple[float, ...] = 1.0
    weight_grad: float | tuple[float, ...] = 1.0
    latency: float = 0.0

    def of(self, action: Action) -> float:
        """The cost of one action."""
        if action.kind == "F":
            return _at(self.forward, action.stage)
        first, second = _at(self.input_grad, action.stage), _at(self.weight_grad, action.stage)
        return {"I": first, "W": second, "B": first + second}[action.kind]

    @classmethod
    def even(cls, num_chunks: int, *, latency: float = 0.0) -> Costs:
        """F = I = W = 1 for all that a rank holds, divided evenly over its chunks: schedules with different numbers of
        chunks are then compared for one and the same model."""
        return cls(1 / num_chunks, 1 / num_chunks, 1 / num_chunks, latency)


def _at(costs: float | tuple[float, ...], stage: int) -> float:
    return costs[stage] if isinstance(costs, tuple) else costs


@final
class Span(NamedTuple):
    """An action and when it was taken."""

    action: Action
    start: float
    end: float


@final
@dataclass(frozen=True)
class Timeline:
    """A schedule with its times.

    Args:
        schedule: what was run.
        spans: of every rank, in order.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max((span.end for spans in self.spans for span in spans), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Per rank, the time in which it works."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def bubble(self) -> tuple[float, ...]:
        """Per rank, the time in which it does not."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_share(self) -> float:
        """Idle time of all ranks over all their time: 0 is perfect."""
        return sum(self.bubble) / (self.makespan * len(self.spans)) if self.makespan else 0.0


def simulate(schedule: Schedule, costs: Costs = Costs(), *, pairs: Pairs = "joined") -> Timeline:
    """Run `schedule` on paper. Pure.

    Peaks and messages do not depend on time: `Schedule.peak_in_flight`, `links`.

    Args:
        pairs: `joined`: the two of a pair begin when both can, and what they give is there when both are done.
            `in_turn`: a pair is two actions like any others.

    Raises:
        ConfigError: it never ends, or `costs` name another number of stages.

    Example:
        >>> from stratagem.plugins.pipeline.schedules import one_f_one_b, zb_h1
        >>> simulate(one_f_one_b(4, 8)).bubble[0], simulate(zb_h1(4, 8)).bubble[0]
        (9.0, 3.0)
    """
    check_costs(costs, schedule.num_stages)
    blocks = [_blocks(schedule, rank, pairs) for rank in range(schedule.num_ranks)]
    price = {(a.kind, a.stage): costs.of(a) for a in {a[:2]: a for actions in schedule.ranks for a in actions}.values()}
    done: dict[Action, tuple[float, int]] = {}
    spans: list[list[Span]] = [[] for _ in blocks]
    at, free = [0] * len(blocks), [0.0] * len(blocks)
    waiting: dict[Action, list[int]] = defaultdict(list)
    runnable = list(range(len(blocks)))
    while runnable:
        rank = runnable.pop()
        while at[rank] < len(blocks[rank]):
            block = blocks[rank][at[rank]]
            time = free[rank]
            missing = None
            for need in _needs(block, schedule.num_stages):
                if need not in done:
                    missing = need
                    break
                ready, source = done[need]
                time = max(time, ready if source == rank else ready + costs.latency)
            if missing is not None:
                waiting[missing].append(rank)
                break
            for action in block:
                start, time = time, time + price[action[:2]]
                spans[rank].append(Span(action, start, time))
            free[rank] = time
            at[rank] += 1
            for given in (given for action in block for given in action.gives()):
                done[given] = time, rank
                runnable += waiting.pop(given, ())
    stuck = [f"rank {r} at {blocks[r][at[r]][0]}" for r in range(len(blocks)) if at[r] < len(blocks[r])]
    if stuck:
        raise ConfigError(
            f"it never ends: all wait, {', '.join(stuck)}", where=f"schedule {schedule.name}", do="see `validate`"
        )
    return Timeline(schedule, tuple(map(tuple, spans)))


def _blocks(schedule: Schedule, rank: int, pairs: Pairs) -> tuple[tuple[Action, ...], ...]:
    if pairs == "joined":
        return schedule.blocks_of(rank)
    return tuple((action,) for action in schedule.ranks[rank])


def _needs(block: tuple[Action, ...], num_stages: int) -> tuple[Action, ...]:
    if len(block) == 1:
        return block[0].needs(num_stages)
    # What the block makes itself, it does not wait for.
    inside = {given for action in block for given in action.gives()}
    return tuple(need for action in block for need in action.needs(num_stages) if need not in inside)


def check_costs(costs: Costs, num_stages: int) -> None:
    """Refuse costs that are negative or of another number of stages.

    Raises:
        ConfigError: names the field.
    """
    for name in ("forward", "input_grad", "weight_grad"):
        given = getattr(costs, name)
        if isinstance(given, tuple) and len(given) != num_stages:
            raise ConfigError(
                f"{len(given)} costs for {num_stages} stages",
                where=f"costs.{name}",
                allowed="one per stage, or a number",
            )
        if min(given if isinstance(given, tuple) else (given,)) < 0:
            raise ConfigError("a cost is negative", where=f"costs.{name}", allowed="0 or more")
    if costs.latency < 0:
        raise ConfigError("it is negative", where="costs.latency", allowed="0 or more")
