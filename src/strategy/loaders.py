# SPDX-License-Identifier: Apache-2.0
"""The order of the data is ours: what Lightning's sampler would do to a user's loader, done right.

Lightning gives a distributed run its own sampler, which shuffles training data even where the loader does not, orders a
shuffled epoch differently for every number of ranks, repeats samples in validation, and cannot resume within an epoch.
`LoaderOrder` takes its place for the time of one run: it puts into each loader an `OrderedBatchSampler`.

Left alone, as Lightning leaves them: loaders whose sampler is a `DistributedSampler`, iterable datasets, objects that
are no torch DataLoader, and everything under `Trainer(use_distributed_sampler=False)`.

Note [private parts of Lightning]: the only hook that knows which stage a loader is for is
`_DataConnector._prepare_dataloader`; it is replaced on the one instance and put back in teardown.
"""

from __future__ import annotations

import copy
import os
from functools import partial
from typing import Any, final
from weakref import WeakSet

from lightning.fabric.utilities.data import has_iterable_dataset
from lightning.pytorch import Trainer
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from stratagem.data.sampler import Mode, OrderedBatchSampler, ordered_batch_sampler


@final
class LoaderOrder:
    """Orders every loader of one run, from construction to `restore`.

    Args:
        strategy: says how many data ranks there are and which this is.
        trainer: whose loaders are ordered.
        mode: what a loader's `batch_size` means, `per_rank` or `global`.
    """

    def __init__(self, strategy: ParallelStrategy, trainer: Trainer, mode: Mode = "per_rank") -> None:
        self._trainer, self._mode = trainer, mode
        self._place = strategy.distributed_sampler_kwargs
        self._training: WeakSet[OrderedBatchSampler] = WeakSet()  # reloaded loaders take their samplers with them
        self._connector = trainer._data_connector
        self._theirs = self._connector._prepare_dataloader
        self._connector._prepare_dataloader = self._prepare  # type: ignore[method-assign]

    def restore(self) -> None:
        """Gives Lightning its own back."""
        self._connector.__dict__.pop("_prepare_dataloader", None)

    def weight(self) -> float:
        """By what this rank's loss is multiplied at this training step: its share of the samples, times the ranks."""
        if self._place["num_replicas"] == 1 or not self._training:
            return 1.0
        step = self._trainer.fit_loop.epoch_loop.batch_idx
        weights = {sampler.weight(step % max(len(sampler), 1)) for sampler in self._training}
        if len(weights) > 1:
            rank_zero_warn(
                "Training loaders of different lengths share an uneven batch: the ranks' losses are averaged without "
                "weights, so that batch's samples do not count alike. drop_last=True, or lengths that the global batch "
                "divides, avoid it."
            )
        return weights.pop() if len(weights) == 1 else 1.0

    def _prepare(self, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        if not isinstance(dataloader, DataLoader):
            return dataloader
        samplers = (dataloader.sampler, dataloader.batch_sampler)
        told_not_to = not self._trainer._accelerator_connector.use_distributed_sampler
        own = next((sampler for sampler in samplers if isinstance(sampler, OrderedBatchSampler)), None)
        if told_not_to or has_iterable_dataset(dataloader) or any(isinstance(s, DistributedSampler) for s in samplers):
            if mode == RunningStage.TRAINING and own is not None:
                self._training.add(own)
            return self._theirs(dataloader, shuffle, mode) if own is None else dataloader
        sampler = ordered_batch_sampler(
            dataloader,
            mode=self._mode,
            seed=int(os.environ.get("PL_GLOBAL_SEED", 0)),
            evaluate=mode != RunningStage.TRAINING,
            **self._place,
        )
        ordered = _around(dataloader, sampler, mode)
        if mode == RunningStage.TRAINING:
            self._training.add(sampler)
            self._make_stateful(ordered, sampler)
        return ordered

    def _make_stateful(self, loader: DataLoader[Any], sampler: OrderedBatchSampler) -> None:
        """Lightning stores the state of loaders that have `state_dict`; a user's own state takes precedence."""
        if not hasattr(loader, "state_dict"):
            loader.state_dict = partial(self._state, sampler)
            loader.load_state_dict = sampler.load_state_dict

    def _state(self, sampler: OrderedBatchSampler) -> dict[str, int]:
        ready, length = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready, len(sampler)
        sampler.advance_to(ready if ready <= length else ready % length)
        return sampler.state_dict()


def _around(loader: DataLoader[Any], sampler: OrderedBatchSampler, mode: RunningStage) -> DataLoader[Any]:
    """The same loader around another batch sampler, whatever its class and its constructor's arguments.

    torch forbids setting these attributes, since an iterator may be under way; a fresh copy has none.
    """
    ordered = copy.copy(loader)
    batches = _IndexBatchSamplerWrapper(sampler) if mode == RunningStage.PREDICTING else sampler
    vars(ordered).update(batch_sampler=batches, sampler=sampler, batch_size=None, drop_last=False, _iterator=None)
    return ordered
