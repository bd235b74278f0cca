# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed under `stratagem fit`, however its ranks are started, and what its own checkpoints are good for."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stratagem.plugins.deepspeed import host
from tests.launch import kit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(host.missing()), reason="the extra deepspeed is not installed"),
]

TINY = """
seed_everything: 1
trainer:
  accelerator: cpu
  devices: 2
  max_steps: 4
  val_check_interval: 2
  check_val_every_n_epoch: null
  limit_val_batches: 1
  num_sanity_val_steps: 0
  log_every_n_steps: 1
  enable_progress_bar: false
  enable_model_summary: false
  logger:
    class_path: lightning.pytorch.loggers.CSVLogger
    init_args: {save_dir: runs, name: tiny}
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {dirpath: kept, save_last: true, every_n_train_steps: 2}
model:
  class_path: stratagem.models.CausalLM
  init_args:
    model:
      class_path: stratagem.models.GPT
      init_args:
        config: {num_layers: 1, hidden_size: 16, num_heads: 2, max_seq_len: 16}
data:
  class_path: stratagem.models.TextData
  init_args: {seq_len: 16, global_batch: 8}
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def stratagem(folder: Path, *arguments: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """The command in `folder`, as a fresh process that must end well and leave none behind."""
    folder.mkdir(exist_ok=True)
    (folder / "tiny.yaml").write_text(TINY)
    gone = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
    done = subprocess.run(
        [sys.executable, *before, "-m", "stratagem", *arguments],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name not in gone} | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    ends = time.monotonic() + 10
    while kit.processes() and time.monotonic() < ends:  # the last ones may be on their way out
        time.sleep(0.1)
    assert kit.processes() == [], "processes are left"
    return done


def logged(folder: Path) -> dict[int, float]:
    """The training loss by step, over all the runs of a folder."""
    found = {}
    for path in sorted(folder.glob("runs/tiny/version_*/metrics.csv")):
        with path.open(newline="") as file:
            found |= {int(row["step"]): float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]}
    return found


@pytest.fixture(autouse=True)
def marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So that the processes of this test can be told from all others."""
    monkeypatch.setenv(kit.MARK, str(tmp_path))


def test_ranks_that_are_forked_and_those_of_subprocess_and_of_torchrun_train_alike(tmp_path: Path) -> None:
    common = ("fit", "--config", "tiny.yaml", "--trainer.strategy", "deepspeed_zero_2")
    ways: dict[str, dict[str, Any]] = {
        "auto": {},
        "subprocess": {},
        "torchrun": {"before": TORCHRUN},
    }
    for way, options in ways.items():
        more = ("--trainer.strategy.run.launcher", way) if way == "subprocess" else ()
        stratagem(tmp_path / way, *common, *more, **options)
    losses = {way: logged(tmp_path / way) for way in ways}
    assert len(losses["auto"]) == 4
    assert losses["subprocess"] == losses["torchrun"] == losses["auto"]


def test_a_run_of_stage_3_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    """Two steps and two more are four; validate refuses it, which DeepSpeed cannot read there."""
    three = ("--config", "tiny.yaml", "--trainer.strategy", "deepspeed_zero_3")
    stratagem(tmp_path / "straight", "fit", *three)
    parted = tmp_path / "parted"
    stratagem(parted, "fit", *three, "--trainer.max_steps", "2")
    assert (parted / "kept" / "last.ckpt").is_dir(), "DeepSpeed's own"
    stratagem(parted, "fit", *three, "--ckpt_path", "last")
    assert sorted(logged(parted)) == [0, 1, 2, 3]
    assert logged(parted) == logged(tmp_path / "straight")
    with pytest.raises(AssertionError, match="reads no directory of its training engine"):
        stratagem(parted, "validate", *three, "--ckpt_path", "kept/last.ckpt")
