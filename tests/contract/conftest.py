# SPDX-License-Identifier: Apache-2.0
"""Which part of the contract runs by default: every strategy of ours on 2 ranks, and ring DDP on 1 and 3 too.

The other strategies' larger gangs cost most of the time and differ least; `make slow` and CI run them. `make
exhaustive` runs what takes longer than it is worth at every change: variants of ours, larger gangs of DeepSpeed.
DeepSpeed, which is not ours, is held to the whole contract there, and by default to a few items of it.
"""

from __future__ import annotations

import pytest

_DDP = ("test_parity[gpt_tied", "test_parity[classifier", "test_bytes", "test_a_rank_that_is_killed")
"""Parts of the names of the items that show by default that the suite is fair to a stranger."""

_DEEPSPEED = (("test_parity[groups_and_schedule-", "2ranks"),)
"""Parts of the names of the items that DeepSpeed's stages run by default."""


_TENSOR = ("test_parity[gpt_tied-", "test_a_rank_that_is_killed")
"""Parts of the names of the items that tensor parallelism runs by default, on 2 ranks."""


def _is_exhaustive(item: pytest.Item) -> bool:
    """The larger gangs of what is not ours, and a variant of what is held to the whole contract by its default."""
    is_larger = any(size in item.name for size in ("3ranks", "4ranks"))
    return "test_contract_zero.py::TestBetweenParameters" in item.nodeid or (
        "test_contract_deepspeed.py" in item.nodeid and is_larger
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        larger = ("4ranks",) if "ring_ddp" in item.name else ("3ranks", "4ranks")
        if "test_contract.py" in item.nodeid and any(size in item.name for size in larger):
            item.add_marker(pytest.mark.slow)
        if "test_contract_ddp.py" in item.nodeid and not any(part in item.name for part in _DDP):
            item.add_marker(pytest.mark.slow)
        if "test_contract_tensor.py" in item.nodeid:
            by_default = "TestWhole" in item.nodeid and "2ranks" in item.name
            if not by_default or not any(part in item.name for part in _TENSOR):
                item.add_marker(pytest.mark.exhaustive if "TestWhole" not in item.nodeid else pytest.mark.slow)
        if _is_exhaustive(item):
            item.add_marker(pytest.mark.exhaustive)
        if "test_contract_deepspeed.py" in item.nodeid and not any(
            all(part in item.name for part in parts) for parts in _DEEPSPEED
        ):
            item.add_marker(pytest.mark.slow)
