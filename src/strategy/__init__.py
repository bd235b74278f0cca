# SPDX-License-Identifier: Apache-2.0
"""The one base class that faces Lightning, and what it needs: launcher, ordered loaders, batch norm over ranks."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratagem.strategy.base import MeshStrategy
    from stratagem.strategy.settings import RunSettings

__all__ = ["MeshStrategy", "RunSettings"]


def __getattr__(name: str) -> Any:
    """Loaded when asked for: registering names must not import the base class."""
    if name in __all__:
        from stratagem.strategy import base, settings

        return getattr(base if name == "MeshStrategy" else settings, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
