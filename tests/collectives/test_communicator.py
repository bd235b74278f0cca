# SPDX-License-Identifier: Apache-2.0
"""Every collective, over every transport, against what torch says the result is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stratagem.collectives import Communicator, Op, Traffic, Transport, Wire, Worker, chunk_bounds
from stratagem.errors import CommunicationError

CPU = torch.device("cpu")
RINGS: list[Transport] = ["p2p", "shared_memory"]
SUMMABLE = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
]  # fmt: skip


@contextmanager
def opened(transport: Transport, *, axis: str = "dp", traffic: Traffic | None = None) -> Iterator[Communicator]:
    """A communicator over the whole world."""
    row = list(range(dist.get_world_size()))
    comm = Communicator.create(
        axis, [row], device=CPU, transport=transport, timeout=timedelta(seconds=20), traffic=traffic
    )
    yield comm
    comm.close()


def integers(rank: int, numel: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Small whole numbers, which every dtype sums exactly; different on each rank."""
    generator = torch.Generator().manual_seed(1000 * numel + rank)
    return torch.randint(-3, 4, (numel,), generator=generator).abs_().to(dtype)


def same_everywhere(tensor: Tensor) -> None:
    """Assert, by torch's own means, that all ranks hold the same bits."""
    mine = tensor.contiguous().view(-1).view(torch.uint8)
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    assert all(torch.equal(each, mine) for each in everybody)


@pytest.mark.parametrize("transport", [*RINGS, "native"])
@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_any_size_equals_torchs_own_collectives(num_ranks: int, transport: Transport) -> None:
    n, r = num_ranks, dist.get_rank()
    with opened(transport) as comm:
        assert (comm.rank, comm.size, comm.transport) == (r, n, transport if n > 1 else "none")
        for numel in sorted({0, 1, n - 1, n, n + 1, 17, 1009, 300_007, 1_500_000}):
            mine, total = integers(r, numel), integers(r, numel)
            dist.all_reduce(total)
            reduced = mine.clone()
            comm.all_reduce(reduced)
            assert torch.equal(reduced, total)
            lo, hi = chunk_bounds(numel, n)[r]
            scattered = mine.clone()
            own = comm.reduce_scatter(scattered)
            assert torch.equal(own, total[lo:hi])
            assert own.untyped_storage().data_ptr() == scattered.untyped_storage().data_ptr()
            gathered = torch.full_like(total, torch.nan)
            gathered[lo:hi] = total[lo:hi]
            comm.all_gather(gathered)
            assert torch.equal(gathered, total)
            sent, expected = mine.clone(), mine.clone()
            comm.broadcast(sent, n - 1)
            dist.broadcast(expected, n - 1)
            assert torch.equal(sent, expected)


@pytest.mark.parametrize("transport", RINGS)
@pytest.mark.ranks(3)
def test_random_values_agree_to_rounding_and_bit_for_bit_between_ranks(num_ranks: int, transport: Transport) -> None:
    mine = torch.randn(100_003, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))
    total = mine.clone()
    dist.all_reduce(total)
    with opened(transport) as comm:
        for wire in Wire:
            for op in Op:
                got = mine.clone()
                comm.all_reduce(got, op=op, wire=wire)
                same_everywhere(got)
                if wire is Wire.FULL:
                    torch.testing.assert_close(got, total / (1 if op is Op.SUM else num_ranks), rtol=1e-14, atol=1e-14)
        again = [mine.clone() for _ in range(2)]
        for each in again:
            comm.all_reduce(each)
        assert torch.equal(*again)


@pytest.mark.parametrize("dtype", SUMMABLE, ids=str)
@pytest.mark.ranks(3)
def test_any_dtype_that_can_be_summed(dtype: torch.dtype) -> None:
    for transport in RINGS:
        with opened(transport) as comm:
            got = integers(comm.rank, 1001, dtype)
            comm.all_reduce(got)
            assert torch.equal(got, sum(integers(r, 1001, torch.int64) for r in range(3)).to(dtype))
            same_everywhere(got)


@pytest.mark.parametrize("transport", RINGS)
@pytest.mark.ranks(3)
def test_gather_and_broadcast_carry_any_dtype_and_every_bit(transport: Transport) -> None:
    dtypes = [torch.bool, torch.float8_e4m3fn, torch.uint16, torch.complex64, torch.float32, torch.int64]
    with opened(transport) as comm:
        for dtype in dtypes:
            bits = torch.randint(0, 2, (99 * dtype.itemsize,), dtype=torch.uint8) * (1 if dtype is torch.bool else 255)
            dist.broadcast(bits, 0)
            whole = bits.view(dtype)
            lo, hi = chunk_bounds(99, 3)[comm.rank]
            got = torch.zeros(99 * dtype.itemsize, dtype=torch.uint8).view(dtype)
            got[lo:hi] = whole[lo:hi]
            comm.all_gather(got)
            assert torch.equal(got.view(torch.uint8), bits)
            got = whole.clone() if comm.rank == 2 else torch.zeros_like(bits).view(dtype)
            comm.broadcast(got, 2)
            assert torch.equal(got.view(torch.uint8), bits)


@pytest.mark.parametrize("transport", [*RINGS, "native"])
@pytest.mark.parametrize("sizes", [(0, 700_001, 3), (5, 0, 0), (0, 0, 0), (300_000, 1, 400_000)], ids=str)
@pytest.mark.ranks(3)
def test_uneven_and_empty_bounds(sizes: tuple[int, ...], transport: Transport) -> None:
    edges = [sum(sizes[:i]) for i in range(4)]
    bounds = list(pairwise(edges))
    with opened(transport) as comm:
        mine = [integers(r, edges[-1]) for r in range(3)]
        own = comm.reduce_scatter(mine[comm.rank].clone(), bounds=bounds)
        assert torch.equal(own, sum(mine)[slice(*bounds[comm.rank])])
        whole = mine[0]
        got = torch.full_like(whole, torch.nan)
        got[slice(*bounds[comm.rank])] = whole[slice(*bounds[comm.rank])]
        comm.all_gather(got, bounds=bounds)
        assert torch.equal(got, whole)


@pytest.mark.parametrize("transport", [*RINGS, "native"])
@pytest.mark.ranks(4)
def test_large_float16_is_averaged_without_overflow(transport: Transport) -> None:
    with opened(transport) as comm:
        got = torch.full((1000,), 4e4, dtype=torch.float16)
        if transport != "native":  # how a backend averages is its own affair
            comm.all_reduce(got, op=Op.MEAN)
            assert torch.equal(got, torch.full((1000,), 4e4, dtype=torch.float16))
        got = torch.full((10,), float(comm.rank))
        comm.all_reduce(got, op=Op.MEAN)
        assert torch.equal(got, torch.full((10,), 1.5))


@pytest.mark.parametrize("transport", [*RINGS, "native"])
@pytest.mark.ranks(1, 2, 3)
def test_the_small_ones(num_ranks: int, transport: Transport) -> None:
    n = num_ranks
    with opened(transport) as comm:
        r = comm.rank
        expected: dict[str, float] = {"sum": n * (n - 1) / 2, "mean": (n - 1) / 2, "max": n - 1, "min": 0}
        for op, value in expected.items():
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                got = torch.full((2, 3), float(r), dtype=dtype)
                comm.reduce_small(got, op)  # type: ignore[arg-type]
                assert torch.equal(got, torch.full((2, 3), value, dtype=dtype)), op
        scalar = torch.tensor(r)
        comm.reduce_small(scalar, "max")
        assert scalar.item() == n - 1
        flag = torch.tensor(r == n - 1)
        comm.reduce_small(flag, "max")
        assert flag.item() is True
        with pytest.raises(ValueError, match=r"mean of torch\.int64"):
            comm.reduce_small(torch.tensor(1), "mean")
        mine = {"rank": r, "data": "x" * 1000 * r}
        assert comm.gather_objects(mine) == [{"rank": k, "data": "x" * 1000 * k} for k in range(n)]
        assert comm.broadcast_object(mine, src=n - 1) == {"rank": n - 1, "data": "x" * 1000 * (n - 1)}
        comm.barrier()


@pytest.mark.parametrize("transport", RINGS)
@pytest.mark.ranks(3)
def test_broadcast_of_many_tensors_takes_few_messages(transport: Transport) -> None:
    traffic = Traffic()
    with opened(transport, traffic=traffic) as comm:
        fill = float(comm.rank + 1)
        tensors = [
            torch.full((30, 20), fill),
            torch.full((4, 5), fill).t(),
            torch.full((2, 3, 4, 5), fill).to(memory_format=torch.channels_last),
            torch.full((7,), fill, dtype=torch.float64),
            torch.full((), fill),
            torch.full((3,), comm.rank == 1),
            torch.nn.Parameter(torch.full((2,), fill)),
            torch.full((0,), fill),
        ]
        strides = [each.stride() for each in tensors]
        comm.broadcast_tensors(tensors, src=1)
        assert [each.stride() for each in tensors] == strides
        for each in tensors:
            assert torch.equal(each, torch.full_like(each, 1 if each.dtype is torch.bool else 2))
        total = sum(each.nbytes for each in tensors)
        assert traffic.total().num_calls == 3  # one per dtype
        assert traffic.total().num_bytes == (0 if comm.rank == 0 else total)  # the last of the chain from 1 is 0


@pytest.mark.ranks(4)
def test_rows_of_several_axes_do_not_mix() -> None:
    r = dist.get_rank()
    traffic = Traffic()
    tp = Communicator.create("tp", [[0, 1], [2, 3]], device=CPU, traffic=traffic)
    dp = Communicator.create("dp", [[0, 2], [1, 3]], device=CPU, traffic=traffic)
    lonely = Communicator.create("pp", [[3, 1]], device=CPU, traffic=traffic)
    assert (tp.ranks, dp.ranks) == ((r // 2 * 2, r // 2 * 2 + 1), (r % 2, r % 2 + 2))
    assert (lonely.size, lonely.ranks) == ((2, (3, 1)) if r in (1, 3) else (1, (r,)))
    workers = [Worker(), Worker()]
    results: list[list[Any]] = [[], []]
    for i in range(40):
        numel = 1 + 997 * i
        for worker, comm, found in zip(workers, (tp, dp), results, strict=True):
            tensor = torch.full((numel,), 10.0**comm.rank if comm is tp else 1000.0 * 10.0**comm.rank)
            worker.submit(comm.all_reduce, tensor)
            found.append(tensor)
    for worker in workers:
        worker.drain()
        worker.close()
    assert all((each == 11).all() for each in results[0])
    assert all((each == 11_000).all() for each in results[1])
    assert traffic.total("tp", "all_reduce").num_calls == 40
    for comm in (tp, dp, lonely):
        comm.close()


FORBIDDEN = [
    "all_reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_gather",
    "all_gather_into_tensor",
    "broadcast",
]


@pytest.mark.parametrize("transport", RINGS)
@pytest.mark.ranks(2)
def test_the_ring_is_our_own(transport: Transport) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a built-in collective was called")

    with opened(transport) as comm, mock.patch.multiple(dist, **dict.fromkeys(FORBIDDEN, refuse)):
        calls: list[Callable[[Tensor], object]] = [
            comm.all_reduce,
            comm.reduce_scatter,
            comm.all_gather,
            comm.broadcast,
            lambda t: comm.reduce_small(t, "sum"),
            lambda t: comm.gather_objects(t),
            lambda t: comm.barrier(),
        ]
        for call in calls:
            call(torch.ones(100_000))


@pytest.mark.parametrize("transport", RINGS)
@pytest.mark.ranks(2)
def test_what_cannot_be_done_is_refused_and_harms_nothing(transport: Transport) -> None:
    with opened(transport) as comm:
        with pytest.raises(ValueError, match="contiguous"):
            comm.all_reduce(torch.ones(4, 4).t())
        with pytest.raises(ValueError, match=r"mean of torch\.int64"):
            comm.all_reduce(torch.ones(4, dtype=torch.int64), op=Op.MEAN)
        with pytest.raises(ValueError, match="lies on meta"):
            comm.all_reduce(torch.ones(4, device="meta"))
        with pytest.raises(ValueError, match="src is 2"):
            comm.broadcast(torch.ones(4), src=2)
        with pytest.raises(ValueError, match="slices for 2 ranks"):
            comm.reduce_scatter(torch.ones(4), bounds=[(0, 4)])
        parameter = torch.nn.Parameter(torch.ones(3))
        comm.all_reduce(parameter)
        assert torch.equal(parameter.detach(), torch.full((3,), 2.0))
    with pytest.raises(CommunicationError, match="closed"):
        comm.all_reduce(torch.ones(4))


def test_one_rank_needs_no_process_group() -> None:
    comm = Communicator.create("dp", [[0]], device=CPU)
    tensor = torch.arange(5.0)
    comm.all_reduce(tensor, op=Op.MEAN)
    assert torch.equal(comm.reduce_scatter(tensor), torch.arange(5.0))
    comm.all_gather(tensor, bounds=[(0, 5)])
    comm.broadcast_tensors([tensor])
    comm.barrier()
    assert comm.gather_objects("x") == ["x"]
    assert comm.broadcast_object("x") == "x"
    assert (comm.rank, comm.size, comm.transport, comm.traffic.total().num_bytes) == (0, 1, "none", 0)
    comm.close()


@pytest.mark.parametrize(
    ("rows", "message"), [([[0, 1]], "outside the world of 1"), ([[0], [0]], "a rank stands in two places")]
)
def test_rows_that_cannot_be_are_refused(rows: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Communicator.create("dp", rows, device=CPU)


@pytest.mark.ranks(3)
def test_auto_is_shared_memory_on_one_host_and_falls_back_together() -> None:
    """One rank cannot listen, so nobody uses shared memory; and a rank that asked for nothing else is told why."""
    with opened("auto") as comm:
        assert comm.transport == "shared_memory"
    trouble = mock.patch("socket.socket.listen", side_effect=OSError("no sockets today"))
    with trouble if dist.get_rank() == 1 else mock.MagicMock(), opened("auto") as comm:
        assert comm.transport == "p2p"
        got = torch.ones(10)
        comm.all_reduce(got)
        assert torch.equal(got, torch.full((10,), 3.0))
    fallen = mock.patch("mmap.mmap", side_effect=OSError("no memory today"))
    with fallen if dist.get_rank() == 2 else mock.MagicMock(), opened("auto") as comm:
        assert comm.transport == "p2p"
    with (
        fallen if dist.get_rank() == 2 else mock.MagicMock(),
        pytest.raises(CommunicationError, match="rank 2: no memory today"),
        opened("shared_memory"),
    ):
        pass


@pytest.mark.ranks(2)
def test_ranks_on_different_hosts_use_p2p() -> None:
    where = mock.patch("stratagem.collectives.rendezvous.host_identity", return_value=f"host-{dist.get_rank()}")
    with where, opened("auto") as comm:
        assert comm.transport == "p2p"
