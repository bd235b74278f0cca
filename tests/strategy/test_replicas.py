# SPDX-License-Identifier: Apache-2.0
"""Snapshots in memory: whoever dies and whatever is lost, one state is found, or it is said that none is."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from stratagem.checkpoint.manifest import MANIFEST, rank_file
from stratagem.checkpoint.memory import Memory, sweep
from stratagem.errors import ConfigError
from stratagem.strategy import FaultTolerantCheckpointIO
from stratagem.strategy.opening import read_whole
from stratagem.strategy.replicas import InMemoryReplicas, Replicas, ReplicaSettings, open_newest
from stratagem.testing import Fault, Faults, run_ranks
from stratagem.testing.contract import Subject
from stratagem.testing.contract.resuming import GLOBAL_BATCH, Everything, _Tokens
from stratagem.testing.contract.runs import Run, make_trainer
from tests.checkpoint.test_crash import fail, joined, state_of, step_in

TWO_HOSTS = ("a", "a", "b", "b")


def settings_of(root: Path, **options: Any) -> ReplicaSettings:
    root.mkdir(exist_ok=True)
    return ReplicaSettings(run="test", root=str(root), **options)


def remember(
    root: Path,
    steps: int,
    dies: tuple[str, int, int] | None = None,
    hosts: tuple[str, ...] = (),
    copies: int = 2,
) -> None:
    """The body of every rank: so many snapshots, in one of which a rank dies."""
    rank = dist.get_rank()
    crew = joined(FaultTolerantCheckpointIO()).communicator("dp_replicate", lane="replicas")
    host = hosts[rank] if hosts else ""
    replicas = Replicas(settings_of(root / host, owner=os.getppid(), copies=copies), crew, host)
    replicas.open()
    for step in range(1, steps + 1):

        def at(point: str, step: int = step) -> None:
            if dies == (point, rank, step):
                os.kill(os.getpid(), signal.SIGKILL)

        replicas.at = at
        assert replicas.take(state_of(step))


@pytest.mark.parametrize(
    ("point", "rank"),
    [
        ("written", 1),
        ("renamed", 0),
        *(
            pytest.param(point, rank, marks=pytest.mark.slow)
            for point, rank in (
                ("written", 0),
                ("copied", 0),
                ("copied", 1),
                ("whole", 0),
                ("renamed", 1),
                ("agreed", 0),
                ("agreed", 1),
            )
        ),
    ],
)
def test_killed_between_the_slots_one_of_them_is_whole(point: str, rank: int, tmp_path: Path) -> None:
    fail(2, remember, {"root": tmp_path, "steps": 3, "dies": (point, rank, 3)}, dies={rank: -signal.SIGKILL})
    newest = open_newest(settings_of(tmp_path))
    assert newest is not None
    assert newest.where in ("memory", "partners")
    assert newest.step in {"written": (2,), "copied": (2,), "whole": (2, 3), "renamed": (2, 3), "agreed": (3,)}[point]
    assert step_in(newest.path) == newest.step


def test_the_one_before_stays_until_every_rank_has_the_next(tmp_path: Path) -> None:
    """One copy of each share, and rank 1 dies when rank 0 may have its clean snapshot already."""
    kwargs = {"root": tmp_path, "steps": 3, "dies": ("whole", 1, 3), "copies": 1}
    fail(2, remember, kwargs, dies={1: -signal.SIGKILL})
    newest = open_newest(settings_of(tmp_path))
    assert newest is not None
    assert newest.step == step_in(newest.path) == 2


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_what_is_lost_of_one_is_read_from_its_partner_and_of_both_from_disk(tmp_path: Path) -> None:
    """Three ranks, whose state any number of ranks reads: here one process."""
    run_ranks(3, remember, {"root": tmp_path / "memory", "steps": 2})
    settings = settings_of(tmp_path / "memory")
    folder, disk = settings.memory().folder, tmp_path / "disk"
    assert folder.stat().st_mode & 0o777 == 0o700
    held = {path.parent.name: sorted(p.name for p in path.glob("rank-*")) for path in folder.glob("rank-*/step=2")}
    assert held == {f"rank-0000{r}": sorted({rank_file(r), rank_file((r - 1) % 3)}) for r in range(3)}
    assert len(list(folder.glob("rank-*/*"))) == 3, "the snapshot before is gone"
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.glob("rank-*/step=2/*"))
    FaultTolerantCheckpointIO().save_checkpoint({"state_dict": {}, "global_step": 1}, disk / "old")

    def found() -> tuple[int, str, str]:
        newest = open_newest(settings, disk)
        assert newest is not None
        assert newest.where == "disk" or step_in(newest.path) == newest.step
        return newest.step, newest.where, " ".join(newest.told)

    assert found() == (2, "memory", "")
    cut = read_whole(folder / "view" / "step=2")["state_dict"]["cut"]
    assert torch.equal(cut, torch.full((60, 3), 2.0)), "the boxes of three ranks are one tensor"
    flip(folder / "rank-00001" / "step=2" / rank_file(1))
    with pytest.warns(UserWarning, match="rank-00001.bin was lost and is read from its partner"):
        assert found()[:2] == (2, "partners")
    shutil.rmtree(folder / "rank-00000")  # with it goes the copy of rank 2's share; rank 2 has its own
    assert found()[:2] == (2, "partners")
    flip(folder / "rank-00002" / "step=2" / rank_file(1))
    with pytest.warns(UserWarning, match="step 2 is not whole in memory: rank-00001.bin lost with every copy"):
        assert found()[:2] == (1, "disk")
    shutil.rmtree(folder)
    assert found() == (1, "disk", "")
    assert open_newest(settings) is None


def test_the_disk_counts_where_it_is_newer(tmp_path: Path) -> None:
    run_ranks(1, remember, {"root": tmp_path / "memory", "steps": 2})
    FaultTolerantCheckpointIO().save_checkpoint({"state_dict": {}, "global_step": 3}, tmp_path / "disk" / "new")
    newest = open_newest(settings_of(tmp_path / "memory"), tmp_path / "disk")
    assert newest is not None
    assert (newest.step, newest.where) == (3, "disk")


def recover(root: Path, hosts: tuple[str, ...]) -> tuple[int, str, float]:
    """The body of every rank of a new gang on two hosts."""
    rank = dist.get_rank()
    crew = joined(FaultTolerantCheckpointIO()).communicator("dp_replicate", lane="replicas")
    newest = open_newest(settings_of(root / hosts[rank]), None, crew, hosts[rank])
    assert newest is not None
    assert newest.path.is_relative_to(root / hosts[rank])
    return newest.step, newest.where, step_in(newest.path)


@pytest.mark.slow
def test_a_host_that_is_lost_is_served_by_the_other(tmp_path: Path) -> None:
    """Partners are on the other host, so one host has every share; four ranks come back as three."""
    run_ranks(4, remember, {"root": tmp_path, "steps": 2, "hosts": TWO_HOSTS})
    shutil.rmtree(tmp_path / "b")
    found = run_ranks(3, recover, {"root": tmp_path, "hosts": ("a", "b", "b")})
    assert found == [(2, "partners", 2.0)] * 3


def test_a_memory_that_is_full_is_said_and_the_one_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stratagem.strategy import replicas as module
    from stratagem.strategy.crew import Alone

    replicas = Replicas(settings_of(tmp_path), Alone())
    replicas.open()
    state = {"state_dict": {"w": torch.ones(3)}, "global_step": 1, "stratagem": {}}
    assert replicas.take(state)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write", full)
    with pytest.warns(UserWarning, match="No snapshot was taken .*rank 0: No space left on device"):
        assert not replicas.take({**state, "global_step": 2})
    newest = open_newest(settings_of(tmp_path))
    assert newest is not None
    assert newest.step == 1
    replicas.end()
    assert os.listdir(tmp_path) == []


def test_memories_of_runs_that_are_over_are_swept(tmp_path: Path) -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    memories = {name: Memory(name, tmp_path) for name in ("dead", "alive", "mine")}
    memories["dead"].claim(done.pid)
    memories["mine"].claim(done.pid)
    memories["alive"].claim(os.getpid())
    done.wait()
    assert sweep(tmp_path, but="mine") == [memories["dead"].folder]
    assert sweep(tmp_path) == [memories["mine"].folder]
    assert [path.name for path in tmp_path.iterdir()] == [memories["alive"].folder.name]


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="every_n_steps"):
        ReplicaSettings(run="a", every_n_steps=0)
    with pytest.raises(ConfigError, match="cannot name a folder"):
        ReplicaSettings(run="../a")


# -- under Lightning ------------------------------------------------------------------------------------------------


def live(settings: ReplicaSettings, name: str, resume_from: str | None, injected: list[Fault]) -> dict[str, Tensor]:
    """The body of every rank: one life of a run; the weights at its end."""
    seed_everything(1, verbose=False)
    callbacks = (InMemoryReplicas(settings), Faults(injected))
    trainer = make_trainer(Subject(strategy=name), Run(), *callbacks, max_epochs=2, use_distributed_sampler=True)
    loader = DataLoader(_Tokens(), batch_size=GLOBAL_BATCH, shuffle=True)
    module = Everything(quiet=False)
    trainer.fit(module, loader, ckpt_path=resume_from)
    return {key: value.detach().clone() for key, value in module.state_dict().items()}


@pytest.mark.parametrize("name", ["ring_ddp", pytest.param("zero_3", marks=pytest.mark.slow)])
def test_a_run_that_died_goes_on_from_memory_bit_for_bit(name: str, tmp_path: Path) -> None:
    """With no checkpoint on disk at all; rank 1's memory is lost too. Nothing is left in memory by a run that ends."""
    settings = settings_of(tmp_path, every_n_steps=2)
    kwargs: dict[str, Any] = {"settings": settings, "name": name, "resume_from": None, "injected": []}
    expected = run_ranks(2, live, kwargs)
    assert os.listdir(tmp_path) == []
    fault = Fault("kill", 1, 7, "before_forward")
    fail(2, live, {**kwargs, "injected": [fault]}, dies={1: -signal.SIGKILL})
    shutil.rmtree(settings.memory().folder / "rank-00001")
    newest = open_newest(settings)
    assert newest is not None
    assert (newest.step, newest.where) == (6, "partners")
    assert (newest.path / MANIFEST).is_file()
    ended = run_ranks(2, live, {**kwargs, "resume_from": str(newest.path)})
    for one, other in zip(expected, ended, strict=True):
        wrong = [key for key, value in one.items() if not torch.equal(value, other[key])]
        assert not wrong, wrong
    assert os.listdir(tmp_path) == []
