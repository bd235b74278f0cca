# SPDX-License-Identifier: Apache-2.0
"""A checkpoint keeps every bit on its way through other formats; what cannot be converted is refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stratagem.checkpoint import foreign_picture
from stratagem.checkpoint.convert import Settings, convert
from stratagem.cli import main
from stratagem.errors import CheckpointError, UserError
from stratagem.models import GPT, CausalLM, GPTConfig, transformers_lm
from stratagem.models.optim import OptimizerSettings
from stratagem.strategy.checkpoint_io import FaultTolerantCheckpointIO
from stratagem.testing import run_ranks

FOLDER, HUB = Settings(to="folder"), Settings(to="safetensors")


class Save(pl.Callback):
    """Saves after two steps, and at the end if there is a place for that."""

    def __init__(self, path: Path, end: Path | None = None) -> None:
        self.path, self.end = path, end

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path, weights_only=False)

    def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.end is not None:
            trainer.save_checkpoint(self.end, weights_only=False)


def loader(batch_size: int = 2, first: int = 0) -> DataLoader[Any]:
    """16 rows, from `first` on and around."""
    tokens = torch.randint(0, 32, (16, 9), generator=torch.Generator().manual_seed(0)).roll(-first, 0)
    rows = [{"input_ids": row[:-1], "labels": row[1:]} for row in tokens]
    return DataLoader(rows, batch_size=batch_size)  # type: ignore[arg-type]


ADAMW = OptimizerSettings(warmup_steps=2)


def gpt(tied: bool, optimizer: OptimizerSettings = ADAMW, **settings: Any) -> CausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "num_layers": 1, "hidden_size": 16, "num_heads": 2, "max_seq_len": 16, **settings}
    return CausalLM(GPT(GPTConfig(tie_embeddings=tied, **sizes)), optimizer)


def train(
    module: pl.LightningModule,
    path: Path,
    ours: bool,
    resume: Path | None = None,
    end: Path | None = None,
    data: DataLoader[Any] | None = None,
    **settings: Any,
) -> None:
    """Three steps, with a checkpoint after two."""
    trainer = pl.Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_steps": 3, **settings},
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Save(path, end)],
        plugins=[FaultTolerantCheckpointIO()] if ours else [],
    )
    trainer.fit(module, data or loader(), ckpt_path=resume, weights_only=None if resume is None else True)


def contents(path: Path) -> dict[str, Any]:
    """Of a folder of ours or a single file."""
    return FaultTolerantCheckpointIO().load_checkpoint(path, weights_only=True)


def assert_equal(found: Any, expected: Any, at: str = "") -> None:
    """The same, bit by bit."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor), at
        assert found.dtype == expected.dtype, at
        assert torch.equal(found, expected), at
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), at
        for key, value in expected.items():
            assert_equal(found[key], value, f"{at}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), at
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other, at)
    else:
        assert found == expected, at


def shares(state: dict[str, Tensor]) -> bool:
    return state["model.lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()


def there_and_back(source: Path, there: Path, *, tied: bool, **settings: Any) -> None:
    """A folder to a file and back, and on with the run from the file: the same as from the folder.

    The run goes on under the strategy that saved, so its loaders take the positions that are kept.
    """
    convert(source, there / "one.ckpt", Settings(keep_loaders=True))
    assert_equal(torch.load(there / "one.ckpt", weights_only=True), contents(source))
    convert(there / "one.ckpt", there / "again", FOLDER)
    assert_equal(contents(there / "again"), contents(source))
    assert shares(torch.load(there / "one.ckpt", weights_only=True)["state_dict"]) is tied
    convert(source, there / "plain.ckpt")  # what a plain loader cannot take is set aside, and is put back
    one, other = gpt(tied), gpt(tied)
    train(one, there / "x", ours=True, resume=source, **settings)
    train(other, there / "x", ours=False, resume=there / "plain.ckpt", **settings)
    assert_equal(other.state_dict(), one.state_dict())


def test_a_run_on_one_device_there_and_back_with_windows_of_no_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are opened anew before every tensor; so each is found again, wherever it lies."""
    monkeypatch.setattr(foreign_picture.Window.__init__, "__defaults__", (0,))
    train(gpt(False), tmp_path / "step.ckpt", ours=True)
    there_and_back(tmp_path / "step.ckpt", tmp_path, tied=False)
    loaded = CausalLM.load_from_checkpoint(tmp_path / "one.ckpt", model=gpt(False).model, weights_only=True)
    assert_equal(loaded.state_dict(), contents(tmp_path / "step.ckpt")["state_dict"])


def test_lightnings_own_file_keeps_ties_and_dtypes(tmp_path: Path) -> None:
    train(gpt(True), tmp_path / "own.ckpt", ours=False)
    own = torch.load(tmp_path / "own.ckpt", weights_only=True)
    own["more"] = {"empty": torch.empty(0, 3), "half": torch.arange(6.0).view(2, 3).half().T, "step": torch.tensor(3)}
    torch.save(own, tmp_path / "own.ckpt")
    convert(tmp_path / "own.ckpt", tmp_path / "folder", FOLDER)
    convert(tmp_path / "folder", tmp_path / "back.ckpt")
    back = torch.load(tmp_path / "back.ckpt", weights_only=True)
    assert shares(back["state_dict"])
    assert_equal(back, own)
    convert(tmp_path / "folder", tmp_path / "hub", HUB)
    convert(tmp_path / "hub", tmp_path / "weights", FOLDER)
    weights = contents(tmp_path / "weights")["state_dict"]
    assert shares(weights)
    assert_equal(weights, own["state_dict"])


def train_in_doubles(**settings: Any) -> None:
    """Lightning loads weights before it casts the module, so this one is of doubles from the start."""
    train(gpt(True, OptimizerSettings(name="sgd", momentum=0.9)).double(), **settings)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_plain_trainer_goes_on_from_a_run_of_ours(
    tmp_path: Path, devices: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Our loaders have a state and plain ones have none, which Lightning refuses; so a file has it set aside.

    The plain loader begins where the run stopped; the batches that were done are counted, so the epoch ends in time.
    """
    doubles = {"precision": "64-true", "max_epochs": 1, "max_steps": -1}
    ours = {"path": tmp_path / "step", "end": tmp_path / "end", "ours": True, "strategy": "ring_ddp", **doubles}
    if devices == 1:
        run_ranks(1, train_in_doubles, {"devices": 1, **ours})
    else:
        train_in_doubles(devices=devices, **ours)
    assert main(["convert", str(tmp_path / "step"), str(tmp_path / "one.ckpt")]) == 0
    told = capsys.readouterr().out
    assert "carried: 1 tied name (model.lm_head.weight = model.embed_tokens.weight); state of 1 optimizer" in told
    ranks = "1 rank" if devices == 1 else "2 ranks"
    assert f"alone: random states of {ranks}; positions of 1 data loader (epoch 0, sample {4 * devices})" in told
    rest = loader(2 * devices, first=4 * devices)
    plain = {"path": tmp_path / "x", "ours": False, **doubles}
    train_in_doubles(resume=tmp_path / "one.ckpt", end=tmp_path / "e.ckpt", data=rest, **plain)
    expected, found = contents(tmp_path / "end"), contents(tmp_path / "e.ckpt")
    assert found["global_step"] == expected["global_step"] == 8 // devices
    for name, value in expected["state_dict"].items():
        torch.testing.assert_close(found["state_dict"][name], value, rtol=1e-10, atol=1e-10)
    convert(tmp_path / "one.ckpt", tmp_path / "again", FOLDER)
    assert_equal(contents(tmp_path / "again"), contents(tmp_path / "step"))
    convert(tmp_path / "step", tmp_path / "kept.ckpt", Settings(keep_loaders=True))
    with pytest.raises(RuntimeError, match="0 stateful loaders"):
        train_in_doubles(resume=tmp_path / "kept.ckpt", **plain)


def test_what_is_left_out_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight = torch.ones(3, 2)
    moments = {"step": torch.tensor(1.0), "exp_avg": torch.ones(3, 2), "stratagem_master": torch.ones(3, 2)}
    rank = {"random": {"torch": torch.ones(4)}, "gradients": {"model.a": torch.ones(3, 2)}}
    saved = {
        "state_dict": {"model.a": weight, "model.b": weight},
        "optimizer_states": [{"state": {0: moments}, "param_groups": [{"params": [0]}]}],
        "lr_schedulers": [{"last_epoch": 1}],
        "hyper_parameters": {"depth": 2},
        "mine": [1],
        "stratagem": {"optimizer_names": [["model.a"]], "ranks": [rank, rank]},
    }
    torch.save(saved, tmp_path / "x.ckpt")

    def told(*words: str) -> list[str]:
        assert main(["convert", str(tmp_path / "x.ckpt"), *words]) == 0
        return capsys.readouterr().out.splitlines()[1:]

    tied, trained = "1 tied name (model.b = model.a)", "state of 1 optimizer; exact weights of 1 parameter; "
    ranks = "random states of 2 ranks; gradients of an open accumulation window"
    assert told(str(tmp_path / "folder"), "--to=folder") == [
        f"carried: {tied}; state of 1 optimizer; state of 1 learning-rate schedule; "
        "hyper-parameters of the module; 'mine'",
        f"carried, for stratagem's strategies alone: exact weights of 1 parameter; {ranks}",
    ]
    left_out = f"left out: {trained}state of 1 learning-rate schedule; "
    assert told(str(tmp_path / "y.ckpt"), "--weights-only") == [
        f"carried: {tied}; hyper-parameters of the module; 'mine'",
        left_out + ranks,
    ]
    assert told(str(tmp_path / "hub"), "--to=safetensors") == [
        f"carried: {tied}",
        f"{left_out}hyper-parameters of the module; 'mine'; {ranks}; "
        "config.json, which nothing here tells (--config-from names one)",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_run_on_two_ranks_there_and_back(tmp_path: Path, tied: bool) -> None:
    settings = {"strategy": "ring_ddp", "devices": 2}
    train(gpt(tied), tmp_path / "step.ckpt", ours=True, **settings)
    there_and_back(tmp_path / "step.ckpt", tmp_path, tied=tied, **settings)


@pytest.mark.parametrize(
    ("config_class", "settings"),
    [
        pytest.param("LlamaConfig", {"tie_word_embeddings": False, "hidden_size": 16}, marks=pytest.mark.slow),
        pytest.param("LlamaConfig", {"tie_word_embeddings": True, "hidden_size": 16}, marks=pytest.mark.slow),
        ("GPT2Config", {"n_layer": 1, "n_head": 2, "n_embd": 16}),
    ],
)
def test_transformers_loads_what_is_converted_and_back(
    tmp_path: Path, config_class: str, settings: dict[str, Any]
) -> None:
    import safetensors.torch
    import transformers

    if config_class == "LlamaConfig":
        settings = {**settings, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    settings = {**settings, "vocab_size": 32}
    module = CausalLM(transformers_lm(config_class, settings, seed=1))
    state = module.state_dict()
    arguments = {"model": {"init_args": {"config_class": config_class, "config": settings}}}
    torch.save({"state_dict": state, "hyper_parameters": arguments}, tmp_path / "x.ckpt")
    convert(tmp_path / "x.ckpt", tmp_path / "hub", Settings(to="safetensors", shard_bytes=4000))
    assert len(list((tmp_path / "hub").glob("model-*-of-*.safetensors"))) > 1
    for path in (tmp_path / "hub").glob("*.safetensors"):
        for name, tensor in safetensors.torch.load_file(path).items():
            assert torch.equal(tensor, state[f"model.{name}"])
    loaded: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    assert_equal(dict(loaded.state_dict()), dict(module.model.state_dict()))
    loaded.save_pretrained(tmp_path / "theirs")  # tells nothing about ties: the model has to
    convert(tmp_path / "theirs", tmp_path / "back", FOLDER)
    fresh = CausalLM(transformers_lm(config_class, settings, seed=2))
    fresh.load_state_dict(contents(tmp_path / "back")["state_dict"], strict=True)
    assert_equal(dict(fresh.state_dict()), dict(state))
    convert(tmp_path / "x.ckpt", tmp_path / "half.ckpt", Settings(weights_only=True, dtype=torch.bfloat16))
    assert_equal(torch.load(tmp_path / "half.ckpt")["state_dict"], {k: v.bfloat16() for k, v in state.items()})


class Mine:
    """A class of the user's."""


def test_what_cannot_be_converted_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = {"state_dict": {"model.a": torch.ones(3, 2), "model.b": torch.zeros(4)}}
    torch.save(weights, tmp_path / "x.ckpt")

    def refused(*words: str) -> str:
        before = sorted(tmp_path.iterdir())
        assert main(["convert", *(word if word.startswith("-") else str(tmp_path / word) for word in words)]) == 2
        assert sorted(tmp_path.iterdir()) == before, "a refusal leaves nothing behind"
        return capsys.readouterr().err

    assert main(["convert", str(tmp_path / "x.ckpt"), str(tmp_path / "folder"), "--to=folder"]) == 0
    assert "2 weights with 10 elements" in capsys.readouterr().out
    assert "does not say what it is to be" in refused("x.ckpt", "y")
    assert "the target is there already" in refused("x.ckpt", "folder", "--to=folder")
    assert "the same" in refused("x.ckpt", "x.ckpt", "--force")
    assert "--weights-only" in refused("x.ckpt", "y.ckpt", "--dtype=float16")
    assert "'float13'" in refused("x.ckpt", "y.ckpt", "--dtype=float13")
    assert "nothing of that name" in refused("none", "y.ckpt")
    assert "no weight has the prefix 'net.'" in refused("x.ckpt", "hub", "--to=safetensors", "--prefix=net.")
    (tmp_path / "empty").mkdir()
    assert "it is no checkpoint" in refused("empty", "y.ckpt")
    (tmp_path / "text.ckpt").write_text("not a checkpoint")
    assert "no checkpoint" in refused("text.ckpt", "y.ckpt")
    (tmp_path / "cut.ckpt").write_bytes((tmp_path / "x.ckpt").read_bytes()[:700])
    assert "checkpoint" in refused("cut.ckpt", "y.ckpt")
    torch.save({**weights, "hyper_parameters": {"mine": Mine()}}, tmp_path / "mine.ckpt")
    assert "Mine" in (told := refused("mine.ckpt", "y.ckpt"))
    assert "--trust" in told
    assert main(["convert", str(tmp_path / "mine.ckpt"), str(tmp_path / "trusted.ckpt"), "--trust"]) == 0
    assert main(["convert", str(tmp_path / "x.ckpt"), str(tmp_path / "folder"), "--to=folder", "--force"]) == 0
    convert(tmp_path / "x.ckpt", tmp_path / "hub", HUB)
    whole = (tmp_path / "hub" / "model.safetensors").read_bytes()
    (tmp_path / "hub" / "model.safetensors").write_bytes(whole[:-1])
    assert "no whole safetensors file" in refused("hub", "y.ckpt")
    (tmp_path / "hub" / "manifest.json").write_text("{}")
    assert "several kinds" in refused("hub", "y.ckpt")
    chunks = bytearray((tmp_path / "folder" / "rank-00000.bin").read_bytes())
    chunks[-100] ^= 1
    (tmp_path / "folder" / "rank-00000.bin").write_bytes(chunks)
    assert "its checksum is another one" in refused("folder", "y.ckpt")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    torch.save(
        {"state_dict": {"model.a": torch.ones(3)}, "hyper_parameters": {"config_class": "LlamaConfig"}},
        tmp_path / "x.ckpt",
    )
    with pytest.raises(UserError, match="not installed"):
        convert(tmp_path / "x.ckpt", tmp_path / "hub", HUB)
    assert not (tmp_path / "hub").exists()
    with pytest.raises(CheckpointError, match="nothing of that name"):
        convert(tmp_path / "y.ckpt", tmp_path / "hub", HUB)
