# SPDX-License-Identifier: Apache-2.0
"""Gather DDP: whole replicas; every rank collects everybody's gradients and averages them by itself.

The simplest data parallelism that is right, and a bad one: per rank and optimizer step it sends `N-1` times the
gradient bytes, where a ring needs `2 (N-1)/N` times, and for a moment it holds the gradients of all `N` ranks. It is
here to show how a strategy is added from outside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar, final

import torch
from torch import nn
from typing_extensions import override

from stratagem.mesh import MeshShape
from stratagem.strategy import MeshStrategy, RunSettings
from stratagem.technique import Context, DataTechnique, Technique, state_placements, unique


@final
class GatherDDP(DataTechnique):
    """Replicas of the whole model; each rank gathers the gradients of all and averages them."""

    axis: ClassVar[str] = "dp_replicate"

    def __init__(self) -> None:
        self._syncing, self._due = True, False

    @override
    def apply(self, module: nn.Module, context: Context) -> None:
        """Gives all ranks rank 0's parameters and buffers. Collective over the data axis; moves the model once."""
        self._module, self.context = module, context
        self.names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._comm = context.communicator(self.axis, lane="gradients")
        state_placements(module, context, (self.axis,))
        self._broadcast([*unique(module.parameters()), *unique(module.buffers())])

    @override
    def begin(self) -> None:
        """From here on the next `finish` has something to do, unless gradients only pile up. Local."""
        self._due = self._due or self._syncing

    @override
    def finish(self) -> None:
        """Averages the gradients. All ranks call it; each sends `N-1` times its gradient bytes."""
        if not self._due:
            return
        self._due = False
        if self._comm.size > 1:
            trained = self._trained()
            with torch.no_grad():
                for dtype in sorted({parameter.dtype for parameter in trained}, key=str):
                    self._average([parameter for parameter in trained if parameter.dtype == dtype])
            self._broadcast(unique(self._module.buffers()))

    def _average(self, parameters: list[nn.Parameter]) -> None:
        """One row per rank: all gradients, then for each parameter whether it had one (a missing one counts as 0)."""
        numels = [parameter.numel() for parameter in parameters]
        width = sum(numels) + len(parameters)
        rows = parameters[0].new_zeros(self._comm.size, width)
        *mine, has_gradient = rows[self._comm.rank].split([*numels, len(parameters)])
        for index, parameter in enumerate(parameters):
            if parameter.grad is not None:
                mine[index].view_as(parameter).copy_(parameter.grad)
                has_gradient[index] = 1
        bounds = [(rank * width, (rank + 1) * width) for rank in range(self._comm.size)]
        self._comm.all_gather(rows.view(-1), bounds=bounds)
        *means, anywhere = rows.mean(dim=0).split([*numels, len(parameters)])
        for parameter, mean, used in zip(parameters, means, anywhere.tolist(), strict=True):
            if used and parameter.grad is not None:
                parameter.grad.copy_(mean.view_as(parameter))
            elif used:
                parameter.grad = mean.view_as(parameter).clone()

    def _broadcast(self, tensors: list[torch.Tensor]) -> None:
        with torch.no_grad():
            self._comm.broadcast_tensors(tensors)

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in unique(self._module.parameters()) if parameter.requires_grad]

    @override
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients pile up and nothing is sent. Local."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @override
    def close(self) -> None:
        """There are no hooks and no threads."""

    @override
    def wire_bytes_per_step(self) -> Mapping[str, float]:
        """`N-1` times the gradients, each with one more value that says whether it is there."""
        row = sum((parameter.numel() + 1) * parameter.dtype.itemsize for parameter in self._trained())
        return {self._comm.axis: float((self._comm.size - 1) * row)}

    @override
    def held_bytes(self) -> Mapping[str, int]:
        """Replicas divide nothing; the rows of the other ranks are gone when the step begins."""
        parameters, trained = unique(self._module.parameters()), self._trained()
        return {
            "parameters": sum(p.numel() * p.dtype.itemsize for p in parameters),
            "gradients": sum(p.numel() * p.dtype.itemsize for p in trained),
        }


@final
class GatherDDPStrategy(MeshStrategy):
    """Replicas of the whole model; each rank gathers the gradients of all and averages them.

    Per rank and optimizer step it sends `N-1` times the gradient bytes, to its right neighbour, whatever the
    accumulation. Per rank it holds parameters, gradients and optimizer state whole.

    Args:
        run: timeouts, transport, launcher, the meaning of `batch_size`.
    """

    def __init__(self, run: RunSettings = RunSettings()) -> None:  # noqa: B008  # frozen
        super().__init__(run)

    @override
    def mesh_shape(self, world_size: int) -> MeshShape:
        """All ranks in one row."""
        return MeshShape.fit(world_size)

    @override
    def make_techniques(self) -> list[Technique]:
        """The one technique."""
        return [GatherDDP()]
