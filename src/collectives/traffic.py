# SPDX-License-Identifier: Apache-2.0
"""Counts what every collective of a run sends, per axis and operation: the books that the wire must agree with."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class TrafficRecord:
    """Calls of one operation over one axis, and the payload bytes that this rank sent for them."""

    num_calls: int = 0
    num_bytes: int = 0

    def __add__(self, other: TrafficRecord) -> TrafficRecord:
        return TrafficRecord(self.num_calls + other.num_calls, self.num_bytes + other.num_bytes)

    def __sub__(self, other: TrafficRecord) -> TrafficRecord:
        return TrafficRecord(self.num_calls - other.num_calls, self.num_bytes - other.num_bytes)


@final
@dataclass(frozen=True)
class TrafficSnapshot:
    """The books at one moment; subtract two of them to see what happened between.

    Example:
        >>> before = TrafficSnapshot({("dp_shard", "all_reduce"): TrafficRecord(1, 8)})
        >>> after = TrafficSnapshot({("dp_shard", "all_reduce"): TrafficRecord(3, 40)})
        >>> (after - before).total("dp_shard")
        TrafficRecord(num_calls=2, num_bytes=32)
    """

    records: Mapping[tuple[str, str], TrafficRecord]

    def total(self, axis: str | None = None, op: str | None = None) -> TrafficRecord:
        """The sum over the records of `axis` (all axes if None) and operation `op` (all operations if None)."""
        matching = (r for (a, o), r in self.records.items() if axis in (None, a) and op in (None, o))
        return sum(matching, TrafficRecord())

    def __sub__(self, earlier: TrafficSnapshot) -> TrafficSnapshot:
        keys = {**self.records, **earlier.records}
        nothing = TrafficRecord()
        changes = {key: self.records.get(key, nothing) - earlier.records.get(key, nothing) for key in keys}
        return TrafficSnapshot({key: change for key, change in changes.items() if change != nothing})


@final
class Traffic:
    """The books of one rank. May be written from several threads; one may be shared by the communicators of all axes.

    Example:
        >>> traffic = Traffic()
        >>> traffic.add("dp_shard", "all_gather", 64)
        >>> traffic.total(op="all_gather")
        TrafficRecord(num_calls=1, num_bytes=64)
    """

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], TrafficRecord] = {}
        self._lock = threading.Lock()

    def add(self, axis: str, op: str, num_bytes: int) -> None:
        """Count one call of `op` over `axis` for which this rank sends `num_bytes` of payload."""
        with self._lock:
            self._records[axis, op] = self._records.get((axis, op), TrafficRecord()) + TrafficRecord(1, num_bytes)

    def total(self, axis: str | None = None, op: str | None = None) -> TrafficRecord:
        """The sum over the records of `axis` (all axes if None) and operation `op` (all operations if None)."""
        return self.snapshot().total(axis, op)

    def snapshot(self) -> TrafficSnapshot:
        """A copy of the books as they stand."""
        with self._lock:
            return TrafficSnapshot(dict(self._records))

    def reset(self) -> None:
        """Begin again with empty books."""
        with self._lock:
            self._records.clear()
