# SPDX-License-Identifier: Apache-2.0
"""Optimizers and learning-rate schedules as typed settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from stratagem.errors import ConfigError


@dataclass(frozen=True)  # not @final: jsonargparse takes no default value of a final class
class OptimizerSettings:
    """What `CausalLM` and `ImageClassifier` train with.

    Args:
        name: "adamw"; "sgd", which shows errors of the gradient's scale that AdamW hides.
        lr: highest learning rate.
        weight_decay: on parameters of two and more dims; norms and biases have none.
        betas: of AdamW.
        momentum: of SGD.
        warmup_steps: optimizer steps over which the rate rises linearly to `lr`.
        schedule: "constant", or "cosine" down to `min_lr_ratio` of `lr` at the last optimizer step of the run.
        min_lr_ratio: where the cosine ends, as a share of `lr`.
    """

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 3e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    momentum: float = 0.0
    warmup_steps: int = 0
    schedule: Literal["constant", "cosine"] = "constant"
    min_lr_ratio: float = 0.1

    def __post_init__(self) -> None:
        if self.name not in ("adamw", "sgd"):
            raise ConfigError(f"{self.name!r} is no optimizer", where="optimizer.name", allowed="adamw, sgd")
        if self.schedule not in ("constant", "cosine"):
            raise ConfigError(f"{self.schedule!r}", where="optimizer.schedule", allowed="constant, cosine")
        if self.lr < 0 or self.weight_decay < 0 or self.warmup_steps < 0:
            raise ConfigError("a negative number", where="optimizer", allowed="lr, weight_decay, warmup_steps from 0")
        if not 0.0 <= self.min_lr_ratio <= 1.0:
            raise ConfigError(f"{self.min_lr_ratio}", where="optimizer.min_lr_ratio", allowed="from 0.0 to 1.0")

    @property
    def is_scheduled(self) -> bool:
        """Whether the rate changes at all."""
        return self.warmup_steps > 0 or self.schedule != "constant"

    def build(self, module: nn.Module) -> Optimizer:
        """The optimizer of a module's trainable parameters: a group with weight decay and one without.

        Raises:
            ConfigError: there are none.
        """
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if not groups:
            raise ConfigError("the model has no parameter that is trained", where="model", do="unfreeze some of it")
        if self.name == "sgd":
            return SGD(groups, lr=self.lr, momentum=self.momentum)
        return AdamW(groups, lr=self.lr, betas=self.betas)

    def lr_factor(self, num_steps: Callable[[], float]) -> Callable[[int], float]:
        """The factor on `lr` as a function of the optimizer step, for `LambdaLR`.

        Args:
            num_steps: gives the optimizer steps of the whole run. First called after step 0: Lightning, asked for it
                before a run is set up, would build the training loader too early to restore its position.

        >>> factor = OptimizerSettings(warmup_steps=2, schedule="cosine", min_lr_ratio=0.0).lr_factor(lambda: 6)
        >>> [round(factor(step), 3) for step in range(7)]
        [0.333, 0.667, 1.0, 0.854, 0.5, 0.146, 0.0]
        """

        def factor(step: int) -> float:
            if step < self.warmup_steps:
                return (step + 1) / (self.warmup_steps + 1)
            if step == 0 or self.schedule == "constant":
                return 1.0
            span = max(num_steps() - self.warmup_steps, 1)
            progress = min((step - self.warmup_steps) / span, 1.0)
            return self.min_lr_ratio + (1 - self.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

        return factor
