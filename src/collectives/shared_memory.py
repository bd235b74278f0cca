# SPDX-License-Identifier: Apache-2.0
"""The ring through shared memory: for ranks on one host whose tensors lie in CPU memory.

For each pair of neighbours the sender owns an arena of a few slots, small enough to stay in the caches. It writes
(scales, encodes) straight into a slot, and the receiver adds straight out of it: one copy less on either side than a
socket needs, and none by the kernel.

    sender  -- claim a free slot, write --> [slot 0|slot 1|...] -- add or copy out --> receiver
            -- one byte: "slot is full" ------- doorbell ------->
            <-- one byte: "slot is free" ------ doorbell --------

The doorbell is a Unix-domain stream socket. So waiting blocks in the kernel (ranks share cores, spinning would
steal the time that the other rank needs), a timeout is the kernel's, and a peer that dies is seen at once, as the end
of the stream. A byte is 1 (free), the tag of the collective (full; an unexpected tag is a peer that runs another
collective), or 0, followed by the reason for which the peer gave up.

Note [why slots]
    A neighbour could also read the tensor where it lies, if that lay in shared memory. Tried: an all-reduce then takes
    0.6 of the time. But each rank maps its neighbour's tensors, and the kernel counts them as its own memory, so
    a run whose whole point may be to fit would seem to need (and be limited as if it needed) its gradients twice.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from stratagem.collectives.transport import Link, LinkFault, Message

_FREE = b"\x01"
_GIVES_UP = b"\x00"


@final
class Slots:
    """`num_slots` equal pieces of a shared memory file, as tensors of any dtype."""

    def __init__(self, descriptor: int, num_slots: int, slot_bytes: int) -> None:
        memory = torch.frombuffer(mmap.mmap(descriptor, num_slots * slot_bytes), dtype=torch.uint8)
        self._slots = memory.view(num_slots, slot_bytes).unbind()
        self._views: dict[tuple[int, torch.dtype, int], Tensor] = {}

    def view(self, count: int, dtype: torch.dtype, numel: int) -> Tensor:
        """The first `numel` values of message number `count`'s slot. Kept, since sizes come again and again."""
        slot = count % len(self._slots)
        view = self._views.get((slot, dtype, numel))
        if view is None:
            if len(self._views) >= 1024:
                self._views.clear()
            view = self._views[slot, dtype, numel] = self._slots[slot][: numel * dtype.itemsize].view(dtype)
        return view


@final
class Doorbell:
    """One end of the stream between two neighbours. Counts what the peer has announced.

    Args:
        stream: the connected socket; blocking.
        peer: the global rank at the other end.
        timeout: how long one wait may last.
    """

    def __init__(self, stream: socket.socket, peer: int, timeout: timedelta) -> None:
        seconds = timeout.total_seconds()
        # The kernel's own timeout: Python's would cost a poll() before each recv().
        stream.setblocking(True)
        stream.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        )
        self.stream, self.peer, self.aborted = stream, peer, False

    def ring(self, byte: bytes) -> None:
        """Send; never blocks, for no more bytes are under way than there are slots."""
        try:
            self.stream.send(byte)
        except OSError:
            raise self.lost() from None

    def wait(self, what: str) -> bytes:
        """Wait for the peer to ring; return the bytes, one or more. `what` we wait for is said in errors."""
        start = time.monotonic()
        try:
            heard = self.stream.recv(256)
        except BlockingIOError:
            raise LinkFault(
                f"waited {time.monotonic() - start:.1f} s for {what} rank {self.peer}, which is alive but silent"
            ) from None
        except OSError:
            raise self.lost() from None
        if not heard:
            raise self.lost()
        return heard

    def say(self, cause: str) -> None:
        """Give up: tell the peer why, if it still listens, and end the stream."""
        with contextlib.suppress(OSError):
            self.stream.setblocking(False)
            self.stream.send(_GIVES_UP + cause.encode()[:4096])
        self.hang_up()

    def hang_up(self) -> None:
        """End the stream in both directions; wakes a thread that waits in it."""
        with contextlib.suppress(OSError):
            self.stream.shutdown(socket.SHUT_RDWR)

    def lost(self, heard: bytes = b"") -> LinkFault:
        """What to say about a stream that ended, or that said `heard`: the peer's last words may still be in it."""
        if self.aborted:
            return LinkFault("aborted by this process")
        with contextlib.suppress(OSError):
            self.stream.settimeout(0.1)
            while more := self.stream.recv(4096):
                heard += more
        _, gave_up, cause = heard.partition(_GIVES_UP)
        if gave_up:
            origin = cause.decode(errors="replace")
            return LinkFault(f"rank {self.peer} gave up: {origin}", origin=origin)
        return LinkFault(f"lost rank {self.peer}: it ended or was killed")


@final
class SharedMemoryLink(Link):
    """Links to both neighbours; built by `rendezvous.connect`.

    Args:
        left: the stream from the left neighbour, and its arena.
        right: the stream to the right neighbour, and our arena, mapped by both.
    """

    def __init__(
        self, left: tuple[Doorbell, Slots], right: tuple[Doorbell, Slots], *, window: int, max_bytes: int
    ) -> None:
        self.window, self.max_bytes = window, max_bytes
        self._left, self._incoming = left
        self._right, self._outgoing = right
        self._num_free = window  # slots of ours that the right neighbour has given back
        self._heard = iter(b"")  # what the left neighbour rang and was not pulled; may reach into its next collective
        self._num_owed = 0  # slots of the left neighbour that we are done with and have not given back
        self._num_claimed = self._num_pulled = 0
        self._tag, self._full = 0, b""
        _open_links.add(self)

    @override
    def begin(self, tag: int, incoming: Iterator[Message]) -> None:
        self._tag, self._full = tag, bytes([tag])

    @override
    def pull(self, dtype: torch.dtype, numel: int) -> Tensor:
        tag = next(self._heard, None)
        if tag is None:
            self._give_back()  # before any wait, so that nobody waits for what we owe
            self._heard = iter(self._left.wait("a message from"))
            tag = next(self._heard)
        if tag != self._tag:
            raise self._out_of_turn(tag)
        return self._incoming.view(self._num_pulled, dtype, numel)

    @override
    def release(self) -> None:
        self._num_pulled += 1
        self._num_owed += 1
        if 2 * self._num_owed >= self.window:
            self._give_back()

    @override
    def claim(self, dtype: torch.dtype, numel: int, source: Tensor | None) -> Tensor:
        if not self._num_free:
            self._give_back()
            heard = self._right.wait("a free slot at")
            self._num_free = heard.count(_FREE)
            if self._num_free != len(heard):
                raise self._right.lost(heard)
        self._num_free -= 1
        return self._outgoing.view(self._num_claimed, dtype, numel)

    @override
    def push(self) -> None:
        self._num_claimed += 1
        self._right.ring(self._full)

    @override
    def end(self) -> None:
        self._give_back()

    @override
    def fail(self, cause: str) -> None:
        self._left.say(cause)
        self._right.say(cause)

    @override
    def abort(self) -> None:
        for bell in (self._left, self._right):
            bell.aborted = True
            bell.hang_up()

    @override
    def close(self) -> None:
        self._left.stream.close()
        self._right.stream.close()
        _open_links.discard(self)

    def _out_of_turn(self, tag: int) -> LinkFault:
        heard = bytes([tag, *self._heard])
        if tag == _GIVES_UP[0]:
            return self._left.lost(heard)
        return LinkFault(f"rank {self._left.peer} spoke out of turn: it runs another collective, or other sizes")

    def _give_back(self) -> None:
        if self._num_owed:
            with contextlib.suppress(OSError):  # a neighbour that has sent all it had may have left
                self._left.stream.send(_FREE * self._num_owed)
            self._num_owed = 0


# A forked child (a DataLoader worker) inherits the streams; while it holds them, no peer sees this process die.
_open_links: weakref.WeakSet[SharedMemoryLink] = weakref.WeakSet()


def _close_in_child() -> None:
    for link in list(_open_links):
        link.close()


os.register_at_fork(after_in_child=_close_in_child)
