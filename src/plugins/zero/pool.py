# SPDX-License-Identifier: Apache-2.0
"""Memory for gradients on their way: two buffers per dtype, one that fills and one that travels.

Note [waiting while blocks are fetched]: a reduction ends when every rank has entered it, and a rank on which control
flow leaves a parameter out enters that one after its backward. In stage 2 backward needs nobody, so the wait for it
ends. In stage 3 that rank's backward fetches blocks, which needs this rank: who waited here without bound would wait
for ever. What a rank will enter cannot be known here, so stage 3 waits for a bounded time, then makes one more buffer,
and waits no more until that reduction is over. More than two buffers thus exist where control flow differs, which
costs one wait per backward, or behind a wire that takes longer for a bucket; there fetches, which carry as many bytes
over the same wire and hold backward to its pace, keep gradients from piling up.
"""

from __future__ import annotations

from collections import defaultdict, deque
from concurrent.futures import Future, wait
from typing import final

import torch
from torch import Tensor

from stratagem.buckets import BucketLayout

_Key = tuple[torch.dtype, torch.device]

PATIENCE = 0.25
"""Seconds that stage 3 waits for a reduction within a backward; most take far less."""


@final
class Pool:
    """Lends flat memory to buckets for the time of one reduction.

    While both buffers are lent, `take` waits for the one that travels; only where none does (buckets wait in line
    behind one that does not fill), or where it does not arrive (stage 3 alone), it makes a third. Between
    `clear` and the next `take` it holds nothing.

    A gradient that travels from where autograd put it is not the pool's memory, but counted here all the same: before
    a further one follows it, the one before must have arrived, however slow the wire is.

    Args:
        patience: seconds that a wait may last; None: until the reduction is over. See Note [waiting while blocks are
            fetched].
    """

    def __init__(self, patience: float | None = None) -> None:
        self._patience = patience
        self._stuck: Future[None] | None = None
        """What was waited for in vain."""
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
            future, flat = self._travelling[key][0]
            if self._is_over(future):
                self._travelling[key].popleft()
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
        while len(self._foreign) > 1 and self._is_over(self._foreign[0]):
            self._foreign.popleft()

    def _is_over(self, reduction: Future[None]) -> bool:
        """Waits for a reduction, as long as it is safe; raises what it raised."""
        if self._patience is not None:
            was_in_vain = self._stuck is not None and not self._stuck.done()  # the lane is in order: nor is this one
            if not wait([reduction], timeout=0.0 if was_in_vain else self._patience).done:
                self._stuck = self._stuck if was_in_vain else reduction
                return False
        reduction.result()
        return True

    def clear(self) -> None:
        """Frees all memory; no reduction runs any more."""
        self._free.clear()
        self._travelling.clear()
        self._num_lent.clear()
        self._lent.clear()
        self._foreign.clear()
        self._stuck = None
