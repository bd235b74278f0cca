# SPDX-License-Identifier: Apache-2.0
"""The backend's own collectives behind the same door: NCCL's on CUDA, and Gloo's to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from stratagem.collectives.ring import Bounds
from stratagem.collectives.wire import Op, Wire, wire_format

_OPS = {Op.SUM: dist.ReduceOp.SUM, Op.MEAN: dist.ReduceOp.AVG}


@final
class NativeCollectives:
    """In-place collectives over `group`, on 1-D tensors. `Wire.BF16` converts once; the backend rounds at its hops."""

    def __init__(self, group: dist.ProcessGroup, index: int) -> None:
        self._group, self._index, self._n = group, index, group.size()

    def all_reduce(self, flat: Tensor, op: Op, wire: Wire) -> None:
        """Every rank's `flat` becomes the sum or mean."""
        sent = self._to_wire(flat, op, wire)
        dist.all_reduce(sent, _OPS[op], group=self._group)
        if sent is not flat:
            flat.copy_(sent)

    def reduce_scatter(self, flat: Tensor, bounds: Bounds, op: Op, wire: Wire) -> None:
        """`flat[bounds[index]]` becomes the sum or mean; the rest keeps its values."""
        sent = self._to_wire(flat, op, wire)
        lo, hi = bounds[self._index]
        received = torch.empty(hi - lo, dtype=sent.dtype, device=sent.device)
        if len({hi - lo for lo, hi in bounds}) == 1:
            _renamed("reduce_scatter")(received, sent, _OPS[op], group=self._group)
        else:
            dist.reduce_scatter(received, [sent[lo:hi] for lo, hi in bounds], _OPS[op], group=self._group)
        flat[lo:hi].copy_(received)

    def all_gather(self, flat: Tensor, bounds: Bounds, wire: Wire) -> None:
        """Every rank's slice arrives everywhere; uneven slices go as broadcasts, since backends differ about them."""
        sent = self._to_wire(flat, None, wire)
        lo, hi = bounds[self._index]
        if len({hi - lo for lo, hi in bounds}) == 1:
            _renamed("all_gather")(sent, sent[lo:hi].clone(), group=self._group)
        else:
            for source, (lo, hi) in enumerate(bounds):
                if hi > lo:
                    dist.broadcast(sent[lo:hi], group=self._group, group_src=source)
        if sent is not flat:
            flat.copy_(sent)

    def broadcast(self, flat: Tensor, src: int) -> None:
        """Every rank's `flat` becomes that of `src`, an index along the axis."""
        dist.broadcast(flat, group=self._group, group_src=src)

    def _to_wire(self, flat: Tensor, op: Op | None, wire: Wire) -> Tensor:
        if wire in (Wire.INT8, Wire.INT4):
            raise ValueError(f"wire {wire.value!r} is a ring of our own: use transport 'p2p' or 'shared_memory'")
        dtype = wire_format(flat.dtype, op=op, wire=wire, n=self._n).dtype
        return flat if dtype is flat.dtype else flat.to(dtype)


def _renamed(name: str) -> Callable[..., Any]:
    """The collective on flat tensors, under the name that this torch has for it."""
    old = {"reduce_scatter": "reduce_scatter_tensor", "all_gather": "all_gather_into_tensor"}[name]
    return getattr(dist, f"{name}_single", None) or getattr(dist, old)
