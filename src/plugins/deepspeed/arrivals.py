# SPDX-License-Identifier: Apache-2.0
"""Do all ranks reduce the same gradients in the same order?

DeepSpeed fills its buckets as gradients arrive and reduces a full one at once, without a word about what is in it.
Where branches differ between ranks, so do their buckets: gradients of different parameters are added up, and training
goes on with the sum; or Gloo, given more bytes than it expects, aborts the process. This notices: a fingerprint of the
order of arrival is compared before each bucket is reduced and after each backward.

Stage 3 may not get there: it fetches the parameters of each module from all ranks when the module runs, in forward too.
Ranks in different branches wait for each other, or Gloo aborts, or one module's parameters are taken for another's
until the fingerprints are compared. An agreement before each fetch would find it sooner, and cost as many messages
again as training sends. So the wait is bounded by the run's timeout, and the error says what it may mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from stratagem.errors import CommunicationError, ConfigError

_MODULUS = 2**61 - 1

_REDUCE = ("reduce_ipg_grads", "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads")
"""What reduces a bucket: in stages 1 and 2, and in stage 3."""


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

    def watch(self, optimizer: Any) -> None:
        """Checks before each reduction too. Local.

        Only on CPUs: on CUDA it would make backward wait for every bucket, and NCCL does not abort.

        Args:
            optimizer: DeepSpeed's, of any stage.
        """
        name = next(name for name in _REDUCE if hasattr(optimizer, name))
        theirs = getattr(optimizer, name)

        def reduce(*args: Any, **kwargs: Any) -> Any:
            self.check()
            return theirs(*args, **kwargs)

        if self._device.type == "cpu":
            setattr(optimizer, name, reduce)

    def check(self) -> None:
        """Compares what arrived since the last time with the other ranks. Every rank calls it; two numbers travel.

        Raises:
            ConfigError: on every rank; other gradients arrived, or in another order.
        """
        mine, self._fingerprint = self._fingerprint, 0
        both = torch.tensor([mine, -mine], device=self._device)
        dist.all_reduce(both, dist.ReduceOp.MAX)
        if int(both[0]) != -int(both[1]):
            raise ConfigError(
                "parameters got gradients on some ranks only, or in another order, and DeepSpeed would add up gradients"
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


@contextmanager
def bounded(stage: int, timeout: timedelta) -> Iterator[None]:
    """Within it a collective that waited too long says what that may mean. Local.

    Args:
        stage: of ZeRO.
        timeout: the run's.

    Raises:
        CommunicationError: for what Gloo raises when the timeout is over.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, CommunicationError) or "timed out" not in str(error).lower():
            raise
        raise CommunicationError(
            f"dp_shard: a collective of deepspeed_zero_{stage} waited longer than run.timeout ({timeout}) for another"
            " rank, which hangs, is slow, or has used other parameters in this step, so that the two wait for each"
            " other. Let every rank use the same parameters in the same order, or use zero_1, zero_2 or zero_3."
        ) from error
