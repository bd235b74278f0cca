# SPDX-License-Identifier: Apache-2.0
"""Zero bubble: gradients of weights wait until a rank has nothing better to do.

The next rank waits for the gradient of the input (I) and for nothing else. So I goes first, and W, for which nobody
waits, fills what would be bubble. It costs nothing in memory as long as W is not put off for longer than 1F1B's rank 0
would hold its activations: rank r may be r backwards late.
"""

from __future__ import annotations

from stratagem.plugins.pipeline.actions import Action, Schedule, loop
from stratagem.plugins.pipeline.schedules.tape import (
    alternate,
    check_counts,
    check_interleaved,
    depth_first,
    group_size,
)


def zb_h1(num_ranks: int, num_micro_batches: int) -> Schedule:
    """1F1B with the backward split: W of a micro-batch comes r backwards after its I on rank r.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023 (ZB-H1). Bubble: (p - 1) (F + I - W) on every rank, for
    m >= p and W no dearer than F and I; a third of 1F1B's where the three are equal. Peak: min(m, p) micro-batches on
    every rank, 1F1B's worst. Messages: 2 m (p - 1).

    Raises:
        ConfigError: a number is below 1.

    Example:
        >>> from stratagem.plugins.pipeline.draw import plain
        >>> print(plain(zb_h1(3, 4)))
        0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    check_counts("zb_h1", num_ranks, num_micro_batches)
    counts = (num_ranks, num_micro_batches, 1)
    return Schedule("zb_h1", num_micro_batches, loop(num_ranks, 1), _ranks(counts, num_micro_batches))


def zb_interleaved(
    num_ranks: int, num_micro_batches: int, num_chunks: int = 2, *, group: int | None = None
) -> Schedule:
    """Interleaved 1F1B with the backward split: W comes r backwards late on rank r.

    Source: Qi et al., 2023; the order is the one that torch.distributed.pipelining calls InterleavedZeroBubble.
    Bubble: (p - 1) (F + I - W) / v, on the same terms as ZB-H1. Peak: ((v - 1) g + p) / v micro-batches on every rank
    for m >= p, with groups of g: p where groups are of p. Messages: 2 m (p v - 1).

    Args:
        group: as in `interleaved_1f1b`.

    Raises:
        ConfigError: fewer than two chunks, or groups that do not fit.

    Example:
        >>> from stratagem.plugins.pipeline.draw import plain
        >>> print(plain(zb_interleaved(2, 2, 2)))
        0  0F0 0F1 2F0 2F1 .   2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
        1  .   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """
    counts = (num_ranks, num_micro_batches, num_chunks)
    check_interleaved("zb_interleaved", counts, instead="zb_h1")
    size = group_size("zb_interleaved", counts, group)
    return Schedule("zb_interleaved", num_micro_batches, loop(num_ranks, num_chunks), _ranks(counts, size))


def _ranks(counts: tuple[int, int, int], group: int) -> tuple[tuple[Action, ...], ...]:
    num_ranks, _, num_chunks = counts
    return tuple(
        alternate(*depth_first(rank, counts, group), warmup=(num_chunks - 1) * group + num_ranks - 1 - rank, delay=rank)
        for rank in range(num_ranks)
    )
