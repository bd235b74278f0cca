# SPDX-License-Identifier: Apache-2.0
"""Which sample goes to which rank at which step: arithmetic on frozen data, with no process and no loader in it.

An epoch has an *order*: the sample indices, shuffled or not, the same on every rank. Training walks along it one global
batch at a time, and each batch is cut into one contiguous piece per data rank. So the global batch of step k does not
depend on how many ranks there are:

    order      7 2 9 4 1 8 0 5 3 6          global_batch = 4, num_replicas = 2
    step         0       1      2
    rank 0     7 2     1 8      3           the last batch is uneven: `weight` keeps its mean exact
    rank 1         9 4     0 5    6

Evaluation has no global batch to keep. There each rank takes one contiguous share of the whole order, so that the
predictions of rank 0, 1, ... put one after the other are in order, and cuts it into as many batches as the others do.

Note [filler]: collectives need every rank at every step. A rank with nothing to do at a step repeats one row, and
`size` and `weight` are 0 there: multiplied by `weight`, it changes no mean.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from stratagem.errors import DataError


def cut(total: int, num_parts: int, index: int) -> tuple[int, int]:
    """Part `index` as [start, stop): `total` things in contiguous parts whose sizes differ by at most one.

    >>> [cut(10, 4, index) for index in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    small, num_large = divmod(total, num_parts)
    start = index * small + min(index, num_large)
    return start, start + small + (index < num_large)


def derive_seed(seed: int, *stream: int | str) -> int:
    """A seed in [0, 2**63) for one stream of random numbers; the same wherever and whenever it is computed.

    >>> derive_seed(0, 1) == derive_seed(0, 1), derive_seed(0, 1) == derive_seed(1, 0)
    (True, False)
    """
    text = "/".join(str(part) for part in (seed, *stream))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def epoch_order(num_samples: int, shuffle: bool, seed: int, epoch: int) -> Tensor:
    """The order of one epoch, the same on all ranks and untouched by the global random state.

    Returns:
        int64 tensor [num_samples]: 0, 1, 2, ... or, with `shuffle`, a permutation that depends on (seed, epoch) alone.

    >>> epoch_order(4, False, 0, 0).tolist(), sorted(epoch_order(4, True, 0, 0).tolist())
    ([0, 1, 2, 3], [0, 1, 2, 3])
    """
    if not shuffle:
        return torch.arange(num_samples, device="cpu")
    generator = torch.Generator(device="cpu").manual_seed(derive_seed(seed, "epoch", epoch))
    return torch.randperm(num_samples, generator=generator, device="cpu")


class Order(Protocol):
    """What training order and evaluation order have in common."""

    @property
    def num_batches(self) -> int:
        """Batches per epoch, equal on all ranks."""
        ...

    def rows(self, step: int) -> tuple[int, int]:
        """Positions [start, stop) in the order that this rank loads at `step`; never empty, see Note [filler]."""
        ...

    def size(self, step: int, rank: int | None = None) -> int:
        """Rows that count, on `rank` (default: this one), at `step`; 0 for a filler."""
        ...

    def global_size(self, step: int) -> int:
        """Rows that count at `step`, over all ranks."""
        ...

    def weight(self, step: int) -> float:
        """What to multiply this rank's mean with, so that the mean over the ranks is the mean over the rows."""
        ...


@final
@dataclass(frozen=True)
class BatchOrder:
    """Training order: contiguous global batches, each cut contiguously over the data ranks.

    Args:
        num_samples: length of the epoch's order.
        global_batch: samples per step, over all ranks.
        num_replicas: data ranks, those that read different samples.
        rank: which of them this one is.
        drop_last: leave out a last batch that is not full.

    >>> order = BatchOrder(num_samples=10, global_batch=4, num_replicas=2, rank=1)
    >>> [order.rows(step) for step in range(order.num_batches)]
    [(2, 4), (6, 8), (9, 10)]
    """

    num_samples: int
    global_batch: int
    num_replicas: int = 1
    rank: int = 0
    drop_last: bool = False

    def __post_init__(self) -> None:
        _check(self.num_samples, self.global_batch, self.num_replicas, self.rank)

    @property
    def num_batches(self) -> int:
        """Batches per epoch, equal on all ranks."""
        full, rest = divmod(self.num_samples, self.global_batch)
        return full + (rest > 0 and not self.drop_last)

    def rows(self, step: int) -> tuple[int, int]:
        """Positions [start, stop) in the order that this rank loads at `step`; never empty, see Note [filler]."""
        begin, size = step * self.global_batch, self.global_size(step)
        start, stop = cut(size, self.num_replicas, self.rank)
        if start == stop:
            start, stop = size - 1, size
        return begin + start, begin + stop

    def size(self, step: int, rank: int | None = None) -> int:
        """Rows that count, on `rank` (default: this one), at `step`; 0 for a filler."""
        start, stop = cut(self.global_size(step), self.num_replicas, self.rank if rank is None else rank)
        return stop - start

    def global_size(self, step: int) -> int:
        """Rows that count at `step`, over all ranks."""
        assert 0 <= step < self.num_batches, f"step {step} of {self.num_batches}"
        return min(self.global_batch, self.num_samples - step * self.global_batch)

    def weight(self, step: int) -> float:
        """What to multiply this rank's mean with, so that the mean over the ranks is the mean over the rows."""
        return self.size(step) * self.num_replicas / self.global_size(step)


@final
@dataclass(frozen=True)
class EvalOrder:
    """Evaluation order: every sample once, one contiguous share per rank, the same number of batches on every rank.

    Fillers (see the Note) appear only where the arithmetic leaves no choice: fewer samples than ranks, or batches of
    one and a number of samples that the ranks do not divide.

    Args:
        num_samples: length of the order.
        batch_size: most rows per rank and step; the batches of a rank differ by one row at most.
        num_replicas: data ranks.
        rank: which of them this one is.

    >>> [EvalOrder(7, batch_size=2, num_replicas=2, rank=rank).rows(step) for rank in range(2) for step in range(2)]
    [(0, 2), (2, 4), (4, 6), (6, 7)]
    """

    num_samples: int
    batch_size: int
    num_replicas: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        _check(self.num_samples, self.batch_size, self.num_replicas, self.rank)

    @property
    def num_batches(self) -> int:
        """Batches per epoch, equal on all ranks."""
        largest_share = -(-self.num_samples // self.num_replicas)
        return -(-largest_share // self.batch_size)

    def rows(self, step: int) -> tuple[int, int]:
        """Positions [start, stop) in the order that this rank loads at `step`; never empty, see Note [filler]."""
        start, stop = self._rows(step, self.rank)
        if start == stop:
            stop = min(max(stop, 1), self.num_samples)
            start = stop - 1
        return start, stop

    def size(self, step: int, rank: int | None = None) -> int:
        """Rows that count, on `rank` (default: this one), at `step`; 0 for a filler."""
        start, stop = self._rows(step, self.rank if rank is None else rank)
        return stop - start

    def global_size(self, step: int) -> int:
        """Rows that count at `step`, over all ranks."""
        return sum(self.size(step, rank) for rank in range(self.num_replicas))

    def weight(self, step: int) -> float:
        """What to multiply this rank's mean with, so that the mean over the ranks is the mean over the rows."""
        return self.size(step) * self.num_replicas / self.global_size(step)

    def _rows(self, step: int, rank: int) -> tuple[int, int]:
        assert 0 <= step < self.num_batches, f"step {step} of {self.num_batches}"
        begin, end = cut(self.num_samples, self.num_replicas, rank)
        start, stop = cut(end - begin, self.num_batches, step)
        return begin + start, begin + stop


def _check(num_samples: int, batch: int, num_replicas: int, rank: int) -> None:
    if num_samples < 0:
        raise DataError(f"num_samples is {num_samples}", where="data", allowed="0 or more")
    if batch < 1:
        raise DataError(f"the batch size is {batch}", where="data", allowed="1 or more")
    if num_replicas < 1 or not 0 <= rank < num_replicas:
        raise DataError(f"rank {rank} of {num_replicas}", where="data", allowed="ranks from 0 to num_replicas - 1")
