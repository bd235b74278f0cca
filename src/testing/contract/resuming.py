# SPDX-License-Identifier: Apache-2.0
"""What a run needs to be stopped in the middle and taken up again, and what the contract writes down of it.

    epoch 0          epoch 1                  epoch 2
    x x x x x        x x x | x | x |          x x | x x x    5 batches each, 2 per optimizer step
                           |   |   epoch          late       after the last batch of an epoch, and in the next one
                           |   step                          a window is over, the epoch is not
                           window                            the gradients of one batch wait for those of the next

Who takes it up builds the module from other random numbers, so that whatever is not restored shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from stratagem.data.loader import OrderedLoader
from stratagem.data.sampler import ordered_batch_sampler
from stratagem.strategy.checkpoint_io import FaultTolerantCheckpointIO
from stratagem.testing.contract.runs import Run, dist_size, is_ours, make_trainer
from stratagem.testing.contract.subject import Subject
from stratagem.testing.replicas import _digests

GLOBAL_BATCH, BATCHES, EPOCHS = 12, 5, 3
Moment = Literal["window", "step", "epoch", "late"]
MOMENTS: Mapping[Moment, int] = {
    "window": BATCHES + 3,
    "step": BATCHES + 4,
    "epoch": 2 * BATCHES,
    "late": 2 * BATCHES + 2,
}
"""Batches that were trained when each of the checkpoints is taken."""


@final
@dataclass(frozen=True, kw_only=True)
class Leg:
    """One `fit`, from the start or from a checkpoint to the end.

    Args:
        subject: the strategy; None for Lightning's single device.
        quiet: without dropout and without statistics of batches, so that any number of ranks computes the same.
        save_to: where the checkpoints of `MOMENTS` go, by the moment's name; empty for none.
        resume_from: a checkpoint; empty to begin.
        async_save: as `FaultTolerantCheckpointIO`'s.
    """

    subject: Subject | None
    quiet: bool = False
    save_to: str = ""
    resume_from: str = ""
    async_save: bool = False


@final
@dataclass
class Trace:
    """What one rank saw of a leg.

    Attributes:
        losses: by the number of the batch, counted over all epochs: this rank's mean loss.
        rates: the same, the learning rates after the batch.
        rows: the same, the samples that this rank read.
        digests: hashes of what this rank holds at the end.
        state: on rank 0, the whole state of the module at the end.
    """

    losses: dict[int, float] = field(default_factory=dict)
    rates: dict[int, list[float]] = field(default_factory=dict)
    rows: dict[int, list[int]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)


class Everything(LightningModule):
    """Of all that can be forgotten, one: dropout, batch statistics, buffers, a tied and a frozen parameter, two groups
    of AdamW with a schedule on them.

    Args:
        quiet: see `Leg`.
    """

    def __init__(self, quiet: bool) -> None:
        super().__init__()
        self.quiet = quiet
        self.embed = nn.Embedding(16, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.wide = nn.Linear(8, 12, bias=False)
        self.norm = nn.BatchNorm1d(12)
        self.drop = nn.Dropout(0.0 if quiet else 0.3)
        self.narrow = nn.Linear(12, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.level: Tensor
        self.register_buffer("level", torch.zeros(3))
        self.train()

    @override
    def train(self, mode: bool = True) -> Everything:
        super().train(mode)
        self.norm.train(mode and not self.quiet)
        return self

    @override
    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross entropy of tokens `[B]`."""
        _, tokens, labels = batch
        self.level.mul_(0.9).add_(0.1)
        hidden = torch.tanh(self.frozen(self.embed(tokens)))
        hidden = self.drop(torch.tanh(self.norm(self.wide(hidden)))) * (1 + self.level.sum())
        return F.cross_entropy(self.head(hidden @ self.narrow.weight.t() + self.narrow.bias), labels)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trained if parameter.ndim == 2]
        others = [parameter for parameter in trained if parameter.ndim != 2]
        optimizer = AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.02}], lr=0.01)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, _falling), "interval": "step"},
        }


def _falling(step: int) -> float:
    return 0.8**step


class _Tokens(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Row number, token and label; a list of rows at once too."""

    def __init__(self) -> None:
        rows = torch.arange(GLOBAL_BATCH * BATCHES)
        self.rows, self.tokens, self.labels = rows, rows * 7 % 16, rows * rows % 16

    def __len__(self) -> int:
        return len(self.rows)

    @override
    def __getitem__(self, index: Any) -> tuple[Tensor, Tensor, Tensor]:
        return self.rows[index], self.tokens[index], self.labels[index]


@final
class _Scribe(Callback):
    """Writes down a leg, and takes its checkpoints."""

    def __init__(self, save_to: str) -> None:
        self.trace, self._save_to = Trace(), save_to

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        number = trainer.current_epoch * BATCHES + batch_idx
        self.trace.losses[number] = float(outputs["loss"])
        self.trace.rates[number] = [float(group["lr"]) for group in trainer.optimizers[0].param_groups]
        self.trace.rows[number] = batch[0].tolist()
        for moment, done in MOMENTS.items():
            if self._save_to and number + 1 == done:
                trainer.save_checkpoint(Path(self._save_to) / moment)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trace.digests = dict(_digests(pl_module, trainer.optimizers))
        state = trainer.strategy.lightning_module_state_dict()
        if trainer.global_rank == 0:
            self.trace.state = {name: value.detach().clone() for name, value in state.items()}


def travel(legs: Sequence[Leg]) -> list[Trace]:
    """The body of every rank: one leg after the other. Collective."""
    return [_travel(leg) for leg in legs]


def _travel(leg: Leg) -> Trace:
    scribe, loader = _Scribe(leg.save_to), _loader(leg.subject)
    seed_everything(1, verbose=False)
    torch.manual_seed(99 if leg.resume_from else 1)
    trainer = make_trainer(
        leg.subject,
        Run(accumulate=2),
        scribe,
        max_epochs=EPOCHS,
        plugins=[FaultTolerantCheckpointIO(async_save=leg.async_save)],
        use_distributed_sampler=leg.subject is not None and is_ours(leg.subject),
    )
    module = Everything(leg.quiet)
    if leg.subject is None or not is_ours(leg.subject):
        module.double()  # Lightning restores before it converts, and would round the weights to what it finds
    trainer.fit(module, loader, ckpt_path=leg.resume_from or None)
    return scribe.trace


def _loader(subject: Subject | None) -> DataLoader[Any]:
    """Shuffled. Ours put it in order themselves; for others it is put in the same order here."""
    plain = DataLoader(_Tokens(), batch_size=GLOBAL_BATCH, shuffle=True)
    if subject is not None and is_ours(subject):
        return plain
    size = 1 if subject is None else dist_size()
    rank = torch.distributed.get_rank() if size > 1 else 0
    sampler = ordered_batch_sampler(plain, mode="global", seed=1, num_replicas=size, rank=rank)
    return OrderedLoader(plain.dataset, sampler=sampler)
