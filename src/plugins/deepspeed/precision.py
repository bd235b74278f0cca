# SPDX-License-Identifier: Apache-2.0
"""How the Trainer's `precision` reads under DeepSpeed.

    32-true       as everywhere
    64-true       as everywhere: see `wide.py` for what DeepSpeed has to be told
    bf16-mixed    as everywhere: float32 parameters, autocast around the module's own steps
    bf16-true     parameters and gradients in bf16; DeepSpeed adds float32 masters, which one process has not
    16-mixed      DeepSpeed knows one float16 only: float16 parameters and gradients, float32 masters, a loss scale
    16-true       the same

Note [private parts of Lightning]: Lightning makes the precision plugin of every subclass of its own DeepSpeed strategy,
and refuses `64-true` before the strategy is asked. The one name it looks up for that is replaced by a function that
answers as before, except for `64-true`; a strategy that is not ours still refuses it, when it meets the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from lightning.fabric.plugins.precision.utils import _DtypeContextManager
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from stratagem.errors import ConfigError
from stratagem.plugins.deepspeed.shards import forget_gradients

if TYPE_CHECKING:
    from lightning.fabric.utilities.types import Steppable

_DTYPES = {
    "64-true": torch.float64,
    "32-true": torch.float32,
    "bf16-mixed": torch.float32,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
    "16-true": torch.float16,
}


@final
class EnginePrecision(DeepSpeedPrecision):
    """Casts, runs backward and the step through the engine, and tells it the norm to clip to.

    Args:
        precision: the Trainer's.
    """

    def __init__(self, precision: str) -> None:
        self.precision: Any = precision
        self._desired_dtype = _DTYPES[precision]
        self._clipped = False

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        from stratagem.plugins.deepspeed.strategy import DeepSpeedZeroStrategy

        strategy = module.trainer.strategy if isinstance(module, LightningModule) else None
        if not isinstance(strategy, DeepSpeedZeroStrategy):
            raise ValueError(f"`Trainer(strategy='deepspeed', precision={self.precision!r})` is not supported.")
        return module if "mixed" in self.precision else module.to(dtype=self._desired_dtype)

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """As Lightning's own plugins for one process do."""
        if self.precision == "bf16-mixed":
            with torch.autocast(self._device_type(), dtype=torch.bfloat16):
                yield
        elif "true" in self.precision:
            with _DtypeContextManager(self._desired_dtype):
                yield
        else:
            yield

    @override
    def optimizer_step(  # type: ignore[override]  # as Lightning's own
        self, optimizer: Steppable, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Lightning's; what the module clips to in its hook is what DeepSpeed's step will clip to."""
        stepped: Any = optimizer
        stepped.clip_grad, self._clipped = 0.0, False
        result = super().optimizer_step(optimizer, model, closure, **kwargs)
        forget_gradients(optimizer)
        return result

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float | int = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """DeepSpeed clips within its step; this says to which norm."""
        self._clipped = True
        if clip_val > 0 and gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            raise no_clipping_by_value()
        stepped: Any = optimizer
        stepped.clip_grad = float(clip_val)

    @override
    def _clip_gradients(
        self,
        model: LightningModule | nn.Module,
        optimizer: Steppable,
        clip_val: float | int | None = None,
        gradient_clip_algorithm: GradClipAlgorithmType | None = None,
    ) -> None:
        super()._clip_gradients(model, optimizer, clip_val, gradient_clip_algorithm)
        overridden = isinstance(model, LightningModule) and is_overridden("configure_gradient_clipping", model)
        if overridden and not self._clipped:
            rank_zero_warn(
                "configure_gradient_clipping did not call self.clip_gradients, so this step is not clipped: under"
                " DeepSpeed parameters have no .grad that the hook could change."
            )

    def _device_type(self) -> str:
        from deepspeed.accelerator import get_accelerator

        return str(get_accelerator().device_name())


def no_clipping_by_value() -> ConfigError:
    """The refusal of what DeepSpeed has no code for."""
    return ConfigError(
        "DeepSpeed cannot clip gradients by value",
        where="trainer.gradient_clip_algorithm",
        allowed="norm",
        do="clip by norm, or use zero_1, zero_2 or zero_3, which clip by value too",
    )


def allow_float64() -> None:
    """Lets Lightning build a Trainer with `64-true` for our strategies: see Note [private parts of Lightning]."""
    accelerator_connector.DeepSpeedPrecision = _plugin_for  # type: ignore[attr-defined,assignment]


def _plugin_for(precision: Any) -> DeepSpeedPrecision:
    return EnginePrecision(precision) if precision == "64-true" else DeepSpeedPrecision(precision)
