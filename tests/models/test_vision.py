# SPDX-License-Identifier: Apache-2.0
"""The image classifier: it learns, its buffers move, and its data is the same everywhere."""

from __future__ import annotations

import pytest
import torch

from stratagem.errors import ConfigError, DataError
from stratagem.models import ImageClassifier, ImageData, OptimizerSettings, TinyConvNet
from stratagem.models.vision import synthetic_images
from tests.models.test_causal_lm import trainer


def test_it_learns_and_its_batchnorm_buffers_move() -> None:
    torch.manual_seed(0)
    module, data = ImageClassifier(num_classes=4), ImageData(640, 8, 4, noise=1.0)
    run = trainer(max_epochs=2)
    run.fit(module, data)
    validated = float(run.callback_metrics["val_accuracy"])
    assert validated > 0.9, "a guess gives 0.25"
    norm = module.model[1]
    assert int(norm.num_batches_tracked) == 2 * len(data.train_data) // 32
    assert (norm.running_mean != 0).all()
    predicted = run.predict(module, data)
    assert predicted is not None
    labels = torch.cat([batch[1] for batch in data.predict_dataloader()])
    accuracy = (torch.cat(predicted) == labels).double().mean()
    assert float(accuracy) == pytest.approx(validated)
    assert len(labels) == len(data.validation_data)


def test_images_are_the_same_in_every_precision_and_call() -> None:
    images, labels = synthetic_images(10, 4, 3, 0.5)
    torch.manual_seed(99)
    assert torch.equal(images, synthetic_images(10, 4, 3, 0.5)[0])
    assert labels.bincount().tolist() == [4, 3, 3]
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(synthetic_images(10, 4, 3, 0.5)[0], images.double())
    finally:
        torch.set_default_dtype(torch.float32)
    flat = images.flatten(1)
    same, other = (flat[0] - flat[3]).norm(), (flat[0] - flat[1]).norm()
    assert same < other, "images of one class are nearer"


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="constant rate"):
        ImageClassifier(optimizer=OptimizerSettings(schedule="cosine")).configure_optimizers()
    with pytest.raises(ConfigError, match="sizes from 1"):
        ImageData(num_classes=0)
    with pytest.raises(ConfigError, match="TinyConvNet"):
        TinyConvNet(width=0)
    with pytest.raises(DataError, match=r"data.global_batch"):
        ImageData(16, 8, 4, global_batch=32)
