# SPDX-License-Identifier: Apache-2.0
"""Every schedule by name: pure functions from numbers to a `Schedule`, one family per file.

Bubble is per rank, in units of F = I = W = 1 for all that a rank holds; peak is of micro-batches in flight on the worst
rank, where groups are of p and micro-batches are many; messages are per step.

    name                chunks     stages   bubble           peak               messages
    gpipe               1          loop     3 (p - 1)        m                  2 m (p - 1)
    1f1b                1          loop     3 (p - 1)        p                  2 m (p - 1)
    interleaved_1f1b    2 or more  loop     3 (p - 1) / v    p + (p - 1) / v    2 m (p v - 1)
    looped_bfs          1 or more  loop     3 (p - 1) / v    m                  2 m (p v - 1)
    zb_h1               1          loop     p - 1            p                  2 m (p - 1)
    zb_interleaved      2 or more  loop     (p - 1) / v      p                  2 m (p v - 1)
    zb_v                2          V        (p - 1) / 2      p                  2 m (2 p - 2)
    dual_pipe_v         2          V        p - 1            p + 1 / 2          2 m (2 p - 2)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from stratagem.errors import ConfigError
from stratagem.plugins.pipeline.actions import Schedule
from stratagem.plugins.pipeline.schedules.breadth_first import looped_bfs
from stratagem.plugins.pipeline.schedules.dual_pipe_v import dual_pipe_v
from stratagem.plugins.pipeline.schedules.gpipe import gpipe
from stratagem.plugins.pipeline.schedules.interleaved import interleaved_1f1b
from stratagem.plugins.pipeline.schedules.one_f_one_b import one_f_one_b
from stratagem.plugins.pipeline.schedules.zb_v import zb_v
from stratagem.plugins.pipeline.schedules.zero_bubble import zb_h1, zb_interleaved

__all__ = [
    "NAMES",
    "build_schedule",
    "dual_pipe_v",
    "gpipe",
    "interleaved_1f1b",
    "looped_bfs",
    "one_f_one_b",
    "zb_h1",
    "zb_interleaved",
    "zb_v",
]

_FIXED: Mapping[str, tuple[int, Callable[[int, int], Schedule]]] = MappingProxyType(
    {
        "gpipe": (1, gpipe),
        "1f1b": (1, one_f_one_b),
        "zb_h1": (1, zb_h1),
        "zb_v": (2, zb_v),
        "dual_pipe_v": (2, dual_pipe_v),
    }
)
"""Schedules with one number of chunks."""

_FREE: Mapping[str, Callable[[int, int, int], Schedule]] = MappingProxyType(
    {"interleaved_1f1b": interleaved_1f1b, "looped_bfs": looped_bfs, "zb_interleaved": zb_interleaved}
)

NAMES = ("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_interleaved", "zb_v", "dual_pipe_v")
"""All names; among equals `choose` prefers the one that comes first."""


def build_schedule(name: str, num_ranks: int, num_micro_batches: int, num_chunks: int) -> Schedule:
    """The schedule of that name. Pure.

    Args:
        num_ranks: p.
        num_micro_batches: m.
        num_chunks: v, stages per rank.

    Raises:
        ConfigError: there is no such schedule, or not for these numbers; says for which.

    Example:
        >>> build_schedule("zb_v", 4, 8, 2).owners
        (0, 1, 2, 3, 3, 2, 1, 0)
    """
    if name in _FREE:
        return _FREE[name](num_ranks, num_micro_batches, num_chunks)
    if name not in _FIXED:
        raise ConfigError(f"no schedule is called {name!r}", where="schedule", allowed=", ".join(NAMES))
    chunks, generate = _FIXED[name]
    if num_chunks != chunks:
        raise ConfigError(
            f"{num_chunks} chunks per rank",
            where=f"schedule {name}",
            allowed=f"{chunks}",
            do=f"cut the model into {chunks} stages per rank, or choose another schedule",
        )
    return generate(num_ranks, num_micro_batches)
