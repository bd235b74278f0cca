# SPDX-License-Identifier: Apache-2.0
"""How neighbours on one host find each other, and how all ranks agree on it or on something else.

Names are exchanged through the process group, so there is no fixed name and no port. The shared memory is a file
without a name whose descriptor travels over the doorbell: nothing lies in a file system that a killed run could leave
behind, and the small `/dev/shm` of containers does not matter. A step that fails on one rank fails on all of
them together, after the exchange that follows it, and nobody waits for a rank that has given up.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import sys
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO, TypeVar, cast, final

import torch.distributed as dist

from stratagem.collectives.shared_memory import Doorbell, SharedMemoryLink, Slots

T = TypeVar("T")
_PATIENCE = timedelta(seconds=20)  # for a neighbour that has already said that it is ready


@final
@dataclass(frozen=True)
class _Card:
    """What a rank tells the others: where it runs and where it listens, or why it cannot."""

    host: str
    address: str = ""
    trouble: str = ""


def connect(
    group: dist.ProcessGroup,
    ranks: tuple[int, ...],
    index: int,
    *,
    timeout: timedelta,
    window: int = 4,
    max_bytes: int = 1 << 19,
) -> SharedMemoryLink | str:
    """Link this rank with its neighbours in the ring, or return the reason why not all ranks can.

    Must be called by every rank of `group`; all get a link, or all get a reason. Moves a few hundred bytes.

    Args:
        group: the process group of exactly the ranks of the ring, in ring order.
        ranks: their global ranks.
        index: the place of this rank in the ring.
        timeout: how long a collective may wait for a neighbour.
        window: slots per direction.
        max_bytes: of a slot.
    """
    with contextlib.ExitStack() as listening, contextlib.ExitStack() as undo:
        card, listener = _listen(listening)
        cards = _exchange(group, card)
        troubles = [f"rank {rank}: {c.trouble}" for rank, c in zip(ranks, cards, strict=True) if c.trouble]
        if not troubles and len({c.host for c in cards}) > 1:
            troubles = ["the ranks run on different hosts"]
        if troubles:
            return "; ".join(troubles)
        assert listener is not None
        link, trouble = None, ""
        left_rank, right_rank = ranks[index - 1], ranks[(index + 1) % len(ranks)]
        try:
            right, outgoing = _call(cards[(index + 1) % len(ranks)].address, window, max_bytes, undo)
            left, incoming = _answer(listener, window, max_bytes, undo)
            link = SharedMemoryLink(
                (Doorbell(left, left_rank, timeout), incoming),
                (Doorbell(right, right_rank, timeout), outgoing),
                window=window,
                max_bytes=max_bytes,
            )
        except (OSError, ValueError) as error:
            trouble = f"rank {ranks[index]}: {error}"
            undo.close()  # now, so that the neighbours do not wait for us
        troubles = [text for text in _exchange(group, trouble) if text]
        if troubles or link is None:
            return "; ".join(troubles)
        undo.pop_all()
        return link


def host_identity() -> str:
    """The same string for two processes if, and only if, they can reach each other's Unix sockets."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts += [boot.read_text().strip(), os.readlink(network)]
    return "/".join(parts)


def _exchange(group: dist.ProcessGroup, mine: T) -> list[T]:
    everybody: list[T] = [mine] * group.size()
    dist.all_gather_object(everybody, mine, group=group)
    return everybody


def _listen(stack: contextlib.ExitStack) -> tuple[_Card, socket.socket | None]:
    """Open a listening socket under a fresh name; `stack` closes it."""
    host = host_identity()
    try:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        if sys.platform == "linux":  # a name outside any file system, which dies with the socket
            address = f"\0stratagem-{secrets.token_hex(16)}"
        else:
            address = stack.enter_context(tempfile.TemporaryDirectory(prefix="stratagem-")) + "/s"
        listener.bind(address)
        listener.listen(4)
        listener.settimeout(_PATIENCE.total_seconds())
        return _Card(host, address=address), listener
    except OSError as error:
        return _Card(host, trouble=f"cannot listen on a Unix socket: {error}"), None


def _call(address: str, window: int, max_bytes: int, undo: contextlib.ExitStack) -> tuple[socket.socket, Slots]:
    """Connect to the right neighbour and hand it the descriptor of the arena that we write."""
    stream = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    stream.settimeout(_PATIENCE.total_seconds())
    stream.connect(address)
    with _anonymous_file(window * max_bytes) as file:
        slots = Slots(file.fileno(), window, max_bytes)
        socket.send_fds(stream, [b"arena"], [file.fileno()])
    return stream, slots


def _answer(
    listener: socket.socket, window: int, max_bytes: int, undo: contextlib.ExitStack
) -> tuple[socket.socket, Slots]:
    """Accept the left neighbour and map the arena that it writes."""
    stream = undo.enter_context(listener.accept()[0])
    stream.settimeout(_PATIENCE.total_seconds())
    if sys.platform == "linux":  # outside any file system there are no permissions: ask the kernel who calls
        _, user, _ = struct.unpack("3i", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            raise OSError(f"a process of another user ({user}) called")
    _, descriptors, _, _ = socket.recv_fds(stream, 16, 1)
    if not descriptors:
        raise OSError("the left neighbour sent no memory")
    with os.fdopen(descriptors[0], "r+b", buffering=0) as file:
        return stream, Slots(file.fileno(), window, max_bytes)


def _anonymous_file(num_bytes: int) -> BinaryIO:
    """Memory without a name. Reserved at once: a host without room says so here, not by a SIGBUS in a collective."""
    if sys.platform == "linux":
        file = cast(BinaryIO, os.fdopen(os.memfd_create("stratagem"), "r+b", buffering=0))
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    else:
        file = cast(BinaryIO, tempfile.TemporaryFile(buffering=0))  # noqa: SIM115 - the caller closes it
        file.truncate(num_bytes)
    return file
