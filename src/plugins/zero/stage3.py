# SPDX-License-Identifier: Apache-2.0
"""ZeRO's stage 3: parameters are divided, too, and brought together block by block while they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from stratagem.checkpoint.parts import Part
from stratagem.errors import ConfigError
from stratagem.plugins.zero.blocks import Block, find_blocks
from stratagem.plugins.zero.bucket import Bucket
from stratagem.plugins.zero.fetcher import Fetcher, Unit
from stratagem.plugins.zero.initial import ShardedInit
from stratagem.plugins.zero.lane import Lane
from stratagem.plugins.zero.optimizer import OwnedOptimizer
from stratagem.plugins.zero.parts import part_of_piece
from stratagem.plugins.zero.predictions import group_bytes
from stratagem.plugins.zero.settings import ZeroSettings
from stratagem.plugins.zero.state import gather_parameter
from stratagem.plugins.zero.technique import Zero
from stratagem.plugins.zero.watched import absent
from stratagem.technique import Context, unique


@final
class Zero3(Zero):
    """Stage 3: parameters, gradients and the optimizer's state are divided.

    Bytes per parameter with float32 Adam `16/N`, and the blocks that are in use. Per rank and optimizer step it sends
    `3 (N-1)/N` times the parameter bytes: fetched for forward, fetched again for backward, and gradients once; less
    where backward does not read parameters (embeddings, a first layer whose input needs no gradient). With A
    micro-batches all of it happens A times. Modules of at most `persistence_threshold` elements stay whole, as in stage
    2.
    With `secondary_shard: G` backward fetches within runs of G ranks: `2 (N-1)/N` along the axis and `(G-1)/G` within
    the run, for `1/G` of the parameter bytes from forward to the end of backward.
    What autocast makes of a parameter stays with autograd as it is. Fetching is collective: a forward that only some
    ranks run (a callback on rank 0) waits for the others in vain.
    Source: arXiv 1910.02054.

    Args:
        settings: see `ZeroSettings`.
        initial: what divided the module while it was built, if something did; see `ShardedInit`.
    """

    stage: ClassVar[int] = 3

    def __init__(self, settings: ZeroSettings = ZeroSettings(), *, initial: ShardedInit | None = None) -> None:
        super().__init__(settings)
        self._initial = initial
        self._place_by_id: dict[int, tuple[Bucket, int]] = {}
        self._state_hook: RemovableHandle | None = None
        self._keeps_whole_state, self._states_parts = True, False

    # -- start -----------------------------------------------------------------------------------------------------

    @override
    def apply(self, module: nn.Module, context: Context) -> None:
        """Gives all ranks rank 0's values, divides the parameters, and states placements.

        Collective over the data axes. Moves the model once, from rank 0 of each row; what was built divided it moves
        once around the ring, a parameter at a time.

        Raises:
            ConfigError: the ranks built different modules; names the first difference.
        """
        super().apply(module, context)
        fetches = Lane(context, "parameters", group=self._secondary_shard())
        self._lanes.append(fetches)
        self._fetcher = Fetcher(fetches, self.settings)
        blocks = [self._floating(block) for block in find_blocks(module)]
        small = [b for b in blocks if b.numel <= self.settings.persistence_threshold]
        self._make_whole([p for block in small for p in block.parameters])
        units = [self._make_unit(block) for block in blocks if block.numel > self.settings.persistence_threshold]
        self._fetcher.adopt(module, units)
        if self._initial is not None:
            self._initial.release()
        in_launch_order = sorted(self._buckets, key=lambda bucket: -self._first_index[id(bucket.parameters[-1])])
        self._gradients.adopt(in_launch_order)
        self._place_by_id = {id(p): (b, i) for b in self._buckets for i, p in enumerate(b.parameters)}
        for unit in units:
            self._state_placements(unit)
        self._state_hook = module.register_state_dict_post_hook(lambda *args: self._fill_state(*args))

    def _secondary_shard(self) -> int | None:
        wanted, size = self.settings.secondary_shard or None, self._lane.shard.size
        if wanted is not None and size % wanted:
            raise ConfigError(
                f"secondary_shard is {wanted}, and {size} ranks divide a replica",
                where="zero.secondary_shard",
                allowed=", ".join(str(n) for n in range(1, size + 1) if size % n == 0),
            )
        return wanted

    @staticmethod
    def _floating(block: Block) -> Block:
        found = tuple(p for p in block.parameters if p.is_floating_point() or p.is_complex())
        return replace(block, parameters=found)

    @override
    def _equalise(self, module: nn.Module) -> None:
        self._first_index = {id(p): index for index, p in enumerate(unique(module.parameters()))}
        initial = self._initial
        whole = [p for p in unique(module.parameters()) if initial is None or not initial.holds(p)]
        with torch.no_grad():
            self._lane.data.broadcast_tensors([*whole, *unique(module.buffers())])

    def _make_whole(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._initial is not None:
            for parameter in parameters:
                self._initial.make_whole(parameter)
        self._make_buckets(parameters, [parameter.requires_grad for parameter in parameters], divided=False)

    def _make_unit(self, block: Block) -> Unit:
        keys = [parameter.requires_grad for parameter in block.parameters]
        return Unit(block, self._make_buckets(block.parameters, keys, divided=True))

    @override
    def _adopt_values(self, bucket: Bucket, *, divided: bool) -> None:
        if divided:
            bucket.divide(self._values_of(bucket.parameters))
        else:
            bucket.adopt_values()

    def _values_of(self, parameters: Sequence[nn.Parameter]) -> Iterator[Tensor]:
        """Whole values, one after the other; each parameter is without memory when the next one comes."""
        for parameter in parameters:
            built_divided = self._initial is not None and self._initial.holds(parameter)
            yield self._initial.gather(parameter) if built_divided and self._initial is not None else parameter.detach()
            parameter.data = absent(parameter)

    @override
    def _announce(self, buckets: Sequence[Bucket]) -> None:
        """All buckets are announced together, in the order in which backward fills them."""

    def _state_placements(self, unit: Unit) -> None:
        placements = self.context.placements
        for bucket in unit.buckets:
            for parameter, piece in zip(bucket.parameters, bucket.pieces, strict=True):
                name = self.names[id(parameter)]
                axes = self._sharded(placements[name])
                placements[name] = replace(placements[name], flat=(piece.start, piece.stop), shard_axes=axes)

    # -- one step --------------------------------------------------------------------------------------------------

    @override
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As the base class's; at its end blocks are elsewhere."""
        with super().no_sync():
            yield
        self._fetcher.free_all()

    @override
    def _on_finish(self) -> None:
        self._fetcher.free_all()
        super()._on_finish()

    @override
    def _after_step(self, optimizer: OwnedOptimizer) -> None:
        self._fetcher.free_all()
        self._fetcher.count_step()
        super()._after_step(optimizer)

    def _fetches_per_step(self, bucket: Bucket) -> tuple[int, int]:
        unit = next((unit for unit in self._fetcher.units if bucket in unit.buckets), None)
        return (1, 0) if unit is None else unit.fetches_per_step

    @override
    def _gathers_per_step(self, bucket: Bucket) -> int:
        return self._fetches_per_step(bucket)[0]

    @override
    def wire_bytes_per_step(self) -> Mapping[str, float]:
        """As the base class's; what a secondary shard saves there is sent within its group, `(G-1)/G` of it."""
        found, group = super().wire_bytes_per_step(), self._lanes[1].group
        if group is None:
            return found
        near = [(bucket, self._fetches_per_step(bucket)[1]) for bucket in self._buckets]
        return {**found, group.axis: group_bytes(near, group)}

    # -- state -----------------------------------------------------------------------------------------------------

    def _gather(self, parameter: nn.Parameter) -> Tensor | None:
        """The whole value of a divided parameter; None for another."""
        bucket, index = self._place_by_id.get(id(parameter), (None, 0))
        if bucket is None or bucket.values is not None:
            return None
        assert bucket.share is not None
        shard, dtype = self._lane.shard, bucket.cut.layout.dtype
        local = bucket.part(index, bucket.share)
        return self._lane.submit(gather_parameter, bucket, index, shard, local=local, dtype=dtype).result()

    def _fill_state(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """`state_dict()` of the whole module: the hook puts values in. Collective over the shard axes."""
        found: dict[int, Tensor | Part | None] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if prefix + name in state:
                if id(parameter) not in found:  # on every rank alike, whoever keeps it
                    found[id(parameter)] = self._part(parameter) if self._states_parts else self._whole(parameter)
                value = found[id(parameter)]
                if value is not None:
                    state[prefix + name] = value

    def _whole(self, parameter: nn.Parameter) -> Tensor | None:
        whole = self._gather(parameter)
        return whole if self._keeps_whole_state or self._lane.shard.rank == 0 else None

    def _part(self, parameter: nn.Parameter) -> Part | None:
        """My part of a divided parameter; None for another. Local."""
        bucket, index = self._place_by_id.get(id(parameter), (None, 0))
        if bucket is None or bucket.values is not None:
            return None
        assert bucket.share is not None
        local = bucket.part(index, bucket.share)
        return part_of_piece(bucket, index, local, bucket.cut.layout.dtype, self._lane.replicate)

    @override
    def module_parts(self, module: nn.Module) -> dict[str, Any]:
        """My parts of the parameters, and the buffers. Local."""
        self._fetcher.free_all()
        self._states_parts = True
        try:
            return self.buffers_of_first(module, module.state_dict())
        finally:
            self._states_parts = False

    @override
    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """Whole on rank 0 of each shard row. Sends the parameters once around, one at a time."""
        self._keeps_whole_state = False
        try:
            return module.state_dict()
        finally:
            self._keeps_whole_state = True

    @override
    def load_module_state(self, module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """The inverse of `module_state`, from any strategy's; every rank holds the whole state. Local."""
        self._fetcher.free_all()
        with self._loadable(module):
            module.load_state_dict(state, strict=strict)
        for bucket in self._buckets:
            bucket.refresh()

    @contextmanager
    def _loadable(self, module: nn.Module) -> Iterator[None]:
        """Gives each module's parameters memory while its state is loaded, and keeps my part of them afterwards."""
        handles: list[RemovableHandle] = []
        for each in module.modules():
            mine = [p for p in each._parameters.values() if p is not None and self._is_absent(p)]
            if mine:
                handles += [
                    each.register_load_state_dict_pre_hook(lambda *_, mine=mine: self._give_memory(mine)),
                    each.register_load_state_dict_post_hook(lambda *_, mine=mine: self._take_memory(mine)),
                ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _is_absent(self, parameter: nn.Parameter) -> bool:
        bucket = self._place_by_id.get(id(parameter), (None, 0))[0]
        return bucket is not None and bucket.values is None

    @torch.no_grad()
    def _give_memory(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            whole = self._gather(parameter)
            assert whole is not None
            parameter.data = whole

    @torch.no_grad()
    def _take_memory(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            bucket, index = self._place_by_id[id(parameter)]
            bucket.keep_part(index, parameter.detach())
            parameter.data = absent(parameter)

    # -- end -------------------------------------------------------------------------------------------------------

    @override
    def _restore_module(self) -> None:
        """Makes parameters whole, if the settings say so. Collective over the shard axes; moves the model once."""
        self._fetcher.free_all()
        if self.settings.restore_parameters:
            for bucket in self._buckets:
                for parameter in bucket.parameters:
                    whole = self._gather(parameter)
                    if whole is not None:
                        parameter.data = whole

    @override
    def _end(self) -> None:
        self._fetcher.close()
        if self._state_hook is not None:
            self._state_hook.remove()
        super()._end()
