# SPDX-License-Identifier: Apache-2.0
"""The one base class that faces Lightning, and what it needs: launcher, ordered loaders, batch norm over ranks."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratagem.strategy.base import MeshStrategy
    from stratagem.strategy.checkpoint_io import FaultTolerantCheckpointIO
    from stratagem.strategy.settings import RunSettings

_WHERE = {"FaultTolerantCheckpointIO": "checkpoint_io", "MeshStrategy": "base", "RunSettings": "settings"}

__all__ = ["FaultTolerantCheckpointIO", "MeshStrategy", "RunSettings"]


def __getattr__(name: str) -> Any:
    """Loaded when asked for: registering names must not import the base class."""
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
