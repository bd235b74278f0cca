# SPDX-License-Identifier: Apache-2.0
"""DualPipeV: forwards of one arm of a V side by side with backwards of the other."""

from __future__ import annotations

from stratagem.errors import ConfigError
from stratagem.plugins.pipeline.actions import Action, Schedule, v_shape
from stratagem.plugins.pipeline.schedules.tape import Tape, check_counts


def dual_pipe_v(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Two chunks per rank, laid in a V. In the steady state a forward of one arm stands next to a backward of the
    other, so that where a layer communicates (expert parallelism) one computes while the other waits.

    A pair is one block here: it starts when both can, and its results are there when both are done. Backwards are whole
    in the middle and split at both ends only.

    Source: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024 (DualPipe), and its V-shaped half, 2025. Bubble: (p - 1)
    (2 F + I - W), all of one chunk and W no dearer than F and I; where F = I this is what is published,
    (p - 1) (FB + B - 3 W), of a pair FB = F + B that saves nothing. That is p - 1 for F = I = W = 1 of all that a rank
    holds; an engine that takes the two in turn and sends after each gets (p - 1) / 2, see `simulate`.
    Peak: p + 1 / 2 micro-batches. Messages: 2 m (2 p - 2).

    Raises:
        ConfigError: fewer micro-batches than stages, 2 p: the phases do not fit together.

    Example:
        >>> from stratagem.plugins.pipeline.draw import plain
        >>> print(plain(dual_pipe_v(2, 4)))
        0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 --- .   3F2 0B0 --- 3B2 --- .   3F3 0B1 --- 3B3 --- 0I2 0W2 0I3 0W3
        1  .   1F0 2F0 1F1 2F1 1F2 2B0 --- 2F2 1B0 --- 1F3 2B1 --- 2F3 1B1 --- 2B2 --- 1B2 --- .   2I3 1I3 2W3 1W3
    """
    check_counts("dual_pipe_v", num_ranks, num_micro_batches)
    if num_micro_batches < 2 * num_ranks:
        raise ConfigError(
            f"{num_micro_batches} micro-batches are fewer than the {2 * num_ranks} stages",
            where="schedule dual_pipe_v",
            allowed=f"{2 * num_ranks} micro-batches or more",
            do="raise the number of micro-batches, or choose zb_v",
        )
    tapes = [_tape(rank, num_ranks, num_micro_batches) for rank in range(num_ranks)]
    ranks = tuple(tuple(tape.actions) for tape in tapes)
    pairs = frozenset[Action]().union(*(tape.pairs for tape in tapes))
    return Schedule("dual_pipe_v", num_micro_batches, v_shape(num_ranks), ranks, pairs)


def _tape(rank: int, num_ranks: int, num_micro_batches: int) -> Tape:
    tape = Tape((rank, 2 * num_ranks - 1 - rank))
    below, own = num_ranks - 1 - rank, rank + 1
    tape.write("F0", times=2 * below)
    tape.write("F0 F1", times=own)
    tape.write("I1 W F1", times=below)
    pairs = num_micro_batches - 2 * num_ranks + own
    if below == 0:
        # The rank at the turn of the V starts the backwards: its first one must not wait for the end of a pair.
        tape.write("F0 B1 F1+B0")
        pairs -= 1
    tape.write("F0+B1 F1+B0", times=pairs)
    tape.write("B1 F1+B0", times=below)
    # 2 (r + 1) backwards are left, the arms in turn: the first half whole, the second split.
    for index in range(2 * own):
        tape.write(f"{'B' if index < own else 'I'}{1 - index % 2}")
    tape.write("W I0", times=below)
    tape.write("W", times=own)
    return tape
