# SPDX-License-Identifier: Apache-2.0
"""The partition is pure: every element has one owner, no slice leaves a bucket, parameters stay whole if they must."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stratagem.buckets import pack
from stratagem.plugins.zero import Zero1, Zero3, ZeroSettings
from stratagem.plugins.zero.partition import Cut, cut, pack_by_key
from tests.plugins import zero_cases

dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
parameters = st.lists(st.tuples(st.integers(0, 40), dtypes), max_size=12).map(
    lambda rows: [nn.Parameter(torch.zeros(numel, dtype=dtype)) for numel, dtype in rows]
)
how = st.sampled_from(["flat", "parameter"])


@given(parameters, st.integers(1, 7), st.integers(1, 200), how)
def test_every_element_of_every_parameter_has_one_owner(
    found: list[nn.Parameter], num_ranks: int, cap: int, how: str
) -> None:
    owners: dict[int, list[int]] = {index: [0] * p.numel() for index, p in enumerate(found)}
    for each in cut(pack(found, cap_bytes=cap), num_ranks, how=how):
        for rank in range(num_ranks):
            low, high = each.bounds[rank]
            total = 0
            for piece in each.pieces(rank):
                total += piece.numel
                for element in range(piece.start, piece.stop):
                    owners[piece.slot.index][element] += 1
                assert each.spans(piece.slot)[rank] == (piece.start, piece.stop)
            assert total == high - low  # nothing but pieces: no padding
    assert all(count == 1 for counts in owners.values() for count in counts)


@given(parameters, st.integers(1, 7), st.integers(1, 200))
def test_flat_slices_differ_by_one_element_and_parameters_stay_whole_otherwise(
    found: list[nn.Parameter], num_ranks: int, cap: int
) -> None:
    layouts = pack(found, cap_bytes=cap)
    for each in cut(layouts, num_ranks, how="flat"):
        sizes = [stop - start for start, stop in each.bounds]
        assert max(sizes) - min(sizes) <= 1
    for each in cut(layouts, num_ranks, how="parameter"):
        for piece in itertools.chain.from_iterable(each.pieces(rank) for rank in range(num_ranks)):
            assert piece.is_whole or piece.numel == 0


def _loads(cuts: tuple[Cut, ...], num_ranks: int) -> list[int]:
    return [sum(c.bounds[r][1] - c.bounds[r][0] for c in cuts) for r in range(num_ranks)]


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "largest"),
    # The published vectors of DeepSpeed's balanced partition, in elements; 4 ranks.
    [([1, 2, 1], 4, 2), ([1] * 5, 4, 2), ([1, 1, 1, 1, 0, 1], 4, 2)],
)
def test_one_bucket_is_divided_as_evenly_as_its_parameters_allow(
    sizes: list[int], num_ranks: int, largest: int
) -> None:
    found = [nn.Parameter(torch.zeros(size)) for size in sizes]
    assert max(_loads(cut(pack(found, cap_bytes=10**6), num_ranks, how="parameter"), num_ranks)) == largest


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4))
def test_no_order_preserving_cut_has_a_smaller_largest_load(sizes: list[int], num_ranks: int) -> None:
    found = [nn.Parameter(torch.zeros(size)) for size in sizes]
    mine = max(_loads(cut(pack(found, cap_bytes=10**6), num_ranks, how="parameter"), num_ranks))
    rows = sizes[::-1]
    cuts = itertools.combinations_with_replacement(range(len(rows) + 1), num_ranks - 1)
    best = min(max(sum(rows[a:b]) for a, b in itertools.pairwise([0, *edges, len(rows)])) for edges in cuts)
    assert mine == best


def test_a_large_parameter_does_not_make_its_owner_own_the_rest_too() -> None:
    found = [nn.Parameter(torch.zeros(size)) for size in (5, 5, 5, 100, 5, 5, 5)]
    loads = _loads(cut(pack(found, cap_bytes=4 * 20), 2, how="parameter"), 2)
    assert sorted(loads) == [25, 105]  # to the large one comes the smaller half of the bucket before it, nothing after


def test_keys_keep_parameters_apart_and_launch_order_is_that_of_backward() -> None:
    found = [nn.Parameter(torch.zeros(2)) for _ in range(6)]
    buckets = pack_by_key(found, ["a", "b", "a", "b", "a", "b"], cap_bytes=16)
    assert [[slot.index for slot in bucket.slots] for bucket in buckets] == [[5, 3], [4, 2], [1], [0]]
    assert sum(math.prod(slot.size) for bucket in buckets for slot in bucket.slots) == 12


@pytest.mark.ranks(3)
@pytest.mark.parametrize("stage", [Zero1, Zero3])
def test_blocks_that_are_cut_one_by_one_even_each_other_out(stage: type) -> None:
    """Stage 3 cuts block by block, and each cut began as if nobody owned anything: with one matrix per block rank 0
    owned the whole model. What is cut later now evens out what was cut before."""
    module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))
    zero, here = stage(ZeroSettings(partition="parameter", persistence_threshold=0)), zero_cases.context()
    zero.apply(module, here)
    zero.attach([torch.optim.SGD(module.parameters(), lr=0.1)])
    assert sum(stop - start for bucket in zero._buckets for start, stop in [bucket.span]) == 2 * 64
    zero.close()
    here.close()
