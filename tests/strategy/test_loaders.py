# SPDX-License-Identifier: Apache-2.0
"""Which sample a user's own loader gives to which rank at which step, seen from inside `training_step`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from stratagem.data.sampler import OrderedBatchSampler
from stratagem.errors import DataError
from stratagem.plugins.ring_ddp import RingDDPStrategy
from stratagem.strategy import RunSettings


class Recorder(pl.LightningModule):
    """Writes down the samples of every batch, by stage."""

    def __init__(self, loader: Callable[[], Any]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.loader, self.seen = loader, {"train": [], "val": [], "test": [], "predict": []}

    def note(self, stage: str, batch: torch.Tensor) -> torch.Tensor:
        if not self.trainer.sanity_checking:
            self.seen[stage].append(batch.tolist())
        return batch

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.note("train", batch) * self.weight).mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.note("val", batch)

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.note("test", batch)

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.note("predict", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def train_dataloader(self) -> Any:
        return self.loader()

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def trainer(batch_size: str = "global", **options: Any) -> pl.Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    strategy = RingDDPStrategy(run=RunSettings(batch_size=batch_size))
    return pl.Trainer(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **{**quiet, **options})


def everyone(rows: list[list[float]]) -> list[list[list[float]]]:
    """By rank, by step: the samples."""
    gathered: list[list[list[float]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, rows)
    return gathered


def flat(rows: Any) -> list[Any]:
    return list(chain.from_iterable(rows))


def global_batches(rows: list[list[float]]) -> list[list[float]]:
    """By step: the samples of all ranks, in rank order."""
    return [flat(step) for step in zip(*everyone(rows), strict=True)]


def numbers(n: int = 10) -> torch.Tensor:
    return torch.arange(float(n))


@pytest.mark.ranks(1, 2, 3)
def test_an_unshuffled_loader_stays_unshuffled() -> None:
    module = Recorder(lambda: DataLoader(numbers(), batch_size=4))
    trainer(max_epochs=2).fit(module)
    assert global_batches(module.seen["train"]) == 2 * [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9] + [9] * (dist.get_world_size() == 3),
    ]


@pytest.mark.ranks(1, 2, 4)
def test_a_shuffled_epoch_does_not_depend_on_the_number_of_ranks() -> None:
    pl.seed_everything(3, verbose=False)
    module = Recorder(lambda: DataLoader(numbers(16), batch_size=4, shuffle=True))
    trainer(max_epochs=2).fit(module)
    batches = global_batches(module.seen["train"])
    first, second = flat(batches[:4]), flat(batches[4:])
    assert sorted(first) == sorted(second) == numbers(16).tolist()
    assert first != second
    assert first != sorted(first)
    alone = OrderedBatchSampler(16, batch_size=4, shuffle=True, seed=3)
    assert first == [float(index) for batch in alone for index in batch]


@pytest.mark.ranks(2)
def test_batch_size_may_count_one_rank() -> None:
    module = Recorder(lambda: DataLoader(numbers(8), batch_size=2))
    trainer("per_rank", max_epochs=1).fit(module)
    assert everyone(module.seen["train"]) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("num", [10, 7, 4])
def test_evaluation_sees_every_sample_once_in_equally_many_batches(num: int) -> None:
    module = Recorder(lambda: DataLoader(numbers(num), batch_size=2))
    runner = trainer("per_rank")
    runner.validate(module, verbose=False)
    runner.test(module, verbose=False)
    for stage in ("val", "test"):
        ranks = everyone(module.seen[stage])
        assert len({len(rank) for rank in ranks}) == 1
        assert flat(flat(ranks)) == numbers(num).tolist()


@pytest.mark.ranks(2)
def test_predictions_of_the_ranks_follow_each_other() -> None:
    module = Recorder(lambda: DataLoader(numbers(7), batch_size=2))
    predictions = trainer("per_rank").predict(module)
    rows = everyone([batch.tolist() for batch in predictions])
    assert flat(flat(rows)) == numbers(7).tolist()


@pytest.mark.ranks(2)
def test_a_users_own_sampler_is_drawn_alike_on_all_ranks() -> None:
    torch.manual_seed(dist.get_rank())  # ranks whose own random state differs
    module = Recorder(lambda: DataLoader(numbers(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 10, 12)))
    trainer(max_epochs=1).fit(module)
    assert [len(batch) for batch in global_batches(module.seen["train"])] == [4, 4, 4]


class Positional(DataLoader):
    """Leaves no way to give it another sampler."""

    def __init__(self, data: Any, size: int) -> None:
        super().__init__(data, size)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [DataLoader, Positional])
def test_loaders_are_rebuilt_whatever_their_constructor(kind: type) -> None:
    module = Recorder(lambda: kind(numbers(8), 4))
    trainer(max_epochs=1).fit(module)
    assert global_batches(module.seen["train"]) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.ranks(2)
def test_a_loader_that_batches_by_itself_is_refused() -> None:
    with pytest.raises(DataError, match="batch_size=None"):
        trainer(max_epochs=1).fit(Recorder(lambda: DataLoader([numbers(2)], batch_size=None)))


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(numbers(4))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("iterable", [True, False])
def test_what_is_not_ours_to_order_is_left_alone(iterable: bool) -> None:
    module = Recorder(lambda: DataLoader(Stream() if iterable else numbers(4), batch_size=2))
    trainer(max_epochs=1, use_distributed_sampler=iterable).fit(module)
    assert everyone(module.seen["train"]) == 2 * [[[0, 1], [2, 3]]]


@pytest.mark.ranks(2)
def test_lightning_gets_its_own_back() -> None:
    runner = trainer(max_epochs=1)
    runner.fit(Recorder(lambda: DataLoader(numbers(4), batch_size=2)))
    assert "_prepare_dataloader" not in vars(runner._data_connector)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("shuffle", [False, True])
def test_training_goes_on_where_it_was_within_an_epoch(tmp_path: Any, shuffle: bool) -> None:
    """From the checkpoint of every step of two epochs, on the batches that followed it."""
    name = "{step}"
    whole = Recorder(lambda: DataLoader(numbers(12), batch_size=4, shuffle=shuffle))
    every_step = ModelCheckpoint(tmp_path, filename=name, every_n_train_steps=1, save_top_k=-1, save_last=False)
    trainer(max_epochs=2, callbacks=[every_step], enable_checkpointing=True).fit(whole)
    assert len(whole.seen["train"]) == 6
    for step in (1, 2, 3, 4):
        resumed = Recorder(lambda: DataLoader(numbers(12), batch_size=4, shuffle=shuffle))
        trainer(max_epochs=2).fit(resumed, ckpt_path=f"{tmp_path}/step={step}.ckpt")
        assert resumed.seen["train"] == whole.seen["train"][step:]
