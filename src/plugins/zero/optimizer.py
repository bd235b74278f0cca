# SPDX-License-Identifier: Apache-2.0
"""An optimizer whose groups hold pieces instead of parameters.

The groups stay the same dictionaries with as many entries, so that learning rate schedulers, weight-decay groups and
code that walks through them go on working; `step` and `zero_grad` stay the user's own, with hooks around them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stratagem.checkpoint.tree import Stored
from stratagem.collectives import Communicator
from stratagem.errors import ConfigError
from stratagem.plugins.zero.bucket import Bucket, OwnedParameter
from stratagem.technique import unique


@final
class OwnedOptimizer:
    """One of the user's optimizers, taken over.

    Args:
        optimizer: the user's.
        on_step: called after every step.
        on_clear: called after every `zero_grad`, with `set_to_none`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        on_step: Callable[[OwnedOptimizer], None],
        on_clear: Callable[[OwnedOptimizer, bool], None],
    ) -> None:
        self.optimizer = optimizer
        self.places: dict[int, tuple[Bucket, int]] = {}
        """Bucket and index of an `OwnedParameter`, by its id."""
        self._handle: RemovableHandle = optimizer.register_step_post_hook(lambda *_: on_step(self))
        original = optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            original(set_to_none)
            on_clear(self, set_to_none)

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    def strangers(self) -> list[nn.Parameter]:
        """Parameters in the groups that nobody has taken over yet. Local."""
        groups = self.optimizer.param_groups
        return unique(p for group in groups for p in group["params"] if not isinstance(p, OwnedParameter))

    def take_over(self, places: dict[int, tuple[Bucket, int]]) -> None:
        """Puts pieces in the place of parameters, and parts of their state in the place of the state. Local.

        Args:
            places: bucket and index of every stranger, by its id.

        Raises:
            ConfigError: a parameter that another optimizer or group already holds.
        """
        for group in self.optimizer.param_groups:
            for position, parameter in enumerate(group["params"]):
                if isinstance(parameter, OwnedParameter):
                    continue
                bucket, index = places[id(parameter)]
                if bucket.owned_parameters[index] is not None:
                    raise ConfigError(
                        f"a parameter of shape {tuple(parameter.shape)} is in two optimizers or groups",
                        where="configure_optimizers",
                        do="give every parameter to one optimizer",
                    )
                owned = bucket.own(index)
                self.places[id(owned)] = (bucket, index)
                group["params"][position] = owned
                state = self.optimizer.state.pop(parameter, None)
                if state is not None and owned.numel():
                    self.optimizer.state[owned] = part_of_state(state, bucket, index)

    @property
    def buckets(self) -> list[Bucket]:
        """Those that hold a parameter of this optimizer, in launch order."""
        found = {id(bucket): bucket for bucket, _ in self.places.values()}
        return sorted(found.values(), key=lambda bucket: bucket.position)

    def owned(self) -> Iterator[tuple[int, OwnedParameter, Bucket, int]]:
        """Per parameter, in the order of the groups: its plain index, its piece, and where that lies."""
        number = 0
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in self.places:
                    yield number, parameter, *self.places[id(parameter)]
                number += 1

    def stand_in(self) -> Tensor:
        """A gradient of one element for an optimizer that owns none on this rank: scalers want something to look at."""
        owned = next(owned for _, owned, bucket, index in self.owned() if not bucket.pieces[index].numel)
        owned.data = owned.new_zeros(1)
        owned.grad = owned.new_zeros(1)
        return owned.grad

    def restore(self) -> None:
        """Gives the groups the module's parameters and the optimizer its own `zero_grad` back; drops the state."""
        self._handle.remove()
        self.optimizer.__dict__.pop("zero_grad", None)
        for group in self.optimizer.param_groups:
            group["params"][:] = [p.whole if isinstance(p, OwnedParameter) else p for p in group["params"]]
        self.optimizer.state.clear()
        self.places.clear()


@torch.no_grad()
def share_overflow(optimizers: Sequence[OwnedOptimizer], comm: Communicator) -> None:
    """If any rank owns a gradient of an optimizer that is not finite, every rank gets one.

    So a loss scaler, which looks at this rank's gradients only, skips the step and lowers its scale on all ranks alike.
    Every rank of the axis calls it, after the gradients are reduced; it sends one number per optimizer.
    """
    largest = torch.full((len(optimizers),), -1.0, device=comm.device)  # below 0: nobody has a gradient
    gradients = [[owned.grad for _, owned, *_ in each.owned() if owned.grad is not None] for each in optimizers]
    for number, found in enumerate(gradients):
        for gradient in found:
            largest[number] = torch.maximum(largest[number], gradient.abs().amax().to(comm.device, torch.float32))
    comm.reduce_small(largest, "max")
    for each, found, value in zip(optimizers, gradients, largest.tolist(), strict=True):
        if value < 0:
            continue
        stand_in = found[0] if found else each.stand_in()
        if not math.isfinite(value):
            stand_in[(0,) * stand_in.dim()] = float("inf")  # whatever its strides


@torch.no_grad()
def part_of_state(state: dict[str, Any], bucket: Bucket, index: int) -> dict[str, Any]:
    """What of a whole parameter's state belongs to my piece: tensors of the parameter's shape are cut, others kept.

    Of a `Stored` tensor only the piece is read.
    """
    piece = bucket.pieces[index]
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Stored):
            is_cut = tuple(value.shape) == piece.slot.size and not piece.is_whole
            value = value.span(piece.start, piece.stop, piece.slot.stride) if is_cut else value.whole().clone()
        elif (
            isinstance(value, torch.Tensor)
            and tuple(value.shape) == piece.slot.size
            and value.dim()
            and not piece.is_whole
        ):
            flat = torch.empty(value.numel(), dtype=value.dtype, device=value.device)
            replace(piece.slot, offset=0).view(flat).copy_(value)
            value = flat[piece.start : piece.stop].clone()
        elif isinstance(value, torch.Tensor):
            value = value.clone()
        found[key] = value
    return found
