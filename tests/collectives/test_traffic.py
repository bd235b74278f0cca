# SPDX-License-Identifier: Apache-2.0
"""Bytes: what the kernel says was sent, what the formula says, and what the books say."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stratagem.collectives import Communicator, Traffic, TrafficRecord, Wire
from stratagem.testing import WireBytes

NUM_BYTES = 12 << 20  # divisible by 2, 3 and 4 ranks
OPERATIONS: list[tuple[str, int]] = [("all_reduce", 2), ("reduce_scatter", 1), ("all_gather", 1)]


def p2p(traffic: Traffic | None = None) -> Communicator:
    row = [list(range(dist.get_world_size()))]
    limit = timedelta(seconds=20)
    return Communicator.create("dp", row, device=torch.device("cpu"), transport="p2p", timeout=limit, traffic=traffic)


@pytest.mark.parametrize("wire", [Wire.FULL, Wire.BF16])
@pytest.mark.ranks(2, 3, 4)
def test_the_wire_carries_what_the_formula_says_and_only_to_the_right(num_ranks: int, wire: Wire) -> None:
    n = num_ranks
    traffic = Traffic()
    comm = p2p(traffic)
    tensor = torch.ones(NUM_BYTES // 4)
    width = 1 if wire is Wire.FULL else 0.5
    for name, phases in OPERATIONS:
        operation: Callable[..., object] = getattr(comm, name)
        operation(tensor, wire=wire)  # connections and caches are warm
        traffic.reset()
        with WireBytes() as sent:
            operation(tensor, wire=wire)
        expected = phases * (n - 1) / n * NUM_BYTES * width
        assert sent.total == pytest.approx(expected, rel=0.005)
        assert traffic.total("dp", name) == TrafficRecord(1, int(expected))
        right = (comm.rank + 1) % n
        left = (comm.rank - 1) % n
        for peer, num_bytes in enumerate(sent.by_rank()):
            if peer == right:
                assert num_bytes == pytest.approx(expected, rel=0.005)
            elif peer == left:
                assert num_bytes < 0.005 * expected  # Gloo's own acknowledgements
            else:
                assert num_bytes == 0
    comm.close()


@pytest.mark.ranks(3)
def test_books_agree_with_the_wire_for_int8_and_uneven_bounds() -> None:
    traffic = Traffic()
    comm = p2p(traffic)
    tensor = torch.ones(NUM_BYTES // 4)
    bounds = [(0, 100), (100, tensor.numel() // 2), (tensor.numel() // 2, tensor.numel())]
    calls: list[Callable[[], Tensor | None]] = [
        lambda: comm.all_reduce(tensor, wire=Wire.INT8),
        lambda: comm.reduce_scatter(tensor, bounds=bounds),
        lambda: comm.all_gather(tensor, bounds=bounds),
        lambda: comm.broadcast(tensor, src=1),
    ]
    for call in calls:
        call()
        traffic.reset()
        with WireBytes() as sent:
            call()
        dist.barrier()  # a rank that is done early must not close connections that others still measure
        assert sent.total == pytest.approx(traffic.total().num_bytes, rel=0.005, abs=10_000)
    comm.close()


@pytest.mark.ranks(2)
def test_shared_memory_sends_nothing_over_tcp_and_keeps_the_same_books() -> None:
    books = []
    for transport in ("p2p", "shared_memory"):
        traffic = Traffic()
        comm = Communicator.create(
            "dp",
            [[0, 1]],
            device=torch.device("cpu"),
            transport=transport,
            traffic=traffic,  # type: ignore[arg-type]
        )
        tensor = torch.ones(300_000)
        with WireBytes() as sent:
            for wire in Wire:
                comm.all_reduce(tensor, wire=wire)
                comm.reduce_scatter(tensor, wire=wire)
                comm.all_gather(tensor, wire=wire)
            comm.broadcast(tensor)
            comm.barrier()
        if transport == "shared_memory":
            assert sent.total == 0
        books.append(traffic.snapshot())
        comm.close()
    assert books[0] == books[1]
    assert books[0].total("dp", "all_reduce").num_calls == len(Wire)


def test_books_add_up_and_differ() -> None:
    traffic = Traffic()
    traffic.add("tp", "all_reduce", 10)
    before = traffic.snapshot()
    traffic.add("tp", "all_reduce", 5)
    traffic.add("dp", "all_gather", 7)
    assert (traffic.snapshot() - before).records == {
        ("tp", "all_reduce"): TrafficRecord(1, 5),
        ("dp", "all_gather"): TrafficRecord(1, 7),
    }
    assert traffic.total("tp") == TrafficRecord(2, 15)
    assert traffic.total(op="all_gather") == TrafficRecord(1, 7)
    assert traffic.total() == TrafficRecord(3, 22)
    traffic.reset()
    assert traffic.total() == TrafficRecord()
