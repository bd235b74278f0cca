# SPDX-License-Identifier: Apache-2.0
"""Every registered name of this package keeps the contract of a strategy."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from typing_extensions import override

from stratagem.registry import strategies
from stratagem.testing.contract import StrategyContract, Subject
from stratagem.testing.contract.fingerprint import ModelFacts

OURS = sorted(name for name, entry in strategies().items() if entry.distribution == "stratagem")


class TestRegistered(StrategyContract):
    """A new name joins by being registered; what is peculiar to one is said here."""

    @pytest.fixture(params=OURS)
    def described(self, request: pytest.FixtureRequest) -> Subject:
        """One subject per registered name."""
        return Subject(strategy=request.param)

    @override
    def expected_wire_bytes(self, subject: Subject, facts: ModelFacts, num_ranks: int) -> float | None:
        """From first principles, beside what each technique states itself."""
        return {"ring_ddp": 2 * (num_ranks - 1) / num_ranks * facts.trained}.get(subject.name)

    @override
    def expected_held_bytes(self, subject: Subject, facts: ModelFacts, num_ranks: int) -> Mapping[str, float] | None:
        replicas = {"parameters": facts.parameters, "gradients": facts.trained, "optimizer": facts.trained}
        return {"ring_ddp": replicas}.get(subject.name)


def test_no_strategy_of_ours_lacks_what_it_does_not_refuse() -> None:
    """`Lacks` is for others: ours either do it or refuse it."""
    assert OURS
