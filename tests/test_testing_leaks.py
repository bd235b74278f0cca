# SPDX-License-Identifier: Apache-2.0
"""The leak police finds each kind of leak, puts it right, and does not suspect the innocent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stratagem.testing.leaks import Leak, no_leaks


def _variable() -> None:
    os.environ["COLOUR"] = "red"


def _changed_variable() -> None:
    os.environ["PATH"] += ":/nowhere"


def _removed_variable() -> None:
    del os.environ["PATH"]


def _handler() -> None:
    signal.signal(signal.SIGUSR2, lambda number, frame: None)


def _group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _leak_and_fail(leak: Callable[[], None]) -> None:
    with no_leaks():
        leak()
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("leak", "said"),
    [
        (_variable, r"environment variable COLOUR \(set\)"),
        (_changed_variable, r"environment variable PATH \(changed\)"),
        (_removed_variable, r"environment variable PATH \(removed\)"),
        (_handler, "handler of SIGUSR2"),
        (_group, "default process group"),
    ],
)
def test_a_leak_is_named_and_put_right(leak: Callable[[], None], said: str) -> None:
    with pytest.raises(Leak, match=f"^left behind: {said}"), no_leaks():
        leak()
    with no_leaks():
        pass
    # The test's own error stands, and the leak is put right then too.
    with no_leaks(), pytest.raises(ZeroDivisionError):
        _leak_and_fail(leak)


def test_a_thread_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratagem.testing.leaks._PATIENCE", 0.05)
    end = threading.Event()
    with pytest.raises(Leak, match="thread Wanderer"), no_leaks():
        threading.Thread(target=end.wait, name="Wanderer", daemon=True).start()
    end.set()


def test_a_thread_that_is_about_to_end_is_waited_for() -> None:
    with no_leaks():
        threading.Thread(target=time.sleep, args=(0.1,)).start()


def _start_zombie() -> subprocess.Popen[bytes]:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    return child


def _start_sleeper() -> subprocess.Popen[bytes]:
    child = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=-1)
    assert child.stdout is not None
    child.stdout.readline()
    child.stdout.close()
    return child


def test_a_child_process_is_named_running_or_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratagem.testing.leaks._PATIENCE", 0.05)
    children: list[subprocess.Popen[bytes]] = []
    try:
        with pytest.raises(Leak, match=r"child process \d+ \(.*time.sleep"), no_leaks():
            children.append(_start_sleeper())
        with no_leaks():
            pass  # it was there before
        with pytest.raises(Leak, match="a zombie"), no_leaks():
            children.append(_start_zombie())
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_training_with_lightning_is_innocent(tmp_path: Path) -> None:
    """A fit with a seed, a progress bar, a checkpoint and workers for the data leaves nothing that counts."""
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset

    with no_leaks():
        pl.seed_everything(1, workers=True)
        trainer = pl.Trainer(accelerator="cpu", max_steps=2, logger=False, default_root_dir=tmp_path)
        data = torch.utils.data.DataLoader(RandomDataset(32, 64), num_workers=1)
        trainer.fit(BoringModel(), train_dataloaders=data)
        torch.ones(200, 200) @ torch.ones(200, 200)
    assert "PL_GLOBAL_SEED" not in os.environ


def test_a_gang_is_innocent() -> None:
    from stratagem.testing import run_ranks

    with no_leaks():
        run_ranks(2, dist.get_rank)
