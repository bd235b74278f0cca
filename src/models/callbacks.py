# SPDX-License-Identifier: Apache-2.0
"""What a run shows of itself: a bar with loss and tokens per second while it trains, a sample of text at its end."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor
from typing_extensions import override

from stratagem.data import ByteTokenizer, Tokenizer
from stratagem.errors import ConfigError
from stratagem.models.causal_lm import MAX_LENGTHS
from stratagem.models.replicas import data_replicas
from stratagem.models.sampling import generate


@final
class ProgressBar(TQDMProgressBar):
    """Lightning's bar in few words: on 80 columns losses and tokens per second are seen, and what is left is the bar.

    Args:
        refresh_rate: redraw after so many batches; 0 for no bar.
    """

    BAR_FORMAT = "{desc}{n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}] {bar}"

    def __init__(self, refresh_rate: int = 10) -> None:
        super().__init__(refresh_rate=refresh_rate)

    @override
    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """What is shown beside the bar: of numbers above 1000 the whole part, and no number of the log's version."""
        shown: dict[str, Any] = super().get_metrics(trainer, pl_module)
        shown.pop("v_num", None)
        return {
            name: f"{value:.0f}" if isinstance(value, int | float) and 1000 <= abs(value) < 1e9 else value
            for name, value in shown.items()
        }


@final
class TokensPerSecond(pl.Callback):
    """Logs `tokens_per_second` over all ranks, the mean of the last steps; the progress bar shows it as `tok/s`.

    Counted are the inputs in a batch, times the data ranks: ranks that read the same samples count once. Nothing is
    communicated.

    Args:
        window: how many batches the mean is taken over.
    """

    def __init__(self, window: int = 20) -> None:
        if window < 1:
            raise ConfigError(f"window is {window}", where="TokensPerSecond.window", allowed="1 or more")
        self._ends: deque[tuple[float, int]] = deque(maxlen=window + 1)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begins anew: what lies between two epochs is no training."""
        self._ends.clear()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begins anew: validation is no training."""
        self._ends.clear()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts a batch; the first after a pause only starts the clock."""
        num_tokens = batch["input_ids"].numel() * data_replicas(trainer)[0]
        self._ends.append((time.perf_counter(), num_tokens))
        elapsed = self._ends[-1][0] - self._ends[0][0]
        if elapsed > 0:
            tokens = sum(count for _, count in list(self._ends)[1:])
            pl_module.log("tokens_per_second", tokens / elapsed)
            pl_module.log("tok/s", tokens / elapsed, prog_bar=True, logger=False)


@final
class SampleText(pl.Callback):
    """Prints text that the trained model writes, once, when a fit ends.

    All ranks run the model, since under some strategies its forward is collective; rank 0 prints.

    Args:
        prompt: what the text begins with.
        num_tokens: how many tokens to write.
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: sample among the k likeliest only; None for all.
        seed: of the draws, so that all ranks write the same.
    """

    def __init__(
        self,
        prompt: str = "def ",
        num_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = 40,
        seed: int = 0,
    ) -> None:
        if not prompt:
            raise ConfigError("the prompt is empty", where="SampleText.prompt", allowed="one character or more")
        self.prompt, self.num_tokens = prompt, num_tokens
        self.temperature, self.top_k, self.seed = temperature, top_k, seed

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes and prints the sample."""
        datamodule = getattr(trainer, "datamodule", None)
        tokenizer: Tokenizer = getattr(datamodule, "tokenizer", None) or ByteTokenizer()
        text = self.sample(pl_module, tokenizer)
        if trainer.is_global_zero:
            print(f"\nSample:\n{text}", flush=True)

    def sample(self, pl_module: pl.LightningModule, tokenizer: Tokenizer) -> str:
        """The prompt and what the module writes after it."""
        prompt = torch.tensor([list(tokenizer.encode(self.prompt))], dtype=torch.int64, device=pl_module.device)
        tokens: Tensor = generate(
            pl_module,
            prompt,
            self.num_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            generator=torch.Generator(device="cpu").manual_seed(self.seed),
            max_context=_max_context(pl_module),
        )
        return tokenizer.decode(tokens[0].tolist())


def _max_context(pl_module: pl.LightningModule) -> int | None:
    """The longest sequence that the model takes, where its config tells; Transformers has other words for it."""
    config = getattr(getattr(pl_module, "model", None), "config", None)
    for name in MAX_LENGTHS:
        length = getattr(config, name, None)
        if isinstance(length, int):
            return length
    return None
