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
    from stratagem.testing.ranks import HarnessError, RankFailure, RanksFailed, run_ranks

_WHERE = {
    "HarnessError": "ranks",
    "RankFailure": "ranks",
    "RanksFailed": "ranks",
    "run_ranks": "ranks",
}

__all__ = ["HarnessError", "RankFailure", "RanksFailed", "run_ranks"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
