# SPDX-License-Identifier: Apache-2.0
"""The guard's own small talk between all ranks of the world, under whatever strategy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from stratagem.collectives import Communicator
from stratagem.strategy.base import MeshStrategy


@final
class Peers:
    """All ranks of the world. Every rank makes one, at the same time; every method but `device` is collective.

    Under a strategy of ours it speaks through a lane of its own, so that its few bytes stand in the books.

    Args:
        trainer: whose strategy has set up its environment.
    """

    def __init__(self, trainer: Trainer) -> None:
        strategy = trainer.strategy
        self.device = strategy.root_device
        self._communicator: Communicator | None = None
        if isinstance(strategy, MeshStrategy) and strategy.context is not None:
            self._communicator = strategy.context.communicator(*strategy.context.shape.sizes, lane="guard")
        self.rank, self.size = trainer.global_rank, trainer.world_size

    def largest(self, values: Sequence[float]) -> list[float]:
        """Elementwise over all ranks; NaN counts as infinite. Sends 8 bytes per value to each other rank."""
        numbers = [math.inf if math.isnan(value) else value for value in values]
        if self.size == 1:
            return numbers
        tensor = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        if self._communicator is not None:
            self._communicator.reduce_small(tensor, "max")
        else:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        found: list[float] = tensor.tolist()
        return found

    def everyone(self, values: Sequence[float]) -> list[list[float]]:
        """The values of all ranks, by rank: a maximum over slots of which each rank has filled its own."""
        width = len(values)
        slots = [-math.inf] * (width * self.size)
        slots[self.rank * width : (self.rank + 1) * width] = values
        found = self.largest(slots)
        return [found[start : start + width] for start in range(0, len(found), width)]

    def objects(self, mine: Any) -> list[Any]:
        """The objects of all ranks, by rank; pickled."""
        if self.size == 1:
            return [mine]
        if self._communicator is not None:
            return self._communicator.gather_objects(mine)
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine)
        return found
