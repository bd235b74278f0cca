# SPDX-License-Identifier: Apache-2.0
"""Instruments that need no help from what they measure: bytes held, bytes on the wire, as the kernel counts them.

They import nothing of this package, and the comparison and the test harness both read them.
"""

from __future__ import annotations

from stratagem.measure.memory import ProcessMemory, held_bytes, live_tensor_bytes, peak_rss, process_memory
from stratagem.measure.wire import WireBytes, bytes_sent

__all__ = [
    "ProcessMemory",
    "WireBytes",
    "bytes_sent",
    "held_bytes",
    "live_tensor_bytes",
    "peak_rss",
    "process_memory",
]
