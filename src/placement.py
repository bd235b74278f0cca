# SPDX-License-Identifier: Apache-2.0
"""Placement: the single source of truth about where a parameter lives.

For one parameter a `Placement` states its name in the unparallelised model, its global shape, the part of it this rank
holds, over which axes the elements are divided, and over which axes its gradient is averaged. Gradient reduction, the
global norm and clipping, checkpoints and predictions of bytes and memory are all derived from it; no technique
does any of those for itself.

Note [every element once]: a norm over the whole model counts each element exactly once. A parameter that is divided
over some axes adds its local sum, and the sums are added over exactly those axes; a parameter that is replicated along
an axis is added by each rank for itself and never summed over that axis. So a replicated parameter is not counted N
times, and a tied one, which has one placement, not twice.

Example:
    >>> whole = Placement("head.weight", (6, 4), reduce_axes=("dp_replicate",))
    >>> whole.numel, whole.local_numel
    (24, 24)
    >>> half = Placement("head.weight", (6, 4), box=((3, 6), (0, 4)), shard_axes=("tp",))
    >>> half.local_shape, half.local_numel
    ((3, 4), 12)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

Span = tuple[int, int]
"""A half-open range `[start, stop)`."""

_LEAST, _MOST = 1e-15, 1e15  # between them the squares of a norm have their digits in float32

Reduce = Callable[[Tensor, tuple[str, ...], str], None]
"""Reduces a small tensor in place over the given axes, by `"sum"` or `"max"`. Every rank along those axes calls it."""


@final
@dataclass(frozen=True)
class Placement:
    """Where one parameter lives.

    Args:
        name: its name in the unparallelised module.
        shape: its global shape.
        box: per dim, the span this rank holds; the whole shape where left out.
        flat: where the box is cut further, row-major and regardless of dims (flat ZeRO): the span of its elements.
        shard_axes: mesh axes over which the elements are divided, each on one rank.
        reduce_axes: mesh axes over which the gradient is averaged.
        aliases: further names of the same (tied) parameter.
        packed: (dim, number) where a dim is several equal runs, one after the other, of each of which this rank holds
            the same span: a fused `[gate; up]`. The box then is one of `view_shape`.
    """

    name: str
    shape: tuple[int, ...]
    box: tuple[Span, ...] | None = None
    flat: Span | None = None
    shard_axes: tuple[str, ...] = ()
    reduce_axes: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    packed: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.box is not None:
            assert len(self.box) == len(self.view_shape), f"{self.name}: box {self.box} for shape {self.shape}"
            for (start, stop), size in zip(self.box, self.view_shape, strict=True):
                assert 0 <= start <= stop <= size, f"{self.name}: box {self.box} leaves shape {self.shape}"
        if self.flat is not None:
            assert 0 <= self.flat[0] <= self.flat[1] <= math.prod(self.local_shape), f"{self.name}: flat {self.flat}"

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the box, before any flat cut."""
        if self.box is None:
            return self.shape
        sizes = tuple(stop - start for start, stop in self.box)
        if self.packed is None:
            return sizes
        dim, number = self.packed
        return (*sizes[:dim], number * sizes[dim + 1], *sizes[dim + 2 :])

    @property
    def view_shape(self) -> tuple[int, ...]:
        """The global shape, with a packed dim as two.

        >>> Placement("gate_up.weight", (6, 4), packed=(0, 2)).view_shape
        (2, 3, 4)
        """
        if self.packed is None:
            return self.shape
        dim, number = self.packed
        return (*self.shape[:dim], number, self.shape[dim] // number, *self.shape[dim + 1 :])

    @property
    def local_numel(self) -> int:
        """Elements this rank holds."""
        return math.prod(self.local_shape) if self.flat is None else self.flat[1] - self.flat[0]


@torch.no_grad()
def global_norm(parts: Iterable[tuple[Placement, Tensor]], reduce: Reduce, *, norm_type: float = 2.0) -> Tensor:
    """The norm over the whole model of tensors that are placed by `Placement`s: see Note [every element once].

    Every rank of the mesh must call it, with the same placements in the same order; it moves one scalar per distinct
    set of shard axes, over those axes. With nothing sharded nothing is sent.

    Args:
        parts: local tensors (usually gradients) with their placements.
        reduce: the reduction over axes.
        norm_type: p of the p-norm; `inf` for the largest magnitude.

    Returns:
        A scalar, float32 or the wider type of the tensors, equal on all ranks. 0 where there are no tensors. On the
        CPU a finite norm that float32's squares can't hold (below 1e-15, above 1e15) is computed again in float64, by
        all ranks alike, since all have the same first result; it then moves one scalar more.

    Example:
        >>> place = Placement("w", (2,))
        >>> float(global_norm([(place, torch.tensor([3.0, 4.0]))], reduce=lambda *_: None))
        5.0
    """
    groups: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
    for placement, tensor in parts:
        groups[placement.shard_axes].append(tensor.detach())
    tensors = [tensor for group in groups.values() for tensor in group]
    if not tensors:
        return torch.zeros(())
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    device = tensors[0].device
    total = _norm_of_groups(groups, reduce, norm_type, dtype, device)
    if device.type == "cpu" and dtype == torch.float32 and not math.isinf(norm_type):
        seen = float(total)
        if not (_LEAST < seen < _MOST or math.isnan(seen)):
            total = _norm_of_groups(groups, reduce, norm_type, torch.float64, device, wide=True).to(dtype)
    return total


def _norm_of_groups(
    groups: Mapping[tuple[str, ...], list[Tensor]],
    reduce: Reduce,
    norm_type: float,
    dtype: torch.dtype,
    device: torch.device,
    *,
    wide: bool = False,
) -> Tensor:
    """The norm, of which the sums over tensors are taken in `dtype`; with `wide` those over elements, too."""
    infinite = math.isinf(norm_type)
    options = {"dtype": dtype} if wide else {}
    total = torch.zeros((), dtype=dtype, device=device)
    for axes in sorted(groups):
        norms = torch.stack(
            [norm.to(device, dtype) for norm in torch._foreach_norm(groups[axes], norm_type, **options)]
        )
        part = norms.max() if infinite else norms.pow(norm_type).sum()
        if axes:
            reduce(part, axes, "max" if infinite else "sum")
        total = torch.maximum(total, part) if infinite else total + part
    return total if infinite else total.pow(1.0 / norm_type)


@torch.no_grad()
def clip_by_norm(tensors: Iterable[Tensor], total_norm: Tensor, max_norm: float) -> None:
    """Scales tensors in place so that a norm of `total_norm` becomes at most `max_norm`. Local; moves nothing.

    The factor is `min(1, max_norm / (total_norm + 1e-6))`, as in `torch.nn.utils.clip_grad_norm_`, so that results
    stay comparable.
    """
    devices: dict[torch.device, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        devices[tensor.device].append(tensor)
    factor = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    for device, found in devices.items():
        torch._foreach_mul_(found, factor.to(device))
