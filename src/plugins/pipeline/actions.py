# SPDX-License-Identifier: Apache-2.0
"""What a pipeline schedule is made of: actions, and for every rank the order in which it takes them.

A model of `S` stages is laid over `p` ranks, `v = S / p` stages (chunks) to a rank; a batch is cut into `m`
micro-batches. For every stage `s` and micro-batch `k` three things are computed:

    F   the forward                          after F of stage s - 1
    I   the gradient of the stage's input    after F of the stage and I of stage s + 1
    W   the gradient of its weights          after I of the stage; nobody waits for it

`B` is I and W in one. A forward and a backward may be joined to a pair, to be computed side by side.

A schedule says nothing but who does what in which order. When things happen follows from it and from what they cost
(`simulate`); what is sent follows from where the stages lie (`messages`).

Where stage `s` lies, with two chunks on each of four ranks:

    loop    rank 0 1 2 3 0 1 2 3        every hop crosses to another rank
    V       rank 0 1 2 3 3 2 1 0        stage 4 follows stage 3 on the same rank; rank 0 holds first and last
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Literal, NamedTuple, cast, final

from stratagem.errors import ConfigError

Kind = Literal["F", "B", "I", "W"]
"""Forward, whole backward, input gradient, weight gradient."""

_PATTERN = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)


@final
class Action(NamedTuple):
    """One piece of work: `kind` for the stage `stage` and the micro-batch `micro_batch`, both counted from 0.

    It is written as torch.distributed.pipelining writes it: stage, kind, micro-batch.

    Example:
        >>> print(Action("F", 1, 3), Action.parse("12W0").stage)
        1F3 12
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str, *, where: str = "") -> Action:
        """Read one action.

        Raises:
            ConfigError: it is none; `where` is repeated in the message.
        """
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                f"{text.strip()!r} is no action",
                where=where,
                allowed="stage, then F, B, I or W, then micro-batch",
                do="write 1F3 for the forward of micro-batch 3 at stage 1",
            )
        return cls(cast(Kind, match[2]), int(match[1]), int(match[3]))

    def needs(self, num_stages: int) -> tuple[Action, ...]:
        """The actions that come before this one, whoever takes them. Where I is named, B does as well.

        Example:
            >>> print(*Action("B", 1, 0).needs(num_stages=3), "|", *Action("B", 2, 0).needs(num_stages=3))
            1F0 2I0 | 2F0
        """
        kind, stage, k = self
        if kind == "F":
            return (Action("F", stage - 1, k),) if stage else ()
        if kind == "W":
            return (Action("I", stage, k),)
        own = Action("F", stage, k)
        return (own, Action("I", stage + 1, k)) if stage + 1 < num_stages else (own,)

    def gives(self) -> tuple[Action, ...]:
        """What is done when this action is: itself, and of B both halves."""
        if self.kind == "B":
            return (Action("I", self.stage, self.micro_batch), Action("W", self.stage, self.micro_batch))
        return (self,)


def loop(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """The rank of every stage if each lap starts at rank 0 again.

    Example:
        >>> loop(3, 2)
        (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(num_ranks)) * num_chunks


def v_shape(num_ranks: int, num_chunks: int = 2) -> tuple[int, ...]:
    """The rank of every stage if each lap turns round where the last one ended.

    Example:
        >>> v_shape(3)
        (0, 1, 2, 2, 1, 0)
    """
    there = tuple(range(num_ranks))
    return sum((there[:: -1 if lap % 2 else 1] for lap in range(num_chunks)), ())


@final
@dataclass(frozen=True)
class Schedule:
    """Who does what in which order, for one step.

    Args:
        name: for messages and pictures.
        num_micro_batches: m.
        owners: the rank of every stage: `loop`, `v_shape`, or any other.
        ranks: for every rank its actions in order.
        pairs: forwards that are joined with the backward right after them: the two begin when both can.

    Nothing is checked here: `validate` does that, and says all that is wrong at once.

    Example:
        >>> print(Schedule("by hand", 1, owners=(0, 1), ranks=((Action("F", 0, 0), Action("B", 0, 0)),
        ...                                                    (Action("F", 1, 0), Action("B", 1, 0)))))
        0F0,0B0
        1F0,1B0
    """

    name: str
    num_micro_batches: int
    owners: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]
    pairs: frozenset[Action] = frozenset()

    @property
    def num_ranks(self) -> int:
        """p."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.owners)

    @property
    def num_chunks(self) -> int:
        """v, stages per rank."""
        return self.num_stages // max(1, self.num_ranks)

    @property
    def splits_backward(self) -> bool:
        """Whether the engine must be able to compute I and W apart."""
        return any(action.kind in "IW" for actions in self.ranks for action in actions)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in the order of the model."""
        return tuple(stage for stage, owner in enumerate(self.owners) if owner == rank)

    def blocks_of(self, rank: int) -> tuple[tuple[Action, ...], ...]:
        """The actions of a rank, those of a pair together.

        Example:
            >>> order = tuple(map(Action.parse, ("0F0", "0F1", "0B0", "0B1")))
            >>> Schedule("joined", 2, (0,), (order,), pairs=frozenset(order[1:2])).blocks_of(0)[1]
            (Action(kind='F', stage=0, micro_batch=1), Action(kind='B', stage=0, micro_batch=0))
        """
        if not self.pairs:
            return tuple((action,) for action in self.ranks[rank])
        blocks, rest = [], iter(self.ranks[rank])
        for action in rest:
            blocks.append((action, *islice(rest, 1)) if action in self.pairs else (action,))
        return tuple(blocks)

    def peak_in_flight(self) -> tuple[float, ...]:
        """Per rank the most micro-batches whose activations it holds at once, as shares of its whole part of the model.

        One chunk of one micro-batch counts 1 / v, from its F to the end of its B or W. W still reads activations, so I
        frees none of them.
        """
        change = {"F": 1, "B": -1, "I": 0, "W": -1}
        peaks = (max(accumulate((change[a.kind] for a in actions), initial=0)) for actions in self.ranks)
        return tuple(peak / max(1, self.num_chunks) for peak in peaks)

    def __str__(self) -> str:
        """A line per rank, as torch.distributed.pipelining writes and reads it, and `read_schedule` too."""

        def cell(block: tuple[Action, ...]) -> str:
            return str(block[0]) if len(block) == 1 else f"({';'.join(map(str, block))})OVERLAP_F_B"

        return "\n".join(",".join(map(cell, self.blocks_of(rank))) for rank in range(self.num_ranks))
