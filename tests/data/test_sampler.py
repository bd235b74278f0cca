# SPDX-License-Identifier: Apache-2.0
"""The order as a torch sampler: over ranks, over users' own samplers, and across a stop in the middle of an epoch."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from stratagem.data import OrderedBatchSampler, OrderedLoader, ordered_batch_sampler
from stratagem.errors import DataError

DATA = list(range(23))


def _ranks(source: Any, num_replicas: int, **options: Any) -> list[OrderedBatchSampler]:
    return [
        OrderedBatchSampler(source, num_replicas=num_replicas, rank=rank, **options) for rank in range(num_replicas)
    ]


def _global_batches(samplers: list[OrderedBatchSampler]) -> list[list[int]]:
    """What all ranks together load, step by step, without fillers."""
    start = samplers[0].start
    steps = zip(*samplers, strict=True)
    return [
        [row for sampler, rows in zip(samplers, step, strict=True) if sampler.size(start + number) for row in rows]
        for number, step in enumerate(steps)
    ]


@given(n=st.integers(1, 40), batch=st.integers(4, 12), num_replicas=st.integers(1, 4), shuffle=st.booleans())
def test_global_mode_gives_every_number_of_ranks_the_same_batches(
    n: int, batch: int, num_replicas: int, shuffle: bool
) -> None:
    options = {"batch_size": batch, "split": "global", "shuffle": shuffle, "seed": 5}
    alone, many = _ranks(n, 1, **options)[0], _ranks(n, num_replicas, **options)
    for epoch in (0, 1):
        for sampler in (alone, *many):
            sampler.set_epoch(epoch)
        assert _global_batches(many) == list(alone)
    assert len(many[-1]) == len(alone) == len(list(alone))


def test_per_rank_mode_multiplies_the_batch_by_the_ranks() -> None:
    assert _global_batches(_ranks(10, 2, batch_size=2)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert _global_batches(_ranks(10, 2, batch_size=2, drop_last=True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_plain_torch_samplers_are_read_for_their_length_and_shuffling() -> None:
    assert list(OrderedBatchSampler(SequentialSampler(DATA), batch_size=23)) == [DATA]
    shuffled = OrderedBatchSampler(RandomSampler(DATA), batch_size=23, seed=1)
    assert list(shuffled) == list(OrderedBatchSampler(23, batch_size=23, shuffle=True, seed=1)) != [DATA]


def _random_state() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def _as_process(rank: int) -> tuple[Any, ...]:
    """Gives the random generators the state of another process."""
    torch.manual_seed(rank), random.seed(rank), np.random.seed(rank)
    return _random_state()


class _PythonSampler(Sampler[int]):
    """A user's sampler that draws from Python's and numpy's random state."""

    def __iter__(self) -> Iterator[int]:
        return iter([random.randrange(1000), int(np.random.randint(1000)), int(torch.randint(1000, ())), 7])

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: WeightedRandomSampler([0.1, 0.5, 0.4], num_samples=12),
        lambda: SubsetRandomSampler(range(4, 16)),
        lambda: RandomSampler(DATA, replacement=True, num_samples=12),
        lambda: RandomSampler(DATA, num_samples=12),
        lambda: WeightedRandomSampler([0.1, 0.9], 12, generator=torch.Generator().manual_seed(torch.initial_seed())),
        _PythonSampler,
    ],
)
def test_any_other_sampler_is_drawn_alike_on_all_ranks_and_leaves_random_state_alone(make: Any) -> None:
    samplers = []
    for rank in range(2):
        _as_process(rank)
        samplers.append(OrderedBatchSampler(make(), batch_size=4, split="global", num_replicas=2, rank=rank, seed=3))
    epochs = []
    for epoch in range(2):
        drawn = []
        for sampler in samplers:
            before = _as_process(sampler.rank)
            sampler.set_epoch(epoch)
            drawn.append([sampler.indices(step) for step in range(len(sampler))])
            assert _random_state() == before
        alone = OrderedBatchSampler(make(), batch_size=4, split="global", seed=3)
        alone.set_epoch(epoch)
        assert [a + b for a, b in zip(*drawn, strict=True)] == list(alone)
        epochs.append(list(alone))
    assert epochs[0] != epochs[1], "each epoch is drawn anew"


class _ByLength(Sampler[list[int]]):
    """A user's batch sampler with batches of different sizes."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[list[int]]:
        order = iter(torch.randperm(sum(self.sizes)).tolist())
        for size in self.sizes:
            yield [next(order) for _ in range(size)]

    def __len__(self) -> int:
        return len(self.sizes)


def test_own_batches_are_cut_in_global_mode_and_dealt_out_in_per_rank_mode() -> None:
    source = _ByLength([4, 3, 5, 2, 2])
    whole = list(OrderedBatchSampler(source, batch_size=None, split="global"))
    assert [len(batch) for batch in whole] == source.sizes
    assert _global_batches(_ranks(source, 2, batch_size=None, split="global")) == whole
    dealt = _ranks(source, 2, batch_size=None, split="per_rank")
    assert _global_batches(dealt) == [whole[0] + whole[1], whole[2] + whole[3], whole[4]]
    assert [list(sampler) for sampler in dealt] == [whole[0::2], [whole[1], whole[3], [whole[4][-1]]]]
    assert [sampler.weight(2) for sampler in dealt] == [2.0, 0.0]
    assert dealt[0].weight(0) == pytest.approx(8 / 7)
    evaluated = _ranks(source, 2, batch_size=None, split="evaluate")
    seen = [row for s in evaluated for step, rows in enumerate(s) if s.size(step) for row in rows]
    assert seen == [row for batch in whole for row in batch]
    assert {len(s) for s in evaluated} == {3}


def test_set_epoch_reaches_the_sampler_on_both_ways_into_a_loader() -> None:
    """Lightning calls `set_epoch` on `loader.sampler` and `loader.batch_sampler.sampler`, not on a batch sampler."""
    sampler = OrderedBatchSampler(8, batch_size=2, shuffle=True)
    loader = DataLoader(DATA, batch_sampler=sampler)
    assert loader.batch_sampler is not None
    assert loader.batch_sampler.sampler is sampler


@given(
    n=st.integers(1, 40),
    batch=st.integers(4, 9),
    ranks_before=st.integers(1, 4),
    ranks_after=st.integers(1, 4),
    split=st.sampled_from(["global", "per_rank"]),
    data=st.data(),
)
def test_a_stop_anywhere_loses_no_sample_and_repeats_none_on_another_number_of_ranks(
    n: int, batch: int, ranks_before: int, ranks_after: int, split: str, data: st.DataObject
) -> None:
    if split == "per_rank":  # the same global batch takes the same number of ranks
        ranks_after = ranks_before
    options = {"batch_size": batch, "split": split, "shuffle": True, "seed": 2}
    before, after = _ranks(n, ranks_before, **options), _ranks(n, ranks_after, **options)
    for sampler in before:
        sampler.set_epoch(3)
    batches = _global_batches(before)
    stop = data.draw(st.integers(0, len(batches)))
    for sampler in before:
        sampler.advance_to(stop)
    states = [sampler.state_dict() for sampler in before]
    assert all(state == states[0] for state in states), "any rank may save it"
    for sampler in after:
        sampler.load_state_dict(states[0])
        sampler.set_epoch(3)
        assert sampler.state_dict() == states[0], "what was loaded is what is saved"
    resumed = _global_batches(after)
    consumed = [row for rows in batches[:stop] + resumed for row in rows]
    assert consumed == [row for rows in batches for row in rows]
    assert resumed == batches[stop:]
    fresh = _ranks(n, ranks_after, **options)
    for sampler in (*after, *fresh):
        sampler.set_epoch(4)
    assert _global_batches(after) == _global_batches(fresh), "the next epoch is whole"
    assert len(after[0]) == len(fresh[0])


def test_an_epoch_begun_with_other_global_batches_is_refused() -> None:
    sampler = OrderedBatchSampler(12, batch_size=3, num_replicas=1)
    sampler.advance_to(2)
    resumed = OrderedBatchSampler(12, batch_size=3, num_replicas=2)
    with pytest.raises(DataError, match="batches of 3 samples, and now they have 6"):
        resumed.load_state_dict(sampler.state_dict())
    sampler.advance_to(4)
    resumed.load_state_dict(sampler.state_dict())  # between epochs it may change
    assert resumed.epoch == 1


def test_a_finished_epoch_leads_to_the_next_one() -> None:
    sampler = OrderedBatchSampler(8, batch_size=4, shuffle=True)
    sampler.set_epoch(1)
    sampler.advance_to(2)
    resumed = OrderedBatchSampler(8, batch_size=4, shuffle=True)
    resumed.load_state_dict(sampler.state_dict())
    assert (resumed.epoch, resumed.start) == (2, 0)
    assert len(list(resumed)) == 2
    resumed.set_epoch(1)
    assert list(resumed) == [], "nothing of the finished epoch comes twice"


def test_own_batches_resume_at_a_batch() -> None:
    source = _ByLength([4, 3, 5, 2, 2, 6])
    first = _ranks(source, 2, batch_size=None, split="per_rank")[0]
    whole = list(OrderedBatchSampler(source, batch_size=None, split="per_rank"))
    first.advance_to(1)
    assert first.state_dict() == {"epoch": 0, "samples": 7, "batches": 1}
    alone = OrderedBatchSampler(source, batch_size=None, split="per_rank")
    alone.load_state_dict(first.state_dict())
    assert list(alone) == whole[2:]
    with pytest.raises(DataError, match="5 samples"):
        alone.load_state_dict({"epoch": 0, "samples": 5, "batches": 1})
    with pytest.raises(DataError, match="99 samples"):
        OrderedBatchSampler(8, batch_size=2).load_state_dict({"epoch": 0, "samples": 99, "batches": 1})


def test_weight_counts_steps_from_the_beginning_of_the_epoch_after_a_resume() -> None:
    samplers = _ranks(9, 2, batch_size=4, split="global")
    for sampler in samplers:
        sampler.load_state_dict({"epoch": 0, "samples": 4, "batches": 1})
    assert [[sampler.weight(step) for step in (1, 2)] for sampler in samplers] == [[1.0, 2.0], [1.0, 0.0]]


@pytest.fixture
def _sigchld() -> Iterator[None]:
    """A DataLoader with workers leaves a handler of its own behind."""
    handler = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, handler)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.usefixtures("_sigchld")
def test_the_loader_counts_what_was_delivered_not_what_workers_fetched(num_workers: int) -> None:
    data = TensorDataset(torch.arange(40))
    loader = OrderedLoader(data, sampler=OrderedBatchSampler(40, batch_size=4, shuffle=True), num_workers=num_workers)
    whole = [batch[0].tolist() for batch in loader]
    batches = iter(loader)
    got = [next(batches)[0].tolist() for _ in range(3)]
    assert loader.state_dict() == {"epoch": 0, "samples": 12, "batches": 3}
    del batches
    again = OrderedLoader(data, sampler=OrderedBatchSampler(40, batch_size=4, shuffle=True), num_workers=num_workers)
    again.load_state_dict(loader.state_dict())
    assert got + [batch[0].tolist() for batch in again] == whole
    assert len(again) == len(loader) == 10


def test_a_loader_that_is_made_before_the_epoch_is_set_reads_the_epoch_that_is_set() -> None:
    """Lightning makes the iterator first and calls `set_epoch` after, when it resumes."""
    loader = OrderedLoader(TensorDataset(torch.arange(8)), sampler=OrderedBatchSampler(8, batch_size=8, shuffle=True))
    batches = iter(loader)
    loader.set_epoch(5)
    expected = OrderedBatchSampler(8, batch_size=8, shuffle=True)
    expected.set_epoch(5)
    assert [batch[0].tolist() for batch in batches] == list(expected)


def test_loaders_of_users() -> None:
    place = {"num_replicas": 2, "rank": 1}
    assert list(ordered_batch_sampler(DataLoader(DATA, 4, drop_last=True), mode="global", **place))[-1] == [18, 19]
    assert list(ordered_batch_sampler(DataLoader(DATA, 4), mode="global", evaluate=True, **place))[-1] == [22]
    own = DataLoader(DATA, batch_sampler=_ByLength([3, 3]))
    assert len(list(ordered_batch_sampler(own, **place))) == 1
    subclass = type("Mine", (BatchSampler,), {})(SequentialSampler(DATA), 5, False)
    mine = ordered_batch_sampler(DataLoader(DATA, batch_sampler=subclass), **place)
    assert list(mine) == [[5, 6, 7, 8, 9], [15, 16, 17, 18, 19], [22]]
    assert mine.weight(2) == 0.0
    with pytest.raises(DataError, match="batch_size=None"):
        ordered_batch_sampler(DataLoader(DATA, batch_size=None), **place)


def test_a_global_batch_smaller_than_the_ranks_is_refused() -> None:
    with pytest.raises(DataError, match=r"3 data ranks.*Allowed: 3 or more"):
        OrderedBatchSampler(9, batch_size=2, split="global", num_replicas=3)
    with pytest.raises(DataError, match=r"fewer rows than there are data ranks .3."):
        list(OrderedBatchSampler(_ByLength([2, 2]), batch_size=None, split="global", num_replicas=3))
    with pytest.raises(DataError, match="rank 3 of 3"):
        OrderedBatchSampler(9, batch_size=3, num_replicas=3, rank=3)


def test_another_sampler_in_the_ordered_loader_is_refused() -> None:
    with pytest.raises(DataError, match="overfit_batches"):
        OrderedLoader(DATA, sampler=SequentialSampler(DATA))  # type: ignore[arg-type]  # as Lightning does
