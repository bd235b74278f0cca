# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed saved on two ranks is what DeepSpeed's own script finds in it, and what the run itself had."""

from __future__ import annotations

import json
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
from stratagem.measure import peak_rss
from stratagem.plugins.deepspeed.host import missing
from tests.checkpoint.test_convert import assert_equal, contents, gpt, train

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


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_weights_masters_and_moments_of_every_stage(tmp_path: Path, stage: int, precision: str) -> None:
    """Tied (pain 55), sizes that two ranks do not divide, and a layer that is frozen."""
    module = gpt(True, vocab_size=33)
    module.model.blocks[0].requires_grad_(False)
    source = tmp_path / "saved"
    train(module, source, ours=False, strategy=f"deepspeed_zero_{stage}", devices=2, precision=precision)
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
    if precision == "32-true":  # what the same batches give without DeepSpeed, moments too
        plain = gpt(True, vocab_size=33)
        plain.model.blocks[0].requires_grad_(False)
        train(plain, tmp_path / "ours", ours=True, strategy="ring_ddp", devices=2)
        expected = moments(tmp_path / "ours")
        for name, entries in expected.items():
            for key, value in entries.items():
                torch.testing.assert_close(mine[name][key], value, rtol=1e-4, atol=1e-7)
        again = gpt(True, vocab_size=33)
        again.model.blocks[0].requires_grad_(False)
        train(again, tmp_path / "x", ours=True, resume=tmp_path / "folder", strategy="ring_ddp", devices=2)
        for name, value in again.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-6)
    (gone,) = source.glob("checkpoint/*pp_rank_1*optim_states.pt")
    gone.unlink()
    with pytest.raises(CheckpointError, match="2 ranks wrote it; there are 1 files"):
        foreign_deepspeed.read(source)


MEASURED = """
import json, sys
from pathlib import Path
from stratagem.checkpoint.convert import Settings, convert
from stratagem.measure import peak_rss
source, target, to = sys.argv[1:]
import torch
torch.ones(4) + 1
with peak_rss() as peak:
    convert(Path(source), Path(target), Settings(to=to))
print(json.dumps(peak.num_bytes))
"""


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """200 MiB in tensors of 8 MiB; a whole copy anywhere would be seen."""
    try:
        with peak_rss():
            pass
    except RuntimeError as error:
        pytest.skip(str(error))
    state = {f"model.{number}": torch.full((2**21,), float(number)) for number in range(25)}
    torch.save({"state_dict": state}, tmp_path / "a.ckpt")
    del state
    ways = [("a.ckpt", "folder", "folder"), ("folder", "b.ckpt", "ckpt"), ("b.ckpt", "hub", "safetensors")]
    for source, target, to in [*ways, ("hub", "c.ckpt", "ckpt")]:
        words = [sys.executable, "-c", MEASURED, str(tmp_path / source), str(tmp_path / target), to]
        done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=300)
        peak = json.loads(done.stdout.splitlines()[-1])
        print(f"{source} -> {target}: {peak / 2**20:.0f} MiB")
        # A window of 32 MiB and a tensor on either side, and what is imported.
        assert peak < 160 * 2**20, f"{source} -> {target}: {peak / 2**20:.0f} MiB"
    last = torch.load(tmp_path / "c.ckpt", mmap=True)["state_dict"]
    assert len(last) == 25
    assert all(bool((tensor == float(name.removeprefix("model."))).all()) for name, tensor in last.items())
