# SPDX-License-Identifier: Apache-2.0
"""The Lightning face of the ZeRO stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from typing_extensions import override

from stratagem.errors import ConfigError
from stratagem.mesh import MeshShape
from stratagem.plugins.zero.initial import ShardedInit
from stratagem.plugins.zero.lane import SHARD_AXES
from stratagem.plugins.zero.settings import ZeroSettings
from stratagem.plugins.zero.stage1 import Zero1
from stratagem.plugins.zero.stage2 import Zero2
from stratagem.plugins.zero.stage3 import Zero3
from stratagem.plugins.zero.technique import Zero
from stratagem.strategy.base import MeshStrategy
from stratagem.strategy.settings import RunSettings
from stratagem.technique import Technique

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class ZeroStrategy(MeshStrategy, ABC):
    """What the stages share.

    Args:
        zero: buckets, partition, wires, offload.
        replicas: groups of ranks that each divide a whole replica between them; gradients are averaged between groups
            in a second step (HSDP). 1: all ranks divide one replica.
        run: timeouts, transport, launcher, the meaning of `batch_size`.
    """

    def __init__(
        self,
        zero: ZeroSettings = ZeroSettings(),
        replicas: int = 1,
        run: RunSettings = RunSettings(),
    ) -> None:
        super().__init__(run)
        if replicas < 1:
            raise ConfigError(f"replicas is {replicas}", where="replicas", allowed="1 or more")
        self.zero, self.replicas = zero, replicas

    @abstractmethod
    def make_zero(self) -> Zero:
        """The technique of the stage."""

    @override
    def mesh_shape(self, world_size: int) -> MeshShape:
        return MeshShape.fit(world_size, fill="dp_shard", dp_replicate=self.replicas)

    @override
    def make_techniques(self) -> list[Technique]:
        return [self.make_zero()]

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        data: Any = self._data
        data.agree_on_overflow = getattr(self.precision_plugin, "scaler", None) is not None


@final
class Zero1Strategy(ZeroStrategy):
    """ZeRO stage 1: the optimizer's state is divided over the ranks.

    Bytes per parameter with float32 Adam on N ranks: `8 + 8/N`. Bytes sent per rank and optimizer step: `2 (N-1)/N`
    times those of the parameters, whatever the accumulation.

    Args:
        zero: buckets, partition, wires, offload.
        replicas: groups of ranks that each divide a whole replica between them.
        run: timeouts, transport, launcher, the meaning of `batch_size`.

    Example:
        >>> Zero1Strategy(replicas=2).mesh_shape(4).sizes
        {'pp': 1, 'dp_replicate': 2, 'dp_shard': 2, 'cp': 1, 'tp': 1}
    """

    @override
    def make_zero(self) -> Zero:
        return Zero1(self.zero)


@final
class Zero2Strategy(ZeroStrategy):
    """ZeRO stage 2: gradients and the optimizer's state are divided over the ranks.

    Bytes per parameter with float32 Adam on N ranks: `4 + 12/N`. Bytes sent per rank and optimizer step: `2 (N-1)/N`
    times those of the parameters; see `ZeroSettings.accumulation` for several micro-batches.

    Args:
        zero: buckets, partition, wires, offload.
        replicas: groups of ranks that each divide a whole replica between them.
        run: timeouts, transport, launcher, the meaning of `batch_size`.
    """

    @override
    def make_zero(self) -> Zero:
        return Zero2(self.zero)


@final
class Zero3Strategy(ZeroStrategy):
    """ZeRO stage 3: parameters, gradients and the optimizer's state are divided over the ranks.

    Bytes per parameter with float32 Adam on N ranks: `16/N`, and the blocks in use. Bytes sent per rank and optimizer
    step: `3 (N-1)/N` times those of the parameters. What the module builds in `configure_model` is divided while it is
    built, with the values of one process; what it builds in `__init__` is whole until the run is set up.

    Args:
        zero: buckets, partition, wires, offload.
        replicas: groups of ranks that each divide a whole replica between them.
        run: timeouts, transport, launcher, the meaning of `batch_size`.
    """

    _initial: ShardedInit | None = None

    @override
    def make_zero(self) -> Zero:
        initial, self._initial = self._initial, None
        return Zero3(self.zero, initial=initial)

    @override
    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Within it modules are divided while they are built. Collective over the shard axes."""
        assert self.context is not None
        self._initial = ShardedInit(self.context.communicator(*SHARD_AXES, lane="parameters"))
        with self._initial:
            yield
