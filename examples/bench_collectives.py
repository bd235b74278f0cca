# SPDX-License-Identifier: Apache-2.0
"""How fast are the ring collectives, compared with the backend's own in the same run?

    python examples/bench_collectives.py                          # 2 ranks, 64 KB to 64 MB
    python examples/bench_collectives.py --ranks 2 3 4 --kib 16384 --json

For each number of ranks and size, Gloo's collective and ours over both transports are timed in turn, round after
round, so that whatever else the machine does hits all of them. One thread per rank. Reported are medians over the
rounds: the time of a call, the CPU time that all threads of a rank spend on it (a ring in the background takes it from
the computation), and the speed relative to Gloo.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from stratagem.collectives import Communicator, Wire
from stratagem.testing import run_ranks

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Timing:
    """Medians for one call of one operation on a float32 tensor of `kib` KiB; times in microseconds."""

    num_ranks: int
    kib: int
    operation: str
    transport: str
    wall_us: float
    cpu_us: float
    speedup: float  # Gloo's wall time / this one's
    cpu_ratio: float  # this one's CPU time / Gloo's


def measure(num_ranks: int, sizes_kib: Sequence[int], *, rounds: int = 7, wires: Sequence[str] = ()) -> list[Timing]:
    """Start `num_ranks` processes and time every operation at every size in them.

    Args:
        num_ranks: 2 or more.
        sizes_kib: sizes of the whole tensor in KiB; rounded down to a multiple of the number of ranks.
        rounds: how often everything is timed; the median counts.
        wires: narrow wires ("bf16", "int8") to time as well, over shared memory.
    """
    arguments = {"sizes_kib": tuple(sizes_kib), "rounds": rounds, "wires": tuple(wires)}
    results: list[list[Timing]] = run_ranks(num_ranks, time_all, arguments, deadline=timedelta(minutes=10))
    return results[0]


def time_all(sizes_kib: Sequence[int], rounds: int, wires: Sequence[str]) -> list[Timing]:
    """The body of each rank."""
    row = [list(range(dist.get_world_size()))]
    shared = Communicator.create("bench", row, device=CPU, transport="shared_memory")
    p2p = Communicator.create("bench", row, device=CPU, transport="p2p")
    timings = []
    for kib in sizes_kib:
        numel = kib * 256 // shared.size * shared.size
        for operation in OPERATIONS:
            calls = {"gloo": _gloo(operation, numel)}
            calls |= {c.transport: _ours(c, operation, numel, Wire.FULL) for c in (p2p, shared)}
            calls |= {f"shared_memory {wire}": _ours(shared, operation, numel, Wire(wire)) for wire in wires}
            timings += _compare(calls, rounds, shared, kib, operation)
    shared.close()
    p2p.close()
    return timings


def _compare(
    calls: dict[str, Callable[[], object]], rounds: int, comm: Communicator, kib: int, operation: str
) -> list[Timing]:
    repeats = max(1, min(100, 16384 // kib))
    walls: dict[str, list[float]] = {name: [] for name in calls}
    cpus: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            comm.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(repeats):
                call()
            comm.barrier()
            walls[name].append((time.perf_counter() - wall) / repeats * 1e6)
            cpus[name].append((time.process_time() - cpu) / repeats * 1e6)
    wall_us = {name: statistics.median(values[1:]) for name, values in walls.items()}
    cpu_us = {name: statistics.median(values[1:]) for name, values in cpus.items()}
    return [
        Timing(
            num_ranks=comm.size,
            kib=kib,
            operation=operation,
            transport=name,
            wall_us=wall_us[name],
            cpu_us=cpu_us[name],
            speedup=wall_us["gloo"] / wall_us[name],
            cpu_ratio=cpu_us[name] / cpu_us["gloo"],
        )
        for name in calls
    ]


def _gloo(operation: str, numel: int) -> Callable[[], object]:
    tensor, n = torch.zeros(numel), dist.get_world_size()
    part = torch.zeros(numel // n)
    if operation == "all_reduce":
        return lambda: dist.all_reduce(tensor)
    if operation == "reduce_scatter":
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return lambda: scatter(part, tensor)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return lambda: gather(tensor, part)


def _ours(comm: Communicator, operation: str, numel: int, wire: Wire) -> Callable[[], object]:
    tensor: Tensor = torch.zeros(numel)
    method = getattr(comm, operation)
    return lambda: method(tensor, wire=wire)


def table(timings: Sequence[Timing]) -> Table:
    """The timings for people, a section for each number of ranks, size and operation."""
    shown = Table(title="float32 tensors, one thread per rank; gloo = 1")
    for column in ("ranks", "KiB", "operation", "transport", "time [ms]", "speed-up", "CPU [ms]", "CPU ratio"):
        shown.add_column(column, justify="left" if column in ("operation", "transport") else "right", no_wrap=True)
    before = None
    for each in timings:
        section = (each.num_ranks, each.kib, each.operation)
        if before not in (None, section):
            shown.add_section()
        before = section
        numbers = zip((each.wall_us / 1e3, each.speedup, each.cpu_us / 1e3, each.cpu_ratio), (3, 2, 3, 2), strict=True)
        texts = [f"{number:.{digits}f}" for number, digits in numbers]
        shown.add_row(str(each.num_ranks), str(each.kib), each.operation, each.transport, *texts)
    return shown


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--kib", type=int, nargs="+", default=[64, 1024, 16384, 65536], help="sizes of the tensor")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--wires", nargs="*", default=[], choices=["bf16", "int8"], help="narrow wires to time as well")
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    options = parser.parse_args()
    timings: list[Timing] = []
    for num_ranks in options.ranks:
        timings += measure(num_ranks, options.kib, rounds=options.rounds, wires=options.wires)
    if options.json:
        print(json.dumps([asdict(each) for each in timings]))
    else:
        Console(width=100).print(table(timings))


if __name__ == "__main__":
    main()
