# SPDX-License-Identifier: Apache-2.0
"""Which part of the contract runs when: every strategy of ours on 2 ranks by default, the larger gangs in `make slow`.

`make exhaustive` runs what takes longer than it is worth at every change: most of the items on 4 ranks, variants of
ours, larger gangs of DeepSpeed, which is not ours. What a file's items are is said here in one table, and an item that
no row names is what the row of its file says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import pytest

When = Literal["default", "slow", "exhaustive"]

_CORE = ("test_parity[gpt_tied", "test_parity[averaged", "test_bytes", "test_resume_is_bit_equal")
"""Parts of the names of the items that show most: who keeps these hardly breaks the others."""

_FAILS_ELSEWHERE = ("before_forward", "after_backward")


@final
@dataclass(frozen=True)
class Row:
    """Items whose node id has `where` in it, and all of `parts`, and any of `names`, run `when`; the first row counts.

    Example:
        >>> Row("test_contract.py", "slow", parts=("4ranks",)).fits("test_contract.py::test_bytes[4ranks-zero_1]")
        True
    """

    where: str
    when: When
    parts: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    def fits(self, item: str) -> bool:
        """Whether it speaks of the item with this node id."""
        every = self.where in item and all(part in item for part in self.parts)
        return every and (not self.names or any(name in item for name in self.names))


TABLE = (
    # every strategy of ours
    Row("test_contract.py", "slow", ("4ranks",), _CORE),
    Row("test_contract.py", "exhaustive", ("4ranks",)),
    Row("test_contract.py", "default", ("3ranks", "ring_ddp"), _CORE),
    Row("test_contract.py", "slow", ("3ranks",)),
    Row("test_contract.py", "default", ("1ranks", "ring_ddp"), _CORE),
    Row("test_contract.py", "slow", ("1ranks",)),
    Row("test_contract.py", "default", ("ring_ddp",)),
    Row("test_contract.py", "slow", ("test_a_rank_that_raises",), _FAILS_ELSEWHERE),
    Row("test_contract_zero.py", "exhaustive", ("TestBetweenParameters",)),
    Row("test_contract_tensor.py", "default", ("TestWhole", "2ranks"), ("gpt_tied-", "test_a_rank_that_is_killed")),
    Row("test_contract_tensor.py", "slow", ("TestWhole", "2ranks")),
    Row("test_contract_tensor.py", "slow", ("TestWhole", "3ranks"), _CORE),
    Row("test_contract_tensor.py", "slow", ("4ranks",), ("test_parity[gpt_tied-",)),
    Row("test_contract_tensor.py", "exhaustive"),
    # strangers: that the suite is fair
    Row("test_contract_ddp.py", "default", (), ("gpt_tied", "classifier", "test_bytes", "test_a_rank_that_is_killed")),
    Row("test_contract_ddp.py", "slow"),
    Row("test_contract_deepspeed.py", "default", ("2ranks", "test_parity[groups_and_schedule-")),
    Row("test_contract_deepspeed.py", "slow", ("2ranks",), (*_CORE, "test_a_rank_that_is_killed", "test_checkpoints")),
    Row("test_contract_deepspeed.py", "exhaustive"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        when = next((row.when for row in TABLE if row.fits(item.nodeid)), "default")
        if when != "default":
            item.add_marker(getattr(pytest.mark, when))
