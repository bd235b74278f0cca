# SPDX-License-Identifier: Apache-2.0
"""The bodies of `promises.py`: what a user does with a Trainer, and what came of it, one function per promise.

Each runs on every rank; with `subject=None` it runs in one process. Each seeds, builds its own module, and returns
plain numbers, strings and small tensors.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass, field
from typing import Any, final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from typing_extensions import override

from stratagem.testing.contract.modules import sgd
from stratagem.testing.contract.narrator import Narrator, numbered_rows
from stratagem.testing.contract.runs import Record, Recorder, Run, gradient_norm, make_loader, make_trainer
from stratagem.testing.contract.subject import Subject

GLOBAL_BATCH = 12

STOPS_AFTER = 4
"""Epochs after which the run of `stop` ends."""


@final
@dataclass
class Story:
    """What `tell` heard: metrics by stage, and (sample, loss) for each prediction of this rank."""

    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    predictions: list[tuple[int, float]] = field(default_factory=list)


def tell(subject: Subject | None, even: bool) -> Story:
    """fit with validation, fit on, validate, test, predict with one trainer, then fit anew with another one.

    Not validate and then fit on: a torchmetrics object that was in inference mode refuses that, in one process too.
    """
    seed_everything(1, verbose=False)
    module, story = Narrator(), Story()
    training = make_loader(subject, numbered_rows(24 if even else 29), GLOBAL_BATCH)
    held_out = make_loader(subject, numbered_rows(36 if even else 31), GLOBAL_BATCH)
    trainer = make_trainer(subject, Run())
    trainer.fit(module, training, held_out)
    story.metrics["fit"] = _numbers(trainer)
    assert trainer.fit_loop.max_epochs is not None
    trainer.fit_loop.max_epochs += 1
    trainer.fit(module, training, held_out)
    story.metrics["fit on"] = _numbers(trainer)
    trainer.validate(module, held_out, verbose=False)
    story.metrics["validate"] = _numbers(trainer)
    trainer.test(module, held_out, verbose=False)
    story.metrics["test"] = _numbers(trainer)
    for numbers, losses in trainer.predict(module, held_out) or []:
        story.predictions += zip(numbers.tolist(), losses.tolist(), strict=True)
    seed_everything(2, verbose=False)
    another = make_trainer(subject, Run(accumulate=2))
    another.fit(Narrator(), training, held_out)
    story.metrics["fit anew"] = _numbers(another)
    return story


def _numbers(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


class _Talker(Narrator):
    """Speaks with the other ranks at the start of training, by what a strategy offers to a module."""

    def __init__(self) -> None:
        super().__init__()
        self.said: dict[str, Any] = {}

    @override
    def on_train_start(self) -> None:
        strategy, rank, size = self.trainer.strategy, self.global_rank, self.trainer.world_size
        mine = torch.tensor(float(rank))
        gathered: Any = self.all_gather({"numbers": torch.tensor([rank, 10 * rank]), "tree": {"a": mine}})
        self.said = {
            "sum": float(strategy.reduce(mine + 1, reduce_op="sum")),
            "mean": float(strategy.reduce(mine + 1, reduce_op="mean")),
            "broadcast": strategy.broadcast({"from": rank}, src=size - 1),
            "all": strategy.reduce_boolean_decision(rank == 0, all=True),
            "any": strategy.reduce_boolean_decision(rank == 0, all=False),
            # Of one rank, Lightning's own strategies gather without a leading dim.
            "gathered": gathered["numbers"].reshape(size, 2).tolist(),
            "tree": {"a": gathered["tree"]["a"].reshape(size).tolist()},
        }
        strategy.barrier("talked")


def talk(subject: Subject) -> dict[str, Any]:
    """What the strategy's own means of talking give."""
    seed_everything(1, verbose=False)
    module = _Talker()
    trainer = make_trainer(subject, Run(), max_epochs=1)
    trainer.fit(module, make_loader(subject, numbered_rows(GLOBAL_BATCH), GLOBAL_BATCH))
    return module.said


@final
@dataclass(frozen=True)
class Kept:
    """What one rank knows of the checkpoints, and what it wrote on the terminal."""

    rank: int
    best: str
    best_k: dict[str, float]
    last: str
    score: float
    state: dict[str, Tensor] = field(compare=False)
    output: str = ""


def keep(subject: Subject, folder: str) -> Kept:
    """Trains with a checkpoint per epoch, of which the best two are kept, a progress bar and a log file."""
    seed_everything(1, verbose=False)
    module, recorder = Narrator(), Recorder()
    best = ModelCheckpoint(folder, monitor="val_loss", mode="min", save_top_k=2, save_last=True)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        trainer = make_trainer(
            subject,
            Run(),
            best,
            TQDMProgressBar(),
            recorder,
            max_epochs=4,
            enable_checkpointing=True,
            enable_progress_bar=True,
            logger=CSVLogger(folder),
        )
        training = make_loader(subject, numbered_rows(24), GLOBAL_BATCH)
        trainer.fit(module, training, make_loader(subject, numbered_rows(36), GLOBAL_BATCH))
    scores = {path: float(score) for path, score in best.best_k_models.items()}
    score = float(best.best_model_score) if best.best_model_score is not None else float("nan")
    record = recorder.record
    path = best.last_model_path
    return Kept(trainer.global_rank, best.best_model_path, scores, path, score, record.state, output.getvalue())


class _Wavering(Narrator):
    """Only the last rank finds that things get worse."""

    @override
    def on_validation_epoch_end(self) -> None:
        worse = self.global_rank == self.trainer.world_size - 1 and self.current_epoch >= STOPS_AFTER - 2
        self.log("progress", torch.tensor(float(-self.current_epoch if worse else self.current_epoch)))
        self.log("stuck", torch.tensor(1.0), sync_dist=True)

    @override
    def configure_optimizers(self) -> Any:
        optimizer = sgd(self)
        plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "stuck"}}


def stop(subject: Subject) -> dict[str, Any]:
    """Trains until one rank alone is out of patience; returns where this rank ended."""
    seed_everything(1, verbose=False)
    module, recorder = _Wavering(), Recorder()
    stopping = EarlyStopping("progress", mode="max", patience=2)
    trainer = make_trainer(subject, Run(), stopping, recorder, max_epochs=10)
    training = make_loader(subject, numbered_rows(24), GLOBAL_BATCH)
    trainer.fit(module, training, make_loader(subject, numbered_rows(24), GLOBAL_BATCH))
    rates = [rate for (rate,) in recorder.record.rates]
    return {"step": trainer.global_step, "epoch": trainer.current_epoch, "rates": rates}


class _Watcher(Callback):
    """Measures gradients where callbacks may look at them."""

    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = {"on_after_backward": [], "on_before_optimizer_step": []}

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        (optimizer,) = trainer.optimizers
        self.seen["on_after_backward"].append(gradient_norm(trainer, pl_module, optimizer))

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.seen["on_before_optimizer_step"].append(gradient_norm(trainer, pl_module, optimizer))


def watch(subject: Subject | None) -> dict[str, list[float]]:
    """Gradient norms of a few steps, by hook."""
    seed_everything(1, verbose=False)
    watcher = _Watcher()
    trainer = make_trainer(subject, Run(), watcher)
    trainer.fit(Narrator(), make_loader(subject, numbered_rows(36), GLOBAL_BATCH))
    return watcher.seen


def skip(subject: Subject | None) -> Record:
    """In batch 1 the last half of the samples counts for nothing, in batch 3 all of them."""
    seed_everything(1, verbose=False)
    recorder = Recorder()
    second, fourth = tuple(range(GLOBAL_BATCH + 6, 2 * GLOBAL_BATCH)), tuple(range(3 * GLOBAL_BATCH, 4 * GLOBAL_BATCH))
    trainer = make_trainer(subject, Run(), recorder)
    loader = make_loader(subject, numbered_rows(5 * GLOBAL_BATCH), GLOBAL_BATCH)
    trainer.fit(Narrator(skipped={1: second, 3: fourth}), loader)
    return recorder.record
