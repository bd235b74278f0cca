# SPDX-License-Identifier: Apache-2.0
"""`StrategyContract`: the whole contract as one test class."""

from __future__ import annotations

from stratagem.testing.contract.failure import FailureContract
from stratagem.testing.contract.fingerprint import FingerprintContract
from stratagem.testing.contract.parity import ParityContract
from stratagem.testing.contract.promises import PromisesContract
from stratagem.testing.contract.resume import ResumeContract


class StrategyContract(ParityContract, FingerprintContract, ResumeContract, PromisesContract, FailureContract):
    """The contract; subclass it in a test module and name your strategy.

        class TestMine(StrategyContract):
            strategy = "my_name"                       # or a class or function that builds it
            world_sizes = (1, 2, 4)
            supports_manual_optimization = Refuses("the engine owns the optimizer")

            def expected_wire_bytes(self, subject, facts, num_ranks, accumulate):
                return 2 * (num_ranks - 1) / num_ranks * facts.trained

    Every `supports_...` is True unless the class says otherwise: `Refuses(why)`, and the suite checks that the strategy
    does refuse, or `Lacks(why)`, and the tests are skipped with that reason. A strategy built on `MeshStrategy` states
    its bytes itself and is run with the settings that the contract needs; any other one is given the global batch by a
    sampler, and must be given the two formulas `expected_wire_bytes` and `expected_held_bytes`.
    """
