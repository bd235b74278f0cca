# SPDX-License-Identifier: Apache-2.0
"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from stratagem.plugins.pipeline.actions import Action, Schedule, loop
from stratagem.plugins.pipeline.schedules.tape import check_counts


def gpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Every micro-batch forward, then every micro-batch back.

    Source: Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, 2019.
    Bubble: (p - 1) (F + B) on every rank. Peak: m micro-batches on every rank, which is what 1F1B mends. Messages:
    2 m (p - 1).

    Raises:
        ConfigError: a number is below 1.

    Example:
        >>> from stratagem.plugins.pipeline.draw import plain
        >>> print(plain(gpipe(3, 3)))
        0  F0 F1 F2 .  .  .  .  .  .  B0 -- B1 -- B2 --
        1  .  F0 F1 F2 .  .  .  B0 -- B1 -- B2 --
        2  .  .  F0 F1 F2 B0 -- B1 -- B2 --
    """
    check_counts("gpipe", num_ranks, num_micro_batches)
    batches = range(num_micro_batches)
    ranks = tuple(tuple(Action(kind, rank, k) for kind in ("F", "B") for k in batches) for rank in range(num_ranks))
    return Schedule("gpipe", num_micro_batches, loop(num_ranks, 1), ranks)
