# SPDX-License-Identifier: Apache-2.0
"""State of a model of which each rank holds boxes, as one process would have it: derived from placements alone.

A technique that cuts parameters (tensor parallelism) states a box for each, and does nothing about state. The technique
that owns the gradients knows nothing of boxes: its module is the cut one, and what it calls whole is a box. `Boxed`
stands around it, and translates:

    out     its tensors and parts  ->  put together along the axis, or parts in the coordinates of the whole parameter
    in      whole tensors          ->  the box of each, which it may divide further

So any data technique composes with any technique that states boxes, and neither knows of the other.

Note [open windows]: gradients of a window that is not over are saved per rank; a run on the same mesh gives each rank
its own back, and one on another mesh takes the mean over all ranks. So a rank states its box of a gradient twice: with
zeros around it, times the number of boxes, so that the mean over all ranks is that of the whole gradients over data
ranks; and as it is, under a name of its rank, to be taken up bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from stratagem.checkpoint.parts import Box, Part, overlap, within
from stratagem.checkpoint.tree import Stored, StoredState
from stratagem.collectives import Communicator
from stratagem.placement import Placement
from stratagem.technique import Context, DataTechnique


@torch.no_grad()
def put_together(
    local: Tensor, shape: Sequence[int], boxes: Sequence[Box], comm: Communicator, *, keep: bool = True
) -> Tensor | None:
    """The whole tensor of which each rank of an axis has a box. Every rank of the axis calls it.

    Sends all but one rank's box from each rank.

    Args:
        local: this rank's box.
        shape: of the whole.
        boxes: every rank's.
        comm: of the axis.
        keep: whether this rank wants it; None otherwise.
    """
    sizes = [math.prod(b - a for a, b in box) for box in boxes]
    starts = [sum(sizes[:rank]) for rank in range(len(sizes) + 1)]
    flat = torch.empty(starts[-1], dtype=local.dtype, device=comm.device)
    flat[starts[comm.rank] : starts[comm.rank + 1]] = local.detach().reshape(-1)
    comm.all_gather(flat, bounds=[(starts[r], starts[r + 1]) for r in range(len(sizes))])
    if not keep:
        return None
    whole = torch.empty(tuple(shape), dtype=local.dtype, device=comm.device)
    for rank, box in enumerate(boxes):
        within(whole, tuple((0, size) for size in shape), box).copy_(
            flat[starts[rank] : starts[rank + 1]].view([b - a for a, b in box])
        )
    return whole


def box_of(value: Any, placement: Placement) -> Any:
    """This rank's box of a whole tensor, or of one that is read when it is asked for; what has another shape stays."""
    if placement.box is None or not isinstance(value, Tensor | Stored) or tuple(value.shape) != placement.shape:
        return value
    if isinstance(value, Stored):
        found = [value.box(box) for box in plain_boxes(placement)]
        return found[0] if placement.packed is None else torch.cat(found, placement.packed[0])
    everything = tuple((0, size) for size in placement.view_shape)
    mine = within(value.reshape(placement.view_shape), everything, placement.box)
    return mine.clone(memory_format=torch.contiguous_format).view(placement.local_shape)


def plain_boxes(placement: Placement) -> list[Box]:
    """The boxes of the parameter itself that this rank holds: one, or one of each packed run.

    >>> plain_boxes(Placement("w", (6, 4), box=((0, 2), (1, 2), (0, 4)), packed=(0, 2)))
    [((1, 2), (0, 4)), ((4, 5), (0, 4))]
    """
    assert placement.box is not None
    if placement.packed is None:
        return [placement.box]
    dim, number = placement.packed
    run, (start, stop) = placement.shape[dim] // number, placement.box[dim + 1]
    return [(*placement.box[:dim], (n * run + start, n * run + stop), *placement.box[dim + 2 :]) for n in range(number)]


@final
class Boxed(DataTechnique):
    """A data technique on a module whose parameters are boxes; see the module.

    Args:
        inner: it.
        axis: over which parameters are cut into boxes.
    """

    def __init__(self, inner: DataTechnique, axis: str) -> None:
        self.inner, self.box_axis = inner, axis
        self._boxes: dict[str, list[Box]] = {}
        self._is_applied = False

    @override
    def apply(self, module: nn.Module, context: Context) -> None:
        """As the inner one's, after the technique that cuts. Collective; one small message of boxes."""
        self._is_applied = True
        self.inner.apply(module, context)
        self.module, self.context, self.names = module, context, self.inner.names
        self._comm = context.communicator(self.box_axis)
        self._parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        mine = {name: place.box for name, place in context.placements.items() if self._is_boxed(place)}
        everyone = self._comm.gather_objects(mine)
        self._boxes = {name: [theirs[name] for theirs in everyone] for name in mine}
        self._alias = {alias: name for name in mine for alias in context.placements[name].aliases}
        shape = context.shape
        self._copy, self._num_copies = shape.data_rank(context.rank), shape.data_size

    def _is_boxed(self, place: Placement) -> bool:
        return place.box is not None and self.box_axis in place.shard_axes

    # -- what passes unchanged -------------------------------------------------------------------------------------

    @override
    def begin(self) -> None:
        self.inner.begin()

    @override
    def finish(self) -> None:
        self.inner.finish()

    @override
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self.inner.no_sync():
            yield

    @override
    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        self.inner.attach(optimizers)

    @override
    def placement_of(self, parameter: Tensor) -> Placement | None:
        return self.inner.placement_of(parameter)

    @override
    def norm_parts(self, tensors: Iterable[Tensor]) -> list[tuple[Placement, Tensor]]:
        """As the inner one's, with a zero per set of shard axes, so that all ranks meet in the norm. Local."""
        found = list(tensors)
        places = [self.placement_of(tensor) for tensor in found]
        axes = dict.fromkeys(place.shard_axes for place in places if place is not None and place.shard_axes)
        dtype = torch.float32
        for tensor in found:
            dtype = torch.promote_types(dtype, tensor.dtype)
        zero = torch.zeros(1, dtype=dtype, device=self.context.device)
        return [(Placement("", (1,), shard_axes=each), zero) for each in axes] + self.inner.norm_parts(found)

    @override
    def wire_bytes_per_step(self) -> Mapping[str, float]:
        """The inner one's, for gradients. Activations depend on the batch: see the technique that sends them."""
        return self.inner.wire_bytes_per_step()

    @override
    def held_bytes(self) -> Mapping[str, int]:
        return self.inner.held_bytes()

    @override
    def close(self) -> None:
        if self._is_applied:
            self.inner.close()

    @override
    def abort(self) -> None:
        if self._is_applied:  # or a technique before it refused the module
            self.inner.abort()

    # -- the module's state ----------------------------------------------------------------------------------------

    def _place(self, name: str) -> Placement | None:
        """The placement of a parameter that is a box, by one of its names."""
        name = self._alias.get(name, name)
        return self.context.placements[name] if name in self._boxes else None

    @override
    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """Whole on rank 0 of the box axis. All ranks call it; sends each box once around."""
        state, found = self.inner.module_state(module), {}
        for name, value in state.items():
            place = self._place(name)
            if place is not None:
                if place.name not in found:
                    found[place.name] = self._whole(value, place)
                value = found[place.name] if found[place.name] is not None else value
            state[name] = value
        return state

    def _whole(self, value: Tensor, place: Placement) -> Tensor | None:
        keep = self._comm.rank == 0
        whole = put_together(value, place.view_shape, self._boxes[place.name], self._comm, keep=keep)
        return None if whole is None else whole.view(place.shape)

    @override
    def module_parts(self, module: nn.Module) -> dict[str, Any]:
        state = self.inner.module_parts(module)
        found: dict[Any, Any] = {}  # tied names share a part
        for name, value in state.items():
            if name in self._parameters:  # a buffer is rank 0's already
                place = self._place(name)
                key = id(value) if place is None else place.name
                if key not in found:
                    found[key] = self._part(value, place)
                state[name] = found[key]
        return state

    def _part(self, value: Any, place: Placement | None) -> Any:
        """A tensor or part of the cut module, as a part of the whole one."""
        if place is None or place.box is None:
            return self._once(value) if isinstance(value, Part) else value
        runs = _runs(place)
        if isinstance(value, Part) and value.shape == place.local_shape:
            pieces = [
                (_moved(common, local, plain), within(tensor, box, common))
                for box, tensor in zip(value.boxes, value.tensors, strict=True)
                for local, plain in runs
                if (common := overlap(box, local)) is not None
            ]
            boxes, tensors = tuple(box for box, _ in pieces), tuple(tensor for _, tensor in pieces)
            return Part(place.shape, value.dtype, boxes, tensors, value.copy, value.num_copies)
        if isinstance(value, Tensor) and tuple(value.shape) == place.local_shape and value.dim():
            everything = tuple((0, size) for size in place.local_shape)
            tensors = tuple(within(value.detach(), everything, local) for local, _ in runs)
            boxes = tuple(plain for _, plain in runs)
            return Part(place.shape, value.dtype, boxes, tensors, self._copy, self._num_copies)
        return value

    def _once(self, part: Part) -> Part:
        """A part of what the ranks of the box axis have in common: rank 0's counts, since the others may be cut
        elsewhere."""
        return part if self._comm.rank == 0 else Part(part.shape, part.dtype, (), ())

    @override
    def load_module_state(self, module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """The inverse of `module_state`; of what is read on demand, this rank's box is read. Local."""
        cut: Any = state.copy() if isinstance(state, StoredState) else dict(state)
        for name in list(cut):
            place = self._place(name)
            if place is not None:
                cut[name] = box_of(cut.raw(name) if isinstance(cut, StoredState) else cut[name], place)
        self.inner.load_module_state(module, cut, strict=strict)

    # -- the optimizer's state -------------------------------------------------------------------------------------

    def _places(self, optimizer: Optimizer) -> list[Placement | None]:
        """By plain index of the optimizer's parameters."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return [self._place(self.names.get(id(getattr(p, "whole", p)), "")) for p in parameters]

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole on rank 0 of the box axis. All ranks call it; sends each box once around."""
        state, places = self.inner.optimizer_state(optimizer), self._places(optimizer)
        found: dict[Any, Any] = {}
        for number, entries in state["state"].items():
            place = places[number]
            found[number] = dict(entries)
            for key, value in entries.items() if place is not None else ():
                if isinstance(value, Tensor) and value.dim() and tuple(value.shape) == place.local_shape:
                    whole = self._whole(value, place)
                    found[number][key] = value if whole is None else whole
        return {**state, "state": found}

    @override
    def optimizer_parts(self, optimizer: Optimizer) -> dict[str, Any]:
        state, places = self.inner.optimizer_parts(optimizer), self._places(optimizer)
        found = {
            number: {key: self._part(value, places[number]) for key, value in entries.items()}
            for number, entries in state["state"].items()
        }
        return {**state, "state": found}

    @override
    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        places = self._places(optimizer)
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        cut: dict[Any, Any] = {}
        for number, place in zip(numbers, places, strict=False):
            if number in state["state"]:
                entries = state["state"][number]
                cut[number] = {k: v if place is None else box_of(v, place) for k, v in entries.items()}
        self.inner.load_optimizer_state(optimizer, {**state, "state": cut})

    # -- an open window --------------------------------------------------------------------------------------------

    @override
    def window_gradients(self) -> tuple[dict[str, Tensor], dict[str, Part]]:
        """See Note [open windows]. Local."""
        theirs, reduced = self.inner.window_gradients()
        own: dict[str, Tensor] = {}
        for name, gradient in theirs.items():
            place = self._place(name)
            if place is None or place.box is None:
                own[name] = gradient
                continue
            whole = gradient.new_zeros(place.view_shape)
            everything = tuple((0, size) for size in place.view_shape)
            mine = within(whole, everything, place.box)
            mine.copy_(gradient.reshape(mine.shape)).mul_(self._comm.size)
            own[name], own[self._exact(name, self.context.rank)] = whole.view(place.shape), gradient
        return own, {name: self._part(part, self._place(name)) for name, part in reduced.items()}

    @override
    def resume_window(self, own: Mapping[str, Tensor], reduced: Mapping[str, Any]) -> None:
        mine: dict[str, Tensor] = {}
        for name in self._boxes.keys() | own.keys():
            place, gradient = self._place(name), own.get(name)
            if gradient is None or place is None:
                mine |= {} if gradient is None else {name: gradient}
                continue
            ranks = range(self.context.shape.size)
            exact = [rank for rank in ranks if self._exact(name, rank) in own]
            is_mine = exact == [self.context.rank]
            mine[name] = own[self._exact(name, self.context.rank)] if is_mine else box_of(gradient, place)
        cut = {}
        for name, value in reduced.items():
            place = self._place(name)
            cut[name] = value if place is None else box_of(value, place)
        self.inner.resume_window(mine, cut)

    @staticmethod
    def _exact(name: str, rank: int) -> str:
        return f"{name}@{rank}"


def _runs(place: Placement) -> list[tuple[Box, Box]]:
    """Per packed run, or once: where it lies in this rank's tensor, and where in the parameter."""
    plain = plain_boxes(place)
    if place.packed is None:
        return [(tuple((0, size) for size in place.local_shape), plain[0])]
    dim, number = place.packed
    size = place.local_shape[dim] // number
    local = [tuple((0, n) for n in place.local_shape) for _ in plain]
    return [((*box[:dim], (n * size, (n + 1) * size), *box[dim + 1 :]), plain[n]) for n, box in enumerate(local)]


def _moved(box: Box, within_: Box, into: Box) -> Box:
    """A box that lies in one, in the coordinates of another."""
    return tuple(
        (a - start + target, b - start + target)
        for (a, b), (start, _), (target, _) in zip(box, within_, into, strict=True)
    )
