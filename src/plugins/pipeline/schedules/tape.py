# SPDX-License-Identifier: Apache-2.0
"""What the generators share: writing a rank's order down, and refusing numbers that make no schedule.

A rank takes the micro-batches of a chunk in their order, so the order of a rank is said without naming them: `F1` is
the next forward of chunk 1, and a tape counts.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import cast, final

from stratagem.errors import ConfigError
from stratagem.plugins.pipeline.actions import Action, Kind, loop


@final
class Tape:
    """The order of one rank while it is written.

    Args:
        stages: of the rank; chunk c is `stages[c]`.

    The attribute `actions` is what has been written, `pairs` the forwards in it that are joined with what follows.

    Example:
        >>> tape = Tape((0, 3))
        >>> tape.write("F0 F1", times=2)
        >>> tape.write("I1 W")
        >>> print(*tape.actions)
        0F0 3F0 0F1 3F1 3I0 3W0
    """

    def __init__(self, stages: tuple[int, ...]) -> None:
        self.actions: list[Action] = []
        self.pairs: set[Action] = set()
        self._stages = stages
        self._next: Counter[tuple[str, int]] = Counter()
        self._pending: deque[Action] = deque()

    def write(self, phase: str, times: int = 1) -> None:
        """Take a phase `times` times: kinds with chunks; `W` alone is the oldest weight gradient of any chunk,
        and `F0+B1` a pair."""
        for _ in range(times):
            for word in phase.split():
                first, *rest = word.split("+")
                self._take(first)
                if rest:
                    self.pairs.add(self.actions[-1])
                    self._take(rest[0])

    def _take_weight(self, chunk: str) -> None:
        oldest = next(action for action in self._pending if not chunk or action.stage == self._stages[int(chunk)])
        self._pending.remove(oldest)
        self.actions.append(oldest)

    def _take(self, word: str) -> None:
        if word[0] == "W":
            self._take_weight(word[1:])
            return
        kind, chunk = word[0], int(word[1:])
        # B is the next input gradient and its weight gradient, so it counts as an I.
        counted = "F" if kind == "F" else "I"
        action = Action(cast(Kind, kind), self._stages[chunk], self._next[counted, chunk])
        self._next[counted, chunk] += 1
        self.actions.append(action)
        if kind == "I":
            self._pending.append(action._replace(kind="W"))


def alternate(
    forwards: list[Action], backwards: list[Action], warmup: int, delay: int | None = None
) -> tuple[Action, ...]:
    """Forwards alone, then one forward and one backward in turn, then backwards alone.

    Args:
        forwards: of one rank, in order.
        backwards: as many, of kind B.
        warmup: how many forwards come first.
        delay: None leaves backwards whole. A number splits them: W of a backward comes after the I of the backward
            `delay` later, and what is left at the end.

    Example:
        >>> ahead, back = ([Action(kind, 0, k) for k in range(3)] for kind in "FB")
        >>> print(*alternate(ahead, back, warmup=1))
        0F0 0F1 0B0 0F2 0B1 0B2
        >>> print(*alternate(ahead, back, warmup=1, delay=1))
        0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2
    """
    warmup = min(warmup, len(forwards))
    order, rest = forwards[:warmup], deque(forwards[warmup:])
    for index, whole in enumerate(backwards):
        if rest:
            order.append(rest.popleft())
        order.append(whole if delay is None else whole._replace(kind="I"))
        if delay is not None and index >= delay:
            order.append(backwards[index - delay]._replace(kind="W"))
    if delay is not None:
        order += [whole._replace(kind="W") for whole in backwards[max(0, len(backwards) - delay) :]]
    return tuple(order)


def depth_first(rank: int, counts: tuple[int, int, int], group: int) -> tuple[list[Action], list[Action]]:
    """Forwards and backwards of a rank with several chunks in a loop: `group` micro-batches through one chunk, then the
    same ones through the next, then the next group.

    Args:
        counts: p, m, v.

    Example:
        >>> ahead, back = depth_first(1, counts=(2, 4, 2), group=2)
        >>> print(*ahead, "|", *back[:4])
        1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3 | 3B0 3B1 1B0 1B1
    """
    num_ranks, num_micro_batches, num_chunks = counts
    stages = [stage for stage, owner in enumerate(loop(num_ranks, num_chunks)) if owner == rank]
    groups = [range(k, min(k + group, num_micro_batches)) for k in range(0, num_micro_batches, group)]
    forwards = [Action("F", stage, k) for batch in groups for stage in stages for k in batch]
    backwards = [Action("B", stage, k) for batch in groups for stage in reversed(stages) for k in batch]
    return forwards, backwards


def check_interleaved(name: str, counts: tuple[int, int, int], *, instead: str) -> None:
    """Refuses counts of p, m, v that no schedule has, and a single chunk per rank.

    Raises:
        ConfigError: with the schedule to choose instead.
    """
    check_counts(name, *counts)
    if counts[2] < 2:
        raise ConfigError(
            "one chunk per rank cannot be interleaved",
            where=f"schedule {name}",
            allowed="2 chunks or more",
            do=f"choose {instead}",
        )


def group_size(name: str, counts: tuple[int, int, int], group: int | None) -> int:
    """Micro-batches that a rank takes through one chunk before it turns to the next.

    They must at least fill the ranks: the next chunk's first input comes p forwards after this chunk's first. By
    default the batch is cut into as many equal groups of at least p as there are.

    Args:
        name: of the schedule.
        counts: p, m, v.
        group: what the user asked for, if anything.

    Raises:
        ConfigError: groups do not fit.
    """
    num_ranks, num_micro_batches, _ = counts
    if group is None:
        num_groups = max(1, num_micro_batches // num_ranks)
        if num_micro_batches % num_groups:
            raise ConfigError(
                f"{num_micro_batches} micro-batches do not make {num_groups} equal groups for {num_ranks} ranks",
                where=f"schedule {name}",
                allowed=_legal_counts(num_ranks, num_micro_batches),
                do="change the number of micro-batches, or name the group",
            )
        return num_micro_batches // num_groups
    rest = num_micro_batches % group if group > 0 else 0
    if group < min(num_ranks, num_micro_batches) or (num_micro_batches > group and 0 < rest < num_ranks):
        raise ConfigError(
            f"{num_micro_batches} micro-batches in groups of {group} leave a group smaller than the {num_ranks} ranks",
            where=f"schedule {name}",
            allowed=f"groups of {num_ranks} or more, the last one too",
            do="change the group or the number of micro-batches, or leave the group out",
        )
    return min(group, num_micro_batches)


def check_counts(name: str, num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> None:
    """Refuse numbers below 1.

    Raises:
        ConfigError: names the first that is.
    """
    for what, count in (("ranks", num_ranks), ("micro-batches", num_micro_batches), ("chunks", num_chunks)):
        if count < 1:
            raise ConfigError(f"{count} {what}", where=f"schedule {name}", allowed="1 or more")


def _legal_counts(num_ranks: int, near: int) -> str:
    def legal(count: int) -> bool:
        return count % max(1, count // num_ranks) == 0

    below = next(count for count in range(near, 0, -1) if legal(count))
    above = next(count for count in range(near, 2 * near + num_ranks) if legal(count))
    return f"{below} or {above} micro-batches"
