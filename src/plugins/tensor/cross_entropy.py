# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of logits of which every rank has some classes: nothing that grows with the vocabulary is sent.

For one place with logits z over V classes, target y, and class weights w (1 where there are none), torch's loss is

    (1 - e) w_y (log S - z_y)  +  e/V sum_c w_c (log S - z_c)          S = sum_c exp z_c,  e the label smoothing

Three things are needed of all ranks, each a number per place: the largest logit, to shift z by; S; and the logit of
the target, which one rank has. With label smoothing a fourth, `sum_c w_c z_c`. The gradient needs none:

    d/dz_c  =  (1 - e) w_y (p_c - [c = y])  +  e/V (p_c sum w - w_c)   p_c = exp(z_c) / S
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from stratagem.collectives import Communicator
from stratagem.plugins.tensor.functions import Span

Reduction = Literal["none", "mean", "sum"]


@final
@dataclass(frozen=True)
class LossSettings:
    """Arguments of `F.cross_entropy`, checked by it.

    Args:
        ignore_index: a target that counts for nothing.
        label_smoothing: e.
        reduction: over places.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    reduction: Reduction = "mean"


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        comm: Communicator,
        span: Span,
        num_classes: int,
        smoothing: float,
        ignore: int,
    ) -> Tensor:
        start, stop = span
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest = wide.amax(-1)
        comm.reduce_small(largest, "max")
        shifted = wide - largest.unsqueeze(-1)
        counts = targets != ignore
        mine = counts & (targets >= start) & (targets < stop)
        local = torch.where(mine, targets - start, 0)
        of_target = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0.0)
        own_weights = None if weights is None else weights[start:stop].to(wide.dtype)
        rows = [of_target]
        if smoothing:
            rows.append(shifted.sum(-1) if own_weights is None else shifted @ own_weights)
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(-1), *rows])
        comm.all_reduce(sums)
        log_sum = sums[0].log()
        of_class = _weights_at(targets, counts, weights, wide.dtype)
        loss = (1.0 - smoothing) * of_class * (log_sum - sums[1])
        total_weight = float(num_classes if weights is None else weights.sum())
        if smoothing:
            smooth = total_weight * log_sum - sums[2]
            loss = loss + smoothing / num_classes * smooth.masked_fill(~counts, 0.0)
        exponentials /= sums[0].unsqueeze(-1)
        ctx.save_for_backward(exponentials, local, mine, counts, of_class, own_weights)
        ctx.numbers = smoothing, num_classes, total_weight, logits.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        probabilities, local, mine, counts, of_class, own_weights = ctx.saved_tensors
        smoothing, num_classes, total_weight, dtype = ctx.numbers
        scale = gradient * (1.0 - smoothing) * of_class
        smooth = (gradient * counts) * (smoothing / num_classes)
        result = probabilities * (scale + smooth * total_weight).unsqueeze(-1)
        result.scatter_add_(-1, local.unsqueeze(-1), -(scale * mine).unsqueeze(-1))
        if smoothing:
            each = smooth.unsqueeze(-1)
            result -= each if own_weights is None else each * own_weights
        return result.to(dtype), *[None] * 7


def _weights_at(targets: Tensor, counts: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    if weights is None:
        return counts.to(dtype)
    return weights.to(dtype)[torch.where(counts, targets, 0)] * counts


def vocab_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    comm: Communicator,
    spans: Sequence[Span],
    *,
    weights: Tensor | None = None,
    settings: LossSettings = LossSettings(),
) -> Tensor:
    """`F.cross_entropy` of logits that are cut along the classes, equal on every rank.

    Every rank of the axis calls it, with equal targets. Forward sends three numbers per place (four with label
    smoothing): the maximum `t-1` times, the sums `2 (t-1)/t` times; backward sends nothing.

    Args:
        logits: this rank's classes, `[..., V/t]`.
        targets: int64 `[...]`, class numbers from 0 to V - 1, or `ignore_index`.
        comm: of the axis.
        spans: every rank's classes.
        weights: per class, `[V]`.
        settings: see `LossSettings`.

    Returns:
        A scalar, or `[...]` with `reduction="none"`; in the logits' dtype.

    Raises:
        IndexError: a target that is no class.
    """
    num_classes, dtype = spans[-1][1], logits.dtype
    counts = targets != settings.ignore_index
    if targets.device.type == "cpu" and bool(counts.any()):
        low, high = torch.aminmax(targets[counts])
        if low < 0 or high >= num_classes:
            raise IndexError(f"Target {int(low if low < 0 else high)} is out of bounds.")
    ignore, smoothing = settings.ignore_index, settings.label_smoothing
    each = _CrossEntropy.apply(logits, targets, weights, comm, spans[comm.rank], num_classes, smoothing, ignore)
    if settings.reduction == "none":
        return each.to(dtype)
    total = each.sum()
    if settings.reduction == "mean":
        total = total / _weights_at(targets, counts, weights, each.dtype).sum()
    return total.to(dtype)
