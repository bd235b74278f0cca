# SPDX-License-Identifier: Apache-2.0
"""The secondary shard: backward fetches within a group of neighbours, and computes what it would have anyway."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stratagem.errors import ConfigError
from stratagem.measure.wire import WireBytes
from stratagem.plugins.zero import Zero1, Zero3, ZeroSettings
from tests.plugins import zero_cases as cases

WIDTH, DEPTH = 192, 6
PARAMETERS = DEPTH * (WIDTH + 1) * WIDTH * 4


def _stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("group", [2, 0])
def test_backward_fetches_nothing_from_another_group(group: int) -> None:
    """Two groups of two, by the kernel's count for each peer; gradients are held back, since they have to travel.
    Without a secondary shard the same measurement finds what travels between the groups."""
    rank, module = dist.get_rank(), _stack()
    settings = ZeroSettings(secondary_shard=group, accumulation="whole", broadcast_buffers=False)
    zero, here = Zero3(settings), cases.context(transport="p2p")
    zero.apply(module, here)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    zero.attach([optimizer])
    x = torch.randn(4, WIDTH, requires_grad=True)
    for _ in range(2):  # sockets open, and the step after is counted by the books
        before = here.traffic.total()
        module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        booked = (here.traffic.total() - before).num_bytes
    assert booked == pytest.approx(sum(zero.wire_bytes_per_step().values()), rel=0.005)
    with zero.no_sync():
        loss = module(x).square().mean()
        dist.barrier()
        with WireBytes() as wire:
            loss.backward()
    dist.barrier()
    sent = wire.by_rank()
    between = sum(num_bytes for peer, num_bytes in enumerate(sent) if peer // 2 != rank // 2)
    if group:
        assert between == 0, sent
        assert sum(sent) == pytest.approx(PARAMETERS / 2, rel=0.01)
    elif rank % 2:  # whose right neighbour is in the other group
        assert between == pytest.approx(PARAMETERS * 3 / 4, rel=0.01)
    zero.close()
    here.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("group", [1, 2, 4])
def test_a_run_with_a_secondary_shard_is_that_of_one_process(group: int) -> None:
    """Parameters change at a step, and with them what the group keeps: nothing stale is computed with."""
    for micro_batches, accumulation in ((1, "partition"), (3, "partition"), (3, "whole")):
        module, reference = cases.awkward(), cases.awkward()
        settings = ZeroSettings(
            secondary_shard=group, persistence_threshold=0, bucket_mib=1e-3, accumulation=accumulation
        )
        zero, here = Zero3(settings), cases.context()
        zero.apply(module, here)
        cases.train(module, cases.sgd, zero, here, micro_batches=micro_batches)
        cases.train(reference, cases.sgd, micro_batches=micro_batches)
        assert not any(unit.secondary for unit in zero._fetcher.units)
        zero.close()
        cases.assert_same_parameters(module, reference)
        here.close()


@pytest.mark.ranks(3)
def test_a_group_that_does_not_fit_is_refused() -> None:
    here = cases.context()
    with pytest.raises(ConfigError, match=r"zero.secondary_shard: secondary_shard is 2, and 3 ranks.*1, 3"):
        Zero3(ZeroSettings(secondary_shard=2)).apply(_stack(), here)
    with pytest.raises(ConfigError, match=r"zero.secondary_shard: secondary_shard is -1"):
        ZeroSettings(secondary_shard=-1)
    with pytest.warns(UserWarning, match="changes nothing before stage 3"):
        Zero1(ZeroSettings(secondary_shard=3)).apply(_stack(), here)
    here.close()
