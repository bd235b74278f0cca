# SPDX-License-Identifier: Apache-2.0
"""The Lightning face of ring DDP."""

from __future__ import annotations

from typing import final

from typing_extensions import override

from stratagem.mesh import MeshShape
from stratagem.plugins.ring_ddp.technique import RingDDP, RingDDPSettings
from stratagem.strategy.base import MeshStrategy
from stratagem.strategy.settings import RunSettings
from stratagem.technique import Technique


@final
class RingDDPStrategy(MeshStrategy):
    """Replicas of the whole model; gradients averaged around a ring during backward.

    Per rank and optimizer step it sends `2 (N-1)/N` times the gradient bytes, to the right neighbour only, whatever the
    accumulation. Per rank it holds parameters, gradients and optimizer state whole.

    Args:
        ring: buckets, wire format, unused parameters, buffers.
        run: timeouts, transport, launcher, the meaning of `batch_size`.

    Example:
        >>> RingDDPStrategy(ring=RingDDPSettings(bucket_mib=8)).mesh_shape(4).dp_replicate
        4
    """

    def __init__(
        self,
        ring: RingDDPSettings = RingDDPSettings(),
        run: RunSettings = RunSettings(),
    ) -> None:
        super().__init__(run)
        self.ring = ring

    @override
    def mesh_shape(self, world_size: int) -> MeshShape:
        return MeshShape.fit(world_size)

    @override
    def make_techniques(self) -> list[Technique]:
        return [RingDDP(self.ring)]
