# SPDX-License-Identifier: Apache-2.0
"""Memory for gradients on their way: two buffers per dtype, one that fills and one that travels."""

from __future__ import annotations

from collections import defaultdict, deque
from concurrent.futures import Future
from typing import final

import torch
from torch import Tensor

from stratagem.buckets import BucketLayout

_Key = tuple[torch.dtype, torch.device]


@final
class Pool:
    """Lends flat memory to buckets for the time of one reduction.

    While both buffers are lent, `take` waits for the one that travels; only where none does (buckets wait in line
    behind one that does not fill) it makes a third. Between `clear` and the next `take` it holds nothing.

    A gradient that travels from where autograd put it is not the pool's memory, but counted here all the same: before
    a further one follows it, the one before must have arrived, however slow the wire is.
    """

    def __init__(self) -> None:
        self._numel: dict[_Key, int] = defaultdict(int)
        self._free: dict[_Key, list[Tensor]] = defaultdict(list)
        self._travelling: dict[_Key, deque[tuple[Future[None], Tensor]]] = defaultdict(deque)
        self._num_lent: dict[_Key, int] = defaultdict(int)
        self._lent: dict[int, Tensor] = {}
        self._foreign: deque[Future[None]] = deque()

    def reserve(self, layout: BucketLayout) -> None:
        """Buffers will be large enough for this bucket."""
        key = (layout.dtype, layout.device)
        self._numel[key] = max(self._numel[key], layout.numel)

    def take(self, layout: BucketLayout) -> Tensor:
        """Flat memory `[layout.numel]`, with anything in it. May wait for a reduction to end."""
        key = (layout.dtype, layout.device)
        if layout.numel > self._numel[key]:  # a gradient larger than a bucket, of which autograd made none here
            return torch.empty(layout.numel, dtype=layout.dtype, device=layout.device)
        if not self._free[key] and self._num_lent[key] >= 2 and self._travelling[key]:
            future, flat = self._travelling[key].popleft()
            future.result()
            self._free[key].append(flat)
            self._num_lent[key] -= 1
        self._num_lent[key] += 1
        free = self._free[key]
        whole = free.pop() if free else torch.empty(self._numel[key], dtype=layout.dtype, device=layout.device)
        self._lent[whole.data_ptr()] = whole
        return whole[: layout.numel]

    def give_back(self, layout: BucketLayout, flat: Tensor, *, after: Future[None]) -> None:
        """Lets `flat` be lent again when a reduction is over. May wait for an earlier one, of memory not the pool's."""
        whole = self._lent.pop(flat.data_ptr(), None)
        if whole is not None:
            self._travelling[layout.dtype, layout.device].append((after, whole))
            return
        self._foreign.append(after)
        while len(self._foreign) > 1:
            self._foreign.popleft().result()

    def clear(self) -> None:
        """Frees all memory; no reduction runs any more."""
        self._free.clear()
        self._travelling.clear()
        self._num_lent.clear()
        self._lent.clear()
        self._foreign.clear()
