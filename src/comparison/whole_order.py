# SPDX-License-Identifier: Apache-2.0
"""`WholeOrder`: one process reads what several ranks together read, step by step.

A loader of the user's yields a rank's batch; under N data ranks a step's batch is those of all ranks. The one process
that the ranks are held against must take the same samples in a step, whatever sampler the loader has, so each of its
batches is put together from the index lists that the ranks would have drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

from stratagem.data.sampler import Mode, OrderedBatchSampler
from stratagem.strategy.loaders import LoaderOrder


@final
@dataclass(frozen=True)
class _Rank:
    """All that a `LoaderOrder` asks a strategy for."""

    distributed_sampler_kwargs: dict[str, int]


@final
class WholeBatches(DistributedSampler[list[int]]):
    """The batches of all ranks, one after the other in each step.

    Args:
        ranks: the sampler of each rank.
    """

    def __init__(self, ranks: list[OrderedBatchSampler]) -> None:
        super().__init__(ranks[0].dataset, num_replicas=1, rank=0)
        self._ranks = ranks

    @property
    def sampler(self) -> WholeBatches:
        """Itself: Lightning looks for `set_epoch` here."""
        return self

    @override
    def set_epoch(self, epoch: int) -> None:
        for rank in self._ranks:
            rank.set_epoch(epoch)

    @override
    def __iter__(self) -> Iterator[list[int]]:
        for step, parts in enumerate(zip(*self._ranks, strict=True)):
            sizes = [rank.size(step) for rank in self._ranks]  # a rank without samples of its own repeats one
            yield [index for part, size in zip(parts, sizes, strict=True) for index in part[:size]]

    @override
    def __len__(self) -> int:
        return len(self._ranks[0])


@final
class WholeOrder:
    """Puts `WholeBatches` into every training loader of one run, from construction to `restore`.

    Args:
        trainer: of the one process.
        num_ranks: data ranks that it stands for.
        mode: what a loader's batch size means to them.
    """

    def __init__(self, trainer: Trainer, num_ranks: int, mode: Mode) -> None:
        self._orders: list[LoaderOrder] = []
        for rank in range(num_ranks):
            stand_in: Any = _Rank({"num_replicas": num_ranks, "rank": rank})
            self._orders.append(LoaderOrder(stand_in, trainer, mode))
            self._orders[-1].restore()
        self._connector = trainer._data_connector
        self._connector._prepare_dataloader = self._prepare  # type: ignore[method-assign]

    def restore(self) -> None:
        """Gives Lightning its own back."""
        self._connector.__dict__.pop("_prepare_dataloader", None)

    def _prepare(self, dataloader: object, shuffle: bool, mode: Any) -> object:
        loaders = [order._prepare(dataloader, shuffle, mode) for order in self._orders]
        ranks = [loader.batch_sampler for loader in loaders if isinstance(loader, DataLoader)]
        found = [rank for rank in ranks if isinstance(rank, OrderedBatchSampler)]
        first = loaders[0]
        if first is dataloader or len(found) < len(loaders) or not isinstance(first, DataLoader):
            return dataloader  # left alone, as the ranks leave it
        whole = WholeBatches(found)
        vars(first).update(batch_sampler=whole, sampler=whole)
        return first
