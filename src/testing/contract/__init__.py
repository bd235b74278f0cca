# SPDX-License-Identifier: Apache-2.0
"""The contract of a strategy: one suite that every registered name must pass, ours or a third party's.

    from stratagem.testing.contract import StrategyContract

    class TestMine(StrategyContract):
        strategy = "my_name"

    1 parity         losses, gradient norms and weights are those of one process              parity.py
    2 replicas       ranks end with the same bits                                              parity.py
    3 fingerprint    bytes on the wire and bytes held are those of the formula                 fingerprint.py
    4 resume         stopped and taken up again, a run is the run that never stopped            resume.py
    5 promises       what Lightning promises holds                                             promises.py
    6 failure        one rank's end is every rank's end, soon and with its cause               failure.py

The suite trusts nothing that the strategy says about itself: it reads losses and gradients off the module, bytes off
the kernel, and memory off the storages. What it was proved to catch is in its own tests.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratagem.testing.contract.cases import CASES, Case
    from stratagem.testing.contract.subject import Capability, Lacks, Refuses, Subject
    from stratagem.testing.contract.suite import StrategyContract

_WHERE = {
    "cases": ("CASES", "Case"),
    "subject": ("Capability", "Lacks", "Refuses", "Subject"),
    "suite": ("StrategyContract",),
}

__all__ = ["CASES", "Capability", "Case", "Lacks", "Refuses", "StrategyContract", "Subject"]


def __getattr__(name: str) -> Any:
    for module, names in _WHERE.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
