# SPDX-License-Identifier: Apache-2.0
"""Modules and one training loop that the tests of ZeRO share: the loop knows no technique, the modules are awkward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.mesh import MeshShape
from stratagem.placement import clip_by_norm, global_norm
from stratagem.plugins.zero.technique import Zero
from stratagem.technique import Context

STEPS = 4
CLIP = 0.05


def context(*, replicas: int = 1, **options: object) -> Context:
    """All ranks of the gang on `dp_shard`, or in `replicas` groups."""
    shape = MeshShape.fit(dist.get_world_size(), fill="dp_shard", dp_replicate=replicas)
    return Context(shape, dist.get_rank(), torch.device("cpu"), timeout=timedelta(seconds=20), **options)


class Awkward(nn.Module):
    """Odd sizes, a tied head, frozen and unused parameters, an alternating branch, many tiny parameters, one large."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.large = nn.Linear(7, 37)
        self.tiny = nn.ParameterList(nn.Parameter(torch.randn(3)) for _ in range(9))
        self.frozen = nn.Linear(37, 7)
        self.frozen.requires_grad_(False)
        self.left, self.right = nn.Linear(7, 7), nn.Linear(7, 7)
        self.unused = nn.Linear(2, 3)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.empty = nn.Parameter(torch.zeros(0))
        self.image = nn.Conv2d(2, 3, 2)
        self.image.weight.data = self.image.weight.data.to(memory_format=torch.channels_last)

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        hidden = self.frozen(torch.tanh(self.large(self.embed(tokens))))
        hidden = hidden + sum(p.sum() for p in self.tiny) / 10
        hidden = (self.left if step % 2 else self.right)(hidden)
        pixels = torch.tanh(hidden[:, :2, None, None] * torch.ones(2, 2, dtype=hidden.dtype))
        return self.head(hidden).logsumexp(-1) + self.image(pixels).square().sum((1, 2, 3))


def awkward() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return Awkward().double()


def batch(rank: int | None, size: int, step: int, *, rows: int = 3) -> Tensor:
    """Token numbers of one rank, or of all ranks."""
    everything = torch.randint(0, 13, (rows * size,), generator=torch.Generator().manual_seed(step))
    return everything if rank is None else everything[rank * rows : (rank + 1) * rows]


def sgd(module: nn.Module) -> Optimizer:
    """Two groups: momentum and weight decay differ."""
    matrices = [p for p in module.parameters() if p.ndim >= 2]
    others = [p for p in module.parameters() if p.ndim < 2]
    return torch.optim.SGD(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "momentum": 0.5}], lr=0.3, momentum=0.9
    )


def adamw(module: nn.Module) -> Optimizer:
    """Decoupled weight decay."""
    return torch.optim.AdamW(module.parameters(), lr=0.02, weight_decay=0.1)


def clip(optimizer: Optimizer, zero: Zero | None, here: Context | None) -> float:
    """Clips as the strategy does; in one process as torch does. Returns the norm."""
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    if zero is None:
        return float(nn.utils.clip_grad_norm_(tensors, CLIP))
    assert here is not None
    parts = zero.norm_parts(tensors)
    norm = global_norm(parts, here.reduce)
    clip_by_norm([gradient for _, gradient in parts], norm, CLIP)
    return float(norm)


def train(
    module: nn.Module,
    make: Callable[[nn.Module], Optimizer],
    zero: Zero | None = None,
    here: Context | None = None,
    *,
    steps: Sequence[int] = range(STEPS),
    micro_batches: int = 1,
    optimizer: Optimizer | None = None,
) -> tuple[list[float], list[float], Optimizer]:
    """A plain loop; without `zero` one process reads the batches of all ranks. Returns losses, norms, optimizer."""
    size = dist.get_world_size()
    if optimizer is None:
        optimizer = make(module)
        if zero is not None:
            zero.attach([optimizer])
    losses, norms = [], []
    for step in steps:
        for micro in range(micro_batches):
            seed = step * 10 + micro
            if zero is None:
                loss = module(batch(None, size, seed), step).mean() / micro_batches
                loss.backward()
            elif micro < micro_batches - 1:
                with zero.no_sync():
                    loss = module(batch(dist.get_rank(), size, seed), step).mean() / micro_batches
                    loss.backward()
                    zero.finish()
            else:
                loss = module(batch(dist.get_rank(), size, seed), step).mean() / micro_batches
                loss.backward()
        losses.append(float(loss.detach()))
        norms.append(clip(optimizer, zero, here))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, optimizer


def assert_same_parameters(found: nn.Module, expected: nn.Module, tolerance: float = 1e-10) -> None:
    """Relative to the largest magnitude of each parameter."""
    for (name, mine), reference in zip(found.named_parameters(), expected.parameters(), strict=True):
        scale = float(reference.detach().abs().max()) if reference.numel() else 1.0
        error = float((mine.detach() - reference.detach()).abs().max()) if mine.numel() else 0.0
        assert error <= tolerance * max(scale, 1e-3), f"{name} differs by {error}, scale {scale}"


def assert_ranks_agree(tensors: Sequence[Tensor]) -> None:
    """Bit by bit."""
    everyone: list[list[Tensor]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, [t.detach().clone() for t in tensors])
    for other in everyone:
        for mine, theirs in zip(everyone[0], other, strict=True):
            assert torch.equal(mine, theirs)
