# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed in float64, for comparisons that rounding must not blur.

DeepSpeed's optimizers accumulate and step in float32 whatever the model is, refuse to reduce-scatter another type than
16 or 32 bits, and (stages 1 and 2) round the norm that they clip to to float32. None of it is needed: told otherwise at
these places, all else computes in the type it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def float64_masters() -> Iterator[None]:
    """Within it DeepSpeed builds optimizers that accumulate and step in float64. Local."""
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.runtime.engine import DeepSpeedEngine

    types, masters = DeepSpeedEngine.get_data_types, ZeROOptimizer._configure_master_weights

    def in_float64(self: Any, **settings: Any) -> torch.dtype:
        masters(self, **settings)
        return torch.float64

    DeepSpeedEngine.get_data_types = lambda self: (torch.float64, torch.float64)
    ZeROOptimizer._configure_master_weights = in_float64
    try:
        yield
    finally:
        DeepSpeedEngine.get_data_types, ZeROOptimizer._configure_master_weights = types, masters


def send_float64(optimizer: Any, scaled_norm: Callable[[], float]) -> None:
    """Makes a ZeRO optimizer that was built in `float64_masters` send gradients as they are, and clip exactly. Local.

    Args:
        optimizer: DeepSpeed's.
        scaled_norm: the norm of the whole gradient; collective.
    """
    optimizer.communication_data_type = torch.float64
    (bucket,) = optimizer.ipg_buckets.values()
    if isinstance(getattr(bucket, "buffer", None), Tensor):  # stage 3 has made room already
        bucket.buffer = bucket.buffer.to(torch.float64)
    optimizer.ipg_buckets = {torch.float64: bucket}
    optimizer.low_precision_master_weights_and_grads = False  # what is not float32 is taken for less

    def scaled_global_norm(norm_type: float = 2) -> Tensor:
        return torch.tensor(scaled_norm(), dtype=torch.float64)

    if hasattr(optimizer, "scaled_global_norm"):  # stages 1 and 2; stage 3 keeps the type
        optimizer.scaled_global_norm = scaled_global_norm
