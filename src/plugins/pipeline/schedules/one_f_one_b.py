# SPDX-License-Identifier: Apache-2.0
"""1F1B: a backward as soon as there is one, so that few activations wait."""

from __future__ import annotations

from stratagem.plugins.pipeline.actions import Schedule, loop
from stratagem.plugins.pipeline.schedules.tape import alternate, check_counts, depth_first


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Rank r takes p - 1 - r forwards, as many as it takes until the first gradient is back; then forwards and
    backwards in turn.

    Source: Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, 2019; with one set of
    weights and a flush per step as in Megatron-LM, 2021. Bubble: (p - 1) (F + B) on every rank, as GPipe's. Peak:
    min(m, p - r) micro-batches on rank r. Messages: 2 m (p - 1).

    Raises:
        ConfigError: a number is below 1.

    Example:
        >>> from stratagem.plugins.pipeline.draw import plain
        >>> print(plain(one_f_one_b(3, 4)))
        0  F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- .  B2 -- .  B3 --
        1  .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 --
        2  .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 --
    """
    check_counts("1f1b", num_ranks, num_micro_batches)
    counts = (num_ranks, num_micro_batches, 1)
    ranks = tuple(
        alternate(*depth_first(rank, counts, num_micro_batches), warmup=num_ranks - 1 - rank)
        for rank in range(num_ranks)
    )
    return Schedule("1f1b", num_micro_batches, loop(num_ranks, 1), ranks)
