# SPDX-License-Identifier: Apache-2.0
"""ZB-V: zero bubble with 1F1B's memory, by laying the stages in a V."""

from __future__ import annotations

from stratagem.plugins.pipeline.actions import Action, Schedule, v_shape
from stratagem.plugins.pipeline.schedules.tape import Tape, check_counts


def zb_v(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Two chunks per rank, laid in a V: rank r has the stages r and 2 p - 1 - r, so rank 0 has both ends of the model.

    Backwards start on rank 0, where forwards start too, so no rank waits for the other end of the pipeline.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, and Pipeline Parallelism with Controllable Memory, 2024.
    Bubble: for equal costs and m >= 2 p - 1 every rank works without a gap from its first action to its last, which is
    the zero of the name. As ranks start one after the other, (p - 1) / 2 is left in the makespan (F = I = W = 1 of all
    that a rank holds). Peak: p micro-batches on the worst rank. Messages: 2 m (2 p - 2): the turn of the V stays on
    one rank.

    Raises:
        ConfigError: a number is below 1.

    Example:
        >>> from stratagem.plugins.pipeline.draw import plain
        >>> print(plain(zb_v(2, 3)))
        0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        1  .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    check_counts("zb_v", num_ranks, num_micro_batches)
    ranks = tuple(_rank(rank, num_ranks, num_micro_batches) for rank in range(num_ranks))
    return Schedule("zb_v", num_micro_batches, v_shape(num_ranks), ranks)


def _rank(rank: int, num_ranks: int, num_micro_batches: int) -> tuple[Action, ...]:
    # Phases assume a full pipeline; with fewer micro-batches those that do not exist are left out of the same order.
    full = max(2 * num_ranks - 1, num_micro_batches)
    tape = Tape((rank, 2 * num_ranks - 1 - rank))
    after = num_ranks - rank  # ranks from here to the turn of the V, this one included
    tape.write("F0", times=2 * after - 1)
    tape.write("F1 F0", times=rank)
    tape.write("F1 I1 W1", times=after)
    tape.write("F0 I0 W0 F1 I1 W1", times=full - 2 * num_ranks + rank + 1)
    tape.write("I0 W0 F1 I1 W1", times=after - 1)
    # No forward is left. The neighbours on both arms wait for inputs, so those come first; what is put off comes last.
    tape.write("I0 I1", times=rank)
    tape.write("I0 W0", times=after)
    tape.write("W1", times=rank)
    tape.write("W0", times=rank)
    return tuple(action for action in tape.actions if action.micro_batch < num_micro_batches)
