# SPDX-License-Identifier: Apache-2.0
"""Do all ranks reduce the same gradients in the same order?

DeepSpeed fills its buckets as gradients arrive and reduces a full one at once, without a word about what is in it.
Where branches differ between ranks, so do their buckets: gradients of different parameters are added up, and training
goes on with the sum. This notices: a fingerprint of the order of arrival is compared after each backward.
"""

from __future__ import annotations

from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from stratagem.errors import ConfigError

_MODULUS = 2**61 - 1


@final
class Arrivals:
    """Watches the gradients of a module.

    Args:
        module: not yet DeepSpeed's.
    """

    def __init__(self, module: nn.Module) -> None:
        self._name, self._fingerprint = type(module).__name__, 0
        self._device = next((p.device for p in module.parameters()), torch.device("cpu"))
        trained = [p for p in module.parameters() if p.requires_grad]
        self._hooks = [p.register_hook(partial(self._arrived, number)) for number, p in enumerate(trained, 1)]

    def check(self) -> None:
        """Compares this backward with those of the other ranks. Every rank calls it; two numbers travel.

        Raises:
            ConfigError: on every rank; other gradients arrived, or in another order.
        """
        mine, self._fingerprint = self._fingerprint, 0
        both = torch.tensor([mine, -mine], device=self._device)
        dist.all_reduce(both, dist.ReduceOp.MAX)
        if int(both[0]) != -int(both[1]):
            raise ConfigError(
                "parameters got gradients on some ranks only, or in another order, and DeepSpeed has added up gradients"
                " of different parameters",
                where=self._name,
                do="let every rank use the same parameters in every step, or use zero_1, zero_2 or zero_3",
            )

    def close(self) -> None:
        """Watches no more. Local."""
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, number: int, _: Any) -> None:
        self._fingerprint = (self._fingerprint * 1_000_003 + number) % _MODULUS
