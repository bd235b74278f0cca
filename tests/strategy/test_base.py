# SPDX-License-Identifier: Apache-2.0
"""What the base strategy does around a run: opening and closing the group, several runs, reductions, votes."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel

from stratagem.errors import ConfigError
from stratagem.plugins.ring_ddp import RingDDPStrategy
from stratagem.strategy import RunSettings


def trainer(num_ranks: int, **options: Any) -> pl.Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    settings: dict[str, Any] = {"accelerator": "cpu", "devices": num_ranks, "strategy": "ring_ddp", "max_steps": 2}
    return pl.Trainer(**{**quiet, **settings, **options})


@pytest.mark.ranks(1, 2, 3, group=False)
def test_runs_follow_each_other_in_one_process(num_ranks: int) -> None:
    """Each opens its own process group and destroys it; the second finds nothing of the first in the way."""
    for _ in range(2):
        runner, module = trainer(num_ranks), BoringModel()
        runner.fit(module)
        assert not dist.is_initialized()
        runner.validate(module, verbose=False)
        runner.test(module, verbose=False)
        assert not dist.is_initialized()
        runner.fit_loop.max_epochs = 2
        runner.fit(module)


@pytest.mark.ranks(2)
def test_a_group_that_was_open_stays_open(num_ranks: int) -> None:
    trainer(num_ranks).fit(BoringModel())
    assert dist.is_initialized()
    dist.barrier()


class Talks(BoringModel):
    """Uses the strategy's own words in the middle of a run."""

    def on_train_start(self) -> None:
        strategy, rank, n = self.trainer.strategy, self.global_rank, self.trainer.world_size
        values = torch.tensor([rank, 2 * rank])
        mean = (n - 1) / 2
        assert strategy.reduce(values).tolist() == [mean, 2 * mean]
        assert strategy.reduce(values, reduce_op="avg").dtype == torch.float32
        assert strategy.reduce(values, reduce_op="sum").tolist() == [mean * n, 2 * mean * n]
        assert strategy.reduce(values, reduce_op=dist.ReduceOp.MAX).tolist() == [n - 1, 2 * (n - 1)]
        assert strategy.reduce(values, group=dist.group.WORLD, reduce_op="sum").tolist() == [mean * n, 2 * mean * n]
        assert values.tolist() == [rank, 2 * rank]
        assert strategy.reduce("a word") == "a word"
        assert strategy.broadcast({"from": rank}, src=n - 1) == {"from": n - 1}
        assert strategy.reduce_boolean_decision(rank == 0, all=False)
        assert strategy.reduce_boolean_decision(True)
        assert not strategy.reduce_boolean_decision(rank == 0)
        assert self.all_gather(torch.tensor(rank)).tolist() == list(range(n))
        strategy.barrier()
        assert strategy.distributed_sampler_kwargs == {"num_replicas": n, "rank": rank}


@pytest.mark.ranks(2, 3)
def test_reductions_votes_and_broadcasts(num_ranks: int) -> None:
    trainer(num_ranks).fit(Talks())


class Stumbles(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1:
            raise KeyError("rank 1 stumbled")
        return super().training_step(batch, batch_idx)


@pytest.mark.ranks(2, group=False)
def test_after_a_failure_the_group_is_gone_and_a_new_run_works_elsewhere(num_ranks: int) -> None:
    """Rank 1 raises; rank 0 waits for its gradients and is told. Both have cleaned up."""
    runner = trainer(num_ranks)
    with pytest.raises((KeyError, RuntimeError), match=r"rank 1 stumbled|rank 1"):
        runner.fit(Stumbles())
    assert not dist.is_initialized()
    assert "_prepare_dataloader" not in vars(runner._data_connector)


def test_settings_are_checked_before_anything_starts() -> None:
    from datetime import timedelta

    with pytest.raises(ConfigError, match=r"run.timeout"):
        RunSettings(timeout=timedelta(0))
    assert RingDDPStrategy().is_distributed


@pytest.mark.ranks(2)
def test_clipping_takes_the_norm_of_everything(num_ranks: int) -> None:
    """The clipped gradient has the norm that was asked for, on all ranks, and by-value clipping works too."""

    class Seen(BoringModel):
        def on_before_zero_grad(self, *_: Any) -> None:
            found = [p.grad.flatten() for p in self.parameters() if p.grad is not None]
            if found:
                self.norm, self.largest = float(torch.cat(found).norm()), float(torch.cat(found).abs().max())

    module = Seen()
    trainer(num_ranks, gradient_clip_val=1e-3, max_steps=3).fit(module)
    assert module.norm == pytest.approx(1e-3, rel=1e-2)
    module = Seen()
    trainer(num_ranks, gradient_clip_val=1e-4, gradient_clip_algorithm="value", max_steps=3).fit(module)
    assert module.largest == pytest.approx(1e-4, rel=1e-4)
