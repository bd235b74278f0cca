# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the order: everything once, the same global batch for every number of ranks, exact means."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stratagem.data import BatchOrder, EvalOrder, epoch_order
from stratagem.data.order import cut
from stratagem.errors import DataError

SAMPLES = st.integers(0, 60)
REPLICAS = st.integers(1, 7)


@given(total=st.integers(0, 100), num_parts=st.integers(1, 12))
def test_cut_covers_everything_once_in_near_equal_parts(total: int, num_parts: int) -> None:
    parts = [cut(total, num_parts, index) for index in range(num_parts)]
    assert [place for start, stop in parts for place in range(start, stop)] == list(range(total))
    sizes = [stop - start for start, stop in parts]
    assert max(sizes) - min(sizes) <= 1


@given(num_samples=SAMPLES, global_batch=st.integers(1, 20), num_replicas=REPLICAS, drop_last=st.booleans())
def test_global_batch_is_the_same_rows_in_the_same_order_for_any_number_of_ranks(
    num_samples: int, global_batch: int, num_replicas: int, drop_last: bool
) -> None:
    alone = BatchOrder(num_samples, global_batch, drop_last=drop_last)
    ranks = [BatchOrder(num_samples, global_batch, num_replicas, rank, drop_last) for rank in range(num_replicas)]
    for step in range(alone.num_batches):
        rows: list[int] = []
        for rank, order in enumerate(ranks):
            start, stop = order.rows(step)
            assert stop - start == max(order.size(step), 1), "a rank without rows of its own repeats one"
            assert all(other.size(step, rank) == order.size(step) for other in ranks), "all ranks agree on the sizes"
            rows += range(start, stop) if order.size(step) else ()
        assert rows == list(range(*alone.rows(step)))
        assert len(rows) == ranks[0].global_size(step)
    assert {order.num_batches for order in ranks} == {alone.num_batches}


@given(num_samples=SAMPLES, global_batch=st.integers(1, 20))
def test_training_order_covers_the_epoch_once(num_samples: int, global_batch: int) -> None:
    order = BatchOrder(num_samples, global_batch)
    seen = [row for step in range(order.num_batches) for row in range(*order.rows(step))]
    assert seen == list(range(num_samples))
    kept = BatchOrder(num_samples, global_batch, drop_last=True)
    assert sum(kept.global_size(step) for step in range(kept.num_batches)) == num_samples // global_batch * global_batch


def _orders(kind: str, num_samples: int, batch: int, num_replicas: int) -> list[BatchOrder | EvalOrder]:
    make = BatchOrder if kind == "train" else EvalOrder
    return [make(num_samples, batch, num_replicas, rank) for rank in range(num_replicas)]


@pytest.mark.parametrize("kind", ["train", "evaluate"])
@given(num_samples=st.integers(1, 60), batch=st.integers(1, 20), num_replicas=REPLICAS)
def test_weighted_mean_over_ranks_is_the_mean_over_rows(
    kind: str, num_samples: int, batch: int, num_replicas: int
) -> None:
    values = [float(3 * row % 7) for row in range(num_samples)]
    orders = _orders(kind, num_samples, batch, num_replicas)
    for step in range(orders[0].num_batches):
        rows = [list(range(*order.rows(step))) for order in orders]
        means = [
            order.weight(step) * sum(values[r] for r in own) / len(own) for order, own in zip(orders, rows, strict=True)
        ]
        counted = [values[r] for order, own in zip(orders, rows, strict=True) if order.size(step) for r in own]
        assert sum(means) / num_replicas == pytest.approx(sum(counted) / len(counted), rel=1e-12)


@given(num_samples=SAMPLES, batch_size=st.integers(1, 10), num_replicas=REPLICAS)
def test_evaluation_sees_every_sample_once_in_as_many_batches_on_every_rank(
    num_samples: int, batch_size: int, num_replicas: int
) -> None:
    orders = [EvalOrder(num_samples, batch_size, num_replicas, rank) for rank in range(num_replicas)]
    seen: list[int] = []
    for order in orders:
        assert order.num_batches == orders[0].num_batches
        sizes = [order.size(step) for step in range(order.num_batches)]
        assert max(sizes, default=0) <= batch_size
        assert max(sizes, default=0) - min(sizes, default=0) <= 1
        for step in range(order.num_batches):
            start, stop = order.rows(step)
            assert 0 <= start < stop <= num_samples
            assert stop - start == max(order.size(step), 1)
            seen += range(start, stop) if order.size(step) else ()
        if num_samples >= num_replicas and (batch_size > 1 or num_samples % num_replicas == 0):
            assert min(sizes) > 0, "no filler where the arithmetic allows none"
    assert seen == list(range(num_samples)), "shares of rank 0, 1, ... follow each other in order"


def test_epoch_order_depends_on_seed_and_epoch_alone() -> None:
    state = torch.get_rng_state()
    first = epoch_order(50, True, seed=3, epoch=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(12345)
    assert torch.equal(epoch_order(50, True, seed=3, epoch=1), first)
    assert sorted(first.tolist()) == list(range(50))
    others = [epoch_order(50, True, seed=seed, epoch=epoch) for seed, epoch in ((3, 0), (3, 2), (4, 1), (1, 3), (2, 2))]
    assert not any(torch.equal(first, other) for other in others)
    assert epoch_order(4, False, seed=3, epoch=1).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("arguments", [(-1, 1), (1, 0), (1, 1, 0), (1, 1, 2, 2), (1, 1, 2, -1)])
def test_impossible_numbers_are_refused(arguments: tuple[int, ...]) -> None:
    for make in (BatchOrder, EvalOrder):
        with pytest.raises(DataError, match="Allowed"):
            make(*arguments)
