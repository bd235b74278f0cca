# SPDX-License-Identifier: Apache-2.0
"""The interval that is computed is near the best of a simulated sweep, and all ranks save at the same steps."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from stratagem.errors import ConfigError
from stratagem.resilience.interval import Choice, FailureRate, IntervalCheckpoint, best_interval, seconds, young
from stratagem.strategy import FaultTolerantCheckpointIO
from stratagem.testing import Faults
from tests.resilience.guard_kit import Net, fit


def useful_share(interval: float, stall: float, mtbf: float, recovery: float, failures: np.ndarray) -> float:
    """Of the time, event by event: a cycle trains for `interval - stall` and saves for `stall`; a failure costs what
    was done since the last save that ended, and the recovery."""
    gain = interval - stall
    cycles = np.floor(failures / interval)  # those that a failure has left whole
    return float((cycles * gain).sum() / (failures.sum() + recovery * len(failures)))


@pytest.mark.parametrize(
    ("stall", "mtbf", "recovery"), [(10.0, 6000.0, 600.0), (2.0, 21600.0, 120.0), (30.0, 3600.0, 0.0)]
)
def test_the_formula_finds_the_best_of_a_sweep(stall: float, mtbf: float, recovery: float) -> None:
    """Exponential times between failures, the same ones for each interval of the sweep."""
    failures = np.random.default_rng(0).exponential(mtbf, size=200_000)
    sweep = best_interval(stall, mtbf, recovery) * np.geomspace(0.25, 4.0, 81)
    shares = [useful_share(interval, stall, mtbf, recovery, failures) for interval in sweep]
    best = sweep[int(np.argmax(shares))]
    assert best_interval(stall, mtbf, recovery) == pytest.approx(best, rel=0.3)
    assert young(stall, mtbf) == pytest.approx(best, rel=0.3)


def test_published_numbers_and_words() -> None:
    choice = Choice.of(step=15.0, stall=10.0, persist=10.0, mtbf=6000.0, recovery=600.0)
    assert choice.steps == 24
    measured, formula, so = choice.words().splitlines()
    assert "a step takes 15 s" in measured
    assert "a failure every 6000 s" in measured
    assert "346.4 s" in formula
    assert "373.5 s" in formula
    assert so.startswith("So every 24 steps (370 s)")
    slow_disk = Choice.of(step=1.0, stall=0.1, persist=50.0, mtbf=600.0, recovery=0.0)
    assert slow_disk.steps == 50  # the next save would meet the one in flight


@pytest.mark.parametrize("text", ["", "6", "h", "6x", "6h or so"])
def test_durations_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="like 6h"):
        seconds(text)


def test_what_is_missing_is_said() -> None:
    with pytest.raises(ConfigError, match="how often the run fails"):
        IntervalCheckpoint()
    for wrong in ({}, {"mtbf": "6h", "per_device_day": 0.1}):
        with pytest.raises(ConfigError, match="one of mtbf and per_device_day"):
            FailureRate(**wrong)


class Saves(Callback):
    """At which steps this rank took part in a save."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.steps.append(trainer.global_step)


@pytest.mark.ranks(2)
def test_ranks_save_together_as_often_as_it_pays(tmp_path: Path) -> None:
    """Rank 1 measures longer steps than rank 0, and would come to another interval: rank 0's counts on both. Saves in
    the background; the newest two and the end of the run are kept."""
    faults = Faults()
    for step in range(4):  # at the end of a step, so that rank 1 alone sees it as the step's
        faults = faults.slow_at(rank=1, step=step, pause=timedelta(milliseconds=50), moment="after_step")
    saver = IntervalCheckpoint("auto", FailureRate(mtbf="10s"), probe=2, dirpath=str(tmp_path), filename="{step}")
    saves, io = Saves(), FaultTolerantCheckpointIO(async_save=True)
    trainer = fit("ring_ddp", Net(), faults, saves, saver, steps=60, folder=tmp_path, plugins=[io])
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, (saves.steps, saver.choice))
    assert everyone[0] == everyone[1]
    assert saver.choice is not None
    assert saver.choice.persist >= saver.choice.stall > 0
    assert saves.steps[0] == 2
    assert saves.steps[-1] == trainer.global_step == 60
    kept = sorted(path.name for path in tmp_path.glob("step=*"))
    assert kept == sorted(f"step={step}.ckpt" for step in saves.steps[-2:])


@pytest.mark.ranks(1)
def test_a_fixed_interval_counts_from_the_last_save(tmp_path: Path) -> None:
    saver, saves = IntervalCheckpoint(3, dirpath=str(tmp_path), filename="{step}", keep=-1), Saves()
    fit("ring_ddp", Net(), saves, saver, steps=7, folder=tmp_path)
    assert saves.steps == [3, 6, 7]
    saver, again = IntervalCheckpoint(2, dirpath=str(tmp_path), filename="again-{step}", keep=1), Saves()
    fit("ring_ddp", Net(), again, saver, steps=12, folder=tmp_path, ckpt_path=str(tmp_path / "step=3.ckpt"))
    assert again.steps == [5, 7, 9, 11, 12]
    assert [path.name for path in tmp_path.glob("again-*")] == ["again-step=12.ckpt"]
