# SPDX-License-Identifier: Apache-2.0
"""Buckets: gradients packed into flat memory, in the order in which backward produces them.

Backward visits layers last to first, so packing the parameters in reverse makes the first bucket full while most of
backward still lies ahead. A bucket holds one dtype on one device; its memory IS the gradients' memory, since every
`.grad` is a view into it.

    parameters   embed  q  k  v  o  up  down  head
    buckets                           [head down] [up o v] [k q] [embed]
    launched                               1          2      3      4       on every rank, whatever order they fill in
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn


@final
@dataclass(frozen=True)
class Slot:
    """Where one parameter's gradient lies within its bucket.

    Args:
        index: the parameter's position in the list that was packed.
        offset: first element in the bucket.
        size: shape of the gradient.
        stride: its strides: the parameter's own where they cover memory densely (as `channels_last` does).
    """

    index: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        """This slot of a bucket's flat memory `[numel]`, as a tensor of the parameter's shape."""
        return flat.as_strided(self.size, self.stride, flat.storage_offset() + self.offset)


@final
@dataclass(frozen=True)
class BucketLayout:
    """One bucket: its slots in the order in which they fill, and its memory's length, dtype and device."""

    slots: tuple[Slot, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Bytes of the bucket's memory."""
        return self.numel * self.dtype.itemsize


def pack(
    parameters: Sequence[nn.Parameter], *, cap_bytes: int, first_cap_bytes: int | None = None
) -> tuple[BucketLayout, ...]:
    """Packs parameters, last first, into buckets of at most `cap_bytes`; pure and the same on all ranks.

    Args:
        parameters: in the module's order.
        cap_bytes: a bucket closes before it would exceed this; a larger parameter has a bucket to itself.
        first_cap_bytes: cap of the first bucket of each dtype: a small one leaves earlier. `cap_bytes` where left out.

    Returns:
        Buckets in launch order: by the place, in reverse, of the parameter that fills them last.

    Example:
        >>> weights = [nn.Parameter(torch.zeros(n)) for n in (4, 3, 2)]
        >>> [[slot.index for slot in bucket.slots] for bucket in pack(weights, cap_bytes=20)]
        [[2, 1], [0]]
    """
    open_slots: dict[tuple[torch.dtype, torch.device], list[Slot]] = {}
    opened: set[tuple[torch.dtype, torch.device]] = set()
    done: list[BucketLayout] = []

    def close(key: tuple[torch.dtype, torch.device]) -> None:
        slots = open_slots.pop(key)
        numel = slots[-1].offset + math.prod(slots[-1].size)
        done.append(BucketLayout(tuple(slots), numel, *key))
        opened.add(key)

    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        key = (parameter.dtype, parameter.device)
        cap = cap_bytes if first_cap_bytes is None or key in opened else min(first_cap_bytes, cap_bytes)
        slots = open_slots.setdefault(key, [])
        offset = slots[-1].offset + math.prod(slots[-1].size) if slots else 0
        if slots and (offset + parameter.numel()) * parameter.dtype.itemsize > cap:
            close(key)
            slots, offset = open_slots.setdefault(key, []), 0
        slots.append(Slot(index, offset, tuple(parameter.shape), _dense_stride(parameter)))
    for key in list(open_slots):
        close(key)
    return tuple(sorted(done, key=lambda bucket: -bucket.slots[-1].index))


def _dense_stride(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's strides if they cover exactly `numel` elements without overlap, else contiguous ones."""
    dims = sorted((stride, size) for stride, size in zip(parameter.stride(), parameter.shape, strict=True) if size > 1)
    expected = 1
    for stride, size in dims:
        if stride != expected:
            return torch.empty(parameter.shape, device="meta").stride()
        expected *= size
    return parameter.stride()
