# SPDX-License-Identifier: Apache-2.0
"""A module's parameters, where reading one by its name is noticed: `module.weight` is a lookup in `module._parameters`.

So a parameter whose memory is elsewhere can be brought back the moment anybody uses it, in whichever module: a head
that is tied to an embedding, a norm whose weight another module reads, a block of which only one method is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

from torch import Tensor, nn

Notice = Callable[[nn.Parameter], None]


@final
class WatchedParameters(dict[str, "nn.Parameter | None"]):
    """The dictionary `_parameters` of one module.

    Args:
        parameters: what it held before.
        on_use: called with a parameter before it is handed out by name.

    Attributes:
        on_list: called with a parameter before it is handed out by `items` or `values` (`module.parameters()`), and
            when it is put in; nothing by default, since listing is not using.
    """

    def __init__(self, parameters: dict[str, nn.Parameter | None], on_use: Notice) -> None:
        super().__init__(parameters)
        self.on_use = on_use
        self.on_list: Notice | None = None

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self.on_use(parameter)
        return parameter

    def __setitem__(self, name: str, parameter: nn.Parameter | None) -> None:
        super().__setitem__(name, parameter)
        if self.on_list is not None and parameter is not None:
            self.on_list(parameter)

    def _listed(self) -> Iterator[tuple[str, nn.Parameter | None]]:
        for name, parameter in list(super().items()):
            if self.on_list is not None and parameter is not None:
                self.on_list(parameter)
            yield name, parameter

    def items(self) -> Any:
        """Pairs of name and parameter, in order."""
        return super().items() if self.on_list is None else self._listed()

    def values(self) -> Any:
        """Parameters, in order."""
        return super().values() if self.on_list is None else (parameter for _, parameter in self._listed())

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        import copy

        return {name: copy.deepcopy(parameter, memo) for name, parameter in super().items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (list(super().items()),)


def watch(module: nn.Module, on_use: Notice) -> WatchedParameters:
    """Watches the direct parameters of a module. Local."""
    watched = WatchedParameters(module._parameters, on_use)
    module.__dict__["_parameters"] = watched
    return watched


def unwatch(module: nn.Module) -> None:
    """Gives a module a plain dictionary back. Local."""
    if isinstance(module._parameters, WatchedParameters):
        module.__dict__["_parameters"] = dict(dict.items(module._parameters))


def absent(parameter: Tensor) -> Tensor:
    """What stands for a parameter whose memory is elsewhere: its shape and dtype, one element of memory, all NaN.

    Counting parameters stays right; computing with it is loudly wrong, writing into it an error.
    """
    nothing = parameter.new_full([1] * parameter.dim(), float("nan"))
    return nothing if parameter.numel() == 1 else nothing.expand(parameter.shape)
