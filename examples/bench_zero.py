# SPDX-License-Identifier: Apache-2.0
"""ZeRO beside its peers, on the same module, in one run: DeepSpeed, torch's FSDP2, Lightning's ddp.

    python examples/bench_zero.py [--rounds 5] [--json FILE] [--only zero_1,ddp]

Each contender's step is the median over all steps of all rounds. Within a round contenders take turns in fresh warm
processes, and nobody always comes first, so a machine that slows down slows them all. The peers:

    deepspeed_zero_S      DeepSpeed's stage S on Gloo, with the module's own torch optimizer
    ddp+redundancy        Lightning's ddp and torch's ZeroRedundancyOptimizer, which shards as stage 1 does
    fsdp2                 torch's `fully_shard` around each block and the whole, in a plain loop without Lightning
    compute               no strategy: each rank's own forward, backward and half of the optimizer's work in a plain
                          loop, with nothing sent. Nobody can be faster, so it says where a claim is out of reach

A contender whose package is missing is left out, and the run says so.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from bench_training import CONFIG, LONG, WARM_UP, Batches, Load, train
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW, Optimizer

from stratagem.models import GPT, OptimizerSettings
from stratagem.testing import peak_rss, run_ranks

RANKS = 2
FLOOR = "compute"
TWINS = {f"zero_{stage}": f"deepspeed_zero_{stage}" for stage in (1, 2, 3)}
BOUNDS: tuple[tuple[str, str, str, float], ...] = (
    *(("step", ours, theirs, 0.65 if ours == "zero_3" else 0.6) for ours, theirs in TWINS.items()),
    *(("peak", ours, theirs, 0.85) for ours, theirs in TWINS.items()),
    ("step", "zero_1", "ddp+redundancy", 1.0),
    ("step", "zero_2", "ddp+redundancy", 1.0),
    ("step", "zero_1", "ddp", 1.05),
    ("step", "zero_2", "ddp", 1.05),
    ("step", "zero_3", "fsdp2", 0.6),
)
"""What is claimed: of step or peak, this contender's is at most so many times that one's."""


class RedundancyFree(Batches):
    """The module with its optimizer's state sharded by torch."""

    def configure_optimizers(self) -> Optimizer:
        """Torch's ZeroRedundancyOptimizer around AdamW, on the groups that the module would have."""
        plain = OptimizerSettings().build(self)
        groups = [{**group, "params": list(group["params"])} for group in plain.param_groups]
        return ZeroRedundancyOptimizer(groups, AdamW, lr=plain.defaults["lr"], betas=plain.defaults["betas"])


def train_fsdp2(load: Load, steps: int) -> dict[str, Any]:
    """One rank's run of FSDP2 as its users write it: shard each block, then the whole."""

    def sharded(module: Batches) -> Optimizer:
        mesh = init_device_mesh("cpu", (RANKS,))
        for block in module.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(module.model, mesh=mesh)
        return OptimizerSettings().build(module)

    return _loop(load, steps, sharded)


def train_alone(load: Load, steps: int) -> dict[str, Any]:
    """One rank's share of the work, without the other ranks."""

    def half(module: Batches) -> Optimizer:
        optimizer, left = OptimizerSettings().build(module), sum(p.numel() for p in module.parameters()) // RANKS
        for group in optimizer.param_groups:
            mine = []
            for parameter in group["params"]:
                if left > 0:
                    mine.append(parameter)
                left -= parameter.numel()
            group["params"] = mine
        return optimizer

    return _loop(load, steps, half)


def _loop(load: Load, steps: int, prepare: Callable[[Batches], Optimizer]) -> dict[str, Any]:
    """A plain loop, without Lightning; `prepare` changes the module and builds its optimizer."""
    torch.manual_seed(0)
    module = Batches(GPT(CONFIG))
    num_parameters = sum(p.numel() for p in module.parameters())
    tokens = torch.randint(CONFIG.vocab_size, (load.batch * (steps + WARM_UP + 1), load.length + 1))
    starts: list[float] = []
    with peak_rss() as peak:
        optimizer = prepare(module)
        for batch in tokens.split(load.batch):
            starts.append(time.perf_counter())
            module.zero_grad()
            module.training_step([batch[:, :-1], batch[:, 1:]], 0).backward()
            optimizer.step()
    pairs = zip(starts[WARM_UP:], starts[WARM_UP + 1 :], strict=False)
    return {
        "steps": [later - earlier for earlier, later in pairs],
        "peak": peak.num_bytes,
        "parameters": num_parameters,
    }


def contenders(load: Load, steps: int) -> dict[str, Callable[[], list[dict[str, Any]]]]:
    """What runs one turn of each, and returns what its ranks measured."""

    def lightning(strategy: str, module: type[Batches] = Batches) -> Callable[[], list[dict[str, Any]]]:
        kwargs = {"strategy": strategy, "load": load, "steps": steps, "devices": RANKS, "module": module}
        return functools.partial(run_ranks, RANKS, train, kwargs, deadline=LONG)

    names = ["ddp", "ring_ddp", *TWINS]
    if importlib.util.find_spec("deepspeed") is not None:
        names += TWINS.values()
    found = {name: lightning(name) for name in names}
    found["ddp+redundancy"] = lightning("ddp", RedundancyFree)
    for name, body in (("fsdp2", train_fsdp2), (FLOOR, train_alone)):
        arguments = {"load": load, "steps": steps}
        found[name] = functools.partial(run_ranks, RANKS, body, arguments, deadline=timedelta(minutes=5))
    return found


def measure(load: Load, rounds: int, steps: int, only: Sequence[str]) -> dict[str, Any]:
    """All contenders in turn, `rounds` times."""
    chosen = {name: run for name, run in contenders(load, steps).items() if not only or name in only}
    found: dict[str, dict[str, list[float]]] = {name: {"step": [], "peak": []} for name in chosen}
    num_parameters = 0
    for turn in range(rounds):
        names = list(chosen)
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            ranks = chosen[name]()
            found[name]["step"] += [max(step) for step in zip(*(rank["steps"] for rank in ranks), strict=True)]
            found[name]["peak"].append(max(rank["peak"] for rank in ranks))
            num_parameters = ranks[0]["parameters"]
    return {
        "load": str(load),
        "parameters": num_parameters,
        "step_s": {name: statistics.median(rows["step"]) for name, rows in found.items()},
        "peak_bytes": {name: statistics.median(rows["peak"]) for name, rows in found.items()},
    }


def show(result: dict[str, Any], console: Console) -> None:
    """The figures of one load, then every claim beside what was measured."""
    step, peak = result["step_s"], result["peak_bytes"]
    table = Table(title=f"{result['parameters'] / 1e6:.1f} M parameters, {RANKS} ranks, {result['load']} tokens each")
    for column in ("strategy", "step [ms]", "step / ddp", "peak [MiB]", "peak / ddp"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for name in step:
        ratios = [f"{found[name] / found['ddp']:.2f}" if "ddp" in found else "" for found in (step, peak)]
        table.add_row(name, f"{1e3 * step[name]:.1f}", ratios[0], f"{peak[name] / 2**20:.0f}", ratios[1])
    console.print(table)
    for what, ours, theirs, bound in BOUNDS:
        found = {"step": step, "peak": peak}[what]
        if ours in found and theirs in found:
            ratio = found[ours] / found[theirs]
            word = _word(ratio <= bound)
            if ratio > bound and what == "step" and FLOOR in step and step[FLOOR] > bound * step[theirs]:
                word += f" (nobody's could: {FLOOR} alone is {step[FLOOR] / step[theirs]:.2f} of {theirs})"
            console.print(f"{what:4} {ours} / {theirs}: {ratio:.2f}, claimed {bound:.2f}: {word}")
    console.print()


def _word(holds: bool) -> str:
    return "holds" if holds else "[bold]DOES NOT HOLD[/bold]"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="measured steps per round")
    parser.add_argument("--only", default="", help="these contenders, separated by commas")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console()
    if importlib.util.find_spec("deepspeed") is None:
        console.print("DeepSpeed is not installed, so its twins are left out: pip install 'stratagem[deepspeed]'")
    only = [name for name in options.only.split(",") if name]
    results = [measure(load, options.rounds, options.steps, only) for load in (Load(4, 64), Load(1, 16))]
    for result in results:
        show(result, console)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
