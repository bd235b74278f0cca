# SPDX-License-Identifier: Apache-2.0
"""Our names in Lightning's registry, so that `Trainer(strategy="ring_ddp")` finds them.

Lightning 2.6 fills its strategy registry once, from its own classes, and has no hook for anybody else's. But it calls
whatever was registered under a name, so each of our names goes in as a small factory that imports its plugin when
Lightning calls it, that is, when a Trainer with that name is built. Names that are refused (claimed twice, malformed)
go in as well, so that selecting them says why. Names that Lightning has itself stay Lightning's.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any, final

import torch
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from stratagem.errors import PluginError
from stratagem.registry import Entry, strategies

_NEVER_LOOKED_UP = frozenset({"auto"})  # Trainer takes these words itself and asks no registry

_NEEDS = {  # Lightning's class: modules it needs, whether it needs CUDA
    "DeepSpeedStrategy": (("deepspeed",), True),
    "FSDPStrategy": ((), True),
    "XLAStrategy": (("torch_xla",), False),
    "XLAFSDPStrategy": (("torch_xla",), False),
    "SingleDeviceXLAStrategy": (("torch_xla",), False),
    "SingleTPUStrategy": (("torch_xla",), False),
}


@final
@dataclass(frozen=True)
class LazyStrategy:
    """What Lightning's registry holds for one of our names: called, it imports the plugin and builds the strategy.

    Attributes:
        entry: the entry point behind the name.
    """

    entry: Entry

    @property
    def __name__(self) -> str:
        """Lightning and its tools print the `__name__` of what is registered."""
        return self.entry.value.partition(":")[2] or self.entry.value

    def __call__(self, **init_params: Any) -> Strategy:
        """Import the plugin and build its strategy; called by Lightning when a Trainer names it.

        Raises:
            PluginError: the plugin cannot be imported, or does not build a Lightning strategy.
        """
        strategy = self.entry.load()(**init_params)
        if not isinstance(strategy, Strategy):
            what = f"{self.entry.value} built {type(strategy).__module__}.{type(strategy).__qualname__}"
            raise PluginError(what, where=self.entry.where, allowed="a lightning.pytorch.strategies.Strategy")
        return strategy


def register_strategies() -> None:
    """Put every strategy that an installed package offers into Lightning's registry; imports no plugin.

    Calling it again picks up packages that were installed meanwhile. A name that Lightning or the user's own code has
    registered is left alone; `lightning_conflict` reports it.
    """
    for entry in strategies().values():
        key = entry.name.lower()  # what Lightning looks up
        if not lightning_conflict(entry) and (not entry.refusal or key not in StrategyRegistry):
            StrategyRegistry.register(
                key,
                LazyStrategy(entry),
                description=f"stratagem plugin {entry.name} from {entry.distribution} {entry.version}",
                override=True,
            )


def lightning_conflict(entry: Entry) -> str:
    """Why Lightning would not call this entry under its name, or the empty string.

    Args:
        entry: an entry of the strategies group.
    """
    if entry.name.lower() in _NEVER_LOOKED_UP:
        return f"the name {entry.name!r} has a meaning of its own in Trainer"
    registered = _data().get(entry.name.lower())
    if registered is None or isinstance(registered["strategy"], LazyStrategy):
        return ""
    return f"the name {entry.name!r} is taken by {registered['strategy'].__name__} in Lightning's registry"


def lightning_names() -> list[str]:
    """The names in Lightning's registry that are not ours, in alphabetical order."""
    return sorted(name for name, data in _data().items() if not isinstance(data["strategy"], LazyStrategy))


def names_to_show() -> list[str]:
    """Ours and Lightning's in alphabetical order, without the aliases that Lightning has for an option of `ddp`."""
    return sorted(name for name in {*strategies(), *lightning_names()} if "find_unused" not in name)


def lightning_obstacle(name: str) -> str:
    """Why one of Lightning's own names cannot run on this machine, and after a colon the remedy; empty if it can.

    Args:
        name: one of `lightning_names()`; strategies that were registered by the user's own code have no obstacle.
    """
    data = _data()[name]
    modules, needs_cuda = _NEEDS.get(data["strategy"].__name__, ((), False))
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        return f"needs the module {missing[0]}: pip install {missing[0]}"
    if needs_cuda and not torch.cuda.is_available():
        return "needs CUDA"
    if data["init_params"].get("start_method") == "fork" and not hasattr(os, "fork"):
        return "needs an operating system that can fork"
    return ""


def _data() -> dict[str, dict[str, Any]]:
    return dict(StrategyRegistry)  # a plain dict: the registry's own `get` builds the strategy
