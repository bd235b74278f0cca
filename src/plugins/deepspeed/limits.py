# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed cannot do, said before the run.

DeepSpeed's engine owns backward, clipping and the step. What a LightningModule or a Trainer asks for in their place
would be left out without a word.
"""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import LBFGS, Optimizer

from stratagem.errors import ConfigError
from stratagem.plugins.deepspeed.precision import no_clipping_by_value
from stratagem.strategy.settings import RunSettings

_NATIVE = "use zero_1, zero_2 or zero_3, which allow it"


def check_run(run: RunSettings) -> None:
    """Refuses what DeepSpeed has no choice about.

    Raises:
        ConfigError: another transport than the backend's own collectives.
    """
    if run.transport not in ("auto", "native"):
        raise ConfigError(
            f"transport is {run.transport}, and DeepSpeed talks by the backend's own collectives",
            where="run.transport",
            allowed="auto, native",
        )


def check_module(module: LightningModule, trainer: Trainer) -> None:
    """Refuses modules and Trainers whose wishes the engine would ignore; called before training, on every rank.

    Raises:
        ConfigError: with what, and what to do instead.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise ConfigError(
            "automatic_optimization is False, and DeepSpeed's engine allows one optimizer that it steps itself",
            where=name,
            do=_NATIVE,
        )
    if trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE and trainer.gradient_clip_val:
        raise no_clipping_by_value()
    if is_overridden("backward", module):
        raise ConfigError(
            "it overrides backward, and DeepSpeed's engine runs its own", where=f"{name}.backward", do=_NATIVE
        )


def the_optimizer(optimizers: list[Optimizer], module: LightningModule) -> Optimizer:
    """The one optimizer that DeepSpeed takes.

    Raises:
        ConfigError: there is none, there are several, or it is one that needs a closure.
    """
    where = f"{type(module).__name__}.configure_optimizers"
    if len(optimizers) != 1:
        raise ConfigError(f"it returns {len(optimizers)} optimizers, and DeepSpeed takes 1", where=where, do=_NATIVE)
    (optimizer,) = optimizers
    if isinstance(optimizer, LBFGS):
        raise ConfigError(
            "LBFGS calls backward within its step, and DeepSpeed's step cannot", where=where, do="use SGD or Adam"
        )
    return optimizer
