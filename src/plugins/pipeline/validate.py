# SPDX-License-Identifier: Apache-2.0
"""Whether a schedule can run: all that is wrong with it, at once, before a process is started.

    place        every action is on the rank that owns its stage
    complete     F once, and either B once or I and W once, for every stage and micro-batch
    order        on one rank nothing comes before what it needs, and a pair is a forward and a backward
    deadlock     no ring of ranks, each of which waits for the next; sends wait for nobody
    rendezvous   the same, where a send ends only when the other side receives, however large or small the message is
    memory       no rank holds more micro-batches than it may

A schedule is a fixed order per rank, so it is a graph, and running it once without clocks decides it: who may move,
moves, and if in the end somebody has not finished, nobody ever will. No interleaving needs to be tried, because a move
never takes away the move of another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple, final

from stratagem.errors import ConfigError
from stratagem.plugins.pipeline.actions import Action, Schedule
from stratagem.plugins.pipeline.messages import Placement, Step, programs

Rule = Literal["place", "complete", "order", "deadlock", "rendezvous", "memory"]
_SHOWN = 8
"""Faults that an error spells out; the rest is counted."""


@final
class Fault(NamedTuple):
    """One thing that is wrong: the rule that is broken, and how."""

    rule: Rule
    what: str

    def __str__(self) -> str:
        return f"[{self.rule}] {self.what}"


def validate(
    schedule: Schedule, *, max_in_flight: float | None = None, placement: Placement = "paired", where: str = ""
) -> Schedule:
    """The schedule itself, if nothing is wrong with it.

    Args:
        max_in_flight: bound on `Schedule.peak_in_flight`, for every rank.
        placement: of sends and receives, for the rule `rendezvous`; see `messages`.
        where: what to name in the error; by default the schedule.

    Raises:
        ConfigError: all faults, each with its rule.
    """
    found = faults(schedule, max_in_flight=max_in_flight, placement=placement)
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise ConfigError(
            "; ".join(map(str, found[:_SHOWN])) + more,
            where=where or f"schedule {schedule.name}",
            allowed="schedules without such faults",
            do="mend the order that is named, or choose a schedule by name",
        )
    return schedule


def faults(
    schedule: Schedule, *, max_in_flight: float | None = None, placement: Placement = "paired"
) -> tuple[Fault, ...]:
    """All that is wrong. Pure; arguments as of `validate`.

    Deadlocks are sought among the actions that are there: what is missing is said by `complete` alone. Rendezvous is
    looked at where nothing else is wrong with the order, for without an order there are no messages to place.

    Example:
        >>> late = Schedule("late", 1, owners=(0,), ranks=((Action("B", 0, 0), Action("F", 0, 0)),))
        >>> print(*faults(late))
        [order] rank 0: 0B0 comes before 0F0, which it needs
    """
    found = [*_place(schedule), *_complete(schedule), *_order(schedule), *_deadlock(schedule)]
    if not found:
        found += rendezvous_faults(programs(schedule, placement))
    return (*found, *_memory(schedule, max_in_flight))


def _place(schedule: Schedule) -> Iterator[Fault]:
    for stage, owner in enumerate(schedule.owners):
        if not 0 <= owner < schedule.num_ranks:
            yield Fault("place", f"stage {stage} is on rank {owner} of {schedule.num_ranks}")
    counts = {rank: len(schedule.stages_of(rank)) for rank in range(schedule.num_ranks)}
    if len(set(counts.values())) > 1:
        yield Fault("place", f"ranks hold unequal numbers of stages: {counts}")
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            stage_is_here = action.stage < schedule.num_stages and schedule.owners[action.stage] == rank
            if not stage_is_here:
                yield Fault("place", f"rank {rank}: {action}, but stage {action.stage} is not on this rank")


def _complete(schedule: Schedule) -> Iterator[Fault]:
    counts = Counter(action for actions in schedule.ranks for action in actions)
    for action in sorted(counts, key=lambda a: (a.stage, a.micro_batch, a.kind)):
        if not 0 <= action.micro_batch < schedule.num_micro_batches:
            yield Fault("complete", f"{action}: there are {schedule.num_micro_batches} micro-batches")
    for stage in range(schedule.num_stages):
        for k in range(schedule.num_micro_batches):
            forward, whole, first, second = (counts[Action(kind, stage, k)] for kind in ("F", "B", "I", "W"))
            if forward != 1:
                yield Fault("complete", f"{stage}F{k} is there {forward} times, not once")
            if (whole, first, second) not in ((1, 0, 0), (0, 1, 1)):
                has = f"{whole} x B, {first} x I, {second} x W"
                yield Fault("complete", f"the backward {stage}B{k} is {has}, not one B, nor one I and one W")


def _order(schedule: Schedule) -> Iterator[Fault]:
    for rank, actions in enumerate(schedule.ranks):
        for first, second in zip(actions, (*actions[1:], None), strict=True):
            if first in schedule.pairs and (first.kind != "F" or second is None or second.kind not in "BI"):
                yield Fault(
                    "order", f"rank {rank}: {first} and {second or 'nothing'} make no pair of forward and backward"
                )
        at = {given: index for index, action in enumerate(actions) for given in action.gives()}
        for index, action in enumerate(actions):
            for need in action.needs(schedule.num_stages):
                if at.get(need, -1) > index:
                    yield Fault("order", f"rank {rank}: {action} comes before {need}, which it needs")


def _deadlock(schedule: Schedule) -> Iterator[Fault]:
    """Waits between ranks only: what one rank does to itself is the rule `order`."""
    blocks = [schedule.blocks_of(rank) for rank in range(schedule.num_ranks)]
    home = {
        given: rank for rank, actions in enumerate(schedule.ranks) for action in actions for given in action.gives()
    }
    at, done = [0] * len(blocks), set[Action]()

    def missing(rank: int) -> list[Action]:
        needs = [need for action in blocks[rank][at[rank]] for need in action.needs(schedule.num_stages)]
        return [need for need in needs if home.get(need, rank) != rank and need not in done]

    moved = True
    while moved:
        moved = False
        for rank in range(len(blocks)):
            while at[rank] < len(blocks[rank]) and not missing(rank):
                done.update(given for action in blocks[rank][at[rank]] for given in action.gives())
                at[rank] += 1
                moved = True
    stuck = [
        f"rank {rank} at {blocks[rank][at[rank]][0]} waits for {need} on rank {home[need]}"
        for rank in range(len(blocks))
        if at[rank] < len(blocks[rank])
        for need in missing(rank)
    ]
    if stuck:
        yield Fault("deadlock", ", ".join(stuck))


def rendezvous_faults(steps: tuple[tuple[Step, ...], ...]) -> tuple[Fault, ...]:
    """Whether programs end if a send ends only when its receive has begun. Pure.

    Args:
        steps: of every rank, in order; from `programs`.
    """
    at = [0] * len(steps)

    def now(rank: int) -> Step | None:
        return steps[rank][at[rank]] if at[rank] < len(steps[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in range(len(steps)):
            while (step := now(rank)) is not None:
                if step.what != "compute":
                    other = now(step.peer)
                    # Both sides of a message move in one go.
                    if other is None or other.action != step.action or {step.what, other.what} != {"send", "receive"}:
                        break
                    at[step.peer] += 1
                at[rank] += 1
                moved = True
    stuck = [f"rank {rank} at `{step}`" for rank in range(len(steps)) if (step := now(rank)) is not None]
    return (Fault("rendezvous", "all wait: " + ", ".join(stuck)),) if stuck else ()


def _memory(schedule: Schedule, bound: float | None) -> Iterator[Fault]:
    for rank, peak in enumerate(schedule.peak_in_flight() if bound is not None else ()):
        if bound is not None and peak > bound:
            yield Fault("memory", f"rank {rank} holds {peak:g} micro-batches at once, of {bound:g} allowed")
