# SPDX-License-Identifier: Apache-2.0
"""Who hangs, who is slow, who has drifted, and where the time went: each is told about the rank that it is true of."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from stratagem.errors import CommunicationError, DriftError, HangError
from stratagem.plugins.zero import Zero3Strategy, ZeroSettings
from stratagem.resilience.guard import Guard
from stratagem.resilience.guard_drift import _weighted, bits_hash
from stratagem.resilience.guard_settings import Drift, Heartbeat, Stragglers
from stratagem.testing import Faults, InjectedFault
from tests.resilience.guard_kit import Net, fit

QUICK = Heartbeat(hang_after=timedelta(seconds=1), every=timedelta(seconds=0.1), grace=timedelta(seconds=3))


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "guard" / "hang.json").read_text())
    return found


# -- hangs -----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(3)
def test_a_hanging_rank_is_named_with_its_line_and_what_others_wait_in(tmp_path: Path) -> None:
    """Rank 1 sleeps for ever before the third forward; the others wait for it in the ring. All end, each with an error
    that tells whoever watches them which one is the cause."""
    me = dist.get_rank()
    guard = Guard(heartbeat=QUICK, stragglers=None, folder=str(tmp_path / "guard"))
    with pytest.raises(HangError if me == 1 else CommunicationError) as caught:
        fit("ring_ddp", Net(), guard, Faults().hang_at(rank=1, step=2), steps=4, folder=tmp_path)
    told = [str(caught.value), *getattr(caught.value, "__notes__", [])]
    assert any("rank 1 hangs: forward of step 2" in text for text in told)
    found = report(tmp_path)
    assert found["hanging"] == [1]
    guilty, victim = found["ranks"][1], found["ranks"][0]
    assert "faults.py" in guilty["line"]
    assert guilty["line"].endswith("in _happen")
    assert guilty["collective"] == ""
    assert victim["phase"] in ("backward", "step")
    assert victim["collective"] == "all_reduce over dp_replicate"
    assert any("technique.py" in line for line in victim["stack"])


@pytest.mark.slow
@pytest.mark.ranks(2, dies={0: 75})
def test_who_cannot_be_woken_leaves(tmp_path: Path) -> None:
    """Under Lightning's `ddp` rank 0 waits in C++, which no signal reaches."""
    guard = Guard(heartbeat=QUICK, stragglers=None, folder=str(tmp_path / "guard"))
    expected = HangError if dist.get_rank() == 1 else CommunicationError
    with pytest.raises(expected, match="rank 1 hangs: forward of step 2"):
        fit("ddp", Net(), guard, Faults().hang_at(rank=1, step=2), steps=4, folder=tmp_path)
    assert dist.get_rank() == 1
    assert report(tmp_path)["hanging"] == [1]


# -- stragglers ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.ranks(3)
def test_the_slow_rank_is_named_and_no_other(tmp_path: Path) -> None:
    """Rank 1 pauses in each step. All ranks take as long for a step; the others wait in the ring, in stage 3's gathers,
    or in the reducer of `ddp`."""
    settings = Stragglers(every=3, in_a_row=2, threshold=2.0, slack=timedelta(milliseconds=25))
    for name in ("ring_ddp", "zero_3", "ddp"):
        faults = Faults()
        for step in range(10):
            faults = faults.slow_at(rank=1, step=step, pause=timedelta(milliseconds=150))
        guard = Guard(heartbeat=None, stragglers=settings, folder=str(tmp_path / name))
        fit(name, Net(), guard, faults, steps=10, folder=tmp_path)
        named = {note.split(": ")[1].split(",")[0] for note in guard.attempt.notes}
        assert named == {"rank 1 is slow"}, (name, guard.attempt.notes)
        waited = guard.attempt.waiting
        if dist.get_rank() == 0:
            assert waited is not None
            assert waited > 0.3  # of the 1.5 that rank 1 paused


# -- drift -----------------------------------------------------------------------------------------------------------


class Turn(Callback):
    """On rank `bad`, after step `at`, changes what `find` returns by its lowest bit."""

    def __init__(self, bad: int, at: int, find: Callable[[Trainer, LightningModule], torch.Tensor]) -> None:
        self.bad, self.at, self.find = bad, at, find

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step == self.at and trainer.global_rank == self.bad:
            with torch.no_grad():
                value = self.find(trainer, pl_module).data
                value.view(torch.uint8).view(-1)[0] ^= 1


def step_count(trainer: Trainer, module: LightningModule) -> torch.Tensor:
    state = trainer.optimizers[0].state
    count: torch.Tensor = next(entry["step"] for entry in state.values())
    count += 1.0
    return torch.zeros(1)


def owned_piece(trainer: Trainer, module: LightningModule) -> torch.Tensor:
    groups = trainer.optimizers[0].param_groups
    return next(p for p in groups[0]["params"] if p.numel())


DIVIDED = ZeroSettings(persistence_threshold=0)
WEIGHT = "parameter second.weight"
PLACES: list[tuple[Any, int, Any, str]] = [
    ("ring_ddp", 2, lambda trainer, module: module.second.weight, WEIGHT),
    ("zero_1", 1, lambda trainer, module: module.second.weight, WEIGHT),
    ("ddp", 2, lambda trainer, module: module.second.weight, WEIGHT),
    ("ring_ddp", 1, lambda trainer, module: module.seen, "buffer seen"),
    ("ring_ddp", 1, step_count, "step count of first.weight"),
    ("ring_ddp", 1, lambda trainer, module: next(iter(trainer.optimizers[0].state.values()))["exp_avg"], "exp_avg of"),
]


@pytest.mark.ranks(3)
def test_one_turned_bit_is_found(tmp_path: Path) -> None:
    """One bit on rank 1 of three, after the third step: compared every second step, it is found after the fourth, by
    name and with the odd one out. In other places it is in the parameters one step later, or gone: there each step is
    compared. Where nothing turns nothing is found, also under stage 3, where hardly anything is equal."""
    for name, every, find, what in PLACES:
        guard = Guard(None, None, drift=Drift(every=every, moments=True), folder=str(tmp_path / "guard"))
        found = rf"after step {4 if every == 2 else 3}: {what}.* ranks 0, 1, 2: rank 1 is the odd one out"
        with pytest.raises(DriftError, match=found):
            fit(name, Net(adam=True), Turn(1, 3, find), guard, steps=6, folder=tmp_path)
    strategy = Zero3Strategy(DIVIDED)
    fit(strategy, Net(adam=True), Guard(None, None, drift=Drift(every=1, moments=True)), steps=4, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_pieces_are_compared_where_they_are_held_twice(tmp_path: Path) -> None:
    """Two groups of two ranks divide two replicas: ranks 0 and 2 hold the same pieces, and so do 1 and 3."""
    guard = Guard(None, None, drift=Drift(every=1), folder=str(tmp_path / "guard"))
    strategy = Zero3Strategy(DIVIDED, replicas=2)
    with pytest.raises(DriftError, match=r"piece .* is not the same on ranks 1, 3: with 2 ranks there is no majority"):
        fit(strategy, Net(adam=True), Turn(3, 3, owned_piece), guard, steps=8, folder=tmp_path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
def test_every_single_bit_changes_the_hash(dtype: torch.dtype) -> None:
    """Both kinds of hash, at sizes that fill no word."""
    tensor = torch.arange(7).to(dtype)
    flat = tensor.view(torch.uint8)
    seen = {(bits_hash(tensor), _weighted(flat))}
    for position in range(flat.numel()):
        for bit in range(8):
            flat[position] ^= 1 << bit
            seen.add((bits_hash(tensor), _weighted(flat)))
            flat[position] ^= 1 << bit
    assert len({crc for crc, _ in seen}) == len({total for _, total in seen}) == 8 * flat.numel() + 1


# -- the summary -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_the_summary_counts_over_attempts(tmp_path: Path) -> None:
    """The first attempt fails in its sixth step, two steps after a checkpoint; the second goes on from that one."""

    def guard() -> Guard:
        return Guard(None, Stragglers(), folder=str(tmp_path / "guard"))

    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    faults = Faults().raise_at(rank=0, step=5).raise_at(rank=1, step=5)
    with pytest.raises(InjectedFault):
        fit("ring_ddp", Net(), guard(), saves, faults, steps=8, folder=tmp_path)
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    path = str(tmp_path / "step=3.ckpt")
    fit("ring_ddp", Net(), guard(), saves, steps=8, folder=tmp_path, ckpt_path=path)
    dist.barrier()
    found = json.loads((tmp_path / "guard" / "summary.json").read_text())
    assert {key: found[key] for key in ("attempts", "interruptions", "steps", "lost", "skipped")} == {
        "attempts": 2,
        "interruptions": 1,
        "steps": 8,
        "lost": 2,
        "skipped": 0,
    }
    assert 0 < found["effective"] < 1
    assert found["saving"] > 0
    assert not list((tmp_path / "guard").rglob("*.draft"))
