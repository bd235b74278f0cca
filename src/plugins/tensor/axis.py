# SPDX-License-Identifier: Apache-2.0
"""The products of column and row layers, with what the layers of one input share.

A block's query, key and value layers read one tensor. Each of their backward products is a part of that tensor's
gradient; summed over the layers first and over the ranks then, they cost one all-reduce, not three:

    forward     x --enter--> X --+-- product q      X is x, or under sequence parallelism x gathered from all ranks
                                 +-- product k
                                 +-- product v
    backward    product v:  total  = dv Wv          then its own weight gradient
                product k:  total += dk Wk          then its own weight gradient
                product q:  total += dq Wq, the last one: the reduction of `total` starts in a background thread,
                                                and the weight gradient of q is computed meanwhile
                enter:      waits for it

Under sequence parallelism only x, a rank's share of the sequence, is kept for backward; X is gathered again there, once
for all layers that read it.

Note [who reads what]: layers share an entry if they read the same tensor object, one right after the other, all with
gradients or all without. That is only a matter of bytes: layers that are not recognised as sharing reduce each for
itself.

Note [a layer without a gradient]: if the output of one of the layers is not used, the reduction starts in `enter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from stratagem.collectives import Communicator, Worker
from stratagem.errors import PlanError
from stratagem.plugins.tensor.functions import Span, all_gathered, reduce_scattered, spans

OVERLAP_BYTES = 2**20
"""Smaller reductions are not worth a background thread's wake-up."""

SEQUENCE_DIM = 1
"""Activations are `[B, T, ...]`."""


@final
class TensorAxis:
    """The tensor-parallel axis as the layers of one model see it, on one rank.

    Args:
        comm: of the axis, for the thread that computes.
        sequence: whether activations between blocks are cut along the sequence.
        later: another communicator of the axis and a thread for it, to overlap; None to reduce at once.

    Attributes:
        rank: this rank's place along the axis.
        size: t.
    """

    def __init__(
        self, comm: Communicator, *, sequence: bool = False, later: tuple[Communicator, Worker] | None = None
    ) -> None:
        self.comm, self.sequence, self.later = comm, sequence, later
        self.rank, self.size = comm.rank, comm.size
        self._last: tuple[Tensor, tuple[int, bool], Tensor, Entry] | None = None
        self._length = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorAxis:
        """A copy of a module lives on the same axis."""
        return self

    def enter(self, x: Tensor) -> tuple[Tensor, Entry]:
        """What column layers compute with, and what they share; see the picture above. Collective where it gathers.

        Args:
            x: `[..., I]`, or under sequence parallelism `[B, T/t, I]`.

        Returns:
            X, `[..., I]` or `[B, T, I]`, and the entry.
        """
        last, graph = self._last, x.requires_grad and torch.is_grad_enabled()
        if last is not None and last[0] is x and last[1] == (x._version, graph):
            return last[2], last[3]
        entry = Entry(self, self.shares_of(x) if self.sequence else ())
        entered = _Enter.apply(x, entry)
        if not x.is_inference():
            self._last = x, (x._version, graph), entered, entry
        return entered, entry

    def forget(self) -> None:
        """Drops the last input. Local."""
        self._last = None

    def cut_sequence(self, x: Tensor) -> tuple[Span, ...]:
        """Every rank's share of the sequence of `x` `[B, T, ...]`, which is about to be cut. Local.

        Raises:
            PlanError: `x` has no sequence.
        """
        if x.dim() <= SEQUENCE_DIM + 1:
            raise PlanError(
                f"an activation of shape {tuple(x.shape)} has no sequence to cut",
                where="tensor.sequence_parallel",
                allowed="activations [B, T, ...]",
                do="set sequence_parallel: off",
            )
        self._length = x.shape[SEQUENCE_DIM]
        return spans(self._length, self.size)

    def shares_of(self, x: Tensor) -> tuple[Span, ...]:
        """Every rank's share of the sequence of which `x` is this rank's: the one that was cut last. Local.

        Raises:
            PlanError: `x` is no share of it.
        """
        shares = spans(self._length, self.size)
        start, stop = shares[self.rank]
        if x.dim() <= SEQUENCE_DIM + 1 or x.shape[SEQUENCE_DIM] != stop - start:
            raise PlanError(
                f"an activation of shape {tuple(x.shape)} is not this rank's share of {self._length} tokens",
                where="tensor.sequence_parallel",
                allowed="modules of which the plan cuts the embedding and every block",
                do="set sequence_parallel: off",
            )
        return shares


@final
class Entry:
    """What the layers that read one tensor share: see the picture of the module."""

    def __init__(self, axis: TensorAxis, along: Sequence[Span]) -> None:
        self.axis, self.along = axis, tuple(along)
        self.num_products = 0
        self._missing = 0
        self._total: Tensor | None = None
        self._full: Tensor | None = None
        self._coming: Future[Tensor] | None = None

    def join(self) -> None:
        """One more product whose backward will add to the gradient. Local."""
        self.num_products += 1
        self._missing = self.num_products

    def full(self, x: Tensor) -> Tensor:
        """X of x, in backward. Collective under sequence parallelism, for the first product that asks."""
        if not self.axis.sequence:
            return x
        if self._full is None:
            self._full = all_gathered(x, self.axis.comm, SEQUENCE_DIM, self.along)
        return self._full

    def add(self, gradient: Tensor, dtype: torch.dtype) -> None:
        """Adds a product's part of X's gradient; the last one starts the reduction. Collective then."""
        if self._total is None:
            self._total = gradient.to(dtype)
        else:
            self._total += gradient
        self._missing -= 1
        if self._missing == 0:
            self._start()

    def _start(self) -> None:
        total = self._total
        assert total is not None
        later = self.axis.later
        if later is None or total.nbytes < OVERLAP_BYTES or total.device.type != "cpu":
            return
        comm, worker = later
        self._coming = worker.submit(self._reduce, total, comm)

    def _reduce(self, total: Tensor, comm: Communicator) -> Tensor:
        if self.axis.sequence:
            return reduce_scattered(total, comm, SEQUENCE_DIM, self.along)
        comm.all_reduce(total)
        return total

    def take(self) -> Tensor | None:
        """The reduced gradient of x; None if no product added one. Collective over the axis."""
        total, coming = self._total, self._coming
        self._total = self._coming = self._full = None
        self._missing = self.num_products
        self.axis.forget()
        if coming is not None:
            return coming.result()
        return None if total is None else self._reduce(total, self.axis.comm)


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, entry: Entry) -> Tensor:
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        if entry.axis.sequence:
            return all_gathered(x, entry.axis.comm, SEQUENCE_DIM, entry.along)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        assert gradient is None, "products hand their gradients to the entry"
        return ctx.entry.take(), None


class _ColumnProduct(Function):
    @staticmethod
    def forward(
        ctx: Any, entered: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, entry: Entry, dtype: torch.dtype
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.entry, ctx.dtypes = entry, (entered.dtype, weight.dtype, dtype)
        if ctx.needs_input_grad[0]:
            entry.join()
        cast = entered.to(dtype)
        ctx.save_for_backward(x.to(dtype) if entry.axis.sequence else cast, weight)
        return _linear(cast, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return None, None, None, None, None, None
        x, weight = ctx.saved_tensors
        wanted, _, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        from_dtype, weight_dtype, dtype = ctx.dtypes
        rows = gradient.reshape(-1, gradient.shape[-1])
        full = ctx.entry.full(x)
        if wanted:
            part = rows @ weight.to(dtype)
            ctx.entry.add(part.view(*gradient.shape[:-1], weight.shape[1]), from_dtype)
        of_weight = (rows.t() @ full.reshape(-1, full.shape[-1])).to(weight_dtype) if wants_weight else None
        of_bias = rows.sum(0).to(weight_dtype) if wants_bias else None
        return None, None, of_weight, of_bias, None, None


class _RowProduct(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: TensorAxis, dtype: torch.dtype
    ) -> Tensor:
        ctx.axis, ctx.dtypes = axis, (x.dtype, weight.dtype, dtype)
        cast = x.to(dtype)
        ctx.save_for_backward(cast, weight)
        out = _linear(cast, weight.to(dtype), None)
        ctx.along = axis.cut_sequence(out) if axis.sequence else ()
        if axis.sequence:
            out = reduce_scattered(out, axis.comm, SEQUENCE_DIM, ctx.along)
        else:
            axis.comm.all_reduce(out)
        return out if bias is None else out.add_(bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        x_dtype, weight_dtype, dtype = ctx.dtypes
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0).to(weight_dtype) if wants_bias else None
        if ctx.axis.sequence:
            gradient = all_gathered(gradient, ctx.axis.comm, SEQUENCE_DIM, ctx.along)
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_x = (rows @ weight.to(dtype)).view(*gradient.shape[:-1], weight.shape[1]).to(x_dtype) if wants_x else None
        of_weight = (rows.t() @ x.reshape(-1, x.shape[-1])).to(weight_dtype) if wants_weight else None
        return of_x, of_weight, of_bias, None, None


def column_product(x: Tensor, weight: Tensor, bias: Tensor | None, axis: TensorAxis) -> Tensor:
    """`x weight^T + bias` where the weight's rows are this rank's: `[..., O/t]` of x `[..., I]`.

    Every rank of the axis calls it. Backward sends `2 (t-1)/t` of x's bytes, once for all column layers that read x;
    under sequence parallelism forward sends `(t-1)/t` of X's bytes and backward twice as much.
    """
    entered, entry = axis.enter(x)
    return _ColumnProduct.apply(entered, x.detach(), weight, bias, entry, _dtype(x))


def row_product(x: Tensor, weight: Tensor, bias: Tensor | None, axis: TensorAxis) -> Tensor:
    """`x weight^T`, summed over the ranks, `+ bias`, added once: `[..., O]` of this rank's `[..., I/t]`.

    Every rank of the axis calls it. Forward sends `2 (t-1)/t` of the output's bytes; under sequence parallelism the
    output is this rank's `[B, T/t, O]`, and forward and backward send `(t-1)/t` of the whole output's bytes each.
    """
    return _RowProduct.apply(x, weight, bias, axis, _dtype(x))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, whose result is never a view: a function's result that is one cannot be changed in place."""
    rows, columns = x.reshape(-1, x.shape[-1]), weight.t()
    out = rows @ columns if bias is None else torch.addmm(bias, rows, columns)
    result: Tensor = torch.ops.aten._unsafe_view(out, [*x.shape[:-1], weight.shape[0]])
    return result


def _dtype(x: Tensor) -> torch.dtype:
    """What a linear layer computes in, here and now."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype
