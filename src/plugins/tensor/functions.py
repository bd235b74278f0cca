# SPDX-License-Identifier: Apache-2.0
"""The conjugate collectives: pairs of which one runs forward and the other backward.

    function       forward             backward            who needs it
    copy_to        nothing             all-reduce          what goes into column layers (Megatron's f)
    reduce_from    all-reduce          nothing             what comes out of row layers (Megatron's g)
    gather_from    all-gather          own slice           a cut output that somebody wants whole
    scatter_to     own slice           all-gather          a whole input that a row layer wants cut
    gather_sum     all-gather          reduce-scatter      into column layers, under sequence parallelism
    scatter_sum    reduce-scatter      all-gather          out of row layers, under sequence parallelism

Bytes that each of t ranks sends for a tensor of S bytes: `2 (t-1)/t S` for an all-reduce, `(t-1)/t S` for an all-gather
or a reduce-scatter, so a pair of the last two costs what one all-reduce costs. Every rank of the axis calls each of
them, in the same order; so does autograd, since the ranks' graphs are alike.

Slices need not be even: `spans` gives the first ranks one unit more.

Note [equal gradients]: what is whole on every rank has, by these rules, an equal gradient on every rank, bit for bit:
an all-reduce leaves the same bits everywhere, and what follows it is the same computation. So parameters that are not
cut need no reduction along the axis, but for those that only see a part of the sequence or of the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from stratagem.collectives import Communicator

Span = tuple[int, int]


def spans(size: int, parts: int, unit: int = 1) -> tuple[Span, ...]:
    """`size` elements in `parts` runs of whole units, the first ones longer by a unit where they are not even.

    Example:
        >>> spans(8, 2), spans(7, 3), spans(12, 2, unit=4)
        (((0, 4), (4, 8)), ((0, 3), (3, 5), (5, 7)), ((0, 8), (8, 12)))
    """
    whole, more = divmod(size // unit, parts)
    found, start = [], 0
    for part in range(parts):
        stop = start + (whole + (part < more)) * unit
        found.append((start, stop))
        start = stop
    return tuple(found)


# -- on tensors, without autograd ----------------------------------------------------------------------------------


def all_reduced(tensor: Tensor, comm: Communicator) -> Tensor:
    """The sum over the axis, in memory of its own. Sends `2 (t-1)/t` of the tensor's bytes."""
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    comm.all_reduce(result)
    return result


def all_gathered(tensor: Tensor, comm: Communicator, dim: int, along: Sequence[Span]) -> Tensor:
    """The ranks' slices put together along a dim. Sends `(t-1)/t` of the result's bytes.

    Args:
        tensor: my slice, of which the dim has `along[rank]`'s size.
        comm: of the axis.
        dim: which dim was cut.
        along: every rank's span of it.
    """
    lead = tensor.detach().movedim(dim, 0)
    rest = lead.shape[1:]
    inner = rest.numel()
    start, stop = along[comm.rank]
    flat = tensor.new_empty(along[-1][1] * inner)
    flat[start * inner : stop * inner].view(stop - start, *rest).copy_(lead)
    comm.all_gather(flat, bounds=[(a * inner, b * inner) for a, b in along])
    return flat.view(along[-1][1], *rest).movedim(0, dim)


def reduce_scattered(tensor: Tensor, comm: Communicator, dim: int, along: Sequence[Span]) -> Tensor:
    """My slice, along a dim, of the sum over the axis. Sends `(t-1)/t` of the tensor's bytes. See `all_gathered`."""
    lead = tensor.detach().movedim(dim, 0).clone(memory_format=torch.contiguous_format)
    rest = lead.shape[1:]
    inner = rest.numel()
    start, stop = along[comm.rank]
    mine = comm.reduce_scatter(lead, bounds=[(a * inner, b * inner) for a, b in along])
    return mine.view(stop - start, *rest).movedim(0, dim).clone(memory_format=torch.contiguous_format)


def own_slice(tensor: Tensor, comm: Communicator, dim: int, along: Sequence[Span]) -> Tensor:
    """This rank's slice along a dim, a view. Local."""
    start, stop = along[comm.rank]
    return tensor.narrow(dim, start, stop - start)


# -- with autograd -------------------------------------------------------------------------------------------------


class _CopyTo(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return all_reduced(gradient, ctx.comm), None


class _ReduceFrom(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Communicator) -> Tensor:
        return all_reduced(tensor, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _GatherFrom(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Communicator, dim: int, along: Sequence[Span]) -> Tensor:
        ctx.place = comm, dim, along
        return all_gathered(tensor, comm, dim, along).clone(memory_format=torch.contiguous_format)  # no view

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return own_slice(gradient, *ctx.place).contiguous(), None, None, None


class _ScatterTo(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Communicator, dim: int, along: Sequence[Span]) -> Tensor:
        ctx.place = comm, dim, along
        return own_slice(tensor, comm, dim, along).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return all_gathered(gradient, *ctx.place), None, None, None


class _GatherSum(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Communicator, dim: int, along: Sequence[Span]) -> Tensor:
        ctx.place = comm, dim, along
        return all_gathered(tensor, comm, dim, along).clone(memory_format=torch.contiguous_format)  # no view

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return reduce_scattered(gradient, *ctx.place), None, None, None


class _ScatterSum(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Communicator, dim: int, along: Sequence[Span]) -> Tensor:
        ctx.place = comm, dim, along
        return reduce_scattered(tensor, comm, dim, along)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return all_gathered(gradient, *ctx.place), None, None, None


def copy_to(tensor: Tensor, comm: Communicator) -> Tensor:
    """The tensor itself; its gradient is summed over the axis. Backward sends `2 (t-1)/t` of its bytes."""
    return _CopyTo.apply(tensor, comm)


def reduce_from(tensor: Tensor, comm: Communicator) -> Tensor:
    """The sum over the axis; the gradient passes. Forward sends `2 (t-1)/t` of the tensor's bytes."""
    return _ReduceFrom.apply(tensor, comm)


def gather_from(tensor: Tensor, comm: Communicator, dim: int, along: Sequence[Span]) -> Tensor:
    """The ranks' slices put together; of the gradient, equal on all ranks, each takes its slice. See `all_gathered`."""
    return _GatherFrom.apply(tensor, comm, dim, along)


def scatter_to(tensor: Tensor, comm: Communicator, dim: int, along: Sequence[Span]) -> Tensor:
    """This rank's slice of a tensor that all have; the slices' gradients are put together. See `all_gathered`."""
    return _ScatterTo.apply(tensor, comm, dim, along)


def gather_sum(tensor: Tensor, comm: Communicator, dim: int, along: Sequence[Span]) -> Tensor:
    """The ranks' slices put together; each gets the sum of the gradients of its slice. See `all_gathered`."""
    return _GatherSum.apply(tensor, comm, dim, along)


def scatter_sum(tensor: Tensor, comm: Communicator, dim: int, along: Sequence[Span]) -> Tensor:
    """This rank's slice of the sum over the axis; the gradients are put together. See `reduce_scattered`."""
    return _ScatterSum.apply(tensor, comm, dim, along)
