# SPDX-License-Identifier: Apache-2.0
"""Batch norm over ranks equals batch norm over the whole batch in one process."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stratagem.mesh import MeshShape
from stratagem.strategy.sync_batchnorm import BatchNormOverRanks, convert_batchnorm, restore_batchnorm
from stratagem.technique import Context

LAYERS = {
    "1d": (lambda: nn.BatchNorm1d(3), (3,)),
    "2d": (lambda: nn.BatchNorm2d(3), (3, 2, 4)),
    "no affine": (lambda: nn.BatchNorm1d(3, affine=False), (3,)),
    "cumulative": (lambda: nn.BatchNorm1d(3, momentum=None), (3,)),
    "no statistics": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (3,)),
}


def context() -> Context:
    shape = MeshShape.fit(dist.get_world_size())
    return Context(shape, dist.get_rank(), torch.device("cpu"), timeout=timedelta(seconds=20))


def batch(step: int, shape: tuple[int, ...], offset: float) -> list[Tensor]:
    """What each rank reads: 2, 3, 4, ... samples."""
    generator = torch.manual_seed(step)
    sizes = [2 + rank for rank in range(dist.get_world_size())]
    return [torch.randn(n, *shape, generator=generator, dtype=torch.float64) * 3 + offset for n in sizes]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_equals_one_process_on_the_whole_batch(kind: str, offset: float) -> None:
    make, shape = LAYERS[kind]
    here = context()
    torch.manual_seed(0)
    module, reference = (nn.Sequential(nn.Identity(), make()).double() for _ in range(2))
    for model in (module, reference):
        for p in model.parameters():
            torch.nn.init.uniform_(p, generator=torch.manual_seed(1))
    convert_batchnorm(module, here)
    assert isinstance(module[1], BatchNormOverRanks)
    for step in range(3):
        parts = batch(step, shape, offset)
        mine = parts[here.rank].clone().requires_grad_()
        whole = torch.cat(parts).requires_grad_()
        weights = torch.randn(whole.shape, generator=torch.manual_seed(9), dtype=torch.float64)
        start = sum(len(part) for part in parts[: here.rank])
        out, expected = module(mine), reference(whole)
        torch.testing.assert_close(out, expected[start : start + len(mine)], rtol=1e-9, atol=1e-9)
        module.zero_grad()
        reference.zero_grad()
        (out * weights[start : start + len(mine)]).sum().backward()
        (expected * weights).sum().backward()
        torch.testing.assert_close(mine.grad, whole.grad[start : start + len(mine)], rtol=1e-8, atol=1e-9)
        for p, q in zip(module.parameters(), reference.parameters(), strict=True):
            dist.all_reduce(p.grad)  # a data technique's part
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-8, atol=1e-9)
        for (name, p), q in zip(module.named_buffers(), reference.buffers(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9, msg=name)
    module.eval()
    reference.eval()
    if kind != "no statistics":
        torch.testing.assert_close(module(mine), reference(mine))
    restore_batchnorm(module)
    assert type(module[1]) is type(reference[1])
    assert module.state_dict().keys() == reference.state_dict().keys()
    torch.testing.assert_close(dict(module.state_dict()), dict(reference.state_dict()), rtol=1e-9, atol=1e-9)
    here.close()


@pytest.mark.ranks(1)
def test_one_rank_keeps_its_layers() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3))
    convert_batchnorm(module, context())
    assert type(module[0]) is nn.BatchNorm1d
