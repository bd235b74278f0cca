# SPDX-License-Identifier: Apache-2.0
"""A run of few numbers that goes wrong where it is told to, and the same run in plain torch."""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 2
"""Samples per rank and step."""


class Net(LightningModule):
    """Learns noise; at batch `at` rank `bad` multiplies its loss by `by`.

    Its buffer adds up what the forward has seen, so that a spoiled forward shows; its schedule moves at each step.
    """

    def __init__(self, *, bad: int = -1, at: int = -1, by: float = math.nan, adam: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 1)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
        self.bad, self.at, self.by, self.adam = bad, at, by, adam

    def loss(self, batch: list[Tensor], *, spoiled: bool) -> Tensor:
        inputs, targets = batch
        factor = self.by if spoiled else 1.0
        self.seen += inputs.detach().mean() * factor
        return (self.second(torch.tanh(self.first(inputs))) - targets).square().mean() * factor

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch, spoiled=batch_idx == self.at and self.global_rank == self.bad)

    def configure_optimizers(self) -> Any:
        if self.adam:
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def rows(num_ranks: int, steps: int) -> TensorDataset:
    """The data of a run."""
    generator = torch.Generator().manual_seed(2)
    shape = (num_ranks * BATCH * steps, 7)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    return TensorDataset(numbers[:, :6], numbers[:, 6:])


def fit(
    strategy: Any, module: Net, *callbacks: Callback, steps: int, folder: Path | None = None, **options: Any
) -> Any:
    """Fits on the ranks of this gang; the Trainer."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    num_ranks = int(os.environ["WORLD_SIZE"])
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    saves = any(hasattr(callback, "best_model_path") for callback in callbacks)
    path = options.pop("ckpt_path", None)
    trainer = Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=strategy,
        max_epochs=1,
        precision="64-true",
        num_sanity_val_steps=0,
        enable_checkpointing=saves,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **{**quiet, "max_steps": steps, **options},
    )
    data = rows(num_ranks, steps)
    sampler: Any = DistributedSampler(data, num_ranks, int(os.environ["RANK"]), shuffle=False)  # nobody replaces it
    trainer.fit(module, DataLoader(data, batch_size=BATCH, sampler=sampler), ckpt_path=path)
    return trainer


class Final(Callback):
    """Keeps the module's whole state at the end of the fit; every rank asks for it."""

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        state = trainer.strategy.lightning_module_state_dict()
        self.state = {name: value.detach().clone() for name, value in state.items()}


def reference(
    num_ranks: int, steps: int, *, bad: int, back_to: int | None = None
) -> tuple[dict[str, Tensor], list[float]]:
    """Plain torch: the step of batch `bad` is not made; with `back_to` the weights go back to those after that step."""
    module = Net()
    (optimizer,), (schedule,) = module.configure_optimizers()
    kept: dict[int, Any] = {}
    rates = []
    inputs, targets = rows(num_ranks, steps).tensors
    for step in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        kept[step] = copy.deepcopy((module.state_dict(), optimizer.state_dict()["state"]))
        parts = []
        for rank in range(num_ranks):  # as a DistributedSampler deals
            chosen = [number * num_ranks + rank for number in range(step * BATCH, (step + 1) * BATCH)]
            parts.append([inputs[chosen], targets[chosen]])
        if step != bad:
            optimizer.zero_grad()
            before = module.seen.clone()
            sum(module.loss(part, spoiled=False) for part in parts).div(num_ranks).backward()
            module.seen.copy_(before + parts[0][0].mean())  # rank 0's
            optimizer.step()
        elif back_to is not None:
            state, moments = kept[back_to]
            module.load_state_dict(state)
            optimizer.load_state_dict({**optimizer.state_dict(), "state": copy.deepcopy(moments)})
        schedule["scheduler"].step()
    return module.state_dict(), rates


def assert_close(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(
            state[name], value, rtol=1e-10, atol=1e-10, msg=lambda text, n=name: f"{what} {n}: {text}"
        )
