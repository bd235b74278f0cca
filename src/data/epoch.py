# SPDX-License-Identifier: Apache-2.0
"""One epoch, or what is left of it, as a table: step and rank to sample indices.

A `Source` says in which order the samples of an epoch come; an `EpochPlan` cuts that order into steps and ranks, from a
`Position` on. Sources that are a user's own sampler are run once per epoch under random state that is seeded by
(seed, epoch) and restored afterwards, so every rank, and every resumed run, draws the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, final

import numpy as np
import torch
from torch import Tensor

from stratagem.data.order import BatchOrder, EvalOrder, cut, derive_seed, epoch_order
from stratagem.errors import DataError

Split = Literal["per_rank", "global", "evaluate"]
T = TypeVar("T")


@final
@dataclass(frozen=True)
class Position:
    """How far into the data a run is: `samples` (over all ranks) and `batches` of `epoch` have been delivered."""

    epoch: int = 0
    samples: int = 0
    batches: int = 0


@final
@dataclass(frozen=True)
class Source:
    """The order of the samples of each epoch.

    Args:
        num_samples: the length, where it is known; None for a sampler that has to be run.
        shuffle: shuffle by (seed, epoch); only with `num_samples`.
        sampler: the user's sampler (of indices, or of lists of them), run once per epoch.
    """

    num_samples: int | None = None
    shuffle: bool = False
    sampler: Iterable[Any] | None = None

    def order(self, seed: int, epoch: int) -> Tensor:
        """int64 tensor [samples of the epoch]."""
        if self.sampler is None:
            assert self.num_samples is not None
            return epoch_order(self.num_samples, self.shuffle, seed, epoch)
        return torch.tensor([int(index) for index in draw(self.sampler, seed, epoch)], dtype=torch.int64, device="cpu")

    def batches(self, seed: int, epoch: int) -> list[list[int]]:
        """The batches of a user's batch sampler."""
        assert self.sampler is not None, "a number of samples needs a batch size"
        return [[int(index) for index in batch] for batch in draw(self.sampler, seed, epoch)]


class EpochPlan(Protocol):
    """The steps that are left of one epoch, counted from 0."""

    @property
    def num_batches(self) -> int:
        """Steps left, equal on all ranks."""
        ...

    def indices(self, step: int) -> list[int]:
        """Sample indices that this rank loads at `step`; never empty."""
        ...

    def size(self, step: int, rank: int) -> int:
        """Rows of `rank` at `step` that count."""
        ...

    def consumed(self, num_batches: int) -> int:
        """Samples, over all ranks, in the first `num_batches` steps."""
        ...


@final
@dataclass(frozen=True)
class FlatPlan:
    """The plan of a source of single samples: an order, and the arithmetic that cuts it from position `offset` on."""

    order: Tensor
    offset: int
    cuts: BatchOrder | EvalOrder

    @property
    def num_batches(self) -> int:
        """Steps left, equal on all ranks."""
        return self.cuts.num_batches

    def indices(self, step: int) -> list[int]:
        """Sample indices that this rank loads at `step`; never empty."""
        start, stop = self.cuts.rows(step)
        indices: list[int] = self.order[self.offset + start : self.offset + stop].tolist()
        return indices

    def size(self, step: int, rank: int) -> int:
        """Rows of `rank` at `step` that count."""
        return self.cuts.size(step, rank)

    def consumed(self, num_batches: int) -> int:
        """Samples, over all ranks, in the first `num_batches` steps."""
        return sum(self.cuts.global_size(step) for step in range(num_batches))


@final
@dataclass(frozen=True)
class BatchedPlan:
    """The plan of a user's batch sampler: the rows of each step and rank, some of them empty in the last steps."""

    steps: tuple[tuple[list[int], ...], ...]
    rank: int

    @property
    def num_batches(self) -> int:
        """Steps left, equal on all ranks."""
        return len(self.steps)

    def indices(self, step: int) -> list[int]:
        """Sample indices that this rank loads at `step`; never empty."""
        return self.steps[step][self.rank] or [next(rows[-1] for rows in reversed(self.steps[step]) if rows)]

    def size(self, step: int, rank: int) -> int:
        """Rows of `rank` at `step` that count."""
        return len(self.steps[step][rank])

    def consumed(self, num_batches: int) -> int:
        """Samples, over all ranks, in the first `num_batches` steps."""
        return sum(len(rows) for step in self.steps[:num_batches] for rows in step)


def plan_samples(
    order: Tensor, samples_done: int, *, batch_size: int, split: Split, num_replicas: int, rank: int, drop_last: bool
) -> FlatPlan:
    """Cuts what is left of an order of single samples; the arguments are those of `OrderedBatchSampler`."""
    left = len(order) - samples_done
    if left < 0:
        raise _outside(samples_done, len(order))
    if split == "evaluate":
        return FlatPlan(order, samples_done, EvalOrder(left, batch_size, num_replicas, rank))
    global_batch = batch_size if split == "global" else batch_size * num_replicas
    return FlatPlan(order, samples_done, BatchOrder(left, global_batch, num_replicas, rank, drop_last))


def plan_batches(
    batches: list[list[int]], samples_done: int, *, split: Split, num_replicas: int, rank: int, drop_last: bool
) -> BatchedPlan:
    """Shares out what is left of a user's own batches; the arguments are those of `OrderedBatchSampler`."""
    batches = _after([batch for batch in batches if batch], samples_done)
    steps: list[tuple[list[int], ...]]
    if split == "global":
        if batches and max(map(len, batches)) < num_replicas:
            raise DataError(
                f"the batches of the batch sampler have fewer rows than there are data ranks ({num_replicas})",
                where="data",
                allowed=f"batches of {num_replicas} rows or more",
                do="make larger batches or use fewer data ranks",
            )
        cuts = [[cut(len(batch), num_replicas, part) for part in range(num_replicas)] for batch in batches]
        steps = [tuple(batch[a:b] for a, b in parts) for batch, parts in zip(batches, cuts, strict=True)]
    elif split == "per_rank":
        groups = [batches[start : start + num_replicas] for start in range(0, len(batches), num_replicas)]
        if drop_last and groups and len(groups[-1]) < num_replicas:
            del groups[-1]
        steps = [tuple(group + [[]] * (num_replicas - len(group))) for group in groups]
    else:
        shares = [batches[slice(*cut(len(batches), num_replicas, part))] for part in range(num_replicas)]
        longest = len(shares[0])
        steps = list(zip(*(share + [[]] * (longest - len(share)) for share in shares), strict=True))
    return BatchedPlan(tuple(steps), rank)


def draw(sampler: Iterable[T], seed: int, epoch: int) -> list[T]:
    """Everything a user's sampler yields in `epoch`, the same on every rank; leaves all random state as it was.

    Seeded are torch's, numpy's and Python's global generators and, where there is one, `sampler.generator`, which is
    how torch's own samplers take theirs. A sampler with `set_epoch` is told the epoch.
    """
    tell_epoch = getattr(sampler, "set_epoch", None)
    if callable(tell_epoch):
        tell_epoch(epoch)
    inner = getattr(sampler, "sampler", None)  # a batch sampler draws from its sampler
    generators = [getattr(part, "generator", None) for part in (sampler, inner)]
    with seeded(derive_seed(seed, "epoch", epoch), [g for g in generators if isinstance(g, torch.Generator)]):
        return list(sampler)


@contextmanager
def seeded(seed: int, generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Global CPU random state, and `generators`, seeded inside and put back afterwards."""
    own = [(generator, generator.get_state()) for generator in generators]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            for generator, _ in own:
                generator.manual_seed(seed)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for generator, state in own:
            generator.set_state(state)


def _after(batches: list[list[int]], samples_done: int) -> list[list[int]]:
    done = 0
    for position, batch in enumerate(batches):
        if done == samples_done:
            return batches[position:]
        done += len(batch)
    if done != samples_done:
        raise _outside(samples_done, done)
    return []


def _outside(samples_done: int, num_samples: int) -> DataError:
    return DataError(
        f"the run to resume had consumed {samples_done} samples of its epoch, no place among {num_samples} here",
        where="the position in the data",
        do="resume with the data, the batches and the seed of that run",
    )
