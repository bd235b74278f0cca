# SPDX-License-Identifier: Apache-2.0
"""Peers that die, hang, leave or disagree: everybody is told, soon, and told who."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stratagem.collectives import Communicator, Transport, Worker
from stratagem.errors import CommunicationError

RINGS: list[Transport] = ["p2p", "shared_memory"]
SOON = 10.0  # seconds, on a loaded machine; the timeouts of the communicators below that must not pass are 60


def opened(transport: Transport, timeout: timedelta = timedelta(seconds=60)) -> Communicator:
    row = [list(range(dist.get_world_size()))]
    return Communicator.create("dp_shard", row, device=torch.device("cpu"), transport=transport, timeout=timeout)


def failure(comm: Communicator, numel: int = 1_000_000) -> str:
    """The message of the error that an all-reduce ends in; checks that the communicator then refuses further use."""

    def go_on() -> None:  # a rank may finish a collective or two before its neighbour is gone
        for _ in range(100):
            comm.all_reduce(torch.ones(numel))

    with pytest.raises(CommunicationError) as first:
        go_on()
    with pytest.raises(CommunicationError, match=re.escape(str(first.value))):
        comm.broadcast(torch.ones(1))
    assert "axis 'dp_shard', all_reduce" in str(first.value)
    assert f"rank {dist.get_rank()}:" in str(first.value)
    return str(first.value)


@pytest.mark.parametrize("transport", RINGS)
@pytest.mark.ranks(3, dies={1: -signal.SIGKILL})
def test_a_killed_peer_is_named_at_once(transport: Transport) -> None:
    comm = opened(transport)
    comm.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    assert "rank 1" in failure(comm)
    assert time.monotonic() - start < SOON
    comm.abort()


@pytest.mark.ranks(5, dies={2: -signal.SIGKILL})
def test_the_news_of_a_death_travels_around_the_ring() -> None:
    """Ranks 0 and 4 have no link to rank 2, and still learn that it is the one."""
    comm = opened("shared_memory")
    comm.barrier()
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    assert "lost rank 2" in failure(comm)
    comm.abort()


@pytest.mark.parametrize("transport", RINGS)
@pytest.mark.ranks(2)
def test_a_silent_peer_is_named_after_the_timeout(transport: Transport) -> None:
    comm = opened(transport, timeout=timedelta(seconds=1))
    comm.barrier()
    if dist.get_rank() == 0:
        start = time.monotonic()
        message = failure(comm)
        assert 0.9 < time.monotonic() - start < SOON
        assert re.search(r"waited 1\.\d s for .* rank 1, which is alive but silent", message)
    dist.barrier()  # rank 1 is alive all the time
    comm.abort()


@pytest.mark.parametrize("transport", RINGS)
@pytest.mark.ranks(2)
def test_abort_wakes_a_thread_that_waits(transport: Transport) -> None:
    comm = opened(transport)
    comm.barrier()
    if dist.get_rank() == 0:
        worker = Worker()
        future = worker.submit(comm.all_reduce, torch.ones(1000))
        time.sleep(0.3)
        assert not future.done()
        start = time.monotonic()
        comm.abort()
        error = future.exception(timeout=SOON)
        assert isinstance(error, CommunicationError)
        assert "abort" in str(error)
        worker.close()
        assert time.monotonic() - start < SOON
        comm.abort()  # twice is harmless
        dist.barrier()
    else:
        dist.barrier()
        failure(comm)  # the neighbour is told as well
        comm.abort()


@pytest.mark.parametrize("transport", RINGS)
@pytest.mark.ranks(3)
def test_an_error_midway_on_one_rank_ends_the_others(transport: Transport) -> None:
    comm = opened(transport)
    comm.barrier()
    if dist.get_rank() == 1:
        comm._link.push = lambda: (_ for _ in ()).throw(MemoryError("no memory left"))  # type: ignore[union-attr]
        with pytest.raises(MemoryError):
            comm.all_reduce(torch.ones(1000))
        with pytest.raises(CommunicationError, match="no memory left"):
            comm.all_reduce(torch.ones(1000))
    else:
        message = failure(comm)
        assert transport == "p2p" or "no memory left" in message
    dist.barrier()
    comm.abort()


@pytest.mark.ranks(2)
def test_a_peer_in_another_collective_is_found_out() -> None:
    """Without a check the values of one collective would silently end up in another."""
    comm = opened("shared_memory")
    with pytest.raises(CommunicationError, match=r"spoke out of turn|gave up"):
        comm.all_reduce(torch.ones(1000 + dist.get_rank()))
    comm.abort()


@pytest.mark.parametrize("transport", RINGS)
@pytest.mark.ranks(2)
def test_a_second_thread_is_refused(transport: Transport) -> None:
    comm = opened(transport)
    comm.barrier()
    if dist.get_rank() == 0:
        worker = Worker()
        future = worker.submit(comm.all_reduce, torch.ones(1000))
        while not comm._busy.locked():
            time.sleep(0.001)
        with pytest.raises(RuntimeError, match="another thread"):
            comm.barrier()
        dist.barrier()
        future.result(timeout=SOON)
        worker.close()
    else:
        dist.barrier()
        comm.all_reduce(torch.ones(1000))
    comm.barrier()
    comm.close()


@pytest.mark.ranks(2, dies={1: -signal.SIGKILL})
def test_a_forked_child_does_not_hide_the_death_of_its_parent() -> None:
    """A DataLoader worker outlives its rank for a while; if it held the streams, nobody would see the rank die."""
    comm = opened("shared_memory")
    comm.barrier()
    if dist.get_rank() == 1:
        if os.fork() == 0:
            time.sleep(3)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    assert "lost rank 1" in failure(comm)
    assert time.monotonic() - start < 2
    comm.abort()
    time.sleep(max(0.0, 3.5 - (time.monotonic() - start)))  # leave no process behind


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel through /proc")
@pytest.mark.ranks(2)
def test_memory_and_sockets_have_no_name_that_a_killed_run_could_leave_behind() -> None:
    comm = opened("shared_memory")
    mappings = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:stratagem" in line]
    assert len(mappings) == 2  # the arena that we write, and the left neighbour's
    assert all(line.endswith("(deleted)") for line in mappings)
    names = [comm._link._left.stream.getsockname(), comm._link._right.stream.getpeername()]  # type: ignore[union-attr]
    assert all(name == b"" or name[:1] == b"\0" for name in names)  # in no file system
    comm.close()


@pytest.mark.parametrize("transport", RINGS)
@pytest.mark.ranks(2)
def test_closing_and_opening_again_leaks_nothing(transport: Transport) -> None:
    counts = []
    for _ in range(6):
        comm = opened(transport)
        comm.all_reduce(torch.ones(10_000))
        comm.barrier()
        comm.close()
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert counts[-1] == counts[1]
