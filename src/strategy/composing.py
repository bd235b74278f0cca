# SPDX-License-Identifier: Apache-2.0
"""Composing: Lightning's checkpoint, as each rank has it, into what each rank writes of it.

The same picture goes to disk (`FaultTolerantCheckpointIO`) and into memory (`InMemoryReplicas`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from stratagem.checkpoint import tree
from stratagem.checkpoint.parts import Part
from stratagem.checkpoint.writing import Choice, choose
from stratagem.strategy.crew import Crew
from stratagem.strategy.opening import renamed


@final
@dataclass(frozen=True)
class Picture:
    """One rank's share of a checkpoint.

    Args:
        choices: the chunks that it writes.
        objects: all that is no tensor; rank 0's is written, when `complete`.
        own: what there is of this rank alone (its random state); None if there is nothing.
        aliases: names of tied tensors, and under which name each is stored.
        about: facts for people and tools; the same on all ranks but for the time, and rank 0's counts.
        step: the checkpoint's `global_step`.
    """

    choices: Sequence[Choice]
    objects: Any
    own: Any
    aliases: Mapping[str, str]
    about: Mapping[str, Any]
    step: int

    def complete(self, owns: Sequence[Any]) -> Any:
        """The objects with what is of every rank alone.

        Args:
            owns: of all ranks, in their order.
        """
        self.objects["stratagem"]["ranks"] = [own for own in owns if own is not None]
        return self.objects


def compose(checkpoint: dict[str, Any], crew: Crew) -> Picture:
    """This rank's share; copies nothing. Local.

    Args:
        checkpoint: Lightning's, with tensors or `Part`s.
        crew: who saves it together.
    """

    def part_of(path: tree.Path, tensor: Tensor) -> Part | None:
        """Replicas of the model's and the optimizers' state share the work; of all else rank 0's counts."""
        if path[0] in (tree.STATE, tree.OPTIMIZERS):
            return Part.whole(tensor, copy=crew.rank, num_copies=crew.size)
        return Part.whole(tensor) if crew.rank == 0 else None

    extra = dict(checkpoint.get("stratagem", {}))
    own, mine = tree.take_apart(extra.pop("rank", None), lambda _, tensor: Part.whole(tensor), ("rank", crew.rank))
    rest, parts = tree.take_apart(renamed({**checkpoint, "stratagem": extra}, to_names=True), part_of)
    aliases = tree.tied(checkpoint.get(tree.STATE, {}))
    parts.update(mine)
    step = int(checkpoint.get("global_step", -1))
    about = {
        "global_step": step,
        "epoch": checkpoint.get("epoch", -1),
        "created": time.time(),
        "ranks": crew.size,
        "torch": torch.__version__,
        "lightning": checkpoint.get("pytorch-lightning_version", ""),
        **{key: value for key, value in extra.items() if isinstance(value, str | int | float)},
    }
    choices = choose({name: part for name, part in parts.items() if name not in aliases})
    return Picture(choices, rest, own, aliases, about, step)
