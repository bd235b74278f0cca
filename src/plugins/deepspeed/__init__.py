# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO behind the face of `zero_1`, `zero_2`, `zero_3`, on CPUs with Gloo too, to compare them side by side."""

from typing import TYPE_CHECKING, Any

from stratagem.plugins.deepspeed.settings import DeepSpeedSettings

if TYPE_CHECKING:
    from stratagem.plugins.deepspeed.strategy import (
        DeepSpeedZero1Strategy,
        DeepSpeedZero2Strategy,
        DeepSpeedZero3Strategy,
    )

__all__ = ["DeepSpeedSettings", "DeepSpeedZero1Strategy", "DeepSpeedZero2Strategy", "DeepSpeedZero3Strategy"]


def __getattr__(name: str) -> Any:
    """The strategies need Lightning, the settings do not: they are imported when they are asked for."""
    if name in ("DeepSpeedZero1Strategy", "DeepSpeedZero2Strategy", "DeepSpeedZero3Strategy"):
        from stratagem.plugins.deepspeed import strategy

        return getattr(strategy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
