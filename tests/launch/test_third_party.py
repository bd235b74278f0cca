# SPDX-License-Identifier: Apache-2.0
"""A package that stratagem knows nothing of is installed into a fresh environment, and its strategy trains."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_plugin"

TINY = """
seed_everything: 1
trainer:
  accelerator: cpu
  devices: 2
  max_steps: 12
  limit_val_batches: 1
  log_every_n_steps: 1
  gradient_clip_val: 1.0
  enable_progress_bar: false
  enable_checkpointing: false
  logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: runs, name: tiny}}
model:
  class_path: stratagem.models.CausalLM
  init_args:
    model:
      class_path: stratagem.models.GPT
      init_args: {config: {num_layers: 1, hidden_size: 32, num_heads: 2, max_seq_len: 32}}
    optimizer: {lr: 0.01}
data:
  class_path: stratagem.models.TextData
  init_args: {seq_len: 32, global_batch: 8, max_bytes: 100000}
"""


def losses(folder: Path) -> list[float]:
    """The training loss of each step, of rank 0."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]


@pytest.mark.slow
def test_an_installed_package_adds_a_strategy_that_trains(tmp_path: Path) -> None:
    """The environment is new, but for torch and the like, which a path file lends to it: nothing is downloaded."""
    shutil.copytree(EXAMPLE, tmp_path / "plugin", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    venv = tmp_path / "venv"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            list(map(str, command)),
            cwd=tmp_path,
            env={**environment, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    lender = sysconfig.get_path("purelib")
    (packages / "lent.pth").write_text(f"import site; site.addsitedir({lender!r})\n")
    names = "import stratagem; from stratagem.registry import strategies; print(list(strategies()))"
    assert "gather_ddp" not in run(python, "-c", names)

    run(python, "-m", "pip", "install", "--no-build-isolation", "--no-deps", tmp_path / "plugin")

    table = {row["name"]: row for row in json.loads(run(python, "-m", "stratagem", "strategies", "--json"))}
    row = table["gather_ddp"]
    assert (row["distribution"], row["version"], row["origin"], row["why_not"]) == ("gather-ddp", "0.1.0", "plugin", "")
    assert row["what"].startswith("Replicas of the whole model; each rank gathers")

    (tmp_path / "tiny.yaml").write_text(TINY)
    for strategy in ("gather_ddp", "ring_ddp"):
        run(python, "-m", "stratagem", "fit", "--config", "tiny.yaml", "--trainer.strategy", strategy)
    theirs, ours = (losses(tmp_path / "runs" / "tiny" / f"version_{version}") for version in (0, 1))
    assert len(theirs) == 12
    assert theirs[-1] < theirs[0]
    assert theirs == pytest.approx(ours, rel=1e-4), "two right ways to average are one run"
