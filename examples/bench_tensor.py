# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism beside torch's `parallelize_module`, with the same plan on the same model, in one run.

    python examples/bench_tensor.py [--rounds 3] [--steps 20] [--widths 512,128] [--json FILE]

Four blocks of a GPT, two ranks, forward, backward and a step of SGD. Within a round the contenders take turns in fresh
warm processes, and nobody always comes first. A step's time is that of the slower rank; a contender's is the median
over all steps of all rounds. `cut sequence` is ours with sequence parallelism, which torch's plan here has not.

    one process / plain     the technique on a world of one rank, beside the module as it is
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from stratagem.mesh import MeshShape
from stratagem.models import GPT, GPTConfig
from stratagem.plugins.tensor import TensorParallel, TensorSettings
from stratagem.technique import Context
from stratagem.testing import run_ranks

RANKS, WARM_UP, BATCH, LENGTH = 2, 3, 4, 128
LONG = timedelta(minutes=5)
OURS, OURS_CUT, TORCH = "ours", "ours, cut sequence", "torch"
PLAIN, ALONE = "plain", "one process"
BOUNDS = ((512, OURS, TORCH, 0.85), (128, OURS, TORCH, 0.65), (512, ALONE, PLAIN, 1.02), (128, ALONE, PLAIN, 1.02))
"""What is claimed: at this width, this contender's step is at most so many times that one's."""


def by_torch(model: GPT) -> None:
    """The model's own plan in torch's words. Collective."""
    attention = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")} | {"o_proj": RowwiseParallel()}
    ffn = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    plan: dict[str, Any] = {
        f"blocks.{n}.attention.{k}": v for n in range(len(model.blocks)) for k, v in attention.items()
    }
    plan |= {f"blocks.{n}.ffn.{k}": v for n in range(len(model.blocks)) for k, v in ffn.items()}
    plan["embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def train(contender: str, width: int, steps: int) -> list[float]:
    """One rank's step times. Collective."""
    torch.manual_seed(0)
    config = GPTConfig(num_layers=4, hidden_size=width, num_heads=4, max_seq_len=LENGTH, tie_embeddings=False)
    model: nn.Module = GPT(config)
    context = Context(MeshShape.fit(dist.get_world_size(), fill="tp"), dist.get_rank(), torch.device("cpu"))
    if contender == TORCH:
        by_torch(model)  # type: ignore[arg-type]  # it is one
    elif contender != PLAIN:
        TensorParallel(TensorSettings(sequence_parallel="auto" if contender == OURS_CUT else "off")).apply(
            model, context
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tokens = torch.randint(config.vocab_size, (BATCH, LENGTH + 1))
    times = []
    for _ in range(WARM_UP + steps):
        dist.barrier()
        start = time.perf_counter()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    return times[WARM_UP:]


def measure(width: int, rounds: int, steps: int) -> dict[str, float]:
    """Median step times in seconds, by contender."""
    sizes = {OURS: RANKS, OURS_CUT: RANKS, TORCH: RANKS, PLAIN: 1, ALONE: 1}
    found: dict[str, list[float]] = {name: [] for name in sizes}
    for turn in range(rounds):
        names = list(sizes)
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            kwargs = {"contender": name, "width": width, "steps": steps}
            ranks = run_ranks(sizes[name], train, kwargs, deadline=LONG)
            found[name] += [max(each) for each in zip(*ranks, strict=True)]
    return {name: statistics.median(times) for name, times in found.items()}


def show(width: int, found: dict[str, float], console: Console) -> None:
    """The figures of one width, then every claim beside what was measured."""
    table = Table(title=f"4 blocks of width {width}, {BATCH} x {LENGTH} tokens")
    for column in ("contender", "ranks", "step [ms]"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for name, seconds in found.items():
        table.add_row(name, "1" if name in (PLAIN, ALONE) else str(RANKS), f"{1e3 * seconds:.1f}")
    console.print(table)
    for at, ours, theirs, bound in BOUNDS:
        if at == width:
            ratio = found[ours] / found[theirs]
            mark = "[green]holds[/]" if ratio <= bound else "[red]does not hold[/]"
            console.print(f"{ours} / {theirs}: {ratio:.2f}, claimed at most {bound}: {mark}")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--widths", default="512,128")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    results = {}
    for width in map(int, options.widths.split(",")):
        results[width] = measure(width, options.rounds, options.steps)
        show(width, results[width], Console())
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
