# SPDX-License-Identifier: Apache-2.0
"""How the stages' state leaves for a checkpoint and comes back: whole, or in the parts that each rank holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from stratagem.checkpoint.parts import Part
from stratagem.plugins.zero.bucket import Bucket
from stratagem.plugins.zero.lane import Lane
from stratagem.plugins.zero.optimizer import OwnedOptimizer, part_of_state
from stratagem.plugins.zero.parts import optimizer_parts, part_of_piece
from stratagem.plugins.zero.state import gather_state, load_state
from stratagem.technique import DataTechnique


class Saving(DataTechnique, ABC):
    """The part of `Zero` that saves and loads."""

    _optimizers: list[OwnedOptimizer]
    _buckets: list[Bucket]
    _lane: Lane

    @abstractmethod
    def _settle(self) -> None:
        """Waits for parameters that are still on their way."""

    def _of(self, optimizer: Optimizer) -> OwnedOptimizer | None:
        return next((each for each in self._optimizers if each.optimizer is optimizer), None)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole, under the plain indices, on rank 0 of each shard row. Sends it once around, a tensor at a time."""
        owned = self._of(optimizer)
        if owned is None:
            return super().optimizer_state(optimizer)
        return self._lane.submit(gather_state, owned, self._lane.shard).result()

    @override
    def optimizer_parts(self, optimizer: Optimizer) -> dict[str, Any]:
        """My pieces of it, under the plain indices. Sends one small message of descriptions over the shard axes."""
        owned = self._of(optimizer)
        if owned is None:
            return super().optimizer_parts(optimizer)
        return self._lane.submit(optimizer_parts, owned, self._lane.shard, self._lane.replicate).result()

    @override
    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """The inverse of `optimizer_state`, from any strategy's; every rank has the whole state, or reads from it what
        it owns. Local."""
        owned = self._of(optimizer)
        if owned is None:
            super().load_optimizer_state(optimizer, state)
        else:
            load_state(owned, state)

    @override
    def window_gradients(self) -> tuple[dict[str, Tensor], dict[str, Part]]:
        own, reduced = super().window_gradients()[0], {}
        for bucket in self._buckets:
            for index, owned in enumerate(bucket.owned_parameters):
                if owned is not None and bucket.used[index]:  # by any rank
                    name = self.names[id(bucket.parameters[index])]
                    reduced[name] = part_of_piece(bucket, index, owned.grad, bucket.state_dtype, self._lane.replicate)
        return own, reduced

    @override
    @torch.no_grad()
    def resume_window(self, own: Mapping[str, Tensor], reduced: Mapping[str, Any]) -> None:
        super().resume_window(own, {})
        for bucket in self._buckets:
            for index, owned in enumerate(bucket.owned_parameters):
                found = reduced.get(self.names[id(bucket.parameters[index])])
                if owned is None or found is None:
                    continue
                bucket.used[index] = True
                if bucket.pieces[index].numel and bucket.owned is not None:
                    owned.grad = bucket.part(index, bucket.owned)
                    owned.grad.copy_(part_of_state({"gradient": found}, bucket, index)["gradient"].view_as(owned))

    @override
    def module_parts(self, module: nn.Module) -> dict[str, Any]:
        self._settle()
        return super().module_parts(module)

    @override
    def load_module_state(self, module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
        self._settle()
        super().load_module_state(module, state, strict=strict)
        for bucket in self._buckets:
            bucket.refresh()
