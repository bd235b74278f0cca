# SPDX-License-Identifier: Apache-2.0
"""What scenarios are made of: a model that acts on one rank, a trainer, a fit that fails, a look at what is left."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from stratagem.errors import RankError
from stratagem.plugins.ring_ddp import RingDDPStrategy
from stratagem.strategy import RunSettings

MARK = "STRATAGEM_TEST_MARK"
"""Environment variable that every process of this run has from its very start, which is what `/proc` shows."""


class Model(BoringModel):
    """Does `act` on rank 1 in its second training step."""

    def __init__(self, act: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.act = act
        self.seen: list[int] = []
        self._began = 0.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._began = self._began or time.monotonic()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.global_rank == 1:
            self.act()
        self.seen.append(batch_idx)
        self.log("step", float(batch_idx))
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return batch[:, :1] + self.global_rank


class History(Callback):
    """What users write: a callback that collects."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.trainer: Trainer | None = None
        self.errors: list[str] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.trainer = trainer

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.steps.append(trainer.global_step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if os.environ.get("LOCAL_RANK"):
            print(f"on_exception {os.environ['LOCAL_RANK']} {type(exception).__name__}", file=sys.stderr, flush=True)


def trainer(timeout: float = 60.0, *, launcher: Any = "auto", devices: int = 2, **kwargs: Any) -> Trainer:
    run = RunSettings(timeout=timedelta(seconds=timeout), launcher=launcher)
    defaults: dict[str, Any] = {
        "max_epochs": 1,
        "limit_train_batches": 4,
        "limit_val_batches": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(accelerator="cpu", devices=devices, strategy=RingDDPStrategy(run=run), **{**defaults, **kwargs})


def processes() -> list[int]:
    """The ids of all living processes of this run but this one."""
    mark, found = f"{MARK}={os.environ[MARK]}".encode(), []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):  # empty for a zombie
                    found.append(int(entry))
    return found


def fail(act: Callable[[], Any], timeout: float = 60.0, model: BoringModel | None = None, **kwargs: Any) -> Any:
    """Fit until it fails: the error, the seconds it took, and what was left behind."""
    before = set(os.listdir("/proc/self/fd"))
    began = time.monotonic()
    result: dict[str, Any] = {"error": None}
    try:
        trainer(timeout, **kwargs).fit(model or Model(act))
    except BaseException as error:
        result = {"error": type(error).__name__, "text": str(error)}
        if isinstance(error, RankError):
            result |= {"rank": error.rank, "summary": error.summary, "cause": type(error.cause).__name__}
    result["seconds"] = time.monotonic() - began
    result["processes"] = processes()
    result["descriptors"] = len(set(os.listdir("/proc/self/fd")) - before)
    return result
