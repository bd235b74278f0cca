# SPDX-License-Identifier: Apache-2.0
"""What is compared in these tests: a small regression, and candidates that are right, wrong, or do not live long."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem.comparison.contender import Built, Candidate, Change

RANKS, PER_RANK, ACCUMULATE = 2, 4, 2


class Regression(LightningModule):
    """Two layers; `act` is called before the training step of `step` on rank 1.

    Args:
        act: what goes wrong.
        step: the number of the batch.
        dropout: probability.
        batch_norm: whether a layer normalises over the batch.
    """

    def __init__(
        self, act: Callable[[], Any] = lambda: None, step: int = -1, dropout: float = 0.0, batch_norm: bool = False
    ) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(16) if batch_norm else nn.Identity()
        self.net = nn.Sequential(nn.Linear(8, 16), norm, nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))
        self.act, self.step, self.seen = act, step, 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.seen == self.step and self.global_rank == 1:
            self.act()
        self.seen += 1
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)


class Pair(Regression):
    """Two parts that step by themselves, each with its optimizer and its schedule; it speaks to its logger."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 3)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizers: Any = self.optimizers()
        schedules: Any = self.lr_schedulers()
        logger: Any = self.logger
        losses = []
        for part, optimizer, schedule in zip((self.net, self.other), optimizers, schedules, strict=True):
            self.toggle_optimizer(optimizer)
            losses.append(nn.functional.mse_loss(part(batch[0]), batch[1]))
            optimizer.zero_grad()
            self.manual_backward(losses[-1])
            optimizer.step()
            schedule.step()
            self.untoggle_optimizer(optimizer)
        logger.experiment.add_scalar("loss", losses[0], self.global_step)
        return losses[0].detach()

    def configure_optimizers(self) -> Any:
        found = [torch.optim.AdamW(part.parameters(), lr=0.2) for part in (self.net, self.other)]
        return found, [torch.optim.lr_scheduler.LambdaLR(each, lambda step: step / 100) for each in found]


def candidate(
    name: str,
    strategy: str | Callable[[], Strategy] | None = None,
    per_rank: int = PER_RANK,
    data: int = 5,
    **module: Any,
) -> Candidate:
    """A candidate of that name; `strategy` where it is not registered, `data` seeds it, `module` for `Regression`."""
    return Candidate(name, functools.partial(_build, strategy or name, per_rank, data, module), f"about {name}")


def pair(name: str) -> Candidate:
    """A candidate that trains a `Pair`."""

    def build(change: Change) -> Built:
        seed_everything(3, verbose=False)
        trainer = Trainer(**change({"accelerator": "cpu", "devices": RANKS, "strategy": name}))
        return Built(trainer, Pair(), {"train_dataloaders": DataLoader(dataset(), PER_RANK)})

    return Candidate(name, build)


def dataset(seed: int = 5) -> TensorDataset:
    """Features and targets of 100 samples."""
    rows = torch.randn(100, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return TensorDataset(rows, rows[:, :3] * torch.linspace(0.5, 4.0, 100, dtype=torch.float64)[:, None])


def _build(
    strategy: str | Callable[[], Strategy], per_rank: int, data: int, module: dict[str, Any], change: Change
) -> Built:
    seed_everything(3, verbose=False)
    arguments = {
        "accelerator": "cpu",
        "devices": RANKS,
        "strategy": strategy if isinstance(strategy, str) else strategy(),
        "precision": "64-true",
        "accumulate_grad_batches": ACCUMULATE,
        "gradient_clip_val": 0.3,
    }
    trainer = Trainer(**change(arguments))
    loader = DataLoader(dataset(data), per_rank, shuffle=True)
    return Built(trainer, Regression(**module), {"train_dataloaders": loader})


def fail() -> None:
    """A bug in somebody's code."""
    raise ValueError("the third batch is cursed")


def die() -> None:
    """As the system kills a process that is out of memory."""
    os.kill(os.getpid(), signal.SIGKILL)
