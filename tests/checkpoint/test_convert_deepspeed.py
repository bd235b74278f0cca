# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed saved on two ranks is what its own script finds in it, and a run goes on from it as DeepSpeed does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stratagem.checkpoint import foreign_deepspeed
from stratagem.checkpoint.convert import Settings, convert
from stratagem.errors import CheckpointError
from stratagem.models import CausalLM
from stratagem.plugins.deepspeed.host import missing
from tests.checkpoint.test_convert import assert_equal, contents, gpt, loader, train

pytestmark = pytest.mark.slow
needs_deepspeed = pytest.mark.skipif(bool(missing()), reason="the extra deepspeed is not installed")

SCRIPT = """
import json, sys, torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as read
torch.save({name: tensor.clone() for name, tensor in read(sys.argv[1]).items()}, sys.argv[2])
"""


def by_their_script(source: Path, target: Path) -> dict[str, Tensor]:
    """In a process of its own: DeepSpeed's import changes much."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", SCRIPT, str(source), str(target)]
    subprocess.run(words, check=True, env=environment, capture_output=True, timeout=300)
    found: dict[str, Tensor] = torch.load(target)
    return found


def moments(path: Path) -> dict[str, dict[str, Any]]:
    """Of a folder, by the parameter's name."""
    found = contents(path)
    (names,) = found["stratagem"]["optimizer_names"]
    (state,) = found["optimizer_states"]
    return {names[number]: entries for number, entries in state["state"].items()}


def partly_frozen() -> CausalLM:
    """Trained are a tied weight, with decay, and a norm, without."""
    module = gpt(True, vocab_size=33)
    module.model.blocks[0].requires_grad_(False)
    return module


def goes_on(source: Path, folder: Path, precision: str) -> None:
    """One step more from the imported checkpoint, under ZeRO and in one process, is the step that DeepSpeed took."""
    convert(folder / "later", folder / "expected", Settings(to="folder"))
    expected, state = contents(folder / "expected"), moments(folder / "expected")
    assert len(expected["optimizer_states"][0]["param_groups"]) == 2
    assert expected["global_step"] == 3
    settings = {"strategy": "zero_1", "devices": 2, "precision": precision}
    train(partly_frozen(), folder / "x", ours=True, resume=folder / "folder", end=folder / "zero_1", **settings)
    close = {"rtol": 1e-5, "atol": 1e-8} if precision == "32-true" else {"rtol": 2**-7, "atol": 1e-6}
    found, mine = contents(folder / "zero_1"), moments(folder / "zero_1")
    assert mine.keys() == state.keys()
    for name, entries in state.items():
        assert mine[name].keys() == entries.keys()
        for key, value in entries.items():
            torch.testing.assert_close(mine[name][key], value, **close, check_dtype=key != "step", msg=f"{name} {key}")
    for name, value in expected["state_dict"].items():
        torch.testing.assert_close(found["state_dict"][name], value, **close)
    if precision == "32-true":  # where there are no exact weights beside, which a plain optimizer does not know
        convert(source, folder / "one.ckpt")
        rest, alone = loader(4, first=8), partly_frozen()
        train(alone, folder / "x", ours=False, resume=folder / "one.ckpt", data=rest)
        for name, value in expected["state_dict"].items():
            torch.testing.assert_close(alone.state_dict()[name], value, **close)


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_weights_masters_and_moments_of_every_stage(tmp_path: Path, stage: int, precision: str) -> None:
    """Tied (pain 55), sizes that two ranks do not divide, and a layer that is frozen."""
    module, source = partly_frozen(), tmp_path / "saved"
    settings = {"strategy": f"deepspeed_zero_{stage}", "devices": 2, "precision": precision}
    train(module, source, ours=False, end=tmp_path / "later", **settings)
    theirs = by_their_script(source, tmp_path / "theirs.pt")
    report = convert(source, tmp_path / "folder", Settings(to="folder"))
    convert(source, tmp_path / "exact.ckpt", Settings(weights_only=True, dtype=torch.float32))
    exact = torch.load(tmp_path / "exact.ckpt", weights_only=True)["state_dict"]
    assert exact.keys() == module.state_dict().keys()
    frozen = {name: tensor for name, tensor in exact.items() if ".blocks.0." in name}
    assert theirs.keys() == (exact.keys() - frozen.keys() if stage == 1 else exact.keys())  # their script loses them
    assert_equal({name: exact[name] for name in theirs}, {name: tensor.float() for name, tensor in theirs.items()})
    dtype = torch.float32 if precision == "32-true" else torch.bfloat16
    assert_equal(frozen, {name: module.state_dict()[name].to(dtype).float() for name in frozen})
    assert "stage" in report.source
    found, mine = contents(tmp_path / "folder"), moments(tmp_path / "folder")
    assert found["state_dict"]["model.lm_head.weight"].equal(found["state_dict"]["model.embed_tokens.weight"])
    assert found["global_step"] == 2
    assert mine.keys() == {"model.embed_tokens.weight", "model.norm.weight"}
    for name, entries in mine.items():
        assert entries["step"] == 2
        assert entries["exp_avg"].shape == exact[name].shape
        assert ("stratagem_master" in entries) is (precision == "bf16-true")
    goes_on(source, tmp_path, precision)
    (gone,) = source.glob("checkpoint/*pp_rank_1*optim_states.pt")
    gone.unlink()
    with pytest.raises(CheckpointError, match="2 ranks wrote it; there are 1 files"):
        foreign_deepspeed.read(source)
