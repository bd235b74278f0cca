# SPDX-License-Identifier: Apache-2.0
"""Checkpoints beside their peers, on one state, in one run: torch's DCP, Lightning's AsyncCheckpointIO, plain files.

    python examples/bench_checkpoint.py [--rounds 7] [--mib 256] [--folder DIR] [--json FILE] [--only "ours;dcp"]

Two ranks, one thread each. Two states of the same bytes: *replicas*, of which each rank has all and writes a half, and
*shares*, of which each rank has a half. A figure is the median over the rounds of the slower rank; nobody always comes
first, and before a turn everything is on disk. `first` is the round before these, when no buffer is warm.

    stall     until the call returns and training may go on
    on disk   until the checkpoint is complete; MiB/s of the whole state
    load      into tensors that are there, from files that are not in memory

    plain               write and fsync of the bytes that a rank has to write; read of those that it needs
    ours, ours async    `FaultTolerantCheckpointIO`, checksums included, of the load too
    dcp, dcp async      torch.distributed.checkpoint with a file per rank; `kept` is one stager for all saves
    lightning ...       rank 0 alone, of replicas; it does not fsync
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from typing_extensions import override

from stratagem.checkpoint.parts import Box, Part
from stratagem.mesh import MeshShape
from stratagem.strategy.checkpoint_io import FaultTolerantCheckpointIO
from stratagem.technique import Context
from stratagem.testing import run_ranks

RANKS, TENSORS, COLUMNS = 2, 64, 1024
Held = Literal["replicas", "shares"]
LONG = timedelta(minutes=10)

SYNC = {"ours async": "ours", "dcp async": "dcp", "dcp async, kept": "dcp", "lightning async": "lightning"}
"""The save that waits, for each that does not."""

BOUNDS: tuple[tuple[str, str, str, str, float], ...] = (
    ("stall", "ours async", "on disk", "ours", 0.1),
    ("stall", "ours async", "stall", "dcp async", 1.0),
    ("stall", "ours async", "stall", "dcp async, kept", 1.0),
    ("stall", "ours async", "stall", "lightning async", 1.0),
    ("load", "ours", "load", "dcp", 1.0),
)
"""What is claimed: this figure of this contender is at most so many times that figure of that one."""


@final
class State:
    """One rank's part of the state, and tensors of the same shapes to load into.

    Args:
        held: `replicas` or `shares`.
        num_bytes: of the whole state.
    """

    def __init__(self, held: Held, num_bytes: int) -> None:
        self.held, rank = held, dist.get_rank()
        self.rows = num_bytes // TENSORS // COLUMNS // 4 // RANKS * RANKS
        share = self.rows // RANKS
        self.box: Box = ((0, self.rows), (0, COLUMNS))
        if held == "shares":
            self.box = ((rank * share, (rank + 1) * share), (0, COLUMNS))
        torch.manual_seed(0)
        whole = [torch.rand(self.rows, COLUMNS) for _ in range(TENSORS)]  # the same everywhere
        self.tensors = {f"layer.{n}.weight": w[slice(*self.box[0])].clone() for n, w in enumerate(whole)}
        self.target = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}
        self.mine = [w[rank * share : (rank + 1) * share].clone() for w in whole]  # what this rank has to write

    def part(self, tensor: Tensor) -> Tensor | Part:
        """As our strategies state it: a replica is a plain tensor."""
        if self.held == "replicas":
            return tensor
        return Part((self.rows, COLUMNS), tensor.dtype, (self.box,), (tensor,))

    def check(self, loaded: bool) -> None:
        """What was loaded is what was saved; forgets it again."""
        for name, tensor in self.target.items():
            assert not loaded or torch.equal(tensor, self.tensors[name]), name
            tensor.zero_()


class Contender(ABC):
    """One way to save a state and to load it; every rank calls each method."""

    loads = True

    def __init__(self, state: State) -> None:
        self.state = state

    @abstractmethod
    def save(self, path: Path) -> None:
        """Returns when training may go on."""

    def finish(self) -> None:  # noqa: B027  # it is, where `save` waits
        """Returns when it is on disk."""

    def load(self, path: Path) -> None:
        """Fills `state.target`."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027  # most have nothing to end
        """Ends threads."""


@final
class Plain(Contender):
    """The bytes and nothing else."""

    @override
    def save(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        with open(path / str(dist.get_rank()), "wb") as file:
            for tensor in self.state.mine:
                file.write(tensor.numpy().data)
            file.flush()
            os.fsync(file.fileno())

    @override
    def load(self, path: Path) -> None:
        replicas = self.state.held == "replicas"
        for part in range(RANKS) if replicas else (dist.get_rank(),):
            with open(path / str(part), "rb") as file:
                for tensor in self.state.target.values():
                    size = self.state.rows // RANKS
                    rows = tensor[part * size : (part + 1) * size] if replicas else tensor
                    file.readinto(rows.numpy().data)


@final
class Ours(Contender):
    """`FaultTolerantCheckpointIO` with every rank in its crew."""

    def __init__(self, state: State, async_save: bool) -> None:
        super().__init__(state)
        self.loads = not async_save
        shape = MeshShape.fit(RANKS)
        context = Context(shape, dist.get_rank(), torch.device("cpu"), timeout=timedelta(minutes=5))
        self._io = FaultTolerantCheckpointIO(async_save)
        self._io.join(context.communicator(*shape.sizes, lane="checkpoint async" if async_save else "checkpoint"))
        self._checkpoint = {"state_dict": {name: state.part(t) for name, t in state.tensors.items()}, "global_step": 1}

    @override
    def save(self, path: Path) -> None:
        self._io.save_checkpoint(self._checkpoint, path)

    @override
    def finish(self) -> None:
        self._io.settle()

    @override
    def load(self, path: Path) -> None:
        found = self._io.open_checkpoint(path, weights_only=True)["state_dict"]
        for name, tensor in self.state.target.items():
            stored = found.raw(name)
            tensor.copy_(stored.whole() if self.state.held == "replicas" else stored.box(self.state.box))

    @override
    def close(self) -> None:
        self._io.leave()


@final
class Dcp(Contender):
    """torch.distributed.checkpoint; `kept`: asynchronous, with one stager for all saves or one for each."""

    def __init__(self, state: State, mesh: Any, kept: bool | None = None) -> None:
        super().__init__(state)
        self.loads, self._mesh, self._async = kept is None, mesh, kept is not None
        self._group = dist.new_group(backend="gloo")  # for the thread that saves
        self._stager = DefaultStager(StagingOptions(False, False, False, False)) if kept else None
        self._flying: Future[Any] | None = None

    def _dict(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        if self.state.held == "replicas":
            return {"state_dict": dict(tensors)}
        return {"state_dict": {n: DTensor.from_local(t, self._mesh, [Shard(0)]) for n, t in tensors.items()}}

    @override
    def save(self, path: Path) -> None:
        state, writer = self._dict(self.state.tensors), dcp.FileSystemWriter(path)
        if not self._async:
            dcp.save(state, storage_writer=writer, process_group=self._group)
            return
        stager = self._stager or DefaultStager(StagingOptions(False, False, False, False))
        found = dcp.async_save(state, storage_writer=writer, process_group=self._group, async_stager=stager)
        self._flying = found if isinstance(found, Future) else found.upload_completion
        if stager is not self._stager:
            self._flying.add_done_callback(lambda _: stager.close())

    @override
    def finish(self) -> None:
        if self._flying is not None:
            self._flying.result()
            self._flying = None

    @override
    def load(self, path: Path) -> None:
        dcp.load(self._dict(self.state.target), checkpoint_id=path, process_group=self._group)

    @override
    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


@final
class Lightning(Contender):
    """Lightning's own plugins on rank 0: one file, not synced."""

    loads = False

    def __init__(self, state: State, async_save: bool) -> None:
        super().__init__(state)
        plain = TorchCheckpointIO()
        self._io: CheckpointIO = AsyncCheckpointIO(plain) if async_save else plain

    @override
    def save(self, path: Path) -> None:
        if dist.get_rank() == 0:
            self._io.save_checkpoint({"state_dict": self.state.tensors}, path / "whole.ckpt")

    @override
    def finish(self) -> None:
        if dist.get_rank() == 0:
            self._io.teardown()  # joins the thread; the next save starts another


def contenders(state: State, only: list[str]) -> dict[str, Contender]:
    """All that can save this state; collective."""
    mesh = init_device_mesh("cpu", (RANKS,))
    made: dict[str, Any] = {
        "plain": lambda: Plain(state),
        "ours": lambda: Ours(state, async_save=False),
        "ours async": lambda: Ours(state, async_save=True),
        "dcp": lambda: Dcp(state, mesh),
        "dcp async": lambda: Dcp(state, mesh, kept=False),
        "dcp async, kept": lambda: Dcp(state, mesh, kept=True),
    }
    if state.held == "replicas":  # of shares it would have to gather first
        made |= {"lightning": lambda: Lightning(state, False), "lightning async": lambda: Lightning(state, True)}
    return {name: make() for name, make in made.items() if not only or name in only}


def turn(contender: Contender, path: Path) -> dict[str, float]:
    """One save, and one load of it, in seconds of this rank."""
    first = dist.get_rank() == 0
    dist.barrier()
    start = time.perf_counter()
    contender.save(path)
    stall = time.perf_counter() - start
    contender.finish()
    found = {"stall": stall, "on disk": time.perf_counter() - start}
    dist.barrier()
    if first:
        os.sync()
        for file in path.rglob("*"):
            if file.is_file():
                _forget(file)
    dist.barrier()
    if contender.loads:
        start = time.perf_counter()
        contender.load(path)
        found["load"] = time.perf_counter() - start
    contender.state.check(contender.loads)
    dist.barrier()
    if first:
        shutil.rmtree(path)
    return found


def _forget(file: Path) -> None:
    """Drops a file's pages from memory."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def run(held: Held, num_bytes: int, rounds: int, only: list[str], folder: Path) -> list[dict[str, dict[str, float]]]:
    """One rank: all contenders in turn; the first round is the cold one."""
    torch.set_num_threads(1)
    state = State(held, num_bytes)
    chosen = contenders(state, only)
    found = []
    for number in range(rounds + 1):
        names = list(chosen)
        first = number % len(names)
        order = (*names[first:], *names[:first])
        found.append({name: turn(chosen[name], folder / f"{held}-{number}-{names.index(name)}") for name in order})
    for contender in chosen.values():
        contender.close()
    return found


def measure(held: Held, num_bytes: int, rounds: int, only: list[str], folder: Path) -> dict[str, Any]:
    """Seconds by contender and figure."""
    kwargs = {"held": held, "num_bytes": num_bytes, "rounds": rounds, "only": only, "folder": folder}
    ranks = run_ranks(RANKS, run, kwargs, deadline=LONG)
    slower = [
        {
            name: {key: max(rank[number][name][key] for rank in ranks) for key in figures}
            for name, figures in each.items()
        }
        for number, each in enumerate(ranks[0])
    ]
    cold, *warm = slower
    return {
        "state": held,
        "bytes": num_bytes,
        "first_s": cold,
        "median_s": {
            name: {key: statistics.median(each[name][key] for each in warm) for key in cold[name]} for name in cold
        },
    }


def show(result: dict[str, Any], console: Console) -> None:
    """The figures of one state, then every claim beside what was measured."""
    cold, found, mib = result["first_s"], result["median_s"], result["bytes"] / 2**20
    table = Table(title=f"{mib:.0f} MiB in {TENSORS} tensors, {result['state']}, {RANKS} ranks")
    headings = ("", "stall [ms]", "first [ms]", "stall/sync", "on disk [ms]", "MiB/s", "/plain", "load [ms]", "/plain")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    plain = found.get("plain", {})
    for name, figures in found.items():
        waiting = SYNC.get(name)
        table.add_row(
            name,
            f"{1e3 * figures['stall']:.1f}" if waiting else "",
            f"{1e3 * cold[name]['stall']:.1f}" if waiting else "",
            f"{figures['stall'] / found[waiting]['on disk']:.3f}" if waiting in found else "",
            f"{1e3 * figures['on disk']:.0f}",
            f"{mib / figures['on disk']:.0f}",
            f"{figures['on disk'] / plain['on disk']:.2f}" if plain else "",
            f"{1e3 * figures['load']:.0f}" if "load" in figures else "",
            f"{figures['load'] / plain['load']:.2f}" if plain and "load" in figures else "",
        )
    console.print(table)
    for what, ours, of_what, theirs, bound in BOUNDS:
        if what in found.get(ours, ()) and of_what in found.get(theirs, ()):
            ratio = found[ours][what] / found[theirs][of_what]
            claim = f"{ours}, {what} / {theirs}, {of_what}"
            console.print(f"{claim}: {ratio:.3f}, claimed {bound:.2f}: {_word(ratio <= bound)}")
    console.print()


def _word(holds: bool) -> str:
    return "holds" if holds else "[bold]DOES NOT HOLD[/bold]"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=256, help="of the whole state")
    parser.add_argument(
        "--folder", type=Path, help="where to write; on the disk that is measured (default: the system's)"
    )
    parser.add_argument("--only", default="", help="these contenders, separated by semicolons")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    only = [name.strip() for name in options.only.split(";") if name.strip()]
    console = Console()
    results = []
    for held in ("replicas", "shares"):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            results.append(measure(held, options.mib * 2**20, options.rounds, only, Path(folder)))
        show(results[-1], console)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
