# SPDX-License-Identifier: Apache-2.0
"""The drift sentinel: what the placements say is equal on several ranks is compared, bit by bit, once in a while.

A missed reduction, a bit that turned over in memory or an update made on one rank alone does not show in the loss for a
long time. What is compared:

    parameters            whole ones on all ranks; of divided ones the pieces, on ranks that hold the same piece
    buffers               on all ranks; where the strategy does not share them, those that no step has written to
    optimizer step counts on all ranks that have any
    moments               if asked for: as the parameter, or the piece, that they belong to

Note [two levels]: first each rank tells five numbers, 40 bytes to each other rank: hashes over what it holds, and its
smallest and largest step count. Only where those differ the hashes of everything travel, 60 bytes per tensor, once.
Step counts that differ between parameters on every rank hide a count that lies between them from the first level.

What it costs: one pass over the memory that is compared, CRC-32 on the CPU (some gigabytes per second) and a weighted
sum on another device. Every single turned bit changes either.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, final

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from stratagem.placement import Placement
from stratagem.resilience.guard_peers import Peers
from stratagem.resilience.guard_settings import Drift
from stratagem.strategy.base import MeshStrategy

_CHUNK = 2**22
_STEP = "step count of "


@torch.no_grad()
def bits_hash(tensor: Tensor) -> int:
    """A hash of a tensor's bits; one that differs in a single bit has another hash. Local; reads the tensor once.

    On the CPU the CRC-32; elsewhere a sum modulo 2^64 of 4-byte words times odd numbers, computed where it lies, with
    32 MiB of memory beside it.

    Example:
        >>> one = torch.ones(5)
        >>> bits_hash(one) == bits_hash(one.clone()), bits_hash(one) == bits_hash(one.double())
        (True, False)
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        return zlib.crc32(flat.numpy().data)
    return _weighted(flat)


def _weighted(flat: Tensor) -> int:
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        piece = flat[start : start + _CHUNK]
        if piece.numel() % 4 or piece.storage_offset() % 4:
            piece = torch.nn.functional.pad(piece, (0, -piece.numel() % 4)).clone()
        words = piece.view(torch.int32).to(torch.int64)
        weights = torch.arange(start, start + words.numel(), device=flat.device, dtype=torch.int64).mul_(2).add_(1)
        total += words.mul_(weights).sum()
    return int(total) % 2**64


@final
@dataclass(frozen=True)
class Holding:
    """Everything this rank holds of what is compared, by name; the name of a piece tells which piece it is.

    Attributes:
        replicated: what every rank has.
        placed: what some ranks have.
        steps: step counts, by parameter.
    """

    replicated: Mapping[str, int]
    placed: Mapping[str, int]
    steps: Mapping[str, float]

    def summary(self) -> list[float]:
        """The five numbers of Note [two levels]; each is exact in float64."""
        steps = self.steps.values()
        whole = [
            _short(sorted(self.replicated.items())),
            _short(sorted(self.placed)),
            _short(sorted(self.placed.items())),
        ]
        return [*whole, min(steps, default=-1.0), max(steps, default=-1.0)]

    def entries(self) -> dict[str, float]:
        """All in one."""
        return {**self.replicated, **self.placed, **{_STEP + name: step for name, step in self.steps.items()}}


def _short(listing: Any) -> float:
    return float(int.from_bytes(hashlib.blake2b(repr(listing).encode(), digest_size=6).digest(), "big"))


def suspicious(summaries: Sequence[Sequence[float]]) -> bool:
    """Whether the summaries of all ranks call for a closer look."""
    if len({each[0] for each in summaries}) > 1:
        return True
    contents: dict[float, float] = {}
    for _, keys, content, *_ in summaries:
        if contents.setdefault(keys, content) != content:
            return True
    steps = [(low, high) for *_, low, high in summaries if high >= 0]
    return len(set(steps)) > 1


def first_difference(holdings: Sequence[Mapping[str, float]]) -> str:
    """The first name whose values differ, who has which, and the odd ones out; empty if all that have it agree.

    Example:
        >>> first_difference([{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1, "b": 2}])
        'b is not the same on ranks 0, 1, 2: rank 1 is the odd one out'
        >>> first_difference([{"a": 1}, {"b": 7}, {"a": 2}])
        'a is not the same on ranks 0, 2: with 2 ranks there is no majority'
    """
    names = dict.fromkeys(name for holding in holdings for name in holding)
    for name in names:
        found = {rank: holding[name] for rank, holding in enumerate(holdings) if name in holding}
        counts = Counter(found.values()).most_common()
        if len(counts) < 2:
            continue
        value, most = counts[0]
        if 2 * most > len(found):
            odd = [rank for rank, theirs in found.items() if theirs != value]
            verdict = f"rank {odd[0]} is the odd one out" if len(odd) == 1 else f"ranks {_listed(odd)} are the odd ones"
        else:
            verdict = f"with {len(found)} ranks there is no majority"
        return f"{name} is not the same on ranks {_listed(found)}: {verdict}"
    return ""


def _listed(ranks: Any) -> str:
    return ", ".join(map(str, ranks))


@final
class Sentinel:
    """Compares what must be equal. Made on every rank once the strategy is set up.

    Args:
        trainer: whose strategy states placements, or keeps whole replicas.
        module: what is trained.
        peers: all ranks.
        settings: see `Drift`.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, peers: Peers, settings: Drift) -> None:
        self._trainer, self._module, self._peers, self._settings = trainer, module, peers, settings
        self._untouched = {name: (id(buffer), buffer._version) for name, buffer in module.named_buffers()}

    def check(self) -> str:
        """What differs first, in words, the same on every rank; empty if nothing does. Collective: see Note [two
        levels]."""
        mine = self.holding()
        if not suspicious(self._peers.everyone(mine.summary())):
            return ""
        return first_difference(self._peers.objects(mine.entries()))

    def holding(self) -> Holding:
        """What this rank holds now. Local."""
        strategy = self._trainer.strategy
        placements = strategy.context.placements if isinstance(strategy, MeshStrategy) and strategy.context else {}
        replicated, placed, steps = dict[str, int](), dict[str, int](), dict[str, float]()
        for name, parameter in self._module.named_parameters():
            place = placements.get(name)
            if (place is None or not place.shard_axes) and self._wanted(name):
                replicated[f"parameter {name}"] = bits_hash(parameter)
        for name, buffer in self._buffers():
            if self._wanted(name):
                replicated[f"buffer {name}"] = bits_hash(buffer)
        for name, tensor, place, state in self._optimized():
            if not self._wanted(name):
                continue
            divided = place is not None and bool(place.shard_axes)
            piece = f"{name}[{place.flat or ''}{place.box or ''}]" if divided and place is not None else name
            if divided and placements.get(name) == place and tensor.numel():
                placed[f"piece {piece}"] = bits_hash(tensor)
            if "step" in state:
                steps[name] = float(state["step"])
            if self._settings.moments:
                for key, value in sorted(state.items()):
                    if isinstance(value, Tensor) and key != "step":
                        (placed if divided else replicated)[f"{key} of {piece}"] = bits_hash(value)
        return Holding(replicated, placed, steps)

    def _wanted(self, name: str) -> bool:
        return not any(fnmatch(name, pattern) for pattern in self._settings.ignore)

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Those that are equal after a step.

        Lightning's `ddp` gives all ranks rank 0's before a forward, which then changes them: there only those that no
        step has written to are equal. Batch norm's kernel writes without counting a version.
        """
        strategy = self._trainer.strategy
        data = strategy._data if isinstance(strategy, MeshStrategy) else None
        in_sync = bool(getattr(getattr(data, "settings", None), "broadcast_buffers", False))
        for prefix, owner in self._module.named_modules():
            unequal = isinstance(owner, _BatchNorm) and not isinstance(owner, SyncBatchNorm)
            for name, buffer in owner.named_buffers(prefix, recurse=False):
                if in_sync or (not unequal and self._untouched.get(name) == (id(buffer), buffer._version)):
                    yield name, buffer

    def _optimized(self) -> Iterator[tuple[str, Tensor, Placement | None, Mapping[str, Any]]]:
        """Per tensor of the optimizers: its parameter's name, itself, where it lives, its state."""
        strategy = self._trainer.strategy
        data = strategy._data if isinstance(strategy, MeshStrategy) else None
        names = data.names if data is not None else {id(p): name for name, p in self._module.named_parameters()}
        for optimizer in self._trainer.optimizers:
            for number, tensor in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                name = names.get(id(getattr(tensor, "whole", tensor)), f"parameter {number}")
                place = data.placement_of(tensor) if data is not None else None
                yield name, tensor, place, optimizer.state.get(tensor, {})
