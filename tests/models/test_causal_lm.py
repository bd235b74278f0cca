# SPDX-License-Identifier: Apache-2.0
"""`CausalLM` trains whatever gives logits: ours and small Transformers models made from config classes."""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratagem.errors import ConfigError
from stratagem.models import GPT, CausalLM, GPTConfig, OptimizerSettings, TextData, transformers_lm

LLAMA = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


def _model(name: str) -> nn.Module:
    if name == "gpt":
        torch.manual_seed(0)
        return GPT(GPTConfig(num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, max_seq_len=64))
    pytest.importorskip("transformers", reason="an extra")
    return transformers_lm(f"{name}Config", LLAMA if name == "Llama" else GPT2, seed=0)


def trainer(**options: Any) -> pl.Trainer:
    """A quiet trainer on one CPU."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(accelerator="cpu", devices=1, **{**quiet, **options})


class _Losses(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


@pytest.mark.parametrize("name", ["gpt", "Llama", "GPT2"])
def test_it_trains_any_causal_language_model_on_real_text(name: str) -> None:
    module = CausalLM(_model(name), OptimizerSettings(lr=1e-2, warmup_steps=5, schedule="cosine"))
    data = TextData(seq_len=32, global_batch=8, max_bytes=20_000)
    seen = _Losses()
    often = {"val_check_interval": 60, "check_val_every_n_epoch": None}
    run = trainer(max_steps=60, callbacks=[seen], limit_val_batches=3, limit_test_batches=3, **often)
    run.fit(module, data)
    assert seen.losses[0] == pytest.approx(math.log(256), rel=0.1), "begins as a guess among 256 bytes"
    assert sum(seen.losses[-5:]) / 5 < 3.5, "the frequencies of letters alone give about 3.3"
    metrics = run.callback_metrics
    assert float(metrics["perplexity"]) == pytest.approx(math.exp(float(metrics["val_loss"])), rel=1e-5)
    predicted = run.predict(module, data)
    assert predicted is not None
    assert sum(len(batch) for batch in predicted) == len(data.validation_data)
    assert predicted[0].dtype == torch.int64
    (tested,) = run.test(module, data, verbose=False)
    assert tested["test_loss"] == pytest.approx(run.validate(module, data, verbose=False)[0]["val_loss"], rel=1e-5)


def test_the_loss_is_the_mean_over_labels_and_leaves_out_those_marked() -> None:
    module = CausalLM(_model("gpt"))
    tokens, labels = torch.randint(256, (2, 2, 9))
    labels[0, :5] = -100
    logits = module(tokens)
    rows = [(row, place) for row in range(2) for place in range(9) if labels[row, place] >= 0]
    expected = torch.stack([-logits[r, p].log_softmax(-1)[labels[r, p]] for r, p in rows]).mean()
    torch.testing.assert_close(module.loss({"input_ids": tokens, "labels": labels}), expected)


@pytest.mark.parametrize(("dtype", "loss_dtype"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_the_loss_is_in_float32_or_wider(dtype: torch.dtype, loss_dtype: torch.dtype) -> None:
    module = CausalLM(_model("gpt")).to(dtype)
    tokens = torch.randint(256, (1, 5))
    assert module.loss({"input_ids": tokens, "labels": tokens}).dtype == loss_dtype


def test_validation_loss_is_the_mean_over_all_windows() -> None:
    module, data = CausalLM(_model("gpt")), TextData(seq_len=32, global_batch=4, max_bytes=4_970)
    run = trainer()
    (metrics,) = run.validate(module, data, verbose=False)
    windows = data.validation_data[list(range(len(data.validation_data)))]
    assert len(data.validation_data) % 4, "the last batch is a small one"
    with torch.no_grad():
        expected = F.cross_entropy(module(windows["input_ids"]).flatten(0, 1), windows["labels"].flatten())
    assert metrics["val_loss"] == pytest.approx(float(expected), rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(float(expected.exp()), rel=1e-5)


def test_norms_and_biases_are_not_decayed() -> None:
    optimizer = OptimizerSettings(weight_decay=0.5).build(_model("GPT2"))
    decayed, free = optimizer.param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.5, 0.0)
    assert {p.ndim for p in free["params"]} == {1}
    assert min(p.ndim for p in decayed["params"]) == 2
    model = nn.Linear(2, 2, bias=False)
    assert len(OptimizerSettings(name="sgd", momentum=0.9).build(model).param_groups) == 1
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter"):
        OptimizerSettings().build(model)


def test_the_schedule_rises_to_the_rate_and_ends_where_it_should() -> None:
    rates: list[float] = []

    class Rates(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    settings = OptimizerSettings(lr=0.4, warmup_steps=3, schedule="cosine", min_lr_ratio=0.25)
    data = TextData(seq_len=16, global_batch=8, max_bytes=1_500)
    run = trainer(max_epochs=2, limit_val_batches=0, callbacks=[Rates()])
    run.fit(CausalLM(_model("gpt"), settings), data)
    total = 2 * (len(data.train_data) // 8)
    assert len(rates) == total
    assert rates[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(0.4 * settings.lr_factor(lambda: total)(total - 1))
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "options", [{"name": "lion"}, {"lr": -1.0}, {"min_lr_ratio": 2.0}, {"warmup_steps": -1}, {"schedule": "step"}]
)
def test_impossible_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="optimizer"):
        OptimizerSettings(**options)


def test_a_transformers_model_is_seeded_and_leaves_random_state_alone() -> None:
    state = torch.get_rng_state()
    one, other, third = _model("Llama"), _model("Llama"), transformers_lm("LlamaConfig", LLAMA, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    name, weight = next(iter(one.named_parameters()))
    assert torch.equal(weight, dict(other.named_parameters())[name])
    assert not torch.equal(weight, dict(third.named_parameters())[name])


def test_a_wrong_transformers_model_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="an extra")
    for name in ("LlamaConfg", "AutoModel"):
        with pytest.raises(ConfigError, match=f"config_class: Transformers has no config class '{name}'"):
            transformers_lm(name)
    with pytest.raises(ConfigError, match="no causal language model of a CLIPConfig"):
        transformers_lm("CLIPConfig")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"stratagem\[transformers\]"):
        transformers_lm("LlamaConfig")


CONFIG = """
model:
  class_path: stratagem.models.CausalLM
  init_args:
    model:
{model}
    optimizer: {{name: sgd, lr: 0.5, warmup_steps: 2}}
data:
  class_path: stratagem.models.TextData
  init_args: {{seq_len: 16, global_batch: 4, max_bytes: 5000}}
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  limit_val_batches: 1
  callbacks:
    - class_path: stratagem.models.TokensPerSecond
    - class_path: stratagem.models.SampleText
      init_args: {{num_tokens: 3}}
"""
OURS = """
      class_path: stratagem.models.GPT
      init_args: {config: {num_layers: 1, hidden_size: 16, num_heads: 2, num_kv_heads: 1}}
"""
THEIRS = """
      class_path: stratagem.models.transformers_lm
      init_args: {config_class: GPT2Config, config: {n_embd: 16, n_layer: 1, n_head: 2, vocab_size: 256}, seed: 3}
"""


@pytest.mark.parametrize("model", [OURS, THEIRS], ids=["ours", "transformers"])
def test_a_config_names_model_data_and_callbacks(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning.pytorch.cli import LightningCLI

    if model == THEIRS:
        pytest.importorskip("transformers", reason="an extra")
    (tmp_path / "run.yaml").write_text(CONFIG.format(model=model))
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cli = LightningCLI(
            args=["fit", "--config", "run.yaml"], save_config_callback=None, seed_everything_default=False
        )
    assert cli.trainer.global_step == 2
    assert isinstance(cli.model, CausalLM)
    assert cli.model.optimizer_settings == OptimizerSettings(name="sgd", lr=0.5, warmup_steps=2)
    assert "Sample:\ndef " in capsys.readouterr().out


def test_it_takes_tensors_and_objects_with_logits() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Embedding(256, 256)

        def forward(self, input_ids: Tensor) -> Any:
            return type("Output", (), {"logits": self.inner(input_ids)})()

    wrapped = Wrapped()
    tokens = torch.randint(256, (1, 4))
    assert torch.equal(CausalLM(wrapped)(tokens), CausalLM(wrapped.inner)(tokens))
