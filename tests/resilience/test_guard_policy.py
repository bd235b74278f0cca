# SPDX-License-Identifier: Apache-2.0
"""A step that must not be made is made on no rank, whoever divides what; and a run goes back where it was told to."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from stratagem.errors import ConfigError, DivergedError
from stratagem.resilience.guard import Guard
from stratagem.resilience.guard_settings import BadSteps, Drift
from stratagem.testing import assert_replicas_equal
from tests.resilience.guard_kit import Final, Net, assert_close, fit, reference

STRATEGIES = ("ring_ddp", "zero_1", "zero_2", "zero_3", "ddp")


def guard(bad_steps: BadSteps, folder: Path, **options: Any) -> Guard:
    return Guard(heartbeat=None, stragglers=None, bad_steps=bad_steps, folder=str(folder / "guard"), **options)


@pytest.mark.ranks(3)
def test_a_bad_step_leaves_no_trace(num_ranks: int, tmp_path: Path) -> None:
    leaves_no_trace(num_ranks, "skip", tmp_path)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_nor_on_rank_0(num_ranks: int, tmp_path: Path) -> None:
    leaves_no_trace(num_ranks, "skip", tmp_path)


@pytest.mark.slow
@pytest.mark.ranks(2, 3)
def test_a_run_goes_back(num_ranks: int, tmp_path: Path) -> None:
    leaves_no_trace(num_ranks, "roll_back", tmp_path)


def leaves_no_trace(num_ranks: int, action: Any, tmp_path: Path) -> None:
    """Skipped: NaN on one rank at the third batch. Rolled back: a spike at the sixth, to the checkpoint of step 2,
    since that of step 4 is one step old only. Weights, momentum, buffer and schedule are those of plain torch."""
    steps, skips = 8, action == "skip"
    bad, at, by = num_ranks - 1 if num_ranks == 3 else 0, 2 if skips else 5, math.nan if skips else 1e4
    settings = BadSteps(action=action, spike_factor=10.0, warmup=3, back=2)
    wanted, rates = reference(num_ranks, steps, bad=at, back_to=None if skips else 2)
    for name in STRATEGIES:
        folder = tmp_path / name
        final, watch = Final(), guard(settings, folder, drift=Drift(every=1, moments=True))
        saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
        trainer = fit(name, Net(bad=bad, at=at, by=by), watch, final, saves, steps=steps, folder=folder)
        assert trainer.global_step == steps
        assert watch.attempt.skipped == 1, watch.attempt.notes
        assert watch.attempt.rolled_back == (0 if skips else 3)
        assert final.rates == pytest.approx(rates, rel=1e-12)
        if dist.get_rank() == 0:
            assert_close(final.state, wanted, name)
        if name in ("ring_ddp", "ddp"):
            module = Net()
            module.load_state_dict(final.state)
            del module.seen  # `ddp` gives ranks rank 0's before a forward only
            assert_replicas_equal(module)


class ShortWindow(Net):
    """Half of a window of two micro-batches is NaN, in the gradient alone."""

    @override
    def on_after_backward(self) -> None:
        if self.at == self.trainer.fit_loop.epoch_loop.batch_idx and self.global_rank == self.bad:
            self.second.bias.grad = torch.full_like(self.second.bias, math.nan)


@pytest.mark.ranks(2)
def test_the_gradient_counts_and_windows_are_whole(tmp_path: Path) -> None:
    """A gradient that is NaN on rank 1 in the first half of the second window: under Lightning's `ddp` and ours the
    others would not see it in the loss. Steps of windows 1, 3 and 4 are made; three are in each optimizer's counts."""
    for name in ("ring_ddp", "ddp"):
        module = ShortWindow(bad=1, at=2, by=1.0, adam=True)
        watch = guard(BadSteps(), tmp_path, drift=Drift(every=1, moments=True))
        trainer = fit(name, module, watch, steps=8, folder=tmp_path, accumulate_grad_batches=2, max_steps=4)
        assert watch.attempt.skipped == 1, (name, watch.attempt.notes)
        assert "norm of the gradient is not finite" in watch.attempt.notes[0]
        counts = {float(state["step"]) for state in trainer.optimizers[0].state.values()}
        assert counts == {3.0}


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_who_cannot_go_on_stops_on_every_rank(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match="step 3: the loss is not finite"):
        fit("ring_ddp", Net(bad=1, at=2), guard(BadSteps(action="stop"), tmp_path), steps=4, folder=tmp_path)
    with pytest.raises(DivergedError, match="the 1th bad step in a row"):
        fit("zero_2", Net(bad=1, at=2), guard(BadSteps(limit=1), tmp_path), steps=4, folder=tmp_path)
    with pytest.raises(DivergedError, match="there is no checkpoint of this run that is 1 steps"):
        fit("ddp", Net(bad=1, at=2), guard(BadSteps(action="roll_back"), tmp_path), steps=4, folder=tmp_path)

    class Manual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(ConfigError, match="manual optimization"):
        fit("ring_ddp", Manual(), guard(BadSteps(), tmp_path), steps=1, folder=tmp_path)
