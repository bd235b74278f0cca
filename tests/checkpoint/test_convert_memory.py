# SPDX-License-Identifier: Apache-2.0
"""What a conversion holds is a window, a tensor on either side and its imports, however large the state is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stratagem.measure import peak_rss

pytestmark = pytest.mark.slow

MIB = 2**20
COUNT, EACH = 16, 2 * MIB
"""Tensors of 8 MiB, of weights and of a moment: 256 MiB."""

MEASURED = """
import sys, warnings
from pathlib import Path
from stratagem.checkpoint.convert import Settings, convert
from stratagem.measure import peak_rss
folder = Path(sys.argv[1])
for way in sys.argv[2:]:
    source, target, to = way.split(":")
    convert(folder / f"small-{source}", folder / f"small-{target}", Settings(to=to))  # imports what is needed
    with peak_rss() as peak:
        convert(folder / source, folder / target, Settings(to=to))
    print(source, target, peak.num_bytes)
"""


def checkpoint(size: int) -> dict[str, Any]:
    """Weights, tied and not, and a moment of each."""
    weights = {f"model.{number}": torch.full((size,), float(number)) for number in range(COUNT)}
    state = {number: {"exp_avg": torch.full((size,), -float(number))} for number in range(COUNT)}
    tied = {**weights, "model.head": weights["model.0"]}
    return {"state_dict": tied, "optimizer_states": [{"state": state, "param_groups": [{"params": [*state]}]}]}


def save_as_deepspeed(folder: Path, size: int, stage: int) -> None:
    """The files of two ranks, with what is read of them."""
    folder.mkdir()
    found = checkpoint(size)
    weights, state = found["state_dict"], found["optimizer_states"][0]["state"]
    shapes = {f"model.{number}": torch.Size([size]) for number in range(COUNT)}

    def share(tensors: list[Tensor], rank: int) -> Tensor:
        if stage == 3:  # half of each
            return torch.cat([tensor[rank * size // 2 : (rank + 1) * size // 2] for tensor in tensors])
        return torch.cat(tensors[rank * COUNT // 2 : (rank + 1) * COUNT // 2])

    for rank in range(2):
        masters = share([weights[name] for name in shapes], rank)
        moment = share([entries["exp_avg"] for entries in state.values()], rank)
        base = {"state": {0: {"exp_avg": moment}}, "param_groups": [{"params": [0]}]}
        own: dict[str, Any] = {"zero_stage": stage, "partition_count": 2}
        if stage == 3:
            own |= {"fp32_flat_groups": [masters], "optimizer_state_dict": base}
        else:
            own |= {"single_partition_of_fp32_groups": [masters], "base_optimizer_state": base}
        torch.save({"optimizer_state_dict": own}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if rank == 0 or stage == 3:
            head = "mp_rank_00" if stage < 3 else f"zero_pp_rank_{rank}_mp_rank_00"
            module = weights if stage < 3 else {name: torch.empty(0) for name in shapes}
            ties = {"model.head": "model.0"}
            saved = {"module": module, "param_shapes": [shapes], "shared_params": ties}
            torch.save(saved, folder / f"{head}_model_states.pt")


WAYS = (
    *("a.ckpt:folder:folder", "folder:b.ckpt:ckpt", "b.ckpt:hub:safetensors", "hub:c.ckpt:ckpt"),
    *("ds1:d1:folder", "ds3:d3.ckpt:ckpt"),
)
LIMIT = 80 * MIB
"""Of 256 MiB: on either side a window of 32 MiB and a tensor of 8."""


def test_memory_stays_bounded_in_every_direction(tmp_path: Path) -> None:
    """A whole copy anywhere would be seen."""
    try:
        with peak_rss():
            pass
    except RuntimeError as error:
        pytest.skip(str(error))
    for prefix, size in (("small-", 16), ("", EACH)):
        torch.save(checkpoint(size), tmp_path / f"{prefix}a.ckpt")
        save_as_deepspeed(tmp_path / f"{prefix}ds1", size, 1)
        save_as_deepspeed(tmp_path / f"{prefix}ds3", size, 3)
    words = [sys.executable, "-c", MEASURED, str(tmp_path), *WAYS]
    # Freed tensors go back to the system at once; what glibc would keep of them (some 60 MiB) nobody holds.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB)}
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=300, env=environment)
    rows = [line.split() for line in done.stdout.splitlines()]
    print(*(f"{source} -> {target}: {int(peak) / MIB:.0f} MiB" for source, target, peak in rows), sep="\n")
    assert len(rows) == len(WAYS)
    assert all(int(peak) < LIMIT for *_, peak in rows), rows
    expected = checkpoint(EACH)
    for name in ("b.ckpt", "c.ckpt", "d3.ckpt"):
        found = torch.load(tmp_path / name, mmap=True)
        assert found["state_dict"].keys() == expected["state_dict"].keys()
        assert all(torch.equal(tensor, expected["state_dict"][key]) for key, tensor in found["state_dict"].items())
        assert found["state_dict"]["model.head"].data_ptr() == found["state_dict"]["model.0"].data_ptr()
        if name != "c.ckpt":
            for number, entries in expected["optimizer_states"][0]["state"].items():
                assert torch.equal(found["optimizer_states"][0]["state"][number]["exp_avg"], entries["exp_avg"])
