# SPDX-License-Identifier: Apache-2.0
"""Who owns what: buckets of parameters, each cut into one slice per rank. Frozen data, and pure.

    bucket      [   head   |  down  |    up    |  o  |  v  ]      parameters, last first
    flat        |-- rank 0 --|-- rank 1 --|-- rank 2 --|          cut at any element
    parameter   |- rank 0 -|- rank 1|-------- rank 2 ----|        cut between parameters

Rank r owns slice r of EVERY bucket. So the reduce-scatter of a bucket is one collective, which starts as soon as the
bucket is full, while backward still runs; no slice is padded, so there is no element that weight decay or a norm could
count too much. A rank's slice of a bucket is a row of pieces, each the part of one parameter.

Gradients and parameters share the layout, so a slice of the one is stepped by the same slice of the other.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, final

from torch import nn

from stratagem.buckets import BucketLayout, Slot, pack
from stratagem.collectives import chunk_bounds

Span = tuple[int, int]


@final
@dataclass(frozen=True)
class Piece:
    """The part of one parameter that lies in one slice.

    Args:
        slot: where the parameter lies in its bucket.
        start: first element of the piece within the parameter's memory.
        stop: one past its last; equal to `start` where the slice holds nothing of the parameter.
    """

    slot: Slot
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        return self.stop - self.start

    @property
    def whole_numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.slot.size)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the parameter, which then keeps its shape."""
        return self.numel == self.whole_numel


@final
@dataclass(frozen=True)
class Cut:
    """One bucket and its slices.

    Args:
        layout: the bucket.
        bounds: `[start, stop)` of each rank's slice within the bucket's memory; they follow each other, and may be
            empty.
    """

    layout: BucketLayout
    bounds: tuple[Span, ...]

    def __post_init__(self) -> None:
        edges = [0, *(stop for _, stop in self.bounds)]
        assert [start for start, _ in self.bounds] == edges[:-1], f"slices leave gaps: {self.bounds}"
        assert edges[-1] == self.layout.numel, f"slices {self.bounds} of {self.layout.numel} elements"

    def pieces(self, rank: int) -> Iterator[Piece]:
        """One piece per parameter of the bucket, in the bucket's order; most are empty where there are many ranks."""
        low, high = self.bounds[rank]
        for slot in self.layout.slots:
            numel = math.prod(slot.size)
            start = min(max(low - slot.offset, 0), numel)
            yield Piece(slot, start, max(min(high - slot.offset, numel), start))

    def spans(self, slot: Slot) -> tuple[Span, ...]:
        """What each rank owns of a parameter, as spans within the parameter's memory: they follow each other."""
        numel = math.prod(slot.size)
        edges = [min(max(stop - slot.offset, 0), numel) for _, stop in self.bounds]
        return tuple(zip([0, *edges[:-1]], edges, strict=True))


def pack_by_key(
    parameters: Sequence[nn.Parameter],
    keys: Sequence[Hashable],
    *,
    cap_bytes: int,
    first_cap_bytes: int | None = None,
) -> tuple[BucketLayout, ...]:
    """As `stratagem.buckets.pack`, but parameters with different keys never share a bucket.

    Example:
        >>> import torch
        >>> weights = [nn.Parameter(torch.zeros(n)) for n in (4, 3, 2)]
        >>> [[slot.index for slot in bucket.slots] for bucket in pack_by_key(weights, "aba", cap_bytes=100)]
        [[1], [2, 0]]
    """
    indices: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        indices.setdefault(key, []).append(index)
    packed: list[BucketLayout] = []
    for members in indices.values():
        layouts = pack([parameters[i] for i in members], cap_bytes=cap_bytes, first_cap_bytes=first_cap_bytes)
        for layout in layouts:
            slots = tuple(replace(slot, index=members[slot.index]) for slot in layout.slots)
            packed.append(replace(layout, slots=slots))
    return tuple(sorted(packed, key=lambda bucket: -bucket.slots[-1].index))


def cut(
    layouts: Sequence[BucketLayout],
    num_ranks: int,
    *,
    how: Literal["flat", "parameter"],
    loads: list[int] | None = None,
) -> tuple[Cut, ...]:
    """Cuts every bucket into `num_ranks` slices; the same on all ranks.

    Args:
        layouts: the buckets, in launch order.
        num_ranks: slices per bucket.
        how: `flat`: slices of a bucket differ by one element at most. `parameter`: no parameter is cut, and each bucket
            is divided such that the rank that owns most so far, in bytes, owns as little as possible.
        loads: bytes that each rank owns so far; updated, so that what is cut later evens out what was cut before.

    Example:
        >>> import torch
        >>> layouts = pack([nn.Parameter(torch.zeros(n)) for n in (4, 3)], cap_bytes=100)
        >>> cut(layouts, 2, how="flat")[0].bounds, cut(layouts, 2, how="parameter")[0].bounds
        (((0, 4), (4, 7)), ((0, 3), (3, 7)))
    """
    if how == "flat":
        return tuple(Cut(layout, chunk_bounds(layout.numel, num_ranks)) for layout in layouts)
    loads = [0] * num_ranks if loads is None else loads
    cuts = []
    for layout in layouts:
        bounds = _between_parameters(layout, loads)
        loads[:] = [
            load + (stop - start) * layout.dtype.itemsize for load, (start, stop) in zip(loads, bounds, strict=True)
        ]
        cuts.append(Cut(layout, bounds))
    return tuple(cuts)


def _between_parameters(layout: BucketLayout, loads: Sequence[int]) -> tuple[Span, ...]:
    """The cut that minimises the largest load: the least bound under which filling rank after rank succeeds."""
    sizes = [math.prod(slot.size) * layout.dtype.itemsize for slot in layout.slots]

    def fill(bound: int) -> list[int] | None:
        """Parameters per rank, each rank filled up to the bound; None if some are left over."""
        counts, position = [], 0
        for load in loads:
            first = position
            while position < len(sizes) and load + sizes[position] <= bound:
                load += sizes[position]
                position += 1
            counts.append(position - first)
        return counts if position == len(sizes) else None

    low, high = 0, max(loads) + sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if fill(middle) is None:
            low = middle + 1
        else:
            high = middle
    counts = fill(high)
    assert counts is not None
    edges, position = [0], 0
    for count in counts:
        position += count
        edges.append(layout.slots[position].offset if position < len(sizes) else layout.numel)
    return tuple(pairwise(edges))
