# SPDX-License-Identifier: Apache-2.0
"""What the guard needs of a strategy, and where it must refuse."""

from __future__ import annotations

import logging

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.optim import LBFGS, Optimizer

from stratagem.errors import ConfigError
from stratagem.resilience.guard_settings import BadSteps, Drift, Heartbeat
from stratagem.strategy.base import MeshStrategy

log = logging.getLogger(__name__)


def check(
    trainer: Trainer,
    module: LightningModule,
    heartbeat: Heartbeat | None,
    bad_steps: BadSteps | None,
    drift: Drift | None,
) -> None:
    """Before a fit. Local.

    Raises:
        ConfigError: the strategy or the module cannot do what is wanted.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, MeshStrategy | SingleDeviceStrategy | DDPStrategy):
        for name, wanted in (("bad_steps", bad_steps), ("drift", drift)):
            if wanted is not None:
                raise ConfigError(
                    f"{type(strategy).__name__} does not tell where gradients and replicas are",
                    where=f"Guard.{name}",
                    allowed="strategies of stratagem on its own mesh, ddp, one device",
                    do="leave it out",
                )
    if bad_steps is not None and not module.automatic_optimization:
        raise ConfigError(
            "with manual optimization the step is the module's own",
            where="Guard.bad_steps",
            do="leave it out, or optimize automatically",
        )
    run = getattr(strategy, "run", None)
    if run is not None and heartbeat is not None and heartbeat.hang_after >= run.timeout and trainer.is_global_zero:
        log.warning(
            "heartbeat.hang_after is %s, and the strategy gives up after run.timeout, %s: that will be first.",
            heartbeat.hang_after,
            run.timeout,
        )


def check_optimizers(trainer: Trainer, bad_steps: BadSteps | None) -> None:
    """When the optimizers are there. Local.

    Raises:
        ConfigError: one of them makes several steps in one, of which none alone can be left out.
    """
    if bad_steps is not None and any(isinstance(each, LBFGS) for each in trainer.optimizers):
        raise ConfigError("LBFGS makes several steps in one", where="Guard.bad_steps", do="leave it out")


def gradient_norm(trainer: Trainer, optimizer: Optimizer) -> float:
    """Of the whole gradient, as clipping takes it. Collective under ZeRO: one number."""
    if isinstance(trainer.strategy, MeshStrategy):
        return trainer.strategy.gradient_norm(optimizer)
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
