# SPDX-License-Identifier: Apache-2.0
"""A loader that knows how much of its data was delivered, and goes on from there.

Delivered means: handed to whoever iterates, in this process. What workers have prefetched is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from stratagem.data.sampler import OrderedBatchSampler
from stratagem.errors import DataError


@final
class OrderedLoader(DataLoader[Any]):
    """Loads the batches that an `OrderedBatchSampler` names, and carries the position in the data as its state.

    Lightning saves `state_dict` of such a loader in its checkpoints and gives it back on resume.

    Args:
        dataset: a dataset that gives a whole batch for a list of indices.
        sampler: which rows this rank loads, step by step.
        num_workers: worker processes, 0 to load in this one.

    Raises:
        DataError: another sampler is put in the place of the ordered one.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> loader = OrderedLoader(TensorDataset(torch.arange(6)), sampler=OrderedBatchSampler(6, batch_size=2))
    >>> next(iter(loader))
    [tensor([0, 1])]
    >>> loader.state_dict()
    {'epoch': 0, 'samples': 2, 'batches': 1}
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        *,
        sampler: OrderedBatchSampler,
        num_workers: int = 0,
        **kwargs: Any,
    ) -> None:
        if not isinstance(sampler, OrderedBatchSampler):
            raise DataError(
                f"a {type(sampler).__name__} was put in the place of the loader's own order",
                where="trainer.overfit_batches",
                do="leave overfit_batches out; limit_train_batches with a fixed order does the same",
            )
        kwargs.pop("batch_size", None), kwargs.pop("batch_sampler", None), kwargs.pop("shuffle", None)
        super().__init__(dataset, sampler=sampler, batch_size=None, num_workers=num_workers, **kwargs)  # type: ignore[arg-type]
        self.ordered = sampler

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # the base class promises its private iterator
        """One epoch, or what is left of it. Begins to read at the first `next`, when `set_epoch` has been called."""
        num_delivered = self.ordered.start
        for batch in super().__iter__():
            num_delivered += 1
            self.ordered.advance_to(num_delivered)
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Turns to `epoch`."""
        self.ordered.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """Epoch, and samples (over all ranks) and batches of it that were delivered."""
        return self.ordered.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on from a position, on any number of ranks."""
        self.ordered.load_state_dict(state)
