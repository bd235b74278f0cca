# SPDX-License-Identifier: Apache-2.0
"""Looped breadth-first: GPipe over several small stages per rank."""

from __future__ import annotations

from stratagem.plugins.pipeline.actions import Action, Schedule, loop
from stratagem.plugins.pipeline.schedules.tape import check_counts


def looped_bfs(num_ranks: int, num_micro_batches: int, num_chunks: int = 2) -> Schedule:
    """All micro-batches through a rank's first chunk, then all through its next; back the same way in reverse.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, 2022. Bubble: (p - 1) (F + B) / v, from m = p on. Peak: m
    micro-batches on every rank. Messages: 2 m (p v - 1). What it buys: a chunk is used once in each direction, so
    sharded weights are gathered twice a step and gradients reduced once, while the other chunks still work.

    Raises:
        ConfigError: a number is below 1.

    Example:
        >>> from stratagem.plugins.pipeline.draw import plain
        >>> print(plain(looped_bfs(2, 2, 2)))
        0  0F0 0F1 2F0 2F1 .   .   .   2B1 --- 2B0 --- 0B1 --- 0B0 ---
        1  .   1F0 1F1 3F0 3F1 3B1 --- 3B0 --- 1B1 --- 1B0 ---
    """
    check_counts("looped_bfs", num_ranks, num_micro_batches, num_chunks)
    batches = range(num_micro_batches)
    ranks = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        forwards = [Action("F", stage, k) for stage in stages for k in batches]
        ranks.append((*forwards, *(Action("B", a.stage, a.micro_batch) for a in reversed(forwards))))
    return Schedule("looped_bfs", num_micro_batches, loop(num_ranks, num_chunks), tuple(ranks))
