# SPDX-License-Identifier: Apache-2.0
"""The global norm counts every element once, however parameters are divided."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.placement import Placement, clip_by_norm, global_norm


def norm_over(ranks: list[list[tuple[Placement, torch.Tensor]]], norm_type: float) -> list[float]:
    """Runs `global_norm` for every rank of a one-axis mesh by recording what each would send, then answering."""
    sent: list[list[torch.Tensor]] = []
    for parts in ranks:
        mine: list[torch.Tensor] = []
        global_norm(parts, lambda t, axes, op, mine=mine: mine.append(t.clone()), norm_type=norm_type)
        sent.append(mine)
    results = []
    for parts in ranks:
        calls = iter(range(len(sent[0])))

        def answer(tensor: torch.Tensor, axes: tuple[str, ...], op: str, calls=calls) -> None:
            stacked = torch.stack([rank[next_call] for next_call in [next(calls)] for rank in sent])
            tensor.copy_(stacked.sum(0) if op == "sum" else stacked.amax(0))

        results.append(float(global_norm(parts, answer, norm_type=norm_type)))
    return results


@settings(deadline=None)  # the first example loads what all use
@given(st.integers(1, 4), st.sampled_from([1.0, 2.0, 3.0, math.inf]), st.integers(0, 2**31))
def test_sharded_and_replicated_parts_give_the_whole_norm(n: int, norm_type: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    replicated = torch.randn(5, generator=generator, dtype=torch.float64)
    divided = torch.randn(7, generator=generator, dtype=torch.float64)
    ranks = []
    for rank in range(n):
        span = (7 * rank // n, 7 * (rank + 1) // n)
        ranks.append(
            [
                (Placement("a", (5,), reduce_axes=("dp_shard",)), replicated),
                (Placement("b", (7,), flat=span, shard_axes=("dp_shard",)), divided[span[0] : span[1]]),
            ]
        )
    expected = float(torch.linalg.vector_norm(torch.cat([replicated, divided]), norm_type))
    assert norm_over(ranks, norm_type) == pytest.approx([expected] * n, rel=1e-12)


def test_nothing_sharded_sends_nothing() -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("sent")

    parts = [(Placement("a", (2,)), torch.tensor([3.0, 4.0]))]
    assert float(global_norm(parts, refuse)) == 5.0
    assert float(global_norm([], refuse)) == 0.0


def test_half_precision_norms_do_not_overflow() -> None:
    """The squares of 300 exceed float16's 65504."""
    parts = [(Placement("a", (100,)), torch.full((100,), 300.0, dtype=torch.float16))]
    assert float(global_norm(parts, lambda *_: None)) == pytest.approx(3000.0, rel=1e-3)


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1.0, 1e22, 1e30])
def test_the_norm_of_tiny_and_of_huge_gradients_is_no_zero_and_no_infinity(size: float) -> None:
    """In float32 the squares of all but the middle one are 0 or infinite; sharded and not."""
    whole, half = Placement("a", (8,)), Placement("b", (8,), flat=(0, 4), shard_axes=("dp_shard",))
    ranks = [[(whole, torch.full((8,), size)), (half, torch.full((4,), size))] for _ in range(2)]
    assert norm_over(ranks, 2.0) == pytest.approx([4 * size] * 2, rel=1e-6)


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipping_equals_torch(max_norm: float) -> None:
    mine = [torch.nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (3, 4)]
    for parameter in mine:
        parameter.grad = torch.randn(parameter.shape, dtype=torch.float64)
    theirs = [torch.nn.Parameter(torch.zeros_like(p)) for p in mine]
    for parameter, twin in zip(mine, theirs, strict=True):
        twin.grad = parameter.grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    parts = [(Placement("", tuple(p.shape)), p.grad) for p in mine]
    norm = global_norm(parts, lambda *_: None)
    clip_by_norm([p.grad for p in mine], norm, max_norm)
    torch.testing.assert_close(norm, expected, rtol=1e-15, atol=0.0)  # torch takes the norm of norms: the last bit
    for parameter, twin in zip(mine, theirs, strict=True):
        torch.testing.assert_close(parameter.grad, twin.grad, rtol=1e-15, atol=0.0)


def test_a_box_outside_the_shape_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="leaves shape"):
        Placement("a", (4,), box=((2, 5),))
