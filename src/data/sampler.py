# SPDX-License-Identifier: Apache-2.0
"""The order of `order.py` as a torch sampler that yields one rank's batches, for any loader and any user's own sampler.

Three facts shape it:

* It *is* a `DistributedSampler`, because Lightning, and our own strategies, leave a loader alone whose sampler is one.
  Lightning's own replacement would shuffle training data even where the loader does not.
* It runs ahead. A loader with workers asks for indices long before the batches are delivered, so what was drawn says
  nothing about the position. Whoever hands out batches says so by `advance_to`.
* The position is counted in global samples, not in steps of one rank, so that a run resumes on any number of ranks.

A loader takes it as `DataLoader(dataset, batch_sampler=sampler)` or, if `dataset[[3, 1, 2]]` gives a ready batch, as
`DataLoader(dataset, sampler=sampler, batch_size=None)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, final

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

from stratagem.data.epoch import EpochPlan, Position, Source, Split, plan_batches, plan_samples
from stratagem.errors import DataError

Mode = Literal["per_rank", "global"]


@final
class OrderedBatchSampler(DistributedSampler[list[int]]):
    """Yields the index lists of one rank; the global batch of a step is the same for every number of ranks.

    Args:
        source: where the order comes from: the number of samples; or a user's sampler of indices; or, with
            `batch_size=None`, a user's batch sampler, whose batches are kept whole where possible. A plain
            `SequentialSampler` or `RandomSampler` gives its length and whether to shuffle; any other is run once per
            epoch with random state seeded by (seed, epoch), so that all ranks, and a resumed run, draw the same.
        batch_size: samples per batch in the sense of `split`, or None if `source` yields batches.
        split: "global": `batch_size` counts all ranks together and each batch is cut over them. "per_rank": each rank
            loads `batch_size`; of a batch sampler's list, rank r takes the r-th batch of every `num_replicas`.
            "evaluate": each rank takes a contiguous share in batches of at most `batch_size`, no sample twice.
        num_replicas: data ranks, those that read different samples.
        rank: which of them this one is.
        shuffle: shuffle the samples, if `source` is a number.
        seed: seeds every epoch's order together with the epoch's number.
        drop_last: leave out a last global batch that is not full.

    Raises:
        DataError: fewer samples in a global batch than ranks; a rank or size out of range.

    >>> sampler = OrderedBatchSampler(10, batch_size=4, split="global", num_replicas=2, rank=1)
    >>> list(sampler)
    [[2, 3], [6, 7], [9]]
    >>> sampler.advance_to(2)
    >>> sampler.state_dict()
    {'epoch': 0, 'samples': 8, 'batches': 2}
    """

    def __init__(
        self,
        source: int | Iterable[Any],
        *,
        batch_size: int | None,
        split: Split = "per_rank",
        num_replicas: int = 1,
        rank: int = 0,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if num_replicas < 1 or not 0 <= rank < num_replicas:
            raise DataError(f"rank {rank} of {num_replicas}", where="data", allowed="ranks from 0 to num_replicas - 1")
        if batch_size is not None and split == "global" and batch_size < num_replicas:
            raise DataError(
                f"a global batch of {batch_size} cannot be cut over {num_replicas} data ranks",
                where="data.batch_size",
                allowed=f"{num_replicas} or more",
                do="raise the batch size or use fewer data ranks",
            )
        self._source = _read_source(source, shuffle)
        # What the base class derives from its dataset is not used; the attributes are there for whoever reads them.
        num_samples: Any = range(self._source.num_samples or 0)
        super().__init__(num_samples, num_replicas, rank, shuffle=self._source.shuffle, seed=seed, drop_last=drop_last)
        self.batch_size = batch_size
        self.split: Split = split
        self._loaded = Position()
        self._delivered = 0
        self._plan: EpochPlan | None = None
        self._length: int | None = None

    @property
    def sampler(self) -> OrderedBatchSampler:
        """Itself: Lightning looks for `set_epoch` on a loader's `sampler` and on its `batch_sampler.sampler`."""
        return self

    @property
    def start(self) -> int:
        """Batches of this epoch that an earlier run consumed; `__iter__` begins after them."""
        return self._start.batches

    @override
    def set_epoch(self, epoch: int) -> None:
        """Turns to `epoch`. Only the epoch of a loaded position begins in its middle; every other one is whole."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._plan = None
            self._delivered = self.start

    @override
    def __iter__(self) -> Iterator[list[int]]:
        """Yields what is left of the epoch; says nothing about what was delivered, see `advance_to`."""
        plan = self._epoch_plan()
        for step in range(plan.num_batches):
            yield plan.indices(step)

    @override
    def __len__(self) -> int:
        """Batches in a whole epoch, equal on all ranks; also after a position was loaded."""
        if self._length is None:
            self._length = self._cut(Position(self.epoch)).num_batches
        return self._length

    def indices(self, step: int) -> list[int]:
        """The sample indices that this rank loads at `step`, counted from the epoch's beginning."""
        return self._epoch_plan().indices(step - self.start)

    def size(self, step: int, rank: int | None = None) -> int:
        """Rows of `rank` (default: this one) that count at `step`; 0 if it only repeats a row to keep step."""
        return self._epoch_plan().size(step - self.start, self.rank if rank is None else rank)

    def weight(self, step: int) -> float:
        """What to multiply the local mean loss with at `step`, so that the mean over the ranks is exact; mostly 1.0."""
        sizes = [self.size(step, rank) for rank in range(self.num_replicas)]
        return sizes[self.rank] * self.num_replicas / sum(sizes)

    def advance_to(self, num_batches: int) -> None:
        """States that `num_batches` batches of this epoch, counted from its beginning, have been delivered."""
        assert self.start <= num_batches <= self.start + self._epoch_plan().num_batches, f"{num_batches} batches"
        self._delivered = num_batches

    def state_dict(self) -> dict[str, int]:
        """The position: epoch, global samples and batches of it that have been delivered. The same on all ranks."""
        plan, start = self._epoch_plan(), self._start
        samples = start.samples + plan.consumed(self._delivered - start.batches)
        return {"epoch": self.epoch, "samples": samples, "batches": self._delivered}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Takes a position up again, on any number of ranks; a finished epoch leads to the next one.

        Raises:
            DataError: the position lies outside the data, which must have changed; or within an epoch of batches of
                another global size.
        """
        self._loaded = Position(int(state["epoch"]), int(state["samples"]), int(state["batches"]))
        self.epoch = self._loaded.epoch
        self._plan = None
        self._delivered = self.start
        if self._epoch_plan().num_batches == 0 and self._loaded.samples:
            self.set_epoch(self._loaded.epoch + 1)
        elif self._loaded.batches and self.batch_size is not None:
            self._check_same_global_batch(self._loaded.samples / self._loaded.batches)

    def _check_same_global_batch(self, before: float) -> None:
        """Whoever counts batches, as Lightning does, would lose or repeat samples if their size changed midway."""
        assert self.batch_size is not None
        now = self.batch_size * (1 if self.split == "global" else self.num_replicas)
        if before != now:
            raise DataError(
                f"the checkpoint stands in the middle of an epoch with global batches of {before:g} samples, and now "
                f"they have {now}",
                where="the training data",
                allowed=f"a batch size that gives {before:g} over {self.num_replicas} data ranks",
                do="set batch_size: global in the strategy's run settings, so that it keeps on any number of ranks",
            )

    @property
    def _start(self) -> Position:
        return self._loaded if self._loaded.epoch == self.epoch else Position(self.epoch)

    def _epoch_plan(self) -> EpochPlan:
        if self._plan is None:
            self._plan = self._cut(self._start)
        return self._plan

    def _cut(self, start: Position) -> EpochPlan:
        if self.batch_size is None:
            batches = self._source.batches(self.seed, start.epoch)
            return plan_batches(
                batches,
                start.samples,
                split=self.split,
                num_replicas=self.num_replicas,
                rank=self.rank,
                drop_last=self.drop_last,
            )
        return plan_samples(
            self._source.order(self.seed, start.epoch),
            start.samples,
            batch_size=self.batch_size,
            split=self.split,
            num_replicas=self.num_replicas,
            rank=self.rank,
            drop_last=self.drop_last,
        )


def ordered_batch_sampler(
    loader: DataLoader[Any],
    *,
    mode: Mode = "per_rank",
    num_replicas: int,
    rank: int,
    seed: int = 0,
    evaluate: bool = False,
) -> OrderedBatchSampler:
    """The sampler that puts a user's own loader in order, whatever sampler or batch sampler it was built with.

    Args:
        loader: a map-style loader with automatic batching.
        mode: what the loader's batch size means: "per_rank", as Lightning has it, or "global".
        num_replicas: data ranks.
        rank: which of them this one is.
        seed: seeds the order of shuffling loaders.
        evaluate: every sample once, contiguous shares (see `OrderedBatchSampler`, split "evaluate").

    Raises:
        DataError: the loader does no batching of its own (`batch_size=None`), so there is nothing to order.

    >>> loader = DataLoader(list(range(6)), batch_size=2)
    >>> list(ordered_batch_sampler(loader, num_replicas=2, rank=1))
    [[2, 3], [5]]
    """
    batches = loader.batch_sampler
    if batches is None:
        raise DataError(
            "a loader with batch_size=None orders its own samples, so the ranks cannot share them out",
            where=f"the DataLoader of {type(loader.dataset).__name__}",
            do="give it a batch size, or a sampler that is a DistributedSampler",
        )
    split: Split = "evaluate" if evaluate else mode
    if type(batches) is not BatchSampler:
        return OrderedBatchSampler(
            batches, batch_size=None, split=split, num_replicas=num_replicas, rank=rank, seed=seed
        )
    batch_size = batches.batch_size
    if evaluate and mode == "global":
        batch_size = -(-batch_size // num_replicas)
    return OrderedBatchSampler(
        loader.sampler,
        batch_size=batch_size,
        split=split,
        num_replicas=num_replicas,
        rank=rank,
        seed=seed,
        drop_last=batches.drop_last and not evaluate,
    )


def _read_source(source: int | Iterable[Any], shuffle: bool) -> Source:
    if isinstance(source, int):
        return Source(source, shuffle)
    assert not shuffle, "a sampler decides by itself whether it shuffles"
    if type(source) is SequentialSampler:
        return Source(len(source))
    if type(source) is RandomSampler and not source.replacement and source.num_samples == len(source.data_source):
        return Source(source.num_samples, shuffle=True)
    return Source(sampler=source)
