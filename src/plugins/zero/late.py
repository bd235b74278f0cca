# SPDX-License-Identifier: Apache-2.0
"""Parameters that are still on their way when the optimizer's step has returned.

    step      |= gather 1 =|= gather 2 =|= gather 3 =|
    forward                |- block 1 waits -|- block 2 -|- block 3 -|      each module waits for its own parameters

Whoever looks at the module waits: reading a parameter by its name waits for that one, a module's forward for its own,
and listing parameters (`parameters()`, `state_dict()`) for all. Who kept a parameter in a variable of his own, and
reads it between a step and the next forward, does not; that is why this has to be asked for (`gather: forward`).
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import final

from torch import nn
from torch.utils.hooks import RemovableHandle

from stratagem.plugins.zero.bucket import Bucket
from stratagem.plugins.zero.watched import unwatch, watch


@final
class LateGather:
    """Waits for gathers when their parameters are looked at.

    Args:
        module: all modules below it are watched.
    """

    def __init__(self, module: nn.Module) -> None:
        self._coming: dict[int, Future[None]] = {}
        """By id of the parameter."""
        self._modules = [each for each in module.modules() if any(p is not None for p in each._parameters.values())]
        self._handles: list[RemovableHandle] = []
        for each in self._modules:
            watch(each, self._wait_for).on_list = lambda _: self.wait()
            mine = [p for p in dict.values(each._parameters) if p is not None]
            hook = each.register_forward_pre_hook(lambda *_, mine=mine: self._wait_for(*mine))
            self._handles.append(hook)

    def add(self, buckets: Iterable[Bucket], gathers: Iterable[Future[None]]) -> None:
        """These gathers bring the parameters of these buckets. Local."""
        for bucket, gather in zip(buckets, gathers, strict=True):
            self._coming.update(dict.fromkeys(map(id, bucket.parameters), gather))

    def _wait_for(self, *parameters: nn.Parameter) -> None:
        if self._coming:
            for parameter in parameters:
                gather = self._coming.pop(id(parameter), None)
                if gather is not None:
                    gather.result()

    def wait(self) -> None:
        """Returns when everything is there. Local, but the other ranks must have stepped too."""
        while self._coming:
            self._coming.popitem()[1].result()

    def close(self) -> None:
        """Watches no more; nothing is on its way. Local."""
        self._coming.clear()
        for handle in self._handles:
            handle.remove()
        for module in self._modules:
            unwatch(module)
        self._handles, self._modules = [], []
