# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: the matrices of a model divided over ranks that read the same batch.

Use it where a layer is too large for one device or takes too long on it, between ranks that talk fast: it sends
activations several times per layer. It composes with any data technique on the other ranks.

    settings.py       what can be chosen
    functions.py      the conjugate collectives, as autograd functions
    axis.py           the products of column and row layers, and what layers of one input share
    layers.py         the layers that stand in the place of the user's
    cross_entropy.py  the loss of logits that are cut by classes
    sharded.py        a tensor that is cut and behaves like the whole one
    heads.py          where attention may be cut
    cuts.py           from a plan to cuts, or the reason why not
    infer.py          a plan where there is none
    technique.py      cuts a module and states placements
    strategy.py       the Lightning face
"""

from typing import TYPE_CHECKING, Any

from stratagem.plugins.tensor.settings import TensorSettings
from stratagem.plugins.tensor.technique import TensorParallel

if TYPE_CHECKING:
    from stratagem.plugins.tensor.strategy import TensorParallelStrategy

__all__ = ["TensorParallel", "TensorParallelStrategy", "TensorSettings"]


def __getattr__(name: str) -> Any:
    """The strategy needs Lightning, the technique does not: it is imported when it is asked for."""
    if name == "TensorParallelStrategy":
        from stratagem.plugins.tensor.strategy import TensorParallelStrategy

        return TensorParallelStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
