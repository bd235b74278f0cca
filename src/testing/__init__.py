# SPDX-License-Identifier: Apache-2.0
"""The test harness: gangs of real processes, and instruments that need no help from what they measure.

It stands beside the stack and no layer imports it; plugins of third parties use it on themselves. Installing the
extra `stratagem[test]` gives pytest the marker `ranks`:

    @pytest.mark.ranks(2, 4)
    def test_every_rank_ends_with_the_sum() -> None:
        ...  # runs on 2 and then on 4 processes, torch.distributed is up

Everything is imported when it is first used, because pytest imports this package at its own start.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratagem.measure.memory import ProcessMemory, held_bytes, live_tensor_bytes, peak_rss, process_memory
    from stratagem.measure.wire import WireBytes, bytes_sent
    from stratagem.testing.faults import Fault, Faults, InjectedFault
    from stratagem.testing.leaks import Leak, no_leaks
    from stratagem.testing.ranks import HarnessError, RankFailure, RanksFailed, run_ranks
    from stratagem.testing.replicas import assert_replicas_equal, fingerprint

_WHERE = {
    "stratagem.measure.memory": ("ProcessMemory", "held_bytes", "live_tensor_bytes", "peak_rss", "process_memory"),
    "stratagem.measure.wire": ("WireBytes", "bytes_sent"),
    "stratagem.testing.faults": ("Fault", "Faults", "InjectedFault"),
    "stratagem.testing.leaks": ("Leak", "no_leaks"),
    "stratagem.testing.ranks": ("HarnessError", "RankFailure", "RanksFailed", "run_ranks"),
    "stratagem.testing.replicas": ("assert_replicas_equal", "fingerprint"),
}

__all__ = [
    "Fault",
    "Faults",
    "HarnessError",
    "InjectedFault",
    "Leak",
    "ProcessMemory",
    "RankFailure",
    "RanksFailed",
    "WireBytes",
    "assert_replicas_equal",
    "bytes_sent",
    "fingerprint",
    "held_bytes",
    "live_tensor_bytes",
    "no_leaks",
    "peak_rss",
    "process_memory",
    "run_ranks",
]


def __getattr__(name: str) -> Any:
    for module, names in _WHERE.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
