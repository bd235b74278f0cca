# SPDX-License-Identifier: Apache-2.0
"""`CausalLM`: the LightningModule that trains any causal language model, under any strategy, and knows of none."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, final

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from stratagem.errors import ConfigError, UserError
from stratagem.models.gpt import GPTConfig
from stratagem.models.optim import OptimizerSettings
from stratagem.models.sampling import logits_of

MAX_LENGTHS = ("max_seq_len", "max_position_embeddings", "n_positions")
"""What the longest sequence is called in the config of a model: of a GPT, and in Transformers."""


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

    @classmethod
    def preflight_data(cls, init_args: Mapping[str, Any], data: type, data_args: Mapping[str, Any]) -> list[UserError]:
        """Whether the sequences of the data are short enough for the model, where both tell before they are built."""
        seq_len = data_args.get("seq_len", _default(data, "seq_len"))
        written = init_args.get("model")
        model = written if isinstance(written, Mapping) else {}
        config = (model.get("init_args") or {}).get("config")
        settings = config if isinstance(config, Mapping) else {}
        if "max_seq_len" in settings or str(model.get("class_path", "")).rpartition(".")[2] == "GPT":
            settings = {"max_seq_len": GPTConfig().max_seq_len, **settings}
        for name in MAX_LENGTHS:
            longest = settings.get(name)
            if isinstance(longest, int) and isinstance(seq_len, int) and seq_len > longest:
                key = f"model.init_args.model.init_args.config.{name}"
                what = f"a sequence of {seq_len} tokens is longer than the model's {name}, {longest}"
                do = f"shorten the sequence, or set {key}: {seq_len}"
                return [ConfigError(what, where="data.seq_len", allowed=f"at most {longest}", do=do)]
        return []

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


def _default(cls: Any, name: str) -> Any:
    parameter = inspect.signature(cls).parameters.get(name)
    return parameter.default if parameter is not None else None
