# SPDX-License-Identifier: Apache-2.0
"""The module that uses what Lightning promises: logs of every kind, metrics, all stages, hooks, gathering.

Batches are pairs of sample numbers `[B]` and features `[B, 8]`, so that one can tell which samples went where.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset
from torchmetrics import MeanSquaredError
from typing_extensions import override

from stratagem.testing.contract.modules import sgd

Batch = tuple[Tensor, Tensor]


def numbered_rows(num_samples: int) -> Dataset[tuple[Tensor, ...]]:
    """Pairs of a sample's number and its features."""
    rows = torch.randn(num_samples, 8, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    rows *= torch.linspace(0.5, 2.0, num_samples, dtype=torch.float64)[:, None]
    return TensorDataset(torch.arange(num_samples), rows.to(torch.get_default_dtype()))


class Narrator(LightningModule):
    """A small regression that tells everything about itself.

    Args:
        skipped: by batch, samples whose loss does not count; where none of a batch counts the step returns None.
    """

    def __init__(self, skipped: dict[int, tuple[int, ...]] | None = None) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.skipped = skipped or {}
        self.metric = MeanSquaredError()

    def losses(self, batch: Batch) -> Tensor:
        """One loss per sample `[B]`."""
        _, rows = batch
        return F.mse_loss(self.model(rows), rows.roll(1, 1), reduction="none").mean(1)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        """The mean loss of the samples that count, over all samples; None where none counts."""
        numbers, losses = batch[0], self.losses(batch)
        if batch_idx in self.skipped:
            counts = torch.tensor([int(number) not in self.skipped[batch_idx] for number in numbers])
            return (losses * counts).mean() if bool(counts.any()) else None
        loss = losses.mean()
        size = len(numbers)
        self.log("synced", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=size)
        self.log("local", loss, on_step=True, on_epoch=True, batch_size=size)
        self.log("highest", numbers.max().to(loss.dtype), on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)
        self.log("sum", numbers.sum().to(loss.dtype), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs the loss, and a torchmetrics object."""
        self._evaluate(batch, "val")

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """As validation."""
        self._evaluate(batch, "test")

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> Batch:
        """The samples' numbers, and their losses."""
        return batch[0], self.losses(batch)

    @override
    def configure_optimizers(self) -> Optimizer:
        return sgd(self)

    def _evaluate(self, batch: Batch, stage: str) -> None:
        losses = self.losses(batch)
        self.metric.update(self.model(batch[1]), batch[1].roll(1, 1))
        self.log(f"{stage}_loss", losses.mean(), sync_dist=True, batch_size=len(losses))
        self.log(f"{stage}_metric", self.metric, on_step=False, on_epoch=True)
