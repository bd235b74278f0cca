# SPDX-License-Identifier: Apache-2.0
"""Whole runs of the command line that lose a rank and come back: by themselves, and by torchrun."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOREIGN = ("LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "RANK", "TORCHELASTIC_RESTART_COUNT")


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    """The example, as a module."""
    spec = importlib.util.spec_from_file_location("resume_demo", ROOT / "examples" / "resume_demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def calm(demo: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    folder: Path = tmp_path_factory.mktemp("calm") / "run"
    demo.train(folder)
    return folder


@pytest.mark.slow
def test_a_run_that_loses_a_rank_twice_ends_with_the_very_same_weights(
    demo: ModuleType, calm: Path, tmp_path: Path
) -> None:
    demo.train(tmp_path / "same", demo.KILLS, "--resume", "auto")
    found = demo.compare(calm, tmp_path / "same")
    assert found["equal bits"]
    assert found["same samples"]
    assert (found["loss"], found["devices"], found["reached"], found["redone"]) == (0.0, [4, 4, 4], [4, 8, 12], 3)


@pytest.mark.slow
def test_on_fewer_ranks_the_global_batch_is_kept(demo: ModuleType, calm: Path, tmp_path: Path) -> None:
    demo.train(tmp_path / "fewer", demo.KILLS, "--resume", "auto", "--min-devices", "3")
    found = demo.compare(calm, tmp_path / "fewer")
    assert found["same samples"]
    assert found["devices"] == [4, 3, 3]
    assert found["loss"] < 1e-10
    assert found["weights"] < 1e-10


@pytest.mark.exhaustive
def test_torchrun_restarts_and_each_start_finds_the_newest(demo: ModuleType, calm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    settings = demo.settings(folder, (4,))
    settings["trainer"]["devices"] = 2
    settings["trainer"]["callbacks"][0]["init_args"]["faults"][0]["rank"] = 1
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    torchrun = "-m torch.distributed.run --max-restarts 2 --nproc-per-node 2 --rdzv-backend c10d --local-addr 127.0.0.1"
    command = [sys.executable, *torchrun.split(), "--rdzv-endpoint", "127.0.0.1:0", "--monitor-interval", "0.1"]
    command += ["-m", "stratagem", "fit", "--config", str(folder / "run.yaml"), "--resume", "auto"]
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    environment = {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "examples"), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    losses, seen, attempts = demo.history(folder)
    wanted, expected, _ = demo.history(calm)
    assert {number: points[0][0] for number, points in attempts.items()} == {
        0: 1,
        1: 4,
    }  # the second start goes on from step 3
    assert seen == expected
    assert max(abs(losses[step] - wanted[step]) for step in wanted) < 1e-10


@pytest.mark.exhaustive
def test_the_same_failure_again_ends_the_run_with_both_causes(demo: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "loop"
    folder.mkdir()
    settings = demo.settings(folder, (4,))
    settings["trainer"]["devices"] = 2
    settings["trainer"]["callbacks"][0]["init_args"]["faults"][0] |= {"rank": 1, "kind": "raise", "attempt": None}
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "stratagem", "fit", "--config", str(folder / "run.yaml"), "--resume", "auto"]
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    environment = {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "examples")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stderr[-3000:]
    assert "the same failure at the same step twice" in done.stderr
    assert done.stderr.count("rank 1 was told to raise at step 4 (at step 4)") == 2
    assert len(json.loads((folder / "guard" / "restarts.json").read_text())["attempts"]) == 2


@pytest.mark.exhaustive
def test_lightnings_own_ddp_loses_a_rank_and_is_stopped_and_goes_on(demo: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "ddp"
    folder.mkdir()
    settings = demo.settings(folder, (4,))
    settings["trainer"] |= {"devices": 2, "strategy": "ddp"}
    callbacks = settings["trainer"]["callbacks"]
    callbacks[0]["init_args"]["faults"][0]["rank"] = 1
    sent = {"batch": 7, "rank": 0, "signum": signal.SIGTERM.value, "to_parent": True}  # the parent is that of attempts
    callbacks += [{"class_path": "tests.resilience.test_stopping.Sent", "init_args": sent}]
    callbacks += [{"class_path": "stratagem.resilience.stopping.GracefulStop"}]
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "stratagem", "fit", "--config", str(folder / "run.yaml"), "--resume", "auto"]
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    environment = {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'examples'}{os.pathsep}{ROOT}"}
    for code, newest in ((143, "stopped-step=8.ckpt"), (0, "step=12.ckpt")):
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == code, done.stderr[-3000:]
        assert (folder / "kept" / newest).is_dir()
    # Not the losses: Lightning's ddp loads into float32, before it makes the module float64.
    losses, _, attempts = demo.history(folder)
    assert list(losses) == list(range(1, demo.STEPS + 1))
    assert [points[0][0] for points in attempts.values()] == [1, 4]
