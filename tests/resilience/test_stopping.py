# SPDX-License-Identifier: Apache-2.0
"""A run that is told to stop saves and ends on all ranks at the same batch, and goes on as if it had not stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from stratagem.checkpoint import commit
from stratagem.checkpoint.reading import Reader
from stratagem.errors import ConfigError
from stratagem.models import GPT, CausalLM, GPTConfig, TextData
from stratagem.models.optim import OptimizerSettings
from stratagem.resilience.stopping import STOPPED_BY_SIGNAL, GracefulStop, duration
from stratagem.strategy.checkpoint_io import FaultTolerantCheckpointIO
from stratagem.testing import Fault, Faults, run_ranks

BATCHES = 9  # batches of training, with windows of two: the last one is half a window


class Sent(Callback):
    """Sends a signal to one rank, or to the parent of the ranks, in the middle of a batch."""

    def __init__(self, batch: int, rank: int, signum: int, to_parent: bool = False) -> None:
        self.batch, self.rank, self.signum, self.to_parent = batch, rank, signum, to_parent

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if (batch_idx, trainer.global_rank) == (self.batch, self.rank):
            os.kill(os.getppid() if self.to_parent else os.getpid(), self.signum)


class InValidation(Callback):
    """Sends SIGTERM to rank 1 in the first batch of a validation, and counts those batches."""

    def __init__(self) -> None:
        self.validated = 0

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.validated += 1
        if (self.validated, trainer.global_rank) == (1, 1):
            os.kill(os.getpid(), signal.SIGTERM)


class Losses(Callback):
    """What this rank saw, by the number of the batch."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen[batch_idx] = float(outputs["loss"])


def fit(folder: str, strategy: str, *callbacks: Callback, ckpt_path: str | None = None, **options: Any) -> Any:
    """A run in the middle of an epoch: the exit code, what was seen, and the final weights."""
    seed_everything(1, verbose=False)
    losses = Losses()
    config = GPTConfig(num_layers=1, hidden_size=16, num_heads=2, max_seq_len=16)
    module = CausalLM(GPT(config), OptimizerSettings(name="sgd", lr=0.1, momentum=0.9))
    defaults = {"accelerator": "cpu", "devices": 2, "precision": "64-true", "logger": False, "max_epochs": 1}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = Trainer(
        strategy=strategy,
        default_root_dir=folder,
        callbacks=[losses, *callbacks],
        accumulate_grad_batches=2,
        limit_train_batches=BATCHES,
        **{"limit_val_batches": 0, **defaults, **quiet, **options},
    )
    code = 0
    try:
        trainer.fit(module, TextData(seq_len=16, global_batch=8, max_bytes=3000), ckpt_path=ckpt_path)
    except SystemExit as left:
        code = int(left.code or 0)
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    return code, losses.seen, weights


def stop_and_go_on(folder: str, strategy: str, batch: int) -> Any:
    """In a gang, as torchrun starts ranks: SIGTERM to rank 1 alone, then on to the end; and without a stop."""
    calm = fit(folder, strategy)
    kept = Path(folder) / "checkpoints"
    stopped = fit(folder, strategy, Sent(batch, 1, signal.SIGTERM), GracefulStop())
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    [path] = kept.glob("*.ckpt")
    went_on = fit(folder, strategy, GracefulStop(), ckpt_path=str(path))
    late = fit(folder, strategy, GracefulStop(max_duration="0.0001s"))
    [last] = kept.glob("*.ckpt")
    return calm, stopped, went_on, late, Reader(path if path.exists() else last).manifest.about["global_step"]


@pytest.mark.parametrize(("strategy", "batch"), [("ring_ddp", 4), ("zero_2", 3)])
def test_all_stop_at_the_same_batch_and_go_on_as_if_they_had_not(strategy: str, batch: int, tmp_path: Path) -> None:
    kwargs = {"folder": str(tmp_path), "strategy": strategy, "batch": batch}
    for calm, stopped, went_on, late, _ in run_ranks(2, stop_and_go_on, kwargs):
        assert (calm[0], stopped[0], went_on[0], late[0]) == (0, STOPPED_BY_SIGNAL, 0, 0)
        assert list(stopped[1]) == list(range(batch + 1))  # every rank, though one alone heard the signal
        assert list(late[1]) == [0]  # the time is over after the first batch
        assert {**stopped[1], **went_on[1]} == calm[1]
        assert list(went_on[1]) == list(range(batch + 1, BATCHES))
        assert all(torch.equal(weight, went_on[2][name]) for name, weight in calm[2].items())


def stop_among_others(folder: str) -> Any:
    """In a gang: a signal while validation runs; and one while a save is written in the background."""
    inside = InValidation()
    validating = {"val_check_interval": 4, "limit_val_batches": 2, "num_sanity_val_steps": 0}
    code, seen, _ = fit(f"{folder}/inside", "ring_ddp", inside, GracefulStop(), **validating)
    io = FaultTolerantCheckpointIO(async_save=True)
    kept = ModelCheckpoint(f"{folder}/flying", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    slow = Faults([Fault("slow", rank=1, step=2, moment="save_writing", seconds=1.0)])
    options = {"plugins": [io], "enable_checkpointing": True}
    stopped = fit(f"{folder}/flying", "ring_ddp", Sent(4, 1, signal.SIGTERM), slow, kept, GracefulStop(), **options)
    whole = {path.name: commit.faults(path, deep=True) for path in commit.candidates(Path(folder) / "flying")}
    return (code, list(seen), inside.validated), (stopped[0], whole)


def test_a_stop_lets_a_validation_end_and_a_save_that_is_in_flight_land(tmp_path: Path) -> None:
    for inside, (code, whole) in run_ranks(2, stop_among_others, {"folder": str(tmp_path)}):
        assert inside == (STOPPED_BY_SIGNAL, [0, 1, 2, 3, 4], 2)  # one batch of training after the validation
        assert code == STOPPED_BY_SIGNAL
        assert whole == {"step=1.ckpt": [], "step=2.ckpt": [], "stopped-step=2.ckpt": []}


def test_times_are_understood() -> None:
    for wrong in ("", "6", "0s", "6 weeks", "1:2:3"):
        with pytest.raises(ConfigError, match="is no time"):
            duration(wrong)


# -- forked ranks: this file as a script, whose process is their parent -----------------------------------------------


def script(folder: str) -> None:
    """Fits with forked ranks, again and again; the exit code of each, and the steps in its checkpoint."""
    told: dict[str, tuple[Callback, ...]] = {
        "rank": (Sent(4, 1, signal.SIGTERM), GracefulStop()),
        "parent": (Sent(4, 1, signal.SIGTERM, to_parent=True), GracefulStop()),
        "late": (GracefulStop(max_duration="0.0001s"),),
    }
    for case, callbacks in told.items():
        code, *_ = fit(f"{folder}/{case}", "ring_ddp", *callbacks)
        [path] = (Path(folder) / case / "checkpoints").glob("*.ckpt")
        print(json.dumps([case, code, str(path), Reader(path).manifest.about["global_step"]]), flush=True)


@pytest.mark.slow
def test_forked_ranks_stop_wherever_the_signal_comes_first(tmp_path: Path) -> None:
    names = ("LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "RANK")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-m", "tests.resilience.test_stopping", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {name: rest for name, *rest in map(json.loads, filter(_is_result, done.stdout.splitlines()))}
    assert {name: code for name, (code, *_) in found.items()} == {"rank": 143, "parent": 143, "late": 0}
    for name, (_, path, steps) in found.items():
        assert f"the checkpoint is {path}; go on with --resume auto" in done.stdout
        assert steps == 0 if name == "late" else steps >= 2


def _is_result(line: str) -> bool:
    return line.startswith('["')


if __name__ == "__main__":
    script(sys.argv[1])
