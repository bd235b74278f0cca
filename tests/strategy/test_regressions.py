# SPDX-License-Identifier: Apache-2.0
"""Each test tells of a fault that was once there, in two sentences."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stratagem.errors import DataError
from stratagem.plugins.ring_ddp import RingDDPSettings, RingDDPStrategy
from stratagem.strategy import RunSettings
from stratagem.testing import assert_replicas_equal

TINY = RingDDPSettings(bucket_mib=1e-4, first_bucket_mib=1e-5)


def rows(n: int, width: int = 5) -> list[Tensor]:
    return list(torch.randn(n, width, dtype=torch.float64, generator=torch.manual_seed(5)))


class Net(pl.LightningModule):
    """Four layers, a mean loss, SGD with weight decay."""

    def __init__(self, num_samples: int = 12, batch_size: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4)).double()
        self.num_samples, self.batch_size = num_samples, batch_size

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, weight_decay=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(rows(self.num_samples), batch_size=self.batch_size)


def fit(module: pl.LightningModule, *, alone: bool = False, batch_size: str = "global", **options: Any) -> pl.Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    strategy: Any = "auto" if alone else RingDDPStrategy(ring=TINY, run=RunSettings(batch_size=batch_size))
    devices = 1 if alone else dist.get_world_size()
    trainer = pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **{"max_epochs": 2, **quiet, **options})
    trainer.fit(module)
    return trainer


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def in_one_process(make: Any, **options: Any) -> dict[str, Tensor]:
    """What one process reaches; run on every rank beside the others, with Lightning told that it is alone."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            patch.setenv(name, "1")
        for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"):
            patch.setenv(name, "0")
        module = make()
        fit(module, alone=True, **options)
    return parameters(module)


class Unfreezes(Net):
    """Trains one layer more in every step, and decides so within the step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for index, layer in enumerate(self.layers):
            layer.requires_grad_(index >= 3 - self.global_step % 4)
        return super().training_step(batch, batch_idx)


class Alternates(Net):
    """Freezes another layer in every micro-batch."""

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        for index, layer in enumerate(self.layers):
            layer.requires_grad_(index != batch_idx % 4)


class Joins(Net):
    """In the second micro-batch of each window a layer joins that was frozen from the start, and another is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].requires_grad_(False)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.layers[3].requires_grad_(batch_idx % 2 == 1)
        self.layers[0].requires_grad_(batch_idx % 2 == 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "accumulate"), [(Unfreezes, 1), (Alternates, 2), (Alternates, 1), (Joins, 2), (Joins, 1)]
)
def test_what_is_trained_may_change_until_its_gradient_arrives(kind: type, accumulate: int) -> None:
    """Buckets were chosen before the step ran, so a layer unfrozen in it, or frozen again within a window, was never
    averaged and the replicas drifted. Now the choice is made when backward starts, and a window remembers."""
    module = kind()
    fit(module, accumulate_grad_batches=accumulate)
    assert_replicas_equal(module)
    expected = in_one_process(kind, accumulate_grad_batches=accumulate)
    torch.testing.assert_close(parameters(module), expected, rtol=1e-10, atol=1e-12)


class Surgery(Net):
    """Keeps the first loss's gradients while the second loss's are computed, and applies their sum."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer, kept = self.optimizers(), []
        for scale in (1.0, -3.0):
            optimizer.zero_grad()
            self.manual_backward(scale * self(batch))
            kept.append([p.grad for p in self.parameters()])
        for p, first, second in zip(self.parameters(), *kept, strict=True):
            p.grad = 2 * first + second
        optimizer.step()


@pytest.mark.ranks(2)
def test_gradients_that_are_kept_do_not_change() -> None:
    """`.grad` is a view of bucket memory, and the next backward filled the same memory under the user's fingers.
    A bucket of which somebody holds a gradient now gets fresh memory."""
    module = Surgery()
    fit(module)
    torch.testing.assert_close(parameters(module), in_one_process(Surgery), rtol=1e-10, atol=1e-12)


class Ema(Net):
    """A codebook that is updated through `.data`, and statistics kept by a functional batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(5, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(5, dtype=torch.float64))
        self.register_buffer("var", torch.ones(5, dtype=torch.float64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.ema.data.mul_(0.9).add_(0.1 * batch.mean(0))
        if not hasattr(self, "late"):
            self.layers[0].register_buffer("late", batch.mean(0))
            self.late = True
        return super().training_step(nn.functional.batch_norm(batch, self.mean, self.var, training=True), batch_idx)


@pytest.mark.ranks(2)
def test_buffers_that_count_no_version_follow_too() -> None:
    """Versions alone missed what `.data` and some kernels write, and buffers that were registered late.
    Values are compared as well, and modules are looked at anew in every step."""
    module = Ema()
    fit(module)
    assert_replicas_equal(module)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__(num_samples=8, batch_size=6)
        self.norm = nn.BatchNorm1d(5).double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


@pytest.mark.ranks(3)
def test_a_filler_row_does_not_enter_the_statistics() -> None:
    """The last batch has 2 samples for 3 ranks; the third repeats a row to keep step, and batch norm counted it.
    A rank that only keeps step contributes nothing now."""
    module = Normed()
    fit(module, sync_batchnorm=True)
    torch.testing.assert_close(parameters(module), in_one_process(Normed), rtol=1e-9, atol=1e-11)


@pytest.mark.ranks(2)
def test_an_epoch_is_not_resumed_with_batches_of_another_size(tmp_path: Any) -> None:
    """Two ranks of 3 samples resumed on what one rank of 3 had begun, and part of the epoch was silently lost.
    It is refused, with the setting that keeps the global batch."""
    saved = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit(Net(12, 3), batch_size="global", callbacks=[saved], enable_checkpointing=True)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ring_ddp", max_epochs=2, **quiet)
    with pytest.raises(DataError, match=r"global batches of 3 samples, and now they have 6.*batch_size: global"):
        trainer.fit(Net(12, 3), ckpt_path=f"{tmp_path}/step=2.ckpt")


class Lbfgs(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")


@pytest.mark.ranks(2)
def test_a_line_search_sees_the_loss_of_all_ranks() -> None:
    """LBFGS decides by the loss its closure returns; with each rank's own they searched differently, and hung.
    The closure returns the mean over ranks where the optimizer searches."""
    module = Lbfgs(num_samples=6)
    fit(module, max_epochs=3)
    assert_replicas_equal(module)
    torch.testing.assert_close(
        parameters(module), in_one_process(lambda: Lbfgs(num_samples=6), max_epochs=3), rtol=1e-7, atol=1e-9
    )


@pytest.mark.ranks(2)
def test_lazy_modules_are_refused_by_name() -> None:
    """A parameter without a shape ended in an obscure error deep inside. It is named, with what to do."""

    class Lazy(Net):
        def __init__(self) -> None:
            super().__init__()
            self.late = nn.LazyLinear(2)

    with pytest.raises(ValueError, match=r"'late.weight' has no shape yet"):
        fit(Lazy())
