# SPDX-License-Identifier: Apache-2.0
"""Ring DDP beside Lightning's own `ddp`, on the same module, in one run.

    python examples/bench_training.py [--rounds 5] [--json FILE]

A GPT of about 16 million parameters trains under each strategy in turn, round after round, in fresh warm processes with
one thread per rank. A figure is the median over all steps of all rounds; strategies take turns within a round, so a
machine that slows down slows them all. *Exposed communication* is the step on 2 ranks minus the step of a single device
on the same batch per rank.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

import stratagem  # noqa: F401  # registers the names
from stratagem.models import GPT, CausalLM, GPTConfig
from stratagem.testing import peak_rss, run_ranks

CONFIG = GPTConfig(vocab_size=1024, num_layers=5, hidden_size=512, num_heads=8, num_kv_heads=4, ffn_size=1536)
WARM_UP = 3


@dataclass(frozen=True)
class Load:
    """One rank's micro-batch: `batch` sequences of `length` tokens."""

    batch: int
    length: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.length}"


class StepClock(pl.Callback):
    """Seconds from the start of one training batch to the start of the next."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """Notes the time."""
        self.starts.append(time.perf_counter())

    @property
    def steps(self) -> list[float]:
        """Durations after the warm-up."""
        pairs = zip(self.starts[WARM_UP:], self.starts[WARM_UP + 1 :], strict=False)
        return [later - earlier for earlier, later in pairs]


class Batches(CausalLM):
    """The module, with pairs of tensors for batches."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Next-token loss; nothing is logged, so nothing but gradients is sent."""
        return self.loss({"input_ids": batch[0], "labels": batch[1]})


def train(strategy: str, load: Load, steps: int, devices: int, module: type[Batches] = Batches) -> dict[str, Any]:
    """One rank's run: its step times in seconds and its peak memory in bytes."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = module(GPT(CONFIG))
    num_parameters = sum(p.numel() for p in model.parameters())
    tokens = torch.randint(CONFIG.vocab_size, (load.batch * devices * (steps + WARM_UP), load.length + 1))
    data = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=load.batch)
    clock = StepClock()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with peak_rss() as peak:
        trainer.fit(model, data)
    return {"steps": clock.steps, "peak": peak.num_bytes, "parameters": num_parameters}


def alone(strategy: str, load: Load, steps: int) -> dict[str, Any]:
    """A single device; run twice side by side, so that it shares the machine as two ranks do."""
    return train(strategy, load, steps, 1)


def measure(load: Load, rounds: int, steps: int) -> dict[str, Any]:
    """All contenders in turn, `rounds` times."""
    contenders = {
        "single": lambda: run_ranks(1, alone, {"strategy": "auto", "load": load, "steps": steps}, deadline=LONG),
        "ring_ddp, 1 rank": lambda: run_ranks(
            1, alone, {"strategy": "ring_ddp", "load": load, "steps": steps}, deadline=LONG
        ),
        "ring_ddp": lambda: run_ranks(
            2, train, {"strategy": "ring_ddp", "load": load, "steps": steps, "devices": 2}, deadline=LONG
        ),
        "ddp": lambda: run_ranks(
            2, train, {"strategy": "ddp", "load": load, "steps": steps, "devices": 2}, deadline=LONG
        ),
    }
    found: dict[str, dict[str, list[float]]] = {name: {"step": [], "peak": []} for name in contenders}
    for turn in range(rounds):
        names = list(contenders)
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):  # nobody always comes first
            for rank in contenders[name]():
                found[name]["step"] += rank["steps"]
                found[name]["peak"].append(rank["peak"])
                num_parameters = rank["parameters"]
    return {
        "load": str(load),
        "parameters": num_parameters,
        "step_s": {name: statistics.median(rows["step"]) for name, rows in found.items()},
        "peak_mib": {name: statistics.median(rows["peak"]) / 2**20 for name, rows in found.items()},
    }


LONG = timedelta(minutes=5)


def show(result: dict[str, Any], console: Console) -> None:
    """The figures of one load, with the ratios that matter."""
    step, peak = result["step_s"], result["peak_mib"]
    table = Table(title=f"{result['parameters'] / 1e6:.1f} M parameters, {result['load']} tokens per rank")
    for column in ("strategy", "step [ms]", "exposed [ms]", "step / ddp", "peak [MiB]"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for name in step:
        exposed = f"{1e3 * (step[name] - step['single']):.1f}" if name != "single" else ""
        table.add_row(name, f"{1e3 * step[name]:.1f}", exposed, f"{step[name] / step['ddp']:.3f}", f"{peak[name]:.0f}")
    console.print(table)
    ours, theirs = step["ring_ddp"] - step["single"], step["ddp"] - step["single"]
    console.print(f"exposed communication, ring_ddp / ddp: {ours / theirs:.2f}")
    console.print(f"world size 1, ring_ddp / single: {step['ring_ddp, 1 rank'] / step['single']:.3f}")
    console.print(f"peak memory, ring_ddp / ddp: {peak['ring_ddp'] / peak['ddp']:.2f}\n")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="measured steps per round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console()
    results = [measure(load, options.rounds, options.steps) for load in (Load(4, 64), Load(1, 16))]
    for result in results:
        show(result, console)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
