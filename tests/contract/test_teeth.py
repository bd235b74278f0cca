# SPDX-License-Identifier: Apache-2.0
"""The contract bites: each wrong implementation of `wrong.py` trains without complaint, and must be caught.

Ring DDP and the stages of ZeRO without a fault pass the very same calls, in `test_contract.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta

import pytest
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from stratagem.testing.contract import CASES, Lacks, Refuses, StrategyContract, Subject, failure
from stratagem.testing.contract.fingerprint import ModelFacts
from stratagem.testing.contract.runs import Gangs
from tests.contract.wrong import (
    AverageOverTwo,
    BuffersDrift,
    DecayedPadding,
    HiddenCopy,
    LocalVotes,
    MissingBucket,
    NarrowWire,
    NoBroadcastAtStart,
    NormOfItsOwnPart,
    NormOfTheShard,
    NotDistributed,
    OneParameterForgotten,
    OneRankSkips,
    ReducedTwice,
    RefusesManualOptimization,
    Ring,
    SameDataEverywhere,
    SameShareEverywhere,
    Sharded,
    ShardsOfTheSum,
    StaleGradients,
    SumInsteadOfMean,
    SyncOfEveryMicroBatch,
    UnevenBatchUnweighted,
    WaitsInTeardown,
    ddp_by_another_name,
)

CASE = {case.name: case for case in CASES}

Call = Callable[[StrategyContract, Subject, Gangs], None]


def parity(case: str, num_ranks: int = 2) -> Call:
    """The parity test of one case."""
    return lambda contract, subject, gangs: contract.test_parity(subject, gangs, CASE[case], num_ranks)


def bytes_of(num_ranks: int = 2) -> Call:
    """The fingerprint."""
    return lambda contract, subject, gangs: contract.test_bytes_are_those_of_the_formula(subject, gangs, num_ranks)


def named(test: str, num_ranks: int = 2) -> Call:
    """Any other test."""
    return lambda contract, subject, gangs: getattr(contract, f"test_{test}")(subject, gangs, num_ranks)


TEETH: list[tuple[type[Ring] | type[Sharded], Call, str]] = [
    (SumInsteadOfMean, parity("gpt_tied"), "gradient norms"),
    (SumInsteadOfMean, named("hooks_see_averaged_gradients"), "gradient norms"),
    (AverageOverTwo, parity("groups_and_schedule", 3), "gradient norms"),
    (OneParameterForgotten, parity("groups_and_schedule"), "gradient norms"),
    (SyncOfEveryMicroBatch, bytes_of(), "accumulating 4.* sent"),
    (ReducedTwice, bytes_of(), "accumulating 1.* sent"),
    (StaleGradients, parity("router"), "gradient norms"),
    (BuffersDrift, named("batchnorm_without_sync_is_that_of_ddp"), "buffer"),
    (NormOfItsOwnPart, parity("groups_and_schedule"), "gradient norms.*number 1 "),
    (SameDataEverywhere, parity("boring"), "samples of"),
    (SameShareEverywhere, parity("boring"), "gradient norms"),
    (SameShareEverywhere, named("stages_logs_and_metrics"), "number|lost or doubled|each rank's own"),
    (SameDataEverywhere, named("stages_logs_and_metrics"), "number|lost or doubled|each rank's own"),
    (UnevenBatchUnweighted, parity("boring"), "uneven"),
    (UnevenBatchUnweighted, named("fewer_samples_than_ranks_in_the_last_batch", 3), "norms"),
    (NarrowWire, parity("boring"), "is off|norms|losses"),
    (NarrowWire, bytes_of(), "sent"),
    (HiddenCopy, bytes_of(), "live tensors"),
    (NoBroadcastAtStart, named("ranks_start_from_the_weights_of_rank_0"), "losses of rank|no replica"),
    (NotDistributed, named("stages_logs_and_metrics"), "rank"),
    (ShardsOfTheSum, parity("groups_and_schedule"), "gradient norms"),
    (MissingBucket, parity("groups_and_schedule"), "gradient norms"),
    (NormOfTheShard, parity("groups_and_schedule"), "gradient norms.*number 1 "),
    (DecayedPadding, parity("groups_and_schedule"), "gradient norms|is off"),
    (OneRankSkips, parity("groups_and_schedule"), "gradient norms|is off"),
]


@pytest.fixture
def gangs() -> Gangs:
    return Gangs()


@pytest.fixture
def impatient() -> Gangs:
    """For runs that hang."""
    return Gangs(patience=timedelta(seconds=8))


@pytest.mark.parametrize(
    ("wrong", "call", "says"), TEETH, ids=[f"{wrong.__name__}-{number}" for number, (wrong, *_) in enumerate(TEETH)]
)
def test_a_wrong_implementation_is_caught(
    wrong: type[Ring] | type[Sharded], call: Call, says: str, gangs: Gangs
) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception), match=says):
        call(StrategyContract(), Subject(strategy=wrong), gangs)


@pytest.mark.parametrize("case", ["groups_and_schedule", "boring"])
def test_what_only_bytes_show_passes_parity(case: str, gangs: Gangs) -> None:
    """Why parity is not enough: these two waste the wire and compute the right numbers."""
    for wasteful in (SyncOfEveryMicroBatch, ReducedTwice):
        parity(case)(StrategyContract(), Subject(strategy=wasteful), gangs)


class ZeroLabels(StrategyContract):
    """The formulas of a sharded optimizer: half the bytes for gradients, and for the optimizer's state a share."""

    @override
    def expected_wire_bytes(self, subject: Subject, facts: ModelFacts, num_ranks: int, accumulate: int) -> float | None:
        return 2 * (num_ranks - 1) / num_ranks * facts.trained

    @override
    def expected_held_bytes(self, subject: Subject, facts: ModelFacts, num_ranks: int) -> Mapping[str, float] | None:
        share = facts.trained / num_ranks
        return {"parameters": facts.parameters, "gradients": facts.trained, "optimizer": share}


@pytest.mark.parametrize("alias", [ddp_by_another_name, Ring])
def test_an_alias_is_caught_by_what_it_holds(alias: Callable[[], Strategy], gangs: Gangs) -> None:
    """ZeRO stage 1 sends what DDP sends, so that only memory tells them apart."""
    subject = Subject(strategy=alias, uneven_batches=Lacks("of no interest here"))
    with pytest.raises(AssertionError, match="bytes of optimizer"):
        bytes_of()(ZeroLabels(), subject, gangs)


def test_a_strategy_that_states_nothing_is_caught(gangs: Gangs) -> None:
    with pytest.raises(AssertionError, match="states no bytes"):
        bytes_of()(StrategyContract(), Subject(strategy=ddp_by_another_name), gangs)


def test_a_rank_that_waits_for_its_peers_when_it_fails_is_caught(
    impatient: Gangs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "_SOON", timedelta(seconds=2))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        StrategyContract().test_a_rank_that_raises(Subject(strategy=WaitsInTeardown), impatient, 2, "before_backward")


def test_ranks_that_decide_each_for_itself_are_caught(impatient: Gangs) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"still running|lost rank"):
        StrategyContract().test_early_stopping(Subject(strategy=LocalVotes), impatient, 2)


def test_a_refusal_is_demanded(gangs: Gangs) -> None:
    """Who claims to refuse, refuses; who does passes."""
    refused = Refuses("the step is its own")
    call = parity("manual_boring")
    call(StrategyContract(), Subject(strategy=RefusesManualOptimization, manual_optimization=refused), gangs)
    with pytest.raises(pytest.fail.Exception, match="should refuse manual_optimization"):
        call(StrategyContract(), Subject(strategy=Ring, manual_optimization=refused), gangs)


def test_a_capability_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="says nothing"):
        Subject(strategy="ddp", manual_optimization=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reason"):
        Lacks(" ")


@pytest.mark.slow
def test_a_stage_passes_with_the_same_settings_and_no_fault(gangs: Gangs) -> None:
    parity("groups_and_schedule")(StrategyContract(), Subject(strategy=Sharded), gangs)
