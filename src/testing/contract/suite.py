# SPDX-License-Identifier: Apache-2.0
"""`StrategyContract`: the whole contract as one test class."""

from __future__ import annotations

from stratagem.testing.contract.failure import FailureContract
from stratagem.testing.contract.fingerprint import FingerprintContract
from stratagem.testing.contract.parity import ParityContract
from stratagem.testing.contract.promises import PromisesContract


class StrategyContract(ParityContract, FingerprintContract, PromisesContract, FailureContract):
    """The contract; subclass it in a test module and name your strategy."""
