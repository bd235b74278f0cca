# SPDX-License-Identifier: Apache-2.0
"""The stages under Lightning, beyond the contract of every strategy: divided building, checkpoints across stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem.errors import ConfigError
from stratagem.plugins.ring_ddp import RingDDPStrategy
from stratagem.plugins.zero import Zero1Strategy, Zero2Strategy, Zero3Strategy, ZeroSettings
from stratagem.strategy.settings import RunSettings

STAGES = {"zero_1": Zero1Strategy, "zero_2": Zero2Strategy, "zero_3": Zero3Strategy}
WIDTH = 48


class Lazy(LightningModule):
    """Builds its model in `configure_model`, as a model does that no rank could hold."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        self.which, self.model = optimizer, None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = nn.Sequential(nn.Linear(8, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
            nn.init.orthogonal_(self.model[2].weight)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        loss = torch.tanh(self.model(batch[0])).square().mean()
        self.log("train_loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        assert self.model is not None
        self.log("val_loss", self.model(batch[0]).square().mean(), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.which == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _strategy(name: str, **options: Any) -> Strategy:
    if name == "one":
        return SingleDeviceStrategy("cpu")
    run = RunSettings(batch_size="global")
    if name == "ring_ddp":
        return RingDDPStrategy(run=run)
    return STAGES[name](ZeroSettings(bucket_mib=0.02, **options), run=run)


def _trainer(name: str, epochs: int, *, precision: Any = "64-true", callbacks: Any = (), **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1 if name == "one" else dist.get_world_size(),
        strategy=_strategy(name, **options),
        max_epochs=epochs,
        precision=precision,
        gradient_clip_val=0.5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(callbacks),
        callbacks=list(callbacks),
        num_sanity_val_steps=1,
    )


def _data(batch_size: int = 6) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    return DataLoader(
        TensorDataset(torch.randn(24, 8, generator=generator, dtype=torch.float64)), batch_size=batch_size
    )


def _module(optimizer: str = "sgd") -> Lazy:
    seed_everything(11, verbose=False)
    return Lazy(optimizer)


def _reference(epochs: int, optimizer: str = "sgd", **loader: Any) -> dict[str, Tensor]:
    """One process: every rank runs it for itself."""
    module = _module(optimizer)
    _trainer("one", epochs).fit(module, _data(**loader))
    return module.state_dict()


def _close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-13)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", STAGES)
def test_what_configure_model_builds_trains_as_in_one_process(stage: str) -> None:
    module, trainer = _module(), _trainer(stage, 2)
    trainer.fit(module, _data(), _data())
    _close(module.state_dict(), _reference(2))  # whole again after the run
    trainer.validate(module, _data(), verbose=False)
    trainer.test(module, _data(), verbose=False)
    assert torch.isfinite(trainer.callback_metrics["val_loss"])


@pytest.mark.ranks(2)
def test_stage_3_builds_divided() -> None:
    """While `configure_model` ends no rank holds the model, and the run's technique takes over what was divided."""
    seen: list[int] = []

    class Watched(Lazy):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            seen.append(sum(p.untyped_storage().nbytes() for p in self.parameters()))
            return super().configure_optimizers()

    seed_everything(11, verbose=False)
    module = Watched()
    trainer = _trainer("zero_3", 1, restore_parameters=False)
    trainer.fit(module, _data())
    whole = sum(p.numel() for p in module.parameters()) * 8
    assert seen[0] < 0.25 * whole  # the small first layer is whole, the rest elsewhere
    assert sum(p.untyped_storage().nbytes() for p in module.parameters()) < 0.25 * whole


@pytest.mark.ranks(2)
@pytest.mark.parametrize("writer", ["one", "ring_ddp", "zero_1", "zero_3"])
@pytest.mark.parametrize("reader", ["ring_ddp", "zero_1", "zero_2", "zero_3"])
def test_a_checkpoint_of_any_goes_on_under_any(writer: str, reader: str, tmp_path: Path) -> None:
    for optimizer in ("sgd", "adamw"):
        module = _module(optimizer)
        path = tmp_path / f"{optimizer}.ckpt"
        if writer != "one" or dist.get_rank() == 0:
            _trainer(writer, 1, callbacks=[ModelCheckpoint(path.parent, filename=path.stem)]).fit(module, _data())
        dist.barrier()
        resumed = _module(optimizer)
        _trainer(reader, 2).fit(resumed, _data(), ckpt_path=path)
        _close(resumed.state_dict(), _reference(2, optimizer))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", STAGES)
def test_replicas_are_groups_that_each_divide_one(stage: str) -> None:
    module = _module()
    strategy = STAGES[stage](ZeroSettings(bucket_mib=0.02), replicas=2, run=RunSettings(batch_size="global"))
    assert strategy.mesh_shape(4).sizes == {"pp": 1, "dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 1}
    trainer = Trainer(
        accelerator="cpu",
        devices=4,
        strategy=strategy,
        max_epochs=1,
        precision="64-true",
        gradient_clip_val=0.5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, _data(batch_size=12))
    _close(module.state_dict(), _reference(1, batch_size=12))


def test_bad_settings_say_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"zero.bucket_mib: bucket_mib is 0.*above 0"):
        ZeroSettings(bucket_mib=0)
    with pytest.raises(ConfigError, match=r"zero.prefetch: prefetch is -1.*0 or more"):
        ZeroSettings(prefetch=-1)
    with pytest.raises(ConfigError, match=r"replicas: replicas is 0.*1 or more"):
        Zero1Strategy(replicas=0)
