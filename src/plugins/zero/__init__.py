# SPDX-License-Identifier: Apache-2.0
"""ZeRO: parameters, gradients and optimizer state divided over the data ranks, with the results of one process.

Use it when the model trains with `ring_ddp` but does not fit: take the lowest stage that makes it fit. Stages 1 and 2
cost what `ring_ddp` costs on the wire, stage 3 half as much again. `technique.py` has the table; start reading there.

After a backward the module's parameters have no `.grad`; the optimizer holds the reduced pieces. So clip by
`gradient_clip_val` or `self.clip_gradients(optimizer, ...)`: `clip_grad_norm_(self.parameters(), ...)` finds nothing to
clip, and says nothing. To look at a whole gradient, ask `Zero.full_gradient(parameter)`, on every rank.

    settings.py     what can be chosen
    partition.py    who owns what: frozen data
    bucket.py       the memory of one bucket
    gradients.py    reduction during backward
    failed.py       what a failed backward left
    pool.py         memory for gradients on their way
    optimizer.py    an optimizer that holds pieces
    separable.py    may this optimizer hold pieces?
    state.py        the optimizer's state, whole again
    technique.py    what the stages share
    stage1.py, stage2.py, stage3.py
    predictions.py  the formulas
    blocks.py       what stage 3 fetches together
    fetcher.py      fetching and freeing it
    watched.py      noticing who uses a parameter
    initial.py      building a module that no rank could hold
    lane.py         communicators and their thread
    strategy.py     the Lightning face
"""

from typing import TYPE_CHECKING, Any

from stratagem.plugins.zero.settings import ZeroSettings
from stratagem.plugins.zero.stage1 import Zero1
from stratagem.plugins.zero.stage2 import Zero2
from stratagem.plugins.zero.stage3 import Zero3

if TYPE_CHECKING:
    from stratagem.plugins.zero.strategy import Zero1Strategy, Zero2Strategy, Zero3Strategy

__all__ = ["Zero1", "Zero1Strategy", "Zero2", "Zero2Strategy", "Zero3", "Zero3Strategy", "ZeroSettings"]


def __getattr__(name: str) -> Any:
    """The strategies need Lightning, the techniques do not: they are imported when they are asked for."""
    if name in ("Zero1Strategy", "Zero2Strategy", "Zero3Strategy"):
        from stratagem.plugins.zero import strategy

        return getattr(strategy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
