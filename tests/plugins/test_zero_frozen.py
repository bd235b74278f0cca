# SPDX-License-Identifier: Apache-2.0
"""What is trained may change at any micro-batch, until its gradient arrives: every stage, against one process."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stratagem.plugins.zero import Zero1, Zero2, Zero3, ZeroSettings
from tests.plugins import zero_cases as cases

STAGES = {"zero_1": Zero1, "zero_2": Zero2, "zero_3": Zero3}

SCHEDULES = {
    # Layers trained at micro-batch 0, 1, 2, 3 of four layers, and again.
    "unfreezes": ({3}, {2, 3}, {1, 2, 3}, {0, 1, 2, 3}),
    "alternates": ({1, 2, 3}, {0, 2, 3}, {0, 1, 3}, {0, 1, 2}),
    "joins": ({0, 1, 2}, {1, 2, 3}, {0, 1, 2}, {1, 2, 3}),
    "leaves": ({0, 1, 2, 3}, {3}, {0, 1, 2, 3}, {0}),
}


class Layers(nn.Module):
    """Four layers; ranks use the second one only in some micro-batches, each in others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4)).double()

    def forward(self, x: Tensor, skips: bool) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x if skips and number == 1 else torch.tanh(layer(x))
        return x.square().sum()

    def train_only(self, numbers: set[int]) -> None:
        for number, layer in enumerate(self.layers):
            layer.requires_grad_(number in numbers)


def _samples(index: int, rank: int) -> Tensor:
    return torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * index + rank))


def _skips(index: int, rank: int, stage: str) -> bool:
    return stage != "zero_3" and (index + rank) % 3 == 0  # stage 3 needs the same fetches on all ranks


def _train(
    module: Layers, zero: object, optimizer: torch.optim.Optimizer, schedule: str, window: int, how: str
) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    stage = "one" if zero is None else f"zero_{zero.stage}"
    trained = SCHEDULES[schedule]
    for index in range(8):
        if zero is None:
            module.train_only(trained[index % 4])
            for each in range(size):
                if any(p.requires_grad for p in module.parameters()):
                    (module(_samples(index, each), _skips(index, each, how)) / size).backward()
        else:
            with nullcontext() if (index + 1) % window == 0 else zero.no_sync():
                if how == "strategy":  # which begins before the step is run, and again when backward is about to
                    zero.begin()
                module.train_only(trained[index % 4])
                loss = module(_samples(index, rank), _skips(index, rank, stage))
                if how == "strategy":
                    zero.begin()
                loss.backward()
                if how == "strategy":
                    zero.finish()
        if (index + 1) % window == 0:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("starts", ["frozen", "trained"])
def test_what_is_trained_may_change_until_its_gradient_arrives(stage: str, starts: str) -> None:
    """What was frozen at the end of a window that piles up took with it what it had gathered before, and a layer
    unfrozen within a step was left out. Now a window remembers, and the choice is made when backward starts."""
    here = cases.context()
    windows = [(1, "partition"), (2, "partition"), *[(2, "whole")] * (stage != "zero_1")]
    # Who unfreezes without a `begin` has hooks only on what was trained at some time.
    loops = ["strategy"] if starts == "frozen" else ["plain"]
    for schedule, (window, accumulation), mib, how in itertools.product(SCHEDULES, windows, (1e-5, 1.0), loops):
        module, reference = Layers(), Layers()
        if starts == "frozen":
            module.train_only(SCHEDULES[schedule][0])
        settings = ZeroSettings(
            bucket_mib=mib, first_bucket_mib=mib, accumulation=accumulation, persistence_threshold=0
        )
        zero = STAGES[stage](settings)
        zero.apply(module, here)
        optimizers = [
            torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9, weight_decay=0.1) for m in (module, reference)
        ]
        zero.attach(optimizers[:1])
        _train(module, zero, optimizers[0], schedule, window, how)
        _train(reference, None, optimizers[1], schedule, window, stage)
        zero.close()
        try:
            cases.assert_ranks_agree(list(module.parameters()))
            cases.assert_same_parameters(module, reference)
        except AssertionError as error:
            raise AssertionError(f"{schedule}, window {window}, {accumulation}, {mib}, {how}: {error}") from error
    here.close()
