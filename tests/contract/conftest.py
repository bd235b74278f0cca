# SPDX-License-Identifier: Apache-2.0
"""Which part of the contract runs by default: every strategy on 2 ranks, and ring DDP on every number of ranks.

The other strategies' larger gangs cost most of the time and differ least; `make slow` and CI run them.
"""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (
            "test_contract.py" in item.nodeid
            and "ring_ddp" not in item.name
            and ("3ranks" in item.name or "4ranks" in item.name)
        ):
            item.add_marker(pytest.mark.slow)
