# SPDX-License-Identifier: Apache-2.0
"""The guard from a config: checked before the start, and built with typed settings."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from lightning.pytorch import Trainer

from stratagem import config
from stratagem.cli._run import RunCLI
from stratagem.errors import ConfigError
from stratagem.resilience.guard import Guard
from stratagem.resilience.guard_settings import BadSteps, Drift, Heartbeat, Stragglers
from stratagem.resilience.interval import IntervalCheckpoint

FOLDER = Path(__file__).parents[2] / "configs"
WORDS = ["--config", str(FOLDER / "gpt_tiny.yaml"), "--config", str(FOLDER / "callbacks" / "guard.yaml")]


@pytest.mark.slow
def test_the_overlay_adds_the_guard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Trainer, "fit", lambda self, **kwargs: None)
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    form, meaning = config.check(config.read(WORDS), "fit")
    assert [*form, *meaning] == []
    callbacks = RunCLI(["fit", *WORDS]).trainer.callbacks
    guard = next(each for each in callbacks if isinstance(each, Guard))
    assert guard.heartbeat == Heartbeat(hang_after=timedelta(minutes=5))
    assert guard.bad_steps == BadSteps(action="skip", spike_factor=4.0)
    assert guard.drift == Drift(every=100)
    saver = next(each for each in callbacks if isinstance(each, IntervalCheckpoint))
    assert saver.failures is not None
    assert saver.failures.between(2) == 6 * 3600
    assert any(type(each).__name__ == "ProgressBar" for each in callbacks)


def test_settings_refuse_what_means_nothing() -> None:
    for make, where in (
        (lambda: Heartbeat(hang_after=timedelta(seconds=1)), "hang_after"),
        (lambda: Stragglers(threshold=1.0), "threshold"),
        (lambda: BadSteps(action="jump"), "action"),  # type: ignore[arg-type]
        (lambda: BadSteps(spike_factor=0.5), "spike_factor"),
        (lambda: BadSteps(gradient=False, gradient_factor=3.0), "gradient_factor"),
        (lambda: BadSteps(warmup=60), "warmup"),
        (lambda: Drift(every=0), "every"),
    ):
        with pytest.raises(ConfigError, match=where):
            make()
