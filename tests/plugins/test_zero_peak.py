# SPDX-License-Identifier: Apache-2.0
"""Stage 3 is never whole: what the kernel says of a rank's resident memory, from building the module to its steps."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stratagem.measure.memory import peak_rss
from stratagem.plugins.zero import Zero3, ZeroSettings
from stratagem.plugins.zero.initial import ShardedInit
from stratagem.plugins.zero.lane import SHARD_AXES
from tests.plugins import zero_cases as cases

SMALL, LARGE, WIDTH = 16, 112, 512
"""Blocks of 1 MiB. The difference of two depths is compared, since what does not grow with the model is no share of it:
blocks and gradients in flight, the ring's memory."""

_M_MMAP_THRESHOLD = -3
"""Of mallopt: has every tensor of 64 KiB or more given back when it is freed, so that the peak is what is in use."""


class Stack(nn.Module):
    """Blocks of one matrix each."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def _peak(depth: int, make: Callable[[nn.Module], torch.optim.Optimizer], *, naive: bool = False) -> int:
    """By how much resident memory grows at its highest: built divided, trained for two steps."""
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)
    here = cases.context()
    torch.manual_seed(0)
    nn.Linear(WIDTH, WIDTH)(torch.randn(2, WIDTH)).sum().backward()  # what torch itself keeps from then on
    with peak_rss() as peak:
        with ShardedInit(here.communicator(*SHARD_AXES, lane="parameters"), whole_mib=2.0) as initial:
            module = Stack(depth)
        zero = Zero3(ZeroSettings(bucket_mib=2.1, restore_parameters=False), initial=initial)
        zero.apply(module, here)
        optimizer = make(module)
        zero.attach([optimizer])
        for _ in range(2):
            for unit in zero._fetcher.units if naive else ():
                zero._fetcher.fetch(unit)
            module(torch.randn(2, WIDTH)).backward()
            optimizer.step()
            optimizer.zero_grad()
    zero.close()
    here.close()
    return peak.num_bytes


@pytest.mark.slow
@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize(("kind", "per_parameter"), [("sgd", 8), ("adam", 16)])
def test_a_run_of_stage_3_peaks_at_its_share_and_the_blocks_in_flight(kind: str, per_parameter: int) -> None:
    """Of 96 MiB more of parameters, 8/N bytes each under plain SGD and 16/N under Adam arrive at a rank, and no more:
    at N = 4 half of the parameters, or as much as they are. Who gathers all at the start of a step needs them whole."""

    def make(module: nn.Module) -> torch.optim.Optimizer:
        if kind == "sgd":
            return torch.optim.SGD(module.parameters(), lr=1e-3, foreach=False)
        return torch.optim.Adam(module.parameters(), lr=1e-3, foreach=False)

    numel = (LARGE - SMALL) * (WIDTH + 1) * WIDTH
    share = numel * per_parameter / dist.get_world_size()
    grows = _peak(LARGE, make) - _peak(SMALL, make)
    assert 0.8 * share < grows < 1.25 * share + 2**24, (grows / 2**20, share / 2**20)
    if kind == "sgd":
        assert grows < 0.85 * numel * 4
        naive = _peak(LARGE, make, naive=True) - _peak(SMALL, make, naive=True)
        assert naive > share + 0.6 * numel * 4, (naive / 2**20, share / 2**20)
