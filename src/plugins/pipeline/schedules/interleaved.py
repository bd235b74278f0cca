# SPDX-License-Identifier: Apache-2.0
"""Interleaved 1F1B: several small stages per rank, so that the pipeline fills in a fraction of the time."""

from __future__ import annotations

from stratagem.plugins.pipeline.actions import Action, Schedule, loop
from stratagem.plugins.pipeline.schedules.tape import alternate, check_interleaved, depth_first, group_size


def interleaved_1f1b(
    num_ranks: int, num_micro_batches: int, num_chunks: int = 2, *, group: int | None = None
) -> Schedule:
    """1F1B over `num_chunks` stages per rank, laid in a loop; a group of micro-batches goes through one chunk, then
    through the next.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, 2021.
    Bubble: (p - 1) (F + B) / v for m >= p, F and B of all that a rank holds. Peak on rank r: ((v - 1) g + 2 (p - 1 - r)
    + 1) / v micro-batches, at most m, with groups of g; for g = p that is p (1 + (p - 1) / (p v)) on rank 0. Messages:
    2 m (p v - 1).

    Args:
        group: g, micro-batches per group; p or more, the last group too. By default as many equal groups of at least
            p as there are, or one group of all where m < p.

    Raises:
        ConfigError: fewer than two chunks, or groups that do not fit.

    Example:
        >>> from stratagem.plugins.pipeline.draw import plain
        >>> print(plain(interleaved_1f1b(2, 2, 2)))
        0  0F0 0F1 2F0 2F1 .   .   2B0 --- .   2B1 --- 0B0 --- 0B1 ---
        1  .   1F0 1F1 3F0 3B0 --- 3F1 3B1 --- 1B0 --- 1B1 ---
    """
    counts = (num_ranks, num_micro_batches, num_chunks)
    check_interleaved("interleaved_1f1b", counts, instead="1f1b")
    size = group_size("interleaved_1f1b", counts, group)
    ranks = tuple(interleaved_order(rank, counts, size) for rank in range(num_ranks))
    return Schedule("interleaved_1f1b", num_micro_batches, loop(num_ranks, num_chunks), ranks)


def interleaved_order(rank: int, counts: tuple[int, int, int], group: int) -> tuple[Action, ...]:
    """The order of one rank. Any group gives an order that can run; whether it is worth running `group_size` says.

    A gradient comes back to rank r after p - 1 - r hops there and as many back, so twice as many forwards as in 1F1B
    keep it busy until then.

    Args:
        counts: p, m, v.
        group: micro-batches that go through one chunk before the next; all, if there are no more.
    """
    num_ranks, num_micro_batches, num_chunks = counts
    group = min(group, num_micro_batches)
    return alternate(*depth_first(rank, counts, group), warmup=(num_chunks - 1) * group + 2 * (num_ranks - 1 - rank))
