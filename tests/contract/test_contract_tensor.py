# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism keeps the contract: alone over all ranks, and beside every data technique.

What the contract says of data ranks, it says here of as many as there are: ranks of one tensor row read the same
samples, and `reduce` and `sync_dist` go over data ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from stratagem.plugins.tensor import TensorParallelStrategy, TensorSettings
from stratagem.testing.contract import CASES, Case, StrategyContract, Subject
from stratagem.testing.contract.base import on_ranks
from stratagem.testing.contract.runs import Gangs

_PURE_DATA = "it counts on as many data ranks as ranks; test_tensor.py has what holds here"


def all_ranks() -> Strategy:
    """One row of all ranks; of three, one has more heads than the others."""
    return TensorParallelStrategy(tensor=TensorSettings(uneven=True))


def beside_ring_ddp() -> Strategy:
    """Rows of two."""
    return TensorParallelStrategy(tp=2)


def beside_zero_1() -> Strategy:
    """Rows of two, optimizer state divided over the rows."""
    return TensorParallelStrategy(tp=2, data="zero_1")


def beside_zero_2() -> Strategy:
    """Rows of two, gradients divided over the rows."""
    return TensorParallelStrategy(tp=2, data="zero_2")


def beside_zero_3() -> Strategy:
    """Rows of two, all divided over the rows."""
    return TensorParallelStrategy(tp=2, data="zero_3")


def whole_sequences() -> Strategy:
    """Without sequence parallelism."""
    return TensorParallelStrategy(tensor=TensorSettings(uneven=True, sequence_parallel="off"))


class _TensorContract(StrategyContract):
    """The contract without the items that are about ranks which are all data ranks."""

    @override
    @on_ranks(1, 2, 3, 4)
    def test_batchnorm_without_sync_is_that_of_ddp(self, subject: Subject, gangs: Gangs, num_ranks: int) -> None:
        pytest.skip(_PURE_DATA)

    @override
    @on_ranks(1, 2, 3, 4)
    def test_ranks_start_from_the_weights_of_rank_0(self, subject: Subject, gangs: Gangs, num_ranks: int) -> None:
        pytest.skip(_PURE_DATA)

    @override
    @on_ranks(1, 2, 3, 4)
    def test_strategy_talks(self, subject: Subject, gangs: Gangs, num_ranks: int) -> None:
        pytest.skip(_PURE_DATA)

    @override
    @on_ranks(1, 2, 3, 4)
    def test_stages_logs_and_metrics(self, subject: Subject, gangs: Gangs, num_ranks: int) -> None:
        pytest.skip(_PURE_DATA)

    @override
    @on_ranks(1, 2, 3, 4)
    def test_bytes_are_those_of_the_formula(self, subject: Subject, gangs: Gangs, num_ranks: int) -> None:
        pytest.skip("activations depend on the batch; test_tensor.py has the formula")


class TestWhole(_TensorContract):
    """As the registered name runs, over all ranks."""

    world_sizes = (1, 2, 3)

    @pytest.fixture
    def described(self) -> Subject:
        """The registered name, allowed uneven heads on three ranks."""
        return Subject(strategy=all_ranks, world_sizes=self.world_sizes)


MIXED: tuple[Callable[[], Strategy], ...] = (beside_ring_ddp, beside_zero_1, beside_zero_2, beside_zero_3)


class TestBesideData(_TensorContract):
    """Two tensor rows of two."""

    world_sizes = (4,)

    @pytest.fixture(params=MIXED, ids=lambda variant: variant.__name__)
    def described(self, request: pytest.FixtureRequest) -> Subject:
        """One subject per data technique."""
        return Subject(strategy=request.param, world_sizes=self.world_sizes)


class TestWithoutSequence(_TensorContract):
    """What changes without sequence parallelism: the models of this package."""

    cases: Sequence[Case] = tuple(case for case in CASES if case.name.startswith("gpt_"))
    world_sizes = (2, 3, 4)

    @pytest.fixture
    def described(self) -> Subject:
        """All ranks, sequences whole between the blocks."""
        return Subject(strategy=whole_sequences, world_sizes=self.world_sizes)
