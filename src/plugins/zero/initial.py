# SPDX-License-Identifier: Apache-2.0
"""Building a module that no rank could hold: parameters are divided while they are built.

    with ShardedInit(lane):
        model = GPT(config)          every rank runs the same code and draws the same random numbers as one process

Torch tells when a module registers a parameter. From then on the most recently used parameters, up to a bound, are
whole on every rank; of the others each rank keeps its part. Reading one by its name (`init.normal_(self.weight)`)
brings it back whole, and what was changed in it is kept when it goes. So the values are exactly those of one process,
in the order of its own random numbers, while no rank holds more than its part and the bound.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from stratagem.collectives import Communicator, chunk_bounds
from stratagem.plugins.zero.watched import absent, unwatch, watch


@final
class ShardedInit:
    """Divides the parameters of all modules that are built within it.

    Every rank of the axis enters it and builds the same modules in the same order, with random generators in the same
    state. A parameter that is used after it had to go is sent once around.

    Args:
        comm: over the axis.
        whole_mib: how much may be whole at a time; at least the parameter that is being built.
        min_numel: smaller parameters stay whole.
    """

    def __init__(self, comm: Communicator, *, whole_mib: float = 32.0, min_numel: int = 1024) -> None:
        self._comm, self._bound, self._min_numel = comm, int(whole_mib * 2**20), min_numel
        self._parts: dict[int, tuple[nn.Parameter, Tensor | None]] = {}
        """Per parameter my part of it, or None while it is whole."""
        self._recent: OrderedDict[int, int] = OrderedDict()
        """Bytes of those that are whole, longest unused first."""
        self._modules: list[nn.Module] = []
        self._handle: RemovableHandle | None = None

    def __enter__(self) -> Self:
        self._handle = register_module_parameter_registration_hook(self._on_register)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._handle is not None
        self._handle.remove()
        for module in self._modules:
            watched: Any = module._parameters
            watched.on_list = None
        self._make_room(0)

    def _on_register(self, module: nn.Module, _: str, parameter: nn.Parameter | None) -> None:
        if self._comm.size == 1:
            return
        if module not in self._modules[-1:] and not hasattr(module._parameters, "on_list"):
            watch(module, self._use).on_list = self._use
            self._modules.append(module)
        if parameter is not None:
            self._use(parameter)

    def _use(self, parameter: nn.Parameter) -> None:
        """The parameter is about to be read or written: has it here."""
        key = id(parameter)
        if key not in self._parts:
            if parameter.is_meta or not parameter.is_floating_point() or parameter.numel() < self._min_numel:
                return
            self._parts[key] = (parameter, None)
        elif self._parts[key][1] is not None:
            parameter.data = self.gather(parameter)
            self._parts[key] = (parameter, None)
        self._recent.pop(key, None)
        self._recent[key] = parameter.numel() * parameter.element_size()
        self._make_room(self._bound)

    @torch.no_grad()
    def _make_room(self, bound: int) -> None:
        while self._recent and sum(self._recent.values()) > bound and (len(self._recent) > 1 or not bound):
            key, _ = self._recent.popitem(last=False)
            parameter = self._parts[key][0]
            low, high = self._mine(parameter)
            self._parts[key] = (parameter, parameter.detach().contiguous().view(-1)[low:high].clone())
            parameter.data = absent(parameter)

    def _mine(self, parameter: nn.Parameter) -> tuple[int, int]:
        return chunk_bounds(parameter.numel(), self._comm.size)[self._comm.rank]

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter is divided here. Local."""
        return self._parts.get(id(parameter), (None, None))[1] is not None

    @torch.no_grad()
    def gather(self, parameter: nn.Parameter) -> Tensor:
        """The whole value of a divided parameter. Every rank of the axis calls it; it is sent once around."""
        part = self._parts[id(parameter)][1]
        assert part is not None
        flat = torch.empty(parameter.numel(), dtype=part.dtype, device=part.device)
        flat[slice(*self._mine(parameter))] = part
        self._comm.all_gather(flat)
        return flat.view(parameter.shape)

    def make_whole(self, parameter: nn.Parameter) -> None:
        """Gives a parameter its memory back, for good. As `gather`; nothing happens if it has it."""
        if self.holds(parameter):
            parameter.data = self.gather(parameter)
            del self._parts[id(parameter)]

    def release(self) -> None:
        """Forgets everything; others have taken the values over. Local."""
        for module in self._modules:
            watched: Any = module._parameters
            if getattr(watched, "on_use", None) == self._use:
                unwatch(module)
        self._modules, self._parts = [], {}
        self._recent.clear()
