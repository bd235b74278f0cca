# SPDX-License-Identifier: Apache-2.0
"""The contract is fair to a stranger: Lightning's own DDP keeps it, but for what is said here."""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import override

from stratagem.testing.contract import Lacks, StrategyContract, Subject
from stratagem.testing.contract.fingerprint import ModelFacts


class TestDDP(StrategyContract):
    """Two ranks are enough: what is tested here is the suite."""

    strategy = "ddp_find_unused_parameters_true"
    world_sizes = (2,)
    replicated = ("parameters", "optimizer")  # after the last step nobody sends the buffers round
    supports_uneven_batches = Lacks("its sampler repeats samples until the ranks have as many each")
    supports_sync_batchnorm = Lacks("torch's SyncBatchNorm runs on accelerators only")
    supports_resuming = Lacks("it saves neither random states nor the gradients of an open window")
    supports_naming_the_peer = Lacks("Gloo's errors name an address")

    @override
    def expected_wire_bytes(self, subject: Subject, facts: ModelFacts, num_ranks: int, accumulate: int) -> float | None:
        return 2 * (num_ranks - 1) / num_ranks * facts.trained

    @override
    def expected_held_bytes(self, subject: Subject, facts: ModelFacts, num_ranks: int) -> Mapping[str, float] | None:
        return {"parameters": facts.parameters, "gradients": facts.trained}
