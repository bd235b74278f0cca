# SPDX-License-Identifier: Apache-2.0
"""Which part of the contract runs by default: every strategy on 2 ranks, and ring DDP on every number of ranks.

The other strategies' larger gangs cost most of the time and differ least; `make slow` and CI run them. `make
exhaustive` runs what takes longer than it is worth at every change: variants of ours, larger gangs of DeepSpeed.
DeepSpeed, which is not ours, is held to the whole contract there, and by default to a few items of it.
"""

from __future__ import annotations

import pytest

_DEEPSPEED = (("test_parity[groups_and_schedule-", "2ranks"),)
"""Parts of the names of the items that DeepSpeed's stages run by default."""


def _is_exhaustive(item: pytest.Item) -> bool:
    """The larger gangs of what is not ours, and a variant of what is held to the whole contract by its default."""
    is_larger = any(size in item.name for size in ("3ranks", "4ranks"))
    return "test_contract_zero.py::TestBetweenParameters" in item.nodeid or (
        "test_contract_deepspeed.py" in item.nodeid and is_larger
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (
            "test_contract.py" in item.nodeid
            and "ring_ddp" not in item.name
            and ("3ranks" in item.name or "4ranks" in item.name)
        ):
            item.add_marker(pytest.mark.slow)
        if _is_exhaustive(item):
            item.add_marker(pytest.mark.exhaustive)
        if "test_contract_deepspeed.py" in item.nodeid and not any(
            all(part in item.name for part in parts) for parts in _DEEPSPEED
        ):
            item.add_marker(pytest.mark.slow)
