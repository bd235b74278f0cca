# SPDX-License-Identifier: Apache-2.0
"""Parts: what one rank holds of a tensor of the unparallelised state, as boxes with their elements.

A checkpoint knows nothing of strategies. What a rank divided in whatever way is a set of *boxes*, one span per dim of
the whole tensor, and every element of the whole lies in exactly one box of one rank. A flat cut (ZeRO's) is no box, but
it is a few of them:

    whole [4, 5]      elements 3..16      boxes
    . . . a a                             [0:1, 3:5]   a
    b b b b b                             [1:3, 0:5]   b
    b b b b b
    c . . . .                             [3:4, 0:1]   c

So any part of any layout can be read from the boxes of any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

Span = tuple[int, int]
Box = tuple[Span, ...]
"""Per dim of the whole tensor, `[start, stop)`; `()` is all of a scalar."""


def numel(box: Box) -> int:
    """Elements of a box.

    >>> numel(((1, 3), (0, 5))), numel(())
    (10, 1)
    """
    return math.prod(stop - start for start, stop in box)


def whole_box(shape: Sequence[int]) -> Box:
    """The box of everything."""
    return tuple((0, size) for size in shape)


def boxes_of_span(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The elements `[start, stop)` of a row-major tensor as boxes, at most `2 * dims - 1`, in the order of elements.

    >>> list(boxes_of_span((4, 5), 3, 16))
    [((0, 1), (3, 5)), ((1, 3), (0, 5)), ((3, 4), (0, 1))]
    """
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    inner, rest = math.prod(shape[1:]), tuple(shape[1:])
    row, last = start // inner, stop // inner
    if row == last:
        yield from (((row, row + 1), *box) for box in boxes_of_span(rest, start % inner, stop % inner))
        return
    if start % inner:
        yield from (((row, row + 1), *box) for box in boxes_of_span(rest, start % inner, inner))
        row += 1
    if row < last:
        yield ((row, last), *whole_box(rest))
    if stop % inner:
        yield from (((last, last + 1), *box) for box in boxes_of_span(rest, 0, stop % inner))


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes have in common; None if nothing.

    >>> overlap(((0, 4),), ((2, 6),)), overlap(((0, 2),), ((2, 6),))
    (((2, 4),), None)
    """
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return found if all(start < stop for start, stop in found) else None


def within(tensor: Tensor, of: Box, wanted: Box) -> Tensor:
    """The elements of `wanted` out of a tensor that holds the box `of`; a view."""
    for dim, ((first, _), (start, stop)) in enumerate(zip(of, wanted, strict=True)):
        tensor = tensor.narrow(dim, start - first, stop - start)
    return tensor


@final
@dataclass(frozen=True)
class Part:
    """What this rank holds of one tensor.

    Args:
        shape: of the whole tensor.
        dtype: of its elements.
        boxes: those that this rank holds; none if it holds nothing.
        tensors: their elements, one tensor of each box's shape; views, which are read before the next step.
        copy: which of `num_copies` equal copies of this part this rank has; they share the work of writing it.
        num_copies: ranks that hold the same elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    tensors: tuple[Tensor, ...]
    copy: int = 0
    num_copies: int = 1

    def __post_init__(self) -> None:
        for box, tensor in zip(self.boxes, self.tensors, strict=True):
            assert tuple(tensor.shape) == tuple(b - a for a, b in box), f"{tuple(tensor.shape)} is not the box {box}"
            assert tensor.dtype == self.dtype, f"{tensor.dtype} in a part of {self.dtype}"

    @classmethod
    def whole(cls, tensor: Tensor, *, copy: int = 0, num_copies: int = 1) -> Part:
        """All of a tensor, of which every rank has a copy."""
        shape = tuple(tensor.shape)
        return cls(shape, tensor.dtype, (whole_box(shape),), (tensor.detach(),), copy, num_copies)

    @classmethod
    def span(
        cls,
        elements: Tensor,
        shape: Sequence[int],
        start: int,
        stop: int,
        *,
        stride: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        copy: int = 0,
        num_copies: int = 1,
    ) -> Part:
        """A run of a tensor's memory.

        Args:
            elements: `[stop - start]`.
            shape: of the whole tensor.
            start: first element, in the order in which they lie in memory.
            stop: one past the last.
            stride: how the whole lies in memory, densely (`channels_last` is such a way); row-major where left out.
            dtype: of the whole, where this rank holds nothing of it.
            copy: see `Part`.
            num_copies: see `Part`.

        >>> part = Part.span(torch.arange(3, 16), (4, 5), 3, 16)
        >>> [tuple(tensor.shape) for tensor in part.tensors], part.tensors[2].item()
        ([(1, 2), (2, 5), (1, 1)], 15)
        """
        elements = elements.detach().reshape(-1)
        order = list(range(len(shape)))
        if stride is not None:
            order.sort(key=lambda dim: (-stride[dim], -shape[dim]))
        inverse = [order.index(dim) for dim in range(len(shape))]
        found = tuple(boxes_of_span([shape[dim] for dim in order], start, stop))
        tensors, position = [], 0
        for box in found:
            size = numel(box)
            tensor = elements[position : position + size].view([b - a for a, b in box])
            tensors.append(tensor.permute(inverse))
            position += size
        boxes = tuple(tuple(box[inverse[dim]] for dim in range(len(shape))) for box in found)
        return cls(tuple(shape), dtype or elements.dtype, boxes, tuple(tensors), copy, num_copies)

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank holds."""
        return sum(numel(box) for box in self.boxes) * self.dtype.itemsize
