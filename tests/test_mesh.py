# SPDX-License-Identifier: Apache-2.0
"""The mesh is arithmetic: coordinates and ranks are one-to-one, rows cover the world, published tables hold."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.errors import MeshError
from stratagem.mesh import AXES, MeshShape

shapes = st.builds(MeshShape, **{axis: st.integers(1, 3) for axis in AXES})


@given(shapes)
def test_coordinates_and_ranks_are_one_to_one(shape: MeshShape) -> None:
    assert [shape.rank(shape.coordinate(rank)) for rank in range(shape.size)] == list(range(shape.size))


@given(shapes, st.sampled_from([axes for n in (1, 2, 3) for axes in combinations(AXES, n)]))
def test_rows_cover_the_world_once(shape: MeshShape, axes: tuple[str, ...]) -> None:
    rows = shape.rows(*axes)
    assert sorted(rank for row in rows for rank in row) == list(range(shape.size))
    assert {len(row) for row in rows} == {math.prod(getattr(shape, axis) for axis in axes)}


@given(shapes)
def test_rows_of_two_axes_meet_in_one_rank(shape: MeshShape) -> None:
    for first, second in combinations(AXES, 2):
        for rank in range(shape.size):
            assert set(shape.row_of(rank, first)) & set(shape.row_of(rank, second)) == {rank}


@given(shapes)
def test_each_share_of_the_data_is_read_by_all_ranks_that_differ_elsewhere(shape: MeshShape) -> None:
    readers: dict[int, int] = {}
    for rank in range(shape.size):
        readers[shape.data_rank(rank)] = readers.get(shape.data_rank(rank), 0) + 1
    assert readers == dict.fromkeys(range(shape.data_size), shape.size // shape.data_size)


def test_megatron_default_order_of_eight_ranks() -> None:
    """Megatron-LM, tp 2 dp 2 pp 2, order tp-cp-ep-dp-pp: tp 01|23|45|67, dp 02|13|46|57, pp 04|15|26|37."""
    shape = MeshShape(tp=2, dp_replicate=2, pp=2)
    assert shape.rows("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert shape.rows("dp_replicate") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert shape.rows("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_expert_rows_fold_into_the_data_axes() -> None:
    shape = MeshShape(dp_shard=4, tp=2, ep=2)
    assert shape.size == 8
    assert shape.rows("ep") == ((0, 2), (1, 3), (4, 6), (5, 7))


@pytest.mark.parametrize(
    ("world", "sizes", "message"),
    [
        (10, {"tp": 2, "pp": 3}, "multiple of 6 ranks, and there are 10"),
        (8, {"tp": -1, "pp": -1}, "both -1"),
        (8, {"tq": 2}, "unknown axis 'tq'"),
        (8, {"tp": 0}, "need a multiple of 0|size 0"),
        (8, {"dp_replicate": 3}, "multiply to 3 ranks, and there are 8"),
        (4, {"dp_shard": 2, "ep": 3}, "ep=3 does not divide dp_shard.cp=2"),
    ],
)
def test_what_does_not_fit_is_refused(world: int, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        MeshShape.fit(world, **sizes)


def test_an_axis_of_minus_one_takes_the_rest() -> None:
    """torchtitan's case: of 48 ranks, cp 2 tp 3 pp 2 leave 4 for sharding."""
    assert MeshShape.fit(48, dp_shard=-1, cp=2, tp=3, pp=2).dp_shard == 4
