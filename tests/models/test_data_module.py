# SPDX-License-Identifier: Apache-2.0
"""The global batch under any number of ranks and any accumulation, and the position in the data across a stop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from stratagem.errors import ConfigError, DataError
from stratagem.models import GPT, CausalLM, GPTConfig, OptimizerSettings, TextData

ALPHABET = {"seq_len": 4, "global_batch": 12, "validation_fraction": 0.2}


@pytest.fixture
def text(tmp_path: Path) -> str:
    """60 windows of 4 tokens, no two alike."""
    (tmp_path / "text.txt").write_text("".join(f"{number:04d}" for number in range(60)))
    return str(tmp_path / "text.txt")


def _attached(text: str, num_replicas: int, rank: int, accumulate: int, **options: Any) -> TextData:
    """A data module as one rank of a run has it."""
    data = TextData(text, **{**ALPHABET, **options})
    place = {"num_replicas": num_replicas, "rank": rank}
    stub: Any = SimpleNamespace(
        strategy=SimpleNamespace(distributed_sampler_kwargs=place),
        accumulate_grad_batches=accumulate,
        state=SimpleNamespace(fn=TrainerFn.FITTING),
    )
    data.trainer = stub
    data.setup("fit")
    return data


def _windows(batches: list[dict[str, Tensor]]) -> list[tuple[int, ...]]:
    return [tuple(row) for batch in batches for row in batch["input_ids"].tolist()]


def _flat(lists: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def _steps(text: str, num_replicas: int, accumulate: int, epoch: int) -> list[list[tuple[int, ...]]]:
    """The windows of each optimizer step over all ranks, in the order of the global batch."""
    loaders = [_attached(text, num_replicas, rank, accumulate).train_dataloader() for rank in range(num_replicas)]
    for loader in loaders:
        loader.set_epoch(epoch)
    micro = [_windows(list(parts)) for parts in zip(*loaders, strict=True)]
    return [_flat(micro[start : start + accumulate]) for start in range(0, len(micro), accumulate)]


@pytest.mark.parametrize(("num_replicas", "accumulate"), [(1, 1), (2, 1), (4, 1), (3, 2), (1, 6), (2, 3), (12, 1)])
def test_the_global_batch_of_a_step_depends_on_neither_ranks_nor_accumulation(
    text: str, num_replicas: int, accumulate: int
) -> None:
    for epoch in (0, 1):
        alone = _steps(text, 1, 1, epoch)
        assert [len(step) for step in alone] == [12] * 4
        assert _steps(text, num_replicas, accumulate, epoch) == alone
    assert _steps(text, 1, 1, 0) != _steps(text, 1, 1, 1)
    assert Counter(_flat(_steps(text, 1, 1, 0))) == Counter(_flat(_steps(text, 1, 1, 1)))


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5])
def test_held_out_windows_are_seen_once_in_order_by_one_rank_each(text: str, num_replicas: int) -> None:
    datas = [_attached(text, num_replicas, rank, 1, global_batch=30) for rank in range(num_replicas)]
    shares = [list(data.val_dataloader()) for data in datas]
    assert len({len(share) for share in shares}) == 1, "as many batches on every rank"
    held_out = datas[0].validation_data
    assert _windows(_flat(shares)) == _windows([held_out[list(range(len(held_out)))]])
    trained = _windows(list(_attached(text, 1, 0, 1, global_batch=30).train_dataloader()))
    assert not set(trained) & set(_windows(_flat(shares)))


def test_what_does_not_divide_is_refused_with_the_nearest_numbers(text: str) -> None:
    with pytest.raises(ConfigError, match=r"data.global_batch: .*Allowed: multiples of 10, for instance 10 or 20"):
        _attached(text, 5, 0, 2).train_dataloader()
    with pytest.raises(DataError, match=r"do not fill one global batch of 100.*Allowed: at most 48"):
        TextData(text, seq_len=4, global_batch=100, validation_fraction=0.2).setup()
    with pytest.raises(DataError, match=r"held-out samples cannot be shared by 16 data ranks"):
        _attached(text, 16, 0, 1, validation_fraction=0.01, global_batch=48).val_dataloader()
    for options, where in (
        ({"validation_fraction": 0.0}, "data.validation_fraction"),
        ({"global_batch": 0}, "data.global_batch"),
        ({"num_workers": -1}, "data.num_workers"),
        ({"seq_len": 500}, "data.seq_len"),
    ):
        with pytest.raises(DataError, match=where):
            TextData(text, **{**ALPHABET, **options}).setup()


class _Recorder(pl.Callback):
    """What was trained on, step by step."""

    def __init__(self) -> None:
        self.windows: list[tuple[int, ...]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self.windows += _windows([batch])


class _AsksEarly(CausalLM):  # type: ignore[misc]  # final for users; here it stands for a user's own module
    """A module that asks for the number of steps while it builds its optimizer, which makes the loader too early."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


def _fit(text: str, folder: Path, *, asks_early: bool = False, ckpt: str | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    kind = _AsksEarly if asks_early else CausalLM
    settings = OptimizerSettings(lr=0.01, warmup_steps=2, schedule="cosine")
    module = kind(GPT(GPTConfig(num_layers=1, hidden_size=16, num_heads=2)), settings)
    recorder, saver = _Recorder(), ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=1, filename="{step}")
    saver2 = ModelCheckpoint(
        folder, save_top_k=-1, every_n_epochs=1, filename="epoch{epoch}", save_on_train_epoch_end=True
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[recorder, saver, saver2],
        **{"max_epochs": 3, "limit_val_batches": 0, **options},
    )
    trainer.fit(module, TextData(text, **ALPHABET), ckpt_path=ckpt)
    return recorder.windows, module, trainer


@pytest.mark.parametrize("asks_early", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_that_stops_and_goes_on_is_the_run_that_never_stopped(
    text: str, tmp_path: Path, asks_early: bool, accumulate: int
) -> None:
    options = {"accumulate_grad_batches": accumulate, "asks_early": asks_early}
    whole, module, _ = _fit(text, tmp_path / "whole", **options)
    assert len(whole) == 3 * 48
    for name, consumed in (("step=1", 12), ("step=4", 48), ("epochepoch=0", 48), ("step=6", 72), ("step=11", 132)):
        ckpt = str(tmp_path / "whole" / f"{name}.ckpt")
        rest, resumed, _ = _fit(text, tmp_path / name, ckpt=ckpt, **options)
        assert rest == whole[consumed:], name
        for (key, one), other in zip(module.named_parameters(), resumed.parameters(), strict=True):
            assert torch.equal(one, other), (name, key)


def test_a_resumed_run_says_nothing_of_unresumable_loaders(
    text: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    _fit(text, tmp_path / "whole", max_steps=2)
    _fit(text, tmp_path / "rest", ckpt=str(tmp_path / "whole" / "step=2.ckpt"))
    assert not [str(w.message) for w in recwarn if "resumable" in str(w.message)]


@pytest.mark.parametrize("num_replicas", [2, 3, 4])
def test_a_stop_within_an_epoch_goes_on_with_another_number_of_ranks(text: str, num_replicas: int) -> None:
    first = _attached(text, 1, 0, 1)
    loader = first.train_dataloader()
    loader.set_epoch(2)
    batches = iter(loader)
    consumed = _windows([next(batches) for _ in range(2)])
    state = first.state_dict()
    rest = []
    for rank in range(num_replicas):
        data = _attached(text, num_replicas, rank, 1)
        data.load_state_dict(state)
        rest.append(data.train_dataloader())
        rest[-1].set_epoch(2)
    consumed += _windows([batch for parts in zip(*rest, strict=True) for batch in parts])
    assert consumed == _flat(_steps(text, 1, 1, 2))


def test_evaluating_a_checkpoint_does_not_move_a_later_fit(text: str, tmp_path: Path) -> None:
    whole, module, trainer = _fit(text, tmp_path, max_steps=2)
    data = TextData(text, **ALPHABET)
    trainer.validate(module, data, ckpt_path=str(tmp_path / "step=2.ckpt"), verbose=False)
    data.trainer = trainer
    assert _windows([next(iter(data.train_dataloader()))]) == whole[:12]


@pytest.mark.ranks(2)
def test_lightnings_own_ddp_gives_every_rank_its_rows_in_our_order(text: str) -> None:
    """Lightning puts its own shuffling sampler into any loader whose sampler is not a DistributedSampler."""
    from torch.distributed import all_gather_object, get_rank

    recorder = _Recorder()
    seen: list[dict[str, Tensor]] = []

    class Module(CausalLM):  # type: ignore[misc]  # records what it validates on
        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            seen.append(batch)
            return super().validation_step(batch, batch_idx)

    module = Module(GPT(GPTConfig(num_layers=1, hidden_size=16, num_heads=2)))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo", cluster_environment=_Joined()),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=2,
        num_sanity_val_steps=0,
        callbacks=[recorder],
    )
    data = TextData(text, **ALPHABET)
    trainer.fit(module, data)
    assert trainer.strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": get_rank()}
    per_rank: list[Any] = [None, None]
    all_gather_object(per_rank, (recorder.windows, _windows(seen)))
    (first, first_seen), (second, second_seen) = per_rank
    expected = [step for epoch in (0, 1) for step in _steps(text, 1, 1, epoch)]
    steps = [first[start : start + 6] + second[start : start + 6] for start in range(0, len(first), 6)]
    assert steps == expected
    held_out = _windows([data.validation_data[list(range(12))]])
    assert [first_seen[:6], second_seen[:6]] == [held_out[:6], held_out[6:]]


class _Joined(LightningEnvironment):
    """The ranks are there already, and joined: nothing to launch."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return torch.distributed.get_world_size()

    def global_rank(self) -> int:
        return torch.distributed.get_rank()

    def local_rank(self) -> int:
        return torch.distributed.get_rank()

    def set_world_size(self, size: int) -> None:
        pass

    def set_global_rank(self, rank: int) -> None:
        pass
