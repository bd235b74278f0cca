# SPDX-License-Identifier: Apache-2.0
"""`CausalLM`: the LightningModule that trains any causal language model, under any strategy, and knows of none."""

from __future__ import annotations

from typing import final

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from stratagem.models.optim import OptimizerSettings
from stratagem.models.sampling import logits_of


@final
class CausalLM(pl.LightningModule):
    """Next-token prediction with a model of your choice.

    Batches are dictionaries with int64 `input_ids` and `labels`, both [B, T]; labels are already shifted, and -100
    marks a place without one. Logged: `train_loss` each step, `val_loss` and `perplexity` after a validation; all of
    them over all ranks, so that they do not depend on how many there are.

    Args:
        model: gives logits [B, T, V], or an object with such `.logits`, for `input_ids`. In a config: `class_path` and
            `init_args`, for instance of `stratagem.models.GPT`, or of `stratagem.models.transformers_lm`.
        optimizer: what to train with.

    >>> from stratagem.models.gpt import GPT, GPTConfig
    >>> module = CausalLM(GPT(GPTConfig(num_layers=1, hidden_size=16, num_heads=2)))
    >>> module(torch.zeros(1, 3, dtype=torch.int64)).shape
    torch.Size([1, 3, 256])
    """

    def __init__(self, model: nn.Module, optimizer: OptimizerSettings = OptimizerSettings()) -> None:  # noqa: B008  # frozen
        super().__init__()
        self.model = model
        self.optimizer_settings = optimizer

    @override
    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [B, T, V] of token numbers [B, T]."""
        return logits_of(self.model(input_ids))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Mean cross entropy over the labels of a batch, a scalar in float32 or wider."""
        logits = self(batch["input_ids"])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The loss of one batch."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(batch["input_ids"]))
        return loss

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The loss of one batch, logged as its share of `val_loss`."""
        return self._evaluate(batch, "val_loss")

    @override
    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The loss of one batch, logged as its share of `test_loss`."""
        return self._evaluate(batch, "test_loss")

    @override
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The likeliest next token at each place, int64 [B, T]."""
        prediction: Tensor = self(batch["input_ids"]).argmax(dim=-1)
        return prediction

    @override
    def on_validation_epoch_end(self) -> None:
        """Logs `perplexity`, e to the mean loss; the mean of the batches' own perplexities would be too high."""
        loss = self.trainer.callback_metrics.get("val_loss")
        if loss is not None:
            self.log("perplexity", loss.exp(), sync_dist=True)  # a mean of equal numbers; Lightning wants it said

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer of the settings and, if the rate changes, its schedule per optimizer step."""
        settings = self.optimizer_settings
        optimizer = settings.build(self)
        if not settings.is_scheduled:
            return optimizer
        schedule = LambdaLR(optimizer, settings.lr_factor(lambda: self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _evaluate(self, batch: dict[str, Tensor], name: str) -> Tensor:
        loss = self.loss(batch)
        self.log(name, loss, prog_bar=True, on_epoch=True, sync_dist=True, batch_size=len(batch["input_ids"]))
        return loss
