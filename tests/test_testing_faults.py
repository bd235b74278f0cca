# SPDX-License-Identifier: Apache-2.0
"""Faults strike where they are told to, and nowhere else."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from stratagem.checkpoint.commit import faults as damage
from stratagem.strategy import FaultTolerantCheckpointIO
from stratagem.testing import Fault, Faults, InjectedFault, RanksFailed, run_ranks
from stratagem.testing.faults import Moment


class _Recorder(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *unused: object) -> None:
        with open(self.path / f"rank{trainer.global_rank}", "a") as file:
            file.write(f"{trainer.global_step} ")


def _fit(path: Path, faults: Faults, devices: int = 2, accumulate_grad_batches: int = 1) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp",
        max_steps=4,
        accumulate_grad_batches=accumulate_grad_batches,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[_Recorder(path), faults],
    )
    trainer.fit(BoringModel())


def _steps(path: Path, rank: int) -> list[int]:
    return [int(step) for step in (path / f"rank{rank}").read_text().split()]


def test_a_rank_raises_at_its_step(tmp_path: Path) -> None:
    faults = Faults().raise_at(rank=1, step=2)
    with pytest.raises(RanksFailed, match="rank 1 first: InjectedFault: rank 1 was told to raise at step 2") as caught:
        run_ranks(2, _fit, {"path": tmp_path, "faults": faults})
    assert isinstance(caught.value.failures[1].exception, InjectedFault)
    assert _steps(tmp_path, 1) == [1, 2]


def test_a_rank_is_killed_at_its_step_and_the_other_is_told(tmp_path: Path) -> None:
    faults = Faults().kill_at(rank=0, step=1, moment="before_backward")
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, _fit, {"path": tmp_path, "faults": faults}, dies={0: -9})
    assert list(caught.value.failures) == [1]
    assert "onnection" in caught.value.failures[1].summary
    assert _steps(tmp_path, 0) == [1]


def test_a_rank_hangs_at_its_step(tmp_path: Path) -> None:
    faults = Faults().hang_at(rank=0, step=3, moment="after_step")
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, _fit, {"path": tmp_path, "faults": faults}, deadline=timedelta(seconds=6))
    assert "in _happen" in caught.value.failures[0].details
    assert _steps(tmp_path, 0) == [1, 2, 3, 4]


def _pauses(path: Path, faults: Faults) -> list[float]:
    pauses: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stratagem.testing.faults.time.sleep", pauses.append)
        _fit(path, faults, devices=1, accumulate_grad_batches=2)
    return pauses


@pytest.mark.parametrize("moment", ["before_forward", "before_backward", "after_backward", "after_step"])
def test_a_pause_happens_once_also_with_accumulation_and_the_run_goes_on(moment: Moment, tmp_path: Path) -> None:
    faults = Faults([Fault("slow", 0, 1, moment, 0.25)])
    assert run_ranks(1, _pauses, {"path": tmp_path, "faults": faults}) == [[0.25]]
    assert _steps(tmp_path, 0) == [0, 1, 1, 2, 2, 3, 3, 4]


def test_the_sentence_adds_up_and_the_config_says_the_same() -> None:
    sentence = Faults().kill_at(rank=1, step=3).slow_at(rank=0, step=1, pause=timedelta(seconds=2))
    parser = ArgumentParser()
    parser.add_class_arguments(Faults, "faults")
    config = parser.parse_object(
        {
            "faults": {
                "faults": [{"kind": "kill", "rank": 1, "step": 3}, {"kind": "slow", "rank": 0, "step": 1, "seconds": 2}]
            }
        }
    )
    assert parser.instantiate(config).faults.faults == sentence.faults


def test_a_place_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="must be 0 or more"):
        Faults().raise_at(rank=-1, step=0)


def _save(path: Path, faults: Faults) -> list[str]:
    """Two checkpoints of one process under Lightning's own strategy; what the load of the second one says."""
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[FaultTolerantCheckpointIO()],
        callbacks=[ModelCheckpoint(path, "{step}", every_n_train_steps=1, save_top_k=-1), faults],
    )
    trainer.fit(BoringModel())
    return damage(path / "step=2.ckpt")


def test_a_save_is_a_place_too(tmp_path: Path) -> None:
    """A bit turns over once the checkpoint is there; a disk that is full is the error of that save."""
    faults = Faults([Fault("corrupt", 0, 2, "save_committed")])
    assert run_ranks(1, _save, {"path": tmp_path / "a", "faults": faults}, group=False) == [
        ["rank-00000.bin was changed: its checksum is another one"]
    ]
    assert damage(tmp_path / "a" / "step=1.ckpt") == []
    faults = Faults([Fault("full", 0, 1, "save_written")])
    with pytest.raises(RanksFailed, match=r"CheckpointError.*No space left on device.*free some space"):
        run_ranks(1, _save, {"path": tmp_path / "b", "faults": faults}, group=False)
    with pytest.raises(ValueError, match="happens to a save only"):
        Fault("full", 0, 1)
