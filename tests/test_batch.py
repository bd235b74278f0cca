# SPDX-License-Identifier: Apache-2.0
"""The equation of the global batch, its solutions and its refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.batch import BatchPlan
from stratagem.errors import ConfigError

sizes = st.integers(1, 12)


@given(sizes, sizes, sizes)
def test_any_missing_number_is_found(micro: int, accumulate: int, ranks: int) -> None:
    plan = BatchPlan(micro, accumulate, ranks)
    assert BatchPlan.solve(data_ranks=ranks, global_batch=plan.global_batch, micro_batch=micro) == plan
    assert BatchPlan.solve(data_ranks=ranks, global_batch=plan.global_batch, accumulate=accumulate) == plan
    assert BatchPlan.solve(data_ranks=ranks, micro_batch=micro, accumulate=accumulate) == plan


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"global_batch": 10, "data_ranks": 4}, "multiples of 4, for instance 8 or 12"),
        ({"global_batch": 3, "data_ranks": 4}, "for instance 4"),
        ({"global_batch": 32, "micro_batch": 4, "accumulate": 3, "data_ranks": 2}, "takes 4 accumulated"),
        ({"data_ranks": 2}, "neither global_batch nor micro_batch"),
        ({"data_ranks": 2, "micro_batch": 0}, "micro_batch is 0"),
    ],
)
def test_what_cannot_be_solved_says_what_could(given_: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchPlan.solve(**given_)
