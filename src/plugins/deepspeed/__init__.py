# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO behind the face of `zero_1`, `zero_2`, `zero_3`, on CPUs with Gloo too, for comparing the two.

Use it to check ours against an implementation that many have used for years, or to see what changing over would save.
The module, the optimizer and the config stay as they are: only the name of the strategy changes.

What differs from `zero_1`, `zero_2`, `zero_3`:

    who steps       the engine owns backward, clipping and the step: one optimizer, clipping by norm, no manual
                    optimization; what cannot be is refused before the run
    gradients       are reduced inside backward, in buckets filled as they arrive, and kept as pieces that hang on no
                    parameter: hooks see no `.grad`, `gradient_norm` gives the norm. Ranks whose branches differ would
                    add up different parameters: the run ends with an error, in stage 3 perhaps not before
                    `run.timeout` is over
    parameters      a flat float32 copy of this rank's share is stepped and copied back, in float32 runs too, so that
                    each rank holds `1/N` of the parameters more
    buffers         are each rank's own after the start
    bf16-true       has float32 masters; bf16-mixed is autocast, as everywhere; float16 is DeepSpeed's own
    checkpoints     are DeepSpeed's directories, with a share per rank

What a rank sends per optimizer step of k micro-batches on N ranks with Gloo, in bytes of the parameters (measured at
the sockets; stages 1 and 2 within 0.2 %, stage 3 with `comparable` 2.3 % more at N = 2, where small parameters are
padded). Torch's Gloo moves a whole all-reduce for a reduce-scatter; DeepSpeed's stage 1 asks for an all-reduce:

    stage 1         3 (N-1)/N             gradients 2, all-gather of the parameters 1
    stage 2         (2k + 1) (N-1)/N      the same, with the gradients of each micro-batch reduced at once
    stage 3         4k (N-1)/N            all-gather in forward and again in backward 2, gradients 2

    settings.py     what can be chosen, and DeepSpeed's dictionary
    strategy.py     the Lightning face
    host.py         import, process groups, environment
    precision.py    the Trainer's precision
    wide.py         float64
    shards.py       the divided seen whole
    arrivals.py     do ranks reduce the same?
    limits.py       what is refused
"""

from typing import TYPE_CHECKING, Any

from stratagem.plugins.deepspeed.settings import DeepSpeedSettings

if TYPE_CHECKING:
    from stratagem.plugins.deepspeed.strategy import (
        DeepSpeedZero1Strategy,
        DeepSpeedZero2Strategy,
        DeepSpeedZero3Strategy,
    )

__all__ = ["DeepSpeedSettings", "DeepSpeedZero1Strategy", "DeepSpeedZero2Strategy", "DeepSpeedZero3Strategy"]


def __getattr__(name: str) -> Any:
    """The strategies need Lightning, the settings do not: they are imported when they are asked for."""
    if name in ("DeepSpeedZero1Strategy", "DeepSpeedZero2Strategy", "DeepSpeedZero3Strategy"):
        from stratagem.plugins.deepspeed import strategy

        return getattr(strategy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
