# SPDX-License-Identifier: Apache-2.0
"""The modules that the contract trains: ordinary LightningModules that know nothing of ranks, each with one difficulty.

    Router              a branch that only some samples take, one that alternates, frozen, tied and unused parameters
    Adversaries         two optimizers, stepped by hand in turns
    Normalised          batch normalisation, so that buffers have a history
    GroupedOptimizer    several parameter groups with an own rate each, a schedule on top

All train with SGD, momentum and weight decay: AdamW would hide a wrong scale of the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override


def sgd(module: nn.Module, lr: float = 0.1) -> SGD:
    """SGD with momentum and weight decay over everything that is trained."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return SGD(trained, lr=lr, momentum=0.9, weight_decay=0.05)


class Router(LightningModule):
    """Samples `[B, 8]` go through branch `left` or `right` by the sign of their first feature.

    So ranks may take different branches in the same step, and one branch may rest on all of them. Branch `odd`
    alternates by step, `frozen` requires no gradient, `unused` is never called, `out` and `tied` share one weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 6, bias=False)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.left, self.right = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.odd = nn.Linear(6, 6)
        self.unused = nn.Linear(3, 3)
        self.back = nn.Linear(6, 8)
        self.out = nn.Linear(6, 8, bias=False)
        self.tied = nn.Embedding(8, 6)
        self.out.weight = self.tied.weight

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Mean squared error of a reconstruction: a mean over samples."""
        hidden = torch.tanh(self.frozen(self.embed(batch)))
        goes_left = batch[:, 0] > 0
        mixed = hidden.new_zeros(hidden.shape)
        if bool(goes_left.any()):
            mixed = mixed.index_put((goes_left,), self.left(hidden[goes_left]))
        if not bool(goes_left.all()):
            mixed = mixed.index_put((~goes_left,), self.right(hidden[~goes_left]))
        if batch_idx % 2:
            mixed = mixed + self.odd(hidden)
        picked = self.tied((batch[:, 1] > 0).long())
        return F.mse_loss(self.out(torch.tanh(mixed + picked)), batch) + F.mse_loss(self.back(hidden), batch)

    @override
    def configure_optimizers(self) -> Optimizer:
        return sgd(self)


class Adversaries(LightningModule):
    """A generator and a discriminator, each with its own optimizer and schedule, stepped by hand.

    Batches `[B, 2, 8]` hold a real sample and the noise for a false one, so that nothing is drawn per rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 1))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Both losses, added up for the record."""
        real, noise = batch.unbind(1)
        losses = []
        for player, (optimizer, schedule) in enumerate(zip(self._optimizers(), self._schedules(), strict=True)):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            if player == 0:
                loss = F.softplus(-self.discriminator(self.generator(noise))).mean()
            else:
                false = self.generator(noise).detach()
                loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(false)).mean()
            self.manual_backward(loss)
            if player == 0:  # the other is left alone: clipping would hide a wrong scale of the gradient
                self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
            schedule.step()
            self.untoggle_optimizer(optimizer)
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    @override
    def configure_optimizers(self) -> Any:
        players = [sgd(self.generator), sgd(self.discriminator, lr=0.05)]
        return players, [LambdaLR(player, _halved) for player in players]

    def _optimizers(self) -> list[Any]:
        found = self.optimizers()
        assert isinstance(found, list)
        return found

    def _schedules(self) -> list[Any]:
        found = self.lr_schedulers()
        assert isinstance(found, list)
        return found


class Normalised(LightningModule):
    """A classifier of `(features [B, 8], labels [B])` with batch normalisation in one and in three dims.

    Args:
        momentum: of the running statistics; None for their plain mean over all steps.
    """

    def __init__(self, momentum: float | None = 0.3) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(8, 12),
            nn.BatchNorm1d(12, momentum=momentum),
            nn.Tanh(),
            nn.Unflatten(1, (3, 4)),
            nn.Conv1d(3, 4, 2),
            nn.BatchNorm1d(4, momentum=momentum),
            nn.Flatten(),
            nn.Linear(12, 3),
        )

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross entropy."""
        features, labels = batch
        return F.cross_entropy(self.model(features), labels)

    @override
    def configure_optimizers(self) -> Optimizer:
        return sgd(self)


class GroupedOptimizer(LightningModule):
    """Three parameter groups with an own rate, momentum and weight decay each, and a schedule per optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        """Mean squared error, handed over in a dictionary."""
        return {"loss": F.mse_loss(self.model(batch), batch.flip(1))}

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        weights = [p for p in self.model.parameters() if p.ndim == 2]
        biases = [p for p in self.model.parameters() if p.ndim == 1]
        optimizer = SGD(
            [
                {"params": weights[:1], "lr": 0.3, "weight_decay": 0.1},
                {"params": weights[1:], "lr": 0.1, "momentum": 0.5},
                {"params": biases, "weight_decay": 0.0},
            ],
            lr=0.2,
            momentum=0.9,
            weight_decay=0.05,
        )
        schedule = LambdaLR(optimizer, _halved)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _halved(step: int) -> float:
    return 0.5**step
