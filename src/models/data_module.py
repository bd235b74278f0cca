# SPDX-License-Identifier: Apache-2.0
"""What text and image data modules share: the global batch is the experiment's, and the position in it is state.

`global_batch` counts the samples of one optimizer step. Accumulation and data ranks divide it; they do not change which
samples a step takes. Epochs are whole optimizer steps: what does not fill one is held out.

Note [position]: Lightning restores the state of a data module before any loader is made, and the state of a loader only
if nothing has made the loader before, which a learning-rate schedule that asks for the number of steps does. So the
data module keeps the position, and puts it into the loader that it makes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from stratagem.batch import BatchPlan
from stratagem.data import OrderedBatchSampler, OrderedLoader
from stratagem.errors import DataError
from stratagem.models.replicas import data_replicas


class OrderedDataModule(pl.LightningDataModule, ABC):
    """Two map-style datasets, served in the order that does not depend on the number of ranks.

    Args:
        global_batch: samples per optimizer step, over all ranks and accumulated micro-batches.
        num_workers: worker processes of the training loader.
        shuffle_seed: seeds the order of every epoch; None for the order of the data.
    """

    def __init__(self, global_batch: int, num_workers: int, shuffle_seed: int | None) -> None:
        super().__init__()
        if global_batch < 1:
            raise DataError(f"global_batch is {global_batch}", where="data.global_batch", allowed="1 or more")
        if num_workers < 0:
            raise DataError(f"num_workers is {num_workers}", where="data.num_workers", allowed="0 or more")
        self.global_batch = global_batch
        self.num_workers = num_workers
        self.shuffle_seed = shuffle_seed
        self._loader: OrderedLoader | None = None
        self._position: dict[str, int] | None = None

    @property
    @abstractmethod
    def train_data(self) -> Dataset[Any]:
        """Samples to train on, a multiple of `global_batch`; a list of indices gives a batch."""

    @property
    @abstractmethod
    def validation_data(self) -> Dataset[Any]:
        """Held-out samples."""

    @property
    def batch_plan(self) -> BatchPlan:
        """How the global batch is cut under this trainer.

        Raises:
            ConfigError: accumulation and data ranks do not divide it; names the nearest numbers that work.
        """
        accumulate = self.trainer.accumulate_grad_batches if self.trainer is not None else 1
        return BatchPlan.solve(
            data_ranks=data_replicas(self.trainer)[0], global_batch=self.global_batch, accumulate=accumulate
        )

    @override
    def train_dataloader(self) -> OrderedLoader:
        """This rank's rows of each micro-batch."""
        plan, (num_replicas, rank) = self.batch_plan, data_replicas(self.trainer)
        sampler = OrderedBatchSampler(
            _length(self.train_data),
            batch_size=plan.micro_batch * num_replicas,
            split="global",
            num_replicas=num_replicas,
            rank=rank,
            shuffle=self.shuffle_seed is not None,
            seed=self.shuffle_seed or 0,
        )
        self._loader = OrderedLoader(self.train_data, sampler=sampler, num_workers=self.num_workers)
        if self._position is not None:
            self._loader.load_state_dict(self._position)
            self._position = None
        return self._loader

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        """This rank's share of the held-out samples, each of which one rank sees, once."""
        num_replicas, rank = data_replicas(self.trainer)
        num_samples = _length(self.validation_data)
        if num_samples < num_replicas:
            raise DataError(
                f"{num_samples} held-out samples cannot be shared by {num_replicas} data ranks",
                where="data.validation_fraction",
                do="hold out more, or use fewer data ranks",
            )
        # Batches of two and more can be shared out without repeating a row, whatever the number of samples.
        batch_size = max(2, self.batch_plan.micro_batch)
        sampler = OrderedBatchSampler(
            num_samples, batch_size=batch_size, split="evaluate", num_replicas=num_replicas, rank=rank
        )
        return OrderedLoader(self.validation_data, sampler=sampler)

    @override
    def test_dataloader(self) -> DataLoader[Any]:
        """The held-out samples."""
        return self.val_dataloader()

    @override
    def predict_dataloader(self) -> DataLoader[Any]:
        """The held-out samples; the shares of rank 0, 1, ... one after the other are in order."""
        return self.val_dataloader()

    @override
    def state_dict(self) -> dict[str, Any]:
        """The position in the training data, see Note [position]; the same on all ranks."""
        return {} if self._loader is None else {"position": self._loader.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on training from a position; evaluating a checkpoint leaves later training alone."""
        if self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING:
            self._position = state_dict.get("position")

    def _held_out(self, num_samples: int, validation_fraction: float) -> int:
        """How many of `num_samples` to train on: the rest is held out, and this is whole optimizer steps."""
        if not 0.0 < validation_fraction < 1.0:
            raise DataError(
                f"validation_fraction is {validation_fraction}",
                where="data.validation_fraction",
                allowed="above 0.0 and below 1.0",
            )
        largest = min(int(num_samples * (1.0 - validation_fraction)), num_samples - 1)
        num_train = largest // self.global_batch * self.global_batch
        if num_train < 1:
            raise DataError(
                f"{num_samples} samples, some of them held out, do not fill one global batch of {self.global_batch}",
                where="data.global_batch",
                allowed=f"at most {largest}" if largest > 0 else "",
                do="give more data or make the batch smaller",
            )
        return num_train


def _length(data: Dataset[Any]) -> int:
    return len(data)  # type: ignore[arg-type]  # torch's Dataset does not promise a length; map-style ones have it
