# SPDX-License-Identifier: Apache-2.0
"""What ranks send to each other, and where in their order.

After F of stage s its output goes to the rank of stage s + 1; after I or B its input gradient goes to the rank of stage
s - 1. Stages that follow each other on one rank send nothing. So a step has 2 m messages per boundary between ranks:
2 m (p v - 1) in a loop, and 2 m fewer at each turn of a V.

Note [order of messages]: where a send waits until the other side receives (any backend, once the message is larger than
its buffers), it matters where sends and receives stand between the actions.

    naive    receive just before use, send just after. In 1F1B two neighbours then send at the same time, one F down and
             one B up, and both wait forever:  rank 0  0F0 send 0F0  0F1 [send 0F1]          waits for rank 1 to receive
                                               rank 1  receive 0F0  1F0  1B0 [send 1B0]      waits for rank 0 to receive
    paired   all messages of the pipeline stand in one line, by the time at which they are ready, and each rank takes
             its own in that order. The first message of the line that is not yet delivered is next on both sides, so
             somebody can always move: no size deadlocks. Receives come early, so they overlap with work if they are
             posted there and waited for at their use.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple, final

from stratagem.plugins.pipeline.actions import Action, Schedule
from stratagem.plugins.pipeline.simulate import simulate

Placement = Literal["paired", "naive"]


@final
class Step(NamedTuple):
    """One line of a rank's program.

    Args:
        what: `compute` an action, or `send` or `receive` what an action has produced.
        action: which.
        peer: the other rank of a message; -1 for `compute`.
    """

    what: Literal["compute", "send", "receive"]
    action: Action
    peer: int = -1

    def __str__(self) -> str:
        if self.what == "compute":
            return str(self.action)
        return f"{self.what} {self.action} {'to' if self.what == 'send' else 'from'} rank {self.peer}"


def target_of(schedule: Schedule, action: Action) -> int | None:
    """The rank to which an action's result is sent; None if it stays on its rank, or nobody needs it."""
    if action.kind == "W":
        return None
    after = action.stage + (1 if action.kind == "F" else -1)
    if not 0 <= after < schedule.num_stages or schedule.owners[after] == schedule.owners[action.stage]:
        return None
    return schedule.owners[after]


def links(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Messages of one step for every pair (from rank, to rank) that has any.

    Example:
        >>> from stratagem.plugins.pipeline.schedules import gpipe
        >>> links(gpipe(3, 4))
        {(0, 1): 4, (1, 0): 4, (1, 2): 4, (2, 1): 4}
    """
    pairs = (
        (schedule.owners[action.stage], target)
        for actions in schedule.ranks
        for action in actions
        if (target := target_of(schedule, action)) is not None
    )
    return dict(sorted(Counter(pairs).items()))


def programs(schedule: Schedule, placement: Placement = "paired") -> tuple[tuple[Step, ...], ...]:
    """Every rank's order with its sends and receives in it; see Note [order of messages]. Pure.

    Raises:
        ConfigError: the schedule deadlocks by itself.

    Example:
        >>> from stratagem.plugins.pipeline.schedules import one_f_one_b
        >>> for rank in programs(one_f_one_b(2, 2)):
        ...     print(*rank, sep=", ")
        0F0, send 0F0 to rank 1, 0F1, send 0F1 to rank 1, receive 1B0 from rank 1, 0B0, receive 1B1 from rank 1, 0B1
        receive 0F0 from rank 0, receive 0F1 from rank 0, 1F0, 1B0, send 1B0 to rank 0, 1F1, 1B1, send 1B1 to rank 0
    """
    return (_paired if placement == "paired" else _naive)(schedule)


def _paired(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    steps: list[list[Step]] = [[] for _ in schedule.ranks]
    spans = simulate(schedule, pairs="in_turn").spans
    done = [(span.end, rank, span.action) for rank, own in enumerate(spans) for span in own]
    # All costs are 1 here, so an action ends later than what it needs.
    for _, rank, action in sorted(done, key=lambda item: item[:2]):
        steps[rank].append(Step("compute", action))
        target = target_of(schedule, action)
        if target is not None:
            steps[rank].append(Step("send", action, target))
            steps[target].append(Step("receive", action, rank))
    return tuple(map(tuple, steps))


def _naive(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    by_result = {given: action for actions in schedule.ranks for action in actions for given in action.gives()}

    def around(rank: int, action: Action) -> list[Step]:
        sources = [by_result[need] for need in action.needs(schedule.num_stages)]
        steps = [Step("receive", a, schedule.owners[a.stage]) for a in sources if schedule.owners[a.stage] != rank]
        steps.append(Step("compute", action))
        target = target_of(schedule, action)
        return steps if target is None else [*steps, Step("send", action, target)]

    return tuple(
        tuple(step for action in actions for step in around(rank, action))
        for rank, actions in enumerate(schedule.ranks)
    )
