# SPDX-License-Identifier: Apache-2.0
"""Bytes on the wire, read from the kernel: an oracle that needs no help from the code it measures.

Linux counts, for every TCP socket, the payload bytes that left it (`tcpi_bytes_sent` of `TCP_INFO`, less those sent
again). The sum over the sockets of a process is what the process really sent, whichever library sent it and whatever
that library believes. A technique that claims half of an all-reduce cannot hide a whole one here.

What it sees: TCP of this process, also over loopback. What it does not: UNIX sockets, shared memory, sockets that were
both opened and closed inside the measurement. A socket that was there at the start and is gone at the end is an error.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, final

# struct tcp_info of linux/tcp.h: 8 bytes of small fields, 24 of 32 bits, then pacing_rate (104) and so on.
_TCP_ESTABLISHED = 1
_NOTSENT, _BYTES_SENT, _BYTES_RETRANS, _SIZE = 144, 200, 208, 232


class Endpoint(NamedTuple):
    """One end of a connection."""

    address: str
    port: int


class Connection(NamedTuple):
    """A TCP connection, seen from this process."""

    local: Endpoint
    peer: Endpoint


@dataclass(frozen=True)
class _Socket:
    connection: Connection
    num_bytes: int  # that left, without those sent again
    num_queued: int  # that are still to leave


def bytes_sent() -> dict[Connection, int]:
    """Return, for each TCP connection that this process has open, the bytes it sent since it was opened.

    Waits until what was queued has left, at most 5 seconds, so that bytes are counted where they were sent.

    Raises:
        RuntimeError: not on Linux 4.19 or later, or the peer does not read.
    """
    return {each.connection: each.num_bytes for each in _flushed().values()}


@final
class WireBytes:
    """Counts the bytes that this process sends while the `with` block runs.

    Nothing is sent to measure. A rank that leaves the block early counts what it sent itself, so no barrier is needed.

    Attributes:
        by_connection: bytes per connection, without those that sent nothing.

    Example:
        >>> with WireBytes() as wire:
        ...     pass
        >>> wire.total
        0
    """

    def __init__(self) -> None:
        self.by_connection: dict[Connection, int] = {}
        self._before: dict[int, _Socket] = {}

    def __enter__(self) -> WireBytes:
        self._before = _flushed()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            return
        after = _flushed()
        gone = [each.connection for inode, each in self._before.items() if inode not in after]
        if gone:
            raise RuntimeError(f"a connection was closed while its bytes were counted, so they are lost: {gone}")
        sent: dict[Connection, int] = {}
        for inode, each in after.items():
            earlier = self._before[inode].num_bytes if inode in self._before else 0
            if each.num_bytes > earlier:
                sent[each.connection] = sent.get(each.connection, 0) + each.num_bytes - earlier
        self.by_connection = sent

    @property
    def total(self) -> int:
        """Bytes sent to all peers together."""
        return sum(self.by_connection.values())

    def by_rank(self) -> list[int]:
        """Return how many bytes went to each rank of the default process group.

        Every rank of the group must call it, after its block. Costs one `all_gather_object` of the open connections,
        some 100 bytes each. Bytes to processes that are no ranks (a store that a parent hosts) are left out.

        A connection is named by both its ends: one end alone is not enough, since a kernel may give two processes of
        one host the same local port for connections to different peers.

        Raises:
            RuntimeError: two ranks have the same connection, as ranks on two hosts with equal private addresses might.
        """
        import torch.distributed as dist

        mine = {each.connection for each in _sockets().values()} | set(self.by_connection)
        everyone: list[set[Connection]] = [set() for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
        owner: dict[Connection, int] = {}
        for rank, connections in enumerate(everyone):
            for connection in connections:
                if owner.setdefault(connection, rank) != rank:
                    raise RuntimeError(f"ranks {owner[connection]} and {rank} both have {connection}")
        sent = [0] * len(everyone)
        for connection, num_bytes in self.by_connection.items():
            other_end = Connection(connection.peer, connection.local)
            if other_end in owner:
                sent[owner[other_end]] += num_bytes
        return sent

    def matrix(self) -> list[list[int]]:
        """Return `sent[from rank][to rank]`, on every rank of the default group; every rank must call it."""
        import torch.distributed as dist

        rows: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(rows, self.by_rank())
        return rows


def _flushed(patience: float = 5.0) -> dict[int, _Socket]:
    end = time.monotonic() + patience
    while True:
        found = _sockets()
        waiting = [each.connection for each in found.values() if each.num_queued]
        if not waiting:
            return found
        if time.monotonic() > end:
            raise RuntimeError(f"bytes are still queued after {patience} s, the peer does not read: {waiting}")
        time.sleep(0.0005)


def _sockets() -> dict[int, _Socket]:
    """The connected TCP sockets of this process, by inode (which names a socket as long as it is open)."""
    if sys.platform != "linux":
        raise RuntimeError("bytes on the wire are read from TCP_INFO, which is Linux's")
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith("socket:["):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed in the meantime, or the descriptor of the listing itself
            continue
        with copy:
            measured = _measured(copy)
        if measured is not None:
            found[int(target[len("socket:[") : -1])] = measured
    return found


def _measured(opened: socket.socket) -> _Socket | None:
    if opened.family not in (socket.AF_INET, socket.AF_INET6) or opened.type != socket.SOCK_STREAM:
        return None
    try:
        connection = Connection(_endpoint(opened.getsockname()), _endpoint(opened.getpeername()))
    except OSError:  # it listens, or the peer has gone
        return None
    info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    if len(info) < _BYTES_RETRANS + 8:
        raise RuntimeError(f"TCP_INFO of this kernel has {len(info)} bytes and no tcpi_bytes_sent; Linux 4.19 has")
    sent, again = struct.unpack_from("=QQ", info, _BYTES_SENT)
    (queued,) = struct.unpack_from("=I", info, _NOTSENT)
    return _Socket(connection, sent - again, queued if info[0] == _TCP_ESTABLISHED else 0)


def _endpoint(name: tuple[str, int]) -> Endpoint:
    address = name[0].removeprefix("::ffff:")  # IPv4 behind an IPv6 socket is the same place
    return Endpoint(address, name[1])
