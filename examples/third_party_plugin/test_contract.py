# SPDX-License-Identifier: Apache-2.0
"""The contract of a strategy, kept by one from another package: `pip install -e '.[test]'`, then `pytest`."""

from __future__ import annotations

from stratagem.testing.contract import StrategyContract, Subject
from stratagem.testing.contract.fingerprint import ModelFacts


class TestGatherDDP(StrategyContract):
    """Every test of the suite, under the registered name."""

    strategy = "gather_ddp"

    def expected_wire_bytes(self, subject: Subject, facts: ModelFacts, num_ranks: int) -> float | None:
        """Everybody's gradient passes through everybody but one."""
        return (num_ranks - 1) * facts.trained
