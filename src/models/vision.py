# SPDX-License-Identifier: Apache-2.0
"""A small image classifier with BatchNorm: the model whose *buffers* a strategy has to keep right."""

from __future__ import annotations

from typing import final

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from stratagem.data import derive_seed
from stratagem.errors import ConfigError
from stratagem.models.data_module import OrderedDataModule
from stratagem.models.optim import OptimizerSettings


@final
class TinyConvNet(nn.Sequential):
    """Two strided convolutions, each with BatchNorm, and a linear head: [B, channels, S, S] to logits [B, num_classes].

    Args:
        num_classes: classes to tell apart.
        channels: of the images.
        width: channels of the first convolution; the second has twice as many.

    >>> TinyConvNet(num_classes=4)(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 4])
    """

    def __init__(self, num_classes: int = 10, channels: int = 3, width: int = 16) -> None:
        if min(num_classes, channels, width) < 1:
            raise ConfigError("a size below 1", where="TinyConvNet", allowed="num_classes, channels, width from 1")
        super().__init__(
            nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, num_classes),
        )


@final
class ImageClassifier(pl.LightningModule):
    """Trains any classifier on batches of (images [B, C, S, S], labels [B]).

    Logged: `train_loss` each step, `val_loss` and `val_accuracy` after a validation, all of them over all ranks.

    Args:
        model: images to logits [B, num_classes].
        num_classes: classes of the model.
        optimizer: what to train with.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        num_classes: int = 10,
        optimizer: OptimizerSettings = OptimizerSettings(lr=1e-2, weight_decay=0.0),  # noqa: B008  # frozen
    ) -> None:
        super().__init__()
        self.model = TinyConvNet(num_classes) if model is None else model
        self.optimizer_settings = optimizer
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, num_classes]."""
        logits: Tensor = self.model(images)
        return logits

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross entropy of one batch."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(images))
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Loss and accuracy of one batch, logged as shares of the whole."""
        images, labels = batch
        logits = self(images)
        self.val_accuracy.update(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), sync_dist=True, batch_size=len(images))
        self.log("val_accuracy", self.val_accuracy, prog_bar=True, batch_size=len(images))

    @override
    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The likeliest classes, int64 [B]."""
        classes: Tensor = self(batch[0]).argmax(dim=-1)
        return classes

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer of the settings, at a constant rate."""
        if self.optimizer_settings.is_scheduled:
            raise ConfigError(
                "a schedule is set, and this module has none", where="optimizer", allowed="constant rates"
            )
        return self.optimizer_settings.build(self)


@final
class ImageData(OrderedDataModule):
    """Made-up images that can be learnt: each class is a pattern, each image its class's pattern under noise.

    Args:
        num_samples: images, those held out included.
        image_size: S, their height and width; they have 3 channels.
        num_classes: classes, in equal shares.
        noise: deviation of the noise; the patterns have deviation 1.
        global_batch: images per optimizer step, over all ranks and accumulated micro-batches.
        num_workers: worker processes of the training loader.
        shuffle_seed: seeds the order of every epoch; None for the order of the data.
        validation_fraction: share of the images to hold out.
    """

    def __init__(
        self,
        num_samples: int = 2048,
        image_size: int = 16,
        num_classes: int = 10,
        noise: float = 2.0,
        global_batch: int = 32,
        num_workers: int = 0,
        shuffle_seed: int | None = 0,
        validation_fraction: float = 0.1,
    ) -> None:
        super().__init__(global_batch, num_workers, shuffle_seed)
        images, labels = synthetic_images(num_samples, image_size, num_classes, noise)
        num_train = self._held_out(num_samples, validation_fraction)
        self._split = (
            TensorDataset(images[:num_train], labels[:num_train]),
            TensorDataset(images[num_train:], labels[num_train:]),
        )

    @property
    @override
    def train_data(self) -> TensorDataset:
        """The images to train on."""
        return self._split[0]

    @property
    @override
    def validation_data(self) -> TensorDataset:
        """The images held out."""
        return self._split[1]


def synthetic_images(num_samples: int, image_size: int, num_classes: int, noise: float) -> tuple[Tensor, Tensor]:
    """Images [num_samples, 3, S, S] in the default dtype and labels [num_samples]; the same on every machine and call.

    >>> images, labels = synthetic_images(4, 8, 2, 0.1)
    >>> images.shape, labels.tolist()
    (torch.Size([4, 3, 8, 8]), [0, 1, 0, 1])
    """
    if min(num_samples, image_size, num_classes) < 1 or noise < 0:
        raise ConfigError("a size below 1 or a negative noise", where="data", allowed="sizes from 1, noise from 0")
    generator = torch.Generator().manual_seed(derive_seed(0, "synthetic images"))
    # Drawn in float32 whatever the default dtype, so that runs in other precisions see the same images.
    patterns = torch.randn(num_classes, 3, image_size, image_size, generator=generator, dtype=torch.float32)
    labels = torch.arange(num_samples) % num_classes
    images = torch.randn(num_samples, 3, image_size, image_size, generator=generator, dtype=torch.float32)
    return images.mul_(noise).add_(patterns[labels]).to(torch.get_default_dtype()), labels
