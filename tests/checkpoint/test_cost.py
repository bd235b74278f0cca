# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint costs: on disk one state, however many ranks have copies of it; in memory at most a share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from stratagem.checkpoint.manifest import rank_file
from stratagem.checkpoint.parts import Part
from stratagem.checkpoint.reading import Reader
from stratagem.checkpoint.writing import CHUNK_BYTES
from stratagem.measure import peak_rss
from stratagem.strategy.checkpoint_io import FaultTolerantCheckpointIO
from stratagem.testing import run_ranks
from stratagem.testing.contract import Subject
from stratagem.testing.contract.runs import Run, make_trainer
from tests.checkpoint.test_crash import joined

WIDTH, LAYERS = 128, 6
SMALL, FRAME = 96 * 2**10, 2 * 2**10
"""Bytes of all that is no state of the training (random states, objects, manifest), and of what is around a chunk."""


class Wide(pl.LightningModule):
    """Six layers of 64 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.layers(batch[0]), batch[0])

    @override
    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters())


def save_wide(folder: Path, name: str) -> None:
    """The body of every rank: two steps and a checkpoint."""
    plugins = [FaultTolerantCheckpointIO()]
    run = Run(precision="32-true")
    trainer = make_trainer(Subject(strategy=name), run, _SaveAtEnd(folder), max_epochs=1, plugins=plugins)
    trainer.fit(Wide(), DataLoader(TensorDataset(torch.randn(24, WIDTH)), batch_size=12))


class _SaveAtEnd(pl.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.folder / "a")


@pytest.mark.parametrize("name", ["ring_ddp", "zero_3"])
def test_on_disk_is_one_state_and_ranks_write_a_share_each(name: str, tmp_path: Path) -> None:
    run_ranks(3, save_wide, {"folder": tmp_path, "name": name})
    parameters = LAYERS * (WIDTH * WIDTH + WIDTH)
    state = 3 * 4 * parameters  # weights and two moments, of four bytes
    files = {path.name: path.stat().st_size for path in (tmp_path / "a").iterdir()}
    manifest = Reader(tmp_path / "a").manifest
    frames = FRAME * sum(len(entry.chunks) for entry in manifest.entries.values())
    assert manifest.num_bytes == pytest.approx(state, abs=SMALL)
    assert state <= sum(files.values()) <= state + SMALL + frames, files
    shares = [files[rank_file(rank)] for rank in range(3)]
    assert max(shares) - min(shares) <= 4 * WIDTH * WIDTH + SMALL, "one tensor more or less"


STATE_BYTES = 2**28
BUFFER = CHUNK_BYTES // 4


def save_large(folder: Path, async_save: bool, divided: bool) -> int:
    """Saves 256 MiB of state, of which every rank has all or its half; bytes of memory that this took beyond it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    io = FaultTolerantCheckpointIO(async_save)
    joined(io)
    rows = STATE_BYTES // 4 // 1024
    state: dict[str, Any] = {}
    for number in range(4):
        if divided:
            share = rows // 4 // size
            part = torch.ones(share, 1024)
            box = ((rank * share, (rank + 1) * share), (0, 1024))
            state[f"w{number}"] = Part((share * size, 1024), part.dtype, (box,), (part,))
        else:
            state[f"w{number}"] = torch.ones(rows // 4, 1024)
    io.save_checkpoint({"state_dict": {"first": torch.ones(3)}, "global_step": 0}, folder / "first")
    io.settle()
    with peak_rss() as peak:
        io.save_checkpoint({"state_dict": state, "global_step": 1}, folder / "a")
        io.settle()
    io.leave()
    return peak.num_bytes


@pytest.mark.slow
@pytest.mark.parametrize("divided", [False, True], ids=["replicas", "divided"])
@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_in_memory_a_save_takes_a_share_and_a_buffer(async_save: bool, divided: bool, tmp_path: Path) -> None:
    """Nothing beyond a buffer where the training waits; else a copy of what this rank writes."""
    share = STATE_BYTES // 2 if async_save else 0
    kwargs = {"folder": tmp_path, "async_save": async_save, "divided": divided}
    for rank, taken in enumerate(run_ranks(2, save_large, kwargs)):
        print(f"rank {rank}: {taken / 2**20:.1f} MiB beyond the state")
        assert taken <= share + BUFFER, f"rank {rank}: {taken / 2**20:.1f} MiB"
        assert taken >= share * 0.9
