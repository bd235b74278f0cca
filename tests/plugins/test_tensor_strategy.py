# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism under Lightning: who reads what, what is logged, how far a seed goes, what is left after a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from stratagem.plugins.tensor import TensorParallelStrategy
from stratagem.strategy.settings import RunSettings
from stratagem.testing.contract.parity import close_states
from stratagem.testing.ranks import run_ranks


class Talkative(LightningModule):
    """Remembers the rows that it read, its losses, and what its strategy's means of talking gave."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 6), nn.ReLU(inplace=True), nn.Linear(6, 4), nn.BatchNorm1d(4))
        self.rows: list[list[float]] = []
        self.losses: list[float] = []
        self.said: list[float] = []

    @override
    def on_train_start(self) -> None:
        mine = torch.tensor(float(self.global_rank))
        self.said = [float(self.trainer.strategy.reduce(mine, reduce_op=op)) for op in ("sum", "max")]

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.layers(batch) - batch).square().mean()
        self.rows.append(batch.flatten().tolist())
        self.losses.append(float(loss.detach()))
        self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=False)
        return loss

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _fit(tp: int, own_seeds: bool = False) -> dict[str, Any]:
    seed_everything(1 + (dist.get_rank() if own_seeds else 0), verbose=False)
    module = Talkative()
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=TensorParallelStrategy(tp=tp, run=RunSettings(batch_size="global")),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(torch.arange(8.0).view(8, 1), batch_size=4))  # type: ignore[arg-type]
    return {
        "rows": module.rows,
        "losses": module.losses,
        "said": module.said,
        "metric": float(trainer.callback_metrics["loss"]),
        "state": {name: value.clone() for name, value in module.state_dict().items()},
        "classes": [type(layer).__name__ for layer in module.layers],
    }


@pytest.mark.slow
def test_rows_read_alike_and_reduce_goes_over_data_ranks() -> None:
    """And every rank starts from rank 0's values, and has an ordinary whole module after the run."""
    alike = run_ranks(4, _fit, {"tp": 2})
    seeded = run_ranks(4, _fit, {"tp": 2, "own_seeds": True})
    for found in alike:
        assert found["said"] in ([0.0 + 2.0, 2.0], [1.0 + 3.0, 3.0])  # its own column of ranks
        assert found["classes"] == ["Linear", "ReLU", "Linear", "BatchNorm1d"]
        close_states(found["state"], alike[0]["state"], 0.0, "ranks after the run")
    for found, mate in ((alike[0], alike[1]), (alike[2], alike[3])):
        assert (found["rows"], found["losses"]) == (mate["rows"], mate["losses"])
    assert alike[0]["rows"] != alike[2]["rows"]
    last = [sum(found["losses"][-2:]) / 2 for found in alike]
    assert alike[0]["metric"] == pytest.approx((last[0] + last[2]) / 2, rel=1e-6)
    assert len({found["metric"] for found in alike}) == 1
    for found, same in zip(seeded, alike, strict=True):
        assert found["losses"] == same["losses"]


def test_the_run_is_that_of_one_rank_and_the_module_is_whole_again() -> None:
    one = run_ranks(1, _fit, {"tp": 1})[0]
    two = run_ranks(2, _fit, {"tp": 2})
    for found in two:
        assert found["losses"] == pytest.approx(one["losses"], rel=1e-5)
        close_states(found["state"], one["state"], 1e-5, "whole state")
