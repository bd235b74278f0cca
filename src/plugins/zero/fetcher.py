# SPDX-License-Identifier: Apache-2.0
"""Stage 3's parameters: here while they are needed, elsewhere otherwise.

    forward    |  block 0  |  block 1  |  block 2  |        fetch k+1 while k computes; free k when it is done
    backward   |  block 2  |  block 1  |  block 0  |        fetch again where backward asks; free k when k-2 is fetched

A fetched block is an ordinary flat memory of which the parameters are views. Freed, parameters keep their shape but
point to a single NaN (`watched.absent`), so nothing can silently compute with what is not there.

Note [what backward needs]: while a block's forward runs, autograd's saved tensors pass through a hook; of those that
lie in a fetched memory only the place is kept, and when backward asks for one, its block is fetched. So backward
fetches exactly what it reads, whatever the module looks like: called twice, nested outputs, losses hidden in
attributes; an embedding is not fetched at all. Hooks of others (checkpointing) are handed everything else.

Note [use from elsewhere]: a parameter that is read outside its block's forward (`F.linear(x, self.embed.weight)`) is
fetched by the reading, and stays until the end of backward, as what autograd saves of it does.

Note [the secondary shard]: where one is asked for, a rank keeps its part, of its group's parts, of what forward fetched
from the whole axis, as it arrived. Later fetches are made of those parts, within the group, until the parameters change
or the pass is over; so every rank computes backward with the very bits of its forward.

Note [one order on all ranks]: a fetch is collective, on demand. Ranks must therefore run the same blocks in the same
order; what may differ between ranks must be small enough to stay whole (`persistence_threshold`). What is fetched ahead
is what followed last time.

Note [freeing alike]: what one rank has freed and another has not, only the first would fetch again. So nothing is freed
by the gradients that arrive, since a rank may leave out a part of a block, but by the order of fetches alone: in
backward a fetch leaves the block that was in use before it, and frees those before that; a forward that follows a
backward frees what that left behind, whether it was reduced or not, or failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stratagem.collectives import Wire, chunk_bounds
from stratagem.errors import CommunicationError
from stratagem.plugins.zero.blocks import Block
from stratagem.plugins.zero.bucket import Bucket
from stratagem.plugins.zero.lane import Lane
from stratagem.plugins.zero.predictions import parameter_wire
from stratagem.plugins.zero.settings import ZeroSettings
from stratagem.plugins.zero.watched import absent, unwatch, watch

Phase = Literal["forward", "backward", "evaluation"]


@final
class Unit:
    """A block and its buckets at run time.

    Attributes:
        memory: per bucket the flat memory that is being fetched or is in use; empty while the block is elsewhere.
        is_here: whether the parameters are views of that memory.
        num_users: forward passes that run through the block now.
        is_pinned: whether it was used from outside its forward, and stays until the end of backward.
        secondary: per bucket my part within the group; empty while there is none.
        num_fetches: since the last optimizer step: from the whole axis, and within the group.
        fetches_per_step: in the last optimizer step; once for forward and once for backward before there was one.
    """

    def __init__(self, block: Block, buckets: Sequence[Bucket]) -> None:
        self.block, self.buckets = block, tuple(buckets)
        self.memory: list[Tensor] = []
        self.coming: list[Future[None]] = []
        self.is_here, self.is_pinned = False, False
        self.secondary: list[Tensor] = []
        self.num_users = 0
        self.num_fetches, self.fetches_per_step = (0, 0), (2, 0)
        self.num_bytes = sum(bucket.cut.layout.num_bytes for bucket in self.buckets)


@final
class _Saved:
    """The place of a saved tensor in a block's memory."""

    __slots__ = ("bucket", "offset", "size", "stride", "unit")

    def __init__(self, unit: Unit, bucket: int, tensor: Tensor) -> None:
        self.unit, self.bucket = unit, bucket
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()


@final
class _Foreign:
    """What another hook made of a saved tensor, and how it makes a tensor of that again."""

    __slots__ = ("packed", "unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor]) -> None:
        self.packed, self.unpack = packed, unpack


@final
class Fetcher:
    """Fetches and frees the blocks of a module.

    Args:
        lane: for fetches alone, so that they meet no reduction.
        settings: see `ZeroSettings`.
    """

    def __init__(self, lane: Lane, settings: ZeroSettings) -> None:
        self._lane, self._settings = lane, settings
        self.units: list[Unit] = []
        self._unit_of: dict[int, Unit] = {}
        self._here: dict[int, tuple[Unit, int]] = {}
        """Unit and bucket by the address of a fetched memory."""
        self._order: list[Unit] = []
        """Units that are here or coming, longest unused first."""
        self._next: dict[tuple[Phase, int], Unit] = {}
        self._last: tuple[Phase, int] | None = None
        self._handles: list[RemovableHandle] = []
        self._watched: list[nn.Module] = []
        self._running: list[list[Unit]] = []
        """What is needed by the forward passes that run now, innermost last."""

    def adopt(self, module: nn.Module, units: Sequence[Unit]) -> None:
        """Installs hooks: around every block's forward, and on reading its parameters anywhere in `module`. Local."""
        self.units = list(units)
        self._unit_of = {id(p): unit for unit in units for p in unit.block.parameters}
        for unit in units:
            for parameter in unit.block.parameters:
                parameter.data = absent(parameter)
        covered = {id(m) for unit in units if unit.block.is_whole for m in unit.block.module.modules()}
        whole = {id(unit.block.module) for unit in units if unit.block.is_whole}
        for each in module.modules():
            mine = self._units_of(each._parameters.values())
            if mine:
                watch(each, self._on_use)
                self._watched.append(each)
            if id(each) in whole:
                self._around(each, self._units_of(each.parameters()))
            elif mine and id(each) not in covered:
                self._around(each, mine)

    def _units_of(self, parameters: Iterable[nn.Parameter | None]) -> list[Unit]:
        found = (self._unit_of.get(id(parameter)) for parameter in parameters)
        return list(dict.fromkeys(unit for unit in found if unit is not None))

    def _around(self, module: nn.Module, units: list[Unit]) -> None:
        """Has `units` here while `module` runs."""
        self._handles.append(module.register_forward_pre_hook(lambda *_: self._enter(units)))
        self._handles.append(module.register_forward_hook(lambda *_: self._leave(units), always_call=True))

    # -- use -------------------------------------------------------------------------------------------------------

    @staticmethod
    def _phase() -> Phase:
        if torch._C._current_graph_task_id() != -1:  # torch has no public word for "autograd runs backward here"
            return "backward"
        return "forward" if torch.is_grad_enabled() else "evaluation"

    def _enter(self, units: list[Unit]) -> None:
        for unit in units:
            self.fetch(unit)
            unit.num_users += 1
        # The public class for this is a context manager; a forward's begin and end are two hooks.
        pack, unpack = self._hooks_over(torch._C._autograd._top_saved_tensors_default_hooks(False))
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
        self._running.append(units)

    def _leave(self, units: list[Unit]) -> None:
        if not self._running or self._running[-1] is not units:  # the fetch itself has failed
            return
        self._running.pop()
        torch._C._autograd._pop_saved_tensors_default_hooks()
        in_backward = self._phase() == "backward"  # a recomputed forward, whose backward follows at once
        for unit in units:
            unit.num_users -= 1
            if not in_backward and not unit.is_pinned:
                self.free(unit)

    def _on_use(self, parameter: nn.Parameter) -> None:
        """See Note [use from elsewhere]."""
        unit = self._unit_of.get(id(parameter))
        if unit is not None and not unit.num_users:
            unit.is_pinned = True
            self.fetch(unit)

    def _hooks_over(self, outer: tuple[Any, Any] | None) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """See Note [what backward needs]."""
        if outer is not None and outer[0] == self._pack:
            outer = None

        def pack_over(tensor: Tensor) -> Any:
            packed = self._pack(tensor)
            assert outer is not None
            return packed if isinstance(packed, _Saved) else _Foreign(outer[0](tensor), outer[1])

        return (self._pack, self._unpack) if outer is None else (pack_over, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.layout is not torch.strided:
            return tensor
        found = self._here.get(tensor.untyped_storage().data_ptr())
        if found is None or tensor.dtype != found[0].memory[found[1]].dtype:
            return tensor
        return _Saved(*found, tensor)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _Saved):
            self.fetch(packed.unit)
            memory = packed.unit.memory[packed.bucket]
            return memory.as_strided(packed.size, packed.stride, packed.offset)
        return packed.unpack(packed.packed) if isinstance(packed, _Foreign) else packed

    # -- fetching --------------------------------------------------------------------------------------------------

    def fetch(self, unit: Unit) -> None:
        """Has a block here, and others on their way. Collective over the shard axes if it is not yet here.

        Sends `(N-1)/N` of the block's bytes; from a secondary shard `(G-1)/G`, within the group of G.
        """
        phase = self._phase()
        if unit.is_here and self._last == (phase, id(unit)):
            return
        if self._last is not None and self._last[0] == "backward" != phase:
            self._leave_backward()
        here, self._last = self._last, (phase, id(unit))
        if here is not None and here != self._last and here[0] == phase:
            self._next[here] = unit
        self._start(unit)
        if not unit.is_here:
            self._wait(unit)
            self._arrive(unit)
            if phase == "forward":
                self._keep_secondary(unit)
        self._order.remove(unit)
        self._order.append(unit)
        if phase == "backward":
            self._make_room(unit)
        self._look_ahead(unit, phase)

    @torch.inference_mode(mode=False)  # what is fetched there may be in use when it has ended
    def _start(self, unit: Unit) -> None:
        if unit.memory:
            return
        self._order.append(unit)
        far, near = unit.num_fetches
        unit.num_fetches = (far, near + 1) if unit.secondary else (far + 1, near)
        unit.coming = []
        for number, bucket in enumerate(unit.buckets):
            layout = bucket.cut.layout
            flat = torch.empty(layout.numel, dtype=layout.dtype, device=layout.device)
            comm, mine, bounds = self._lane.shard, bucket.share, bucket.cut.bounds
            wire = parameter_wire(bucket, self._settings)
            if unit.secondary:  # rounded already, and not again
                assert self._lane.group is not None
                comm, mine, wire = self._lane.group, unit.secondary[number], Wire.FULL
                bounds = chunk_bounds(layout.numel, comm.size)
            assert mine is not None
            with torch.no_grad():
                flat[slice(*bounds[comm.rank])].copy_(mine)
            unit.coming.append(self._lane.submit(comm.all_gather, flat, bounds=bounds, wire=wire))
            unit.memory.append(flat)

    @torch.inference_mode(mode=False)
    def _keep_secondary(self, unit: Unit) -> None:
        """See Note [the secondary shard]."""
        group = self._lane.group
        if group is not None and not unit.secondary:
            bounds = [chunk_bounds(flat.numel(), group.size)[group.rank] for flat in unit.memory]
            unit.secondary = [flat[slice(*span)].clone() for flat, span in zip(unit.memory, bounds, strict=True)]

    @staticmethod
    def _wait(unit: Unit) -> None:
        try:
            for future in unit.coming:
                future.result()
        except CommunicationError as error:
            if "out of turn" not in str(error):
                raise
            raise CommunicationError(
                f"{error}. This rank fetches block {unit.block.name!r}. If control flow differs between ranks, "
                "keep the modules concerned whole: raise zero.persistence_threshold above their number of elements, "
                "or train with zero_2"
            ) from error

    @torch.inference_mode(mode=False)
    def _arrive(self, unit: Unit) -> None:
        unit.coming, unit.is_here = [], True
        for number, (bucket, flat) in enumerate(zip(unit.buckets, unit.memory, strict=True)):
            for slot, parameter in zip(bucket.cut.layout.slots, bucket.parameters, strict=True):
                parameter.data = slot.view(flat)
            if flat.numel():
                self._here[flat.untyped_storage().data_ptr()] = (unit, number)

    def _look_ahead(self, unit: Unit, phase: Phase) -> None:
        """Starts to fetch what came next last time, as far as the bound on fetched bytes allows."""
        for _ in range(self._settings.prefetch):
            following = self._next.get((phase, id(unit)))
            if following is None or following is unit:
                return
            alive = sum(each.num_bytes for each in self._order)
            if not following.memory and alive + following.num_bytes > self._settings.max_live_mib * 2**20:
                return
            self._start(following)
            unit = following

    def _leave_backward(self) -> None:
        """See Note [freeing alike]; what was used from elsewhere may still be, where a forward differentiates."""
        for unit in [each for each in self._order if not each.is_pinned]:
            self.free(unit)

    def _make_room(self, needed: Unit) -> None:
        """Frees blocks that backward has left behind, but the last: see Note [freeing alike]."""
        idle = [u for u in self._order if u.is_here and u is not needed and not u.num_users and not u.is_pinned]
        for unit in idle[: max(len(idle) - 1, 0)]:
            self.free(unit)

    @torch.inference_mode(mode=False)
    def free(self, unit: Unit) -> None:
        """Lets go of a block's memory, unless a forward runs through it. Local."""
        if unit.num_users or not unit.memory:
            return
        for future in unit.coming:
            future.result()
        for flat in unit.memory:
            self._here.pop(flat.untyped_storage().data_ptr() if flat.numel() else -1, None)
        for parameter in unit.block.parameters:
            parameter.data = absent(parameter)
        unit.memory, unit.coming, unit.is_here, unit.is_pinned = [], [], False, False
        self._order.remove(unit)

    def count_step(self) -> None:
        """An optimizer step is over. Local."""
        for unit in self.units:
            if any(unit.num_fetches):
                unit.fetches_per_step = unit.num_fetches
            unit.num_fetches = (0, 0)

    def free_all(self) -> None:
        """Lets go of every block; what comes next is a new pass. Local."""
        for unit in list(self._order):
            self.free(unit)
        for unit in self.units:
            unit.secondary = []
        self._last = None

    def close(self) -> None:
        """Removes the hooks; parameters stay as they are. Local."""
        for handle in self._handles:
            handle.remove()
        for module in self._watched:
            unwatch(module)
        self._handles, self._watched = [], []
