# SPDX-License-Identifier: Apache-2.0
"""Wrong implementations of data parallelism, for `test_teeth.py`: ring DDP or a ZeRO stage with one plausible fault.

All of them train, and most of their losses fall.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from typing_extensions import override

from stratagem.collectives import Op, Wire
from stratagem.errors import ConfigError
from stratagem.mesh import MeshShape
from stratagem.placement import Placement
from stratagem.plugins.ring_ddp import RingDDP, RingDDPSettings
from stratagem.plugins.zero import Zero1, Zero2, Zero3, ZeroSettings
from stratagem.plugins.zero.bucket import Bucket
from stratagem.plugins.zero.strategy import ZeroStrategy
from stratagem.plugins.zero.technique import Zero
from stratagem.strategy.base import MeshStrategy
from stratagem.technique import Context, DataTechnique, Technique


class Ring(MeshStrategy):
    """Ring DDP, open to be spoilt."""

    settings = RingDDPSettings()

    @override
    def mesh_shape(self, world_size: int) -> MeshShape:
        return MeshShape.fit(world_size)

    @override
    def make_techniques(self) -> list[Technique]:
        return [RingDDP(self.settings)]

    @override
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        technique = self._data
        assert isinstance(technique, RingDDP | Lying)
        if technique._syncing:
            self.spoil()
        return loss

    def spoil(self) -> None:
        """Runs after every backward whose gradients were reduced."""

    @property
    def trained(self) -> list[nn.Parameter]:
        """What has a gradient."""
        assert self.model is not None
        return [parameter for parameter in self.model.parameters() if parameter.grad is not None]


class Lying(DataTechnique):
    """Does what ring DDP does, and says what it likes."""

    axis = "dp_replicate"

    def __init__(self, settings: RingDDPSettings) -> None:
        self.ring = RingDDP(settings)

    @property
    def _syncing(self) -> bool:
        return self.ring._syncing

    @override
    def apply(self, module: nn.Module, context: Context) -> None:
        self.context = context
        self.ring.apply(module, context)
        self.names = self.ring.names
        self.bytes = sum(p.numel() * p.element_size() for p in module.parameters())
        self.size = context.shape.size

    @override
    def begin(self) -> None:
        self.ring.begin()

    @override
    def finish(self) -> None:
        self.ring.finish()

    @override
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self.ring.no_sync():
            yield

    @override
    def wire_bytes_per_step(self) -> Mapping[str, float]:
        return {"dp_replicate": 2 * (self.size - 1) / self.size * self.bytes}

    @override
    def held_bytes(self) -> Mapping[str, int]:
        return self.ring.held_bytes()

    @override
    def close(self) -> None:
        self.ring.close()


class SumInsteadOfMean(Ring):
    @override
    def spoil(self) -> None:
        for parameter in self.trained:
            assert parameter.grad is not None
            parameter.grad.mul_(self.world_size)


class AverageOverTwo(Ring):
    """Divides by the ranks of half a machine, whatever the group."""

    @override
    def spoil(self) -> None:
        for parameter in self.trained:
            assert parameter.grad is not None
            parameter.grad.mul_(self.world_size / 2)


class OneParameterForgotten(Ring):
    @override
    def make_techniques(self) -> list[Technique]:
        assert self.model is not None
        self.forgotten = list(self.model.parameters())[-1]
        self.forgotten.register_post_accumulate_grad_hook(self._remember)  # before the ring hears of it
        return super().make_techniques()

    def _remember(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.local = parameter.grad.clone()

    @override
    def spoil(self) -> None:
        assert self.forgotten.grad is not None
        self.forgotten.grad.copy_(self.local)


class SyncOfEveryMicroBatch(Ring):
    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        yield


class ReducedTwice(Ring):
    @override
    def spoil(self) -> None:
        assert self.context is not None
        for parameter in self.trained:
            assert parameter.grad is not None
            self.context.communicator("dp_replicate").all_reduce(parameter.grad, op=Op.MEAN)


class StaleGradients(Ring):
    """Parameters without gradient keep the one of an earlier step."""

    @override
    def spoil(self) -> None:
        assert self.model is not None
        kept = self.__dict__.setdefault("kept", {})
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None:
                parameter.grad = kept.get(name)
            else:
                kept[name] = parameter.grad.clone()


class BuffersDrift(Ring):
    settings = RingDDPSettings(broadcast_buffers=False)


class NormOfItsOwnPart(Ring):
    """Clips by the norm of a share of the gradients, as if each rank had to count only those."""

    @override
    def _install_clipping(self) -> None:
        def clip(optimizer: torch.optim.Optimizer, clip_val: float) -> None:
            held = [p for p in self.precision_plugin.main_params(optimizer) if p.grad is not None]
            norm = torch.nn.utils.get_total_norm([p.grad for p in held[:: self.world_size] if p.grad is not None])
            torch.nn.utils.clip_grads_with_norm_(held, clip_val, norm)

        self.precision_plugin.clip_grad_by_norm = clip  # type: ignore[method-assign]


class SameDataEverywhere(Ring):
    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}


class SameShareEverywhere(Ring):
    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": 0}


class UnevenBatchUnweighted(Ring):
    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self._loaders is not None:
            self._loaders.weight = lambda: 1.0  # type: ignore[method-assign]


class NarrowWire(Ring):
    """Half the bits on the wire, and not a word about it."""

    settings = RingDDPSettings(wire=Wire.BF16)

    @override
    def make_techniques(self) -> list[Technique]:
        return [Lying(self.settings)]


class HiddenCopy(Ring):
    """Keeps a second copy of the gradients."""

    @override
    def spoil(self) -> None:
        self.copies = [p.grad.clone() for p in self.trained if p.grad is not None]


class NoBroadcastAtStart(Ring):
    @override
    def make_techniques(self) -> list[Technique]:
        assert self.model is not None
        built = [parameter.detach().clone() for parameter in self.model.parameters()]
        technique = super().make_techniques()[0]
        apply = technique.apply

        def apply_and_undo(module: nn.Module, context: Context) -> None:
            apply(module, context)
            for parameter, mine in zip(module.parameters(), built, strict=True):
                parameter.data.copy_(mine)

        technique.apply = apply_and_undo  # type: ignore[method-assign]
        return [technique]


class NotDistributed(Ring):
    """Lightning then ignores `sync_dist` without a word."""

    @property
    @override
    def is_distributed(self) -> bool:
        return False


class LocalVotes(Ring):
    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision


class WaitsInTeardown(Ring):
    """A rank that raises waits for the others before it ends, and they wait for it."""

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self.context is not None and self.global_rank == 1:
            self.context.communicator("dp_replicate").barrier()
        super().on_exception(exception)


class RefusesManualOptimization(Ring):
    """How a technique that owns the step should speak."""

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            raise ConfigError(
                "manual optimization, and the step is mine", where="model", allowed="automatic optimization"
            )
        super().setup(trainer)


class Sharded(ZeroStrategy):
    """A stage of ZeRO, open to be spoilt."""

    stage: type[Zero] = Zero2

    @override
    def make_zero(self) -> Zero:
        return self.stage(ZeroSettings(bucket_mib=1e-3, persistence_threshold=0))  # type: ignore[call-arg]  # a stage

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        assert isinstance(self._data, Zero)
        self.spoil(self._data)

    def spoil(self, zero: Zero) -> None:
        """Runs when everything is in its place."""


class ShardsOfTheSum(Sharded):
    @override
    def spoil(self, zero: Zero) -> None:
        reduce = zero._lane.shard.reduce_scatter
        zero._lane.shard.reduce_scatter = lambda *a, op, **k: reduce(*a, op=Op.SUM, **k)  # type: ignore[method-assign]


class MissingBucket(Sharded):
    """One bucket is never reduced: each rank steps its slice of its own gradient."""

    stage = Zero3

    @override
    def spoil(self, zero: Zero) -> None:
        reduce, victim = zero._gradients._reduce, max(zero._buckets, key=lambda bucket: bucket.numel)

        def reduce_but_one(bucket: Bucket, flat: Tensor, owned: Tensor, kept: Tensor | None, adds: bool) -> None:
            if bucket is victim:
                owned.copy_(flat[slice(*bucket.span)])
            else:
                reduce(bucket, flat, owned, kept, adds)

        zero._gradients._reduce = reduce_but_one  # type: ignore[method-assign]


class NormOfTheShard(Sharded):
    """Clips by the norm of what this rank owns."""

    stage = Zero1

    @override
    def spoil(self, zero: Zero) -> None:
        def local(tensors: Iterable[Tensor]) -> list[tuple[Placement, Tensor]]:
            return [(Placement("", tuple(t.shape)), t.grad) for t in tensors if t.grad is not None]

        zero.norm_parts = local  # type: ignore[method-assign]


class DecayedPadding(Sharded):
    """Takes the end of a slice for padding, and weight decay shrinks it once more."""

    @override
    def spoil(self, zero: Zero) -> None:
        gather = zero._lane.shard.all_gather

        def decay_and_gather(flat: Tensor, *, bounds: Any, **options: Any) -> None:
            start, stop = bounds[zero._lane.shard.rank]
            flat[max(start, stop - 1) : stop] *= 1 - 1e-3
            gather(flat, bounds=bounds, **options)

        zero._lane.shard.all_gather = decay_and_gather  # type: ignore[method-assign]


class OneRankSkips(Sharded):
    """Rank 1 alone finds an overflow, and leaves its second step out."""

    stage = Zero3

    @override
    def spoil(self, zero: Zero) -> None:
        optimizer, steps = zero._optimizers[0].optimizer, itertools.count()

        def skip(*_: object) -> None:
            if next(steps) == 1 and self.global_rank == 1:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None

        optimizer.register_step_pre_hook(skip)


def ddp_by_another_name() -> Strategy:
    """What it says on the label is another technique."""
    return DDPStrategy()
