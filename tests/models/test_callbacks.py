# SPDX-License-Identifier: Apache-2.0
"""Tokens per second and the sample of text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from torch import Tensor, nn

from stratagem.data import ByteTokenizer
from stratagem.errors import ConfigError
from stratagem.models import GPT, CausalLM, GPTConfig, ProgressBar, SampleText, TextData, TokensPerSecond
from stratagem.models import callbacks as module_under_test
from tests.models.test_causal_lm import trainer


class _Next(nn.Module):
    """Always predicts the following byte: after 'a' comes 'b'."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return 100.0 * nn.functional.one_hot((input_ids + 1) % 256, 256).float()


@pytest.mark.parametrize("num_replicas", [1, 4])
def test_tokens_of_all_data_ranks_are_counted_over_the_last_steps(
    num_replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([10.0, 11.0, 13.0, 14.0, 100.0, 102.0])
    monkeypatch.setattr(module_under_test, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    place = {"num_replicas": num_replicas, "rank": 0}
    run: Any = SimpleNamespace(strategy=SimpleNamespace(distributed_sampler_kwargs=place))
    logged: list[float] = []
    module: Any = SimpleNamespace(log=lambda name, value, **_: logged.append(value) if name != "tok/s" else None)
    callback = TokensPerSecond(window=2)

    def step(length: int) -> None:
        callback.on_train_batch_end(run, module, None, {"input_ids": torch.zeros(2, length)}, 0)

    for length in (100, 3, 6, 9):
        step(length)
    callback.on_validation_end(run, module)
    step(1000)
    step(5)
    tokens = [6 / 1, (6 + 12) / 3, (12 + 18) / 3, 10 / 2]
    assert logged == pytest.approx([num_replicas * value for value in tokens])


def test_the_bar_shows_loss_and_speed_on_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest bar: numbers of the log are high, and a validation has added its loss."""
    bar = ProgressBar(refresh_rate=1)
    shown = {"v_num": 13, "train_loss": 3.96, "tok/s": 171234.5, "val_loss": 2.345}
    monkeypatch.setattr(TQDMProgressBar, "get_metrics", lambda self, *_: dict(shown))
    metrics = bar.get_metrics(None, None)  # type: ignore[arg-type]
    assert metrics == {"train_loss": 3.96, "tok/s": "171234", "val_loss": 2.345}
    line = Tqdm.format_meter(
        n=130,
        total=400,
        elapsed=42,
        ncols=80,
        prefix="Epoch 0: ",
        bar_format=ProgressBar.BAR_FORMAT,
        postfix=", ".join(f"{key}={Tqdm.format_num(value)}" for key, value in metrics.items()),
    )
    assert len(line) <= 80
    assert "train_loss=3.960" in line
    assert "tok/s=171234" in line
    assert "val_loss=2.340" in line or "val_loss=2.345" in line or "val_loss=2.350" in line


def test_the_sample_is_what_the_model_writes_after_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    module = CausalLM(_Next())
    run: Any = SimpleNamespace(is_global_zero=True)
    SampleText("ab", num_tokens=4).on_fit_end(run, module)
    assert capsys.readouterr().out == "\nSample:\nabcdef\n"
    run.is_global_zero = False
    SampleText("ab", num_tokens=4).on_fit_end(run, module)
    assert capsys.readouterr().out == ""
    assert SampleText("\x7f", num_tokens=2).sample(module, ByteTokenizer()) == "\x7f\ufffd\ufffd"


def test_a_sample_longer_than_the_models_sequences_is_written() -> None:
    torch.manual_seed(0)
    module = CausalLM(GPT(GPTConfig(num_layers=1, hidden_size=16, num_heads=2, max_seq_len=8)))
    texts = [SampleText(num_tokens=30, seed=seed).sample(module, ByteTokenizer()) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("def ")


def test_both_work_in_a_fit(capsys: pytest.CaptureFixture[str]) -> None:
    module = CausalLM(GPT(GPTConfig(num_layers=1, hidden_size=16, num_heads=2, max_seq_len=16)))
    run = trainer(max_steps=3, limit_val_batches=0, callbacks=[TokensPerSecond(), SampleText(num_tokens=3)])
    run.fit(module, TextData(seq_len=16, global_batch=4, max_bytes=5000))
    assert float(run.logged_metrics["tokens_per_second"]) > 0
    assert float(run.progress_bar_metrics["tok/s"]) == float(run.logged_metrics["tokens_per_second"])
    assert "tok/s" not in run.logged_metrics
    assert "Sample:\ndef " in capsys.readouterr().out
    assert module.training


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="window"):
        TokensPerSecond(0)
    with pytest.raises(ConfigError, match="prompt"):
        SampleText("")
