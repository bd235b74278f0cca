# SPDX-License-Identifier: Apache-2.0
"""Batch normalisation over the batches of all data ranks, on any device (torch's own refuses CPU tensors).

Over the samples of all ranks together, with `n` elements per channel in all,

    forward    mean = sum x / n                   one reduction of [C + 1] numbers (the count travels too)
               var  = sum (x - mean)^2 / n        one reduction of [C] numbers
    backward   dx = w / std * (dy - sum dy / n - xhat * sum(dy * xhat) / n)        one reduction of [2C] numbers

The variance is taken around the common mean, in a second message, because `E[x^2] - mean^2` loses all digits where the
mean is large. Ranks may hold different numbers of samples. Gradients of weight and bias stay local sums: the data
technique averages them like any other gradient.

Source: Ioffe and Szegedy 2015 (arXiv 1502.03167); the reductions are those of any synchronised batch norm.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from stratagem.collectives import Communicator
from stratagem.technique import Context

_PARAMETERS = ("weight", "bias")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@final
class _Normalise(Function):
    """Normalises `x` `[B, C, ...]` by the statistics of all ranks; collective in forward and in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, context: Context
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the output, and for running statistics mean and biased variance `[C]` and the count `[1]`."""
        dims = [dim for dim in range(x.dim()) if dim != 1]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        comm = _data_ranks(context)
        counted = 0.0 if context.idle else 1.0
        count = wide.new_full((1,), counted * x.numel() / max(x.shape[1], 1))
        local_mean = wide.mean(dims) if x.numel() else wide.new_zeros(x.shape[1])
        sums = torch.cat([local_mean * count, count])
        comm.reduce_small(sums, "sum")
        total = sums[-1:]
        mean = sums[:-1] / total
        centred = wide - _per_channel(mean, x)
        variance = counted * centred.square().sum(dims)
        comm.reduce_small(variance, "sum")
        variance /= total
        inverse_std = torch.rsqrt(variance + eps)
        normal = centred * _per_channel(inverse_std, x)
        ctx.save_for_backward(normal, inverse_std, weight, total)
        ctx.comm, ctx.dtype, ctx.bias_dtype = comm, x.dtype, None if bias is None else bias.dtype
        out = normal if weight is None else normal * _per_channel(weight.to(wide.dtype), x)
        out = out if bias is None else out + _per_channel(bias.to(wide.dtype), x)
        ctx.mark_non_differentiable(mean, variance, total)
        return out.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight and bias."""
        normal, inverse_std, weight, total = ctx.saved_tensors
        dims = [dim for dim in range(grad.dim()) if dim != 1]
        wide = grad.to(normal.dtype)
        sum_grad, sum_grad_normal = wide.sum(dims), (wide * normal).sum(dims)
        sums = torch.cat([sum_grad, sum_grad_normal])
        ctx.comm.reduce_small(sums, "sum")
        mean_grad, mean_grad_normal = (sums / total).chunk(2)
        scale = inverse_std if weight is None else inverse_std * weight.to(wide.dtype)
        dx = wide - _per_channel(mean_grad, grad) - normal * _per_channel(mean_grad_normal, grad)
        dx = (dx * _per_channel(scale, grad)).to(ctx.dtype)
        dweight = None if weight is None else sum_grad_normal.to(weight.dtype)
        dbias = None if ctx.bias_dtype is None else sum_grad.to(ctx.bias_dtype)
        return dx, dweight, dbias, None, None


@final
class BatchNormOverRanks(_BatchNorm):
    """A BatchNorm of any dimensionality whose training statistics are those of all data ranks together.

    Every data rank must call it in training mode, in the same order; per call it moves `3C + 1` numbers in forward (two
    messages) and `2C` in backward. In evaluation mode it is local. Parameters, buffers and their names are the
    original's.

    Args:
        original: the layer whose parameters and buffers are taken over.
        context: knows the data ranks, and whether this one's batch counts.
    """

    def __init__(self, original: _BatchNorm, context: Context) -> None:
        super().__init__(
            original.num_features, original.eps, original.momentum, affine=False, track_running_stats=False
        )
        self.affine, self.track_running_stats = original.affine, original.track_running_stats
        self._check_input_dim = original._check_input_dim  # type: ignore[method-assign]
        self._original = (original,)  # in a tuple, so that it is no submodule
        for name in _PARAMETERS:
            self.register_parameter(name, getattr(original, name))
        for name in _BUFFERS:
            self.register_buffer(name, getattr(original, name))
        self.train(original.training)
        self._context = (context,)

    def restored(self) -> _BatchNorm:
        """The original layer with what was learned here."""
        (original,) = self._original
        for name in (*_PARAMETERS, *_BUFFERS):
            setattr(original, name, getattr(self, name))
        return original.train(self.training)

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Normalises `[B, C, ...]`."""
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return nn.functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        out, mean, variance, total = _Normalise.apply(input, self.weight, self.bias, self.eps, self._context[0])
        if self.training and self.track_running_stats:
            assert self.running_mean is not None
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            with torch.no_grad():
                self.num_batches_tracked += 1
                factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                unbiased = variance * (total / (total - 1).clamp(min=1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        return out


def convert_batchnorm(module: nn.Module, context: Context) -> None:
    """Replaces every BatchNorm inside `module` by one over the data ranks, in place; with one data rank, none.

    Every rank of the mesh calls it. Sends nothing itself.
    """
    if context.shape.data_size == 1:
        return
    _data_ranks(context)  # opened here, where all ranks come by
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _BatchNorm):
                setattr(parent, name, BatchNormOverRanks(child, context))


def restore_batchnorm(module: nn.Module) -> None:
    """Puts the original layers back, with what was learned; the inverse of `convert_batchnorm`. Local."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, BatchNormOverRanks):
                setattr(parent, name, child.restored())


def _data_ranks(context: Context) -> Communicator:
    return context.communicator("dp_replicate", "dp_shard")


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    """`[C]` shaped so that it spreads over `[B, C, ...]`."""
    return values.view(1, -1, *([1] * (like.dim() - 2)))
