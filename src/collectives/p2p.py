# SPDX-License-Identifier: Apache-2.0
"""The ring over torch.distributed's sends and receives: works wherever Gloo does, also between hosts.

Every handle of an `isend` is kept until it has been waited for (dropping one hung both sides), and receives are
posted ahead, so that data flows while the ranks compute. Where a message is the bits of a piece it is sent from, and
received into, the tensor itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from stratagem.collectives.transport import Link, LinkFault, Message

_ABORT_TAG = 1
_LEFT, _RIGHT = -1, 1


@final
class P2PLink(Link):
    """Links to both neighbours over the axis's own Gloo group.

    Args:
        group: the process group of exactly the ranks of the ring, in ring order.
        ranks: their global ranks.
        index: the place of this rank in the ring.
        max_bytes: the largest message.
        window: how many receives are posted, and sends kept, at once.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: tuple[int, ...],
        index: int,
        *,
        max_bytes: int = 4 << 20,
        window: int = 3,
    ) -> None:
        self.window, self.max_bytes = window, max_bytes
        self._group = group
        self._peers = {side: (index + side) % len(ranks) for side in (_LEFT, _RIGHT)}  # ranks within the group
        self._names = {side: ranks[peer] for side, peer in self._peers.items()}
        self._scratch = {side: [torch.empty(0, dtype=torch.uint8)] * window for side in (_LEFT, _RIGHT)}
        self._aborted = False
        self._tag = 0
        self._forget()

    def _forget(self) -> None:
        self._incoming: Iterator[Message] = iter(())
        self._receives: deque[tuple[dist.Work, Tensor | None]] = deque()
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()
        self._num_posted = self._num_sent = 0
        self._claimed: Tensor | None = None

    @override
    def begin(self, tag: int, incoming: Iterator[Message]) -> None:
        self._forget()
        self._tag, self._incoming = tag, incoming

    @override
    def pull(self, dtype: torch.dtype, numel: int) -> Tensor | None:
        if not self._num_posted:
            # After the first sends, not before: else sends contend with Gloo's thread for the connection's lock.
            for _ in range(self.window):
                self._post()
        work, payload = self._receives.popleft()
        self._wait(work, _LEFT)
        return payload

    @override
    def release(self) -> None:
        self._post()

    @override
    def claim(self, dtype: torch.dtype, numel: int, source: Tensor | None) -> Tensor:
        while len(self._sends) >= self.window:
            self._wait(self._sends.popleft()[0], _RIGHT)
        self._claimed = source if source is not None else self._buffer(_RIGHT, self._num_sent, dtype, numel)
        self._num_sent += 1
        return self._claimed

    @override
    def push(self) -> None:
        assert self._claimed is not None
        try:
            work = dist.isend(self._claimed, group=self._group, group_dst=self._peers[_RIGHT], tag=self._tag)
        except RuntimeError as error:
            raise self._fault(_RIGHT, error, waited=0) from error
        assert work is not None
        self._sends.append((work, self._claimed))

    @override
    def end(self) -> None:
        while self._sends:
            self._wait(self._sends.popleft()[0], _RIGHT)
        assert not self._receives, "a schedule pulls every message it announced"

    @override
    def fail(self, cause: str) -> None:
        self.abort()  # closing the connections is all that Gloo lets us tell the neighbours

    @override
    def abort(self) -> None:
        self._aborted = True
        self._close_connections()

    @override
    def close(self) -> None:
        pass  # after success nothing is under way; after a failure Gloo may still write to what is

    def _post(self) -> None:
        """Post the receive of the next announced message, if there is one."""
        message = next(self._incoming, None)
        if message is None:
            return
        into = message.into
        payload = None if into is not None else self._buffer(_LEFT, self._num_posted, message.dtype, message.numel)
        self._num_posted += 1
        target = into if payload is None else payload
        assert target is not None
        try:
            work = dist.irecv(target, group=self._group, group_src=self._peers[_LEFT], tag=self._tag)
        except RuntimeError as error:
            raise self._fault(_LEFT, error, waited=0) from error
        assert work is not None
        self._receives.append((work, payload))

    def _buffer(self, side: int, count: int, dtype: torch.dtype, numel: int) -> Tensor:
        """Scratch for message number `count`; the message that used it before is `window` messages ago, and done."""
        buffers, slot, num_bytes = self._scratch[side], count % self.window, numel * dtype.itemsize
        if buffers[slot].numel() < num_bytes:
            buffers[slot] = torch.empty(num_bytes, dtype=torch.uint8)
        return buffers[slot][:num_bytes].view(dtype)

    def _wait(self, work: dist.Work, side: int) -> None:
        start = time.monotonic()
        try:
            work.wait()
        except RuntimeError as error:
            raise self._fault(side, error, waited=time.monotonic() - start) from error

    def _close_connections(self) -> list[int]:
        """Wake every waiter, here and at the neighbours; return the sides whose neighbour had gone before.

        A Gloo receive that times out closes all connections of its group, and there is no other way to do it. One
        from a neighbour that has gone fails at once and closes nothing, hence both sides.
        """
        gone = []
        for side in (_LEFT, _RIGHT):
            try:
                unwanted = torch.empty(1, dtype=torch.uint8)
                work = dist.irecv(unwanted, group=self._group, group_src=self._peers[side], tag=_ABORT_TAG)
                assert work is not None
                work.wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "by peer" in str(error):  # it closed, or the kernel reset, the connection
                    gone.append(side)
        return gone

    def _fault(self, side: int, error: RuntimeError, *, waited: float) -> LinkFault:
        if self._aborted:
            return LinkFault("aborted by this process")
        gone = self._close_connections()
        name, text = self._names[side], str(error).split("] ", 1)[-1].split(". ", 1)[0]
        if "timed out" in text.lower():
            direction = "a message from" if side == _LEFT else "room at"
            return LinkFault(f"waited {waited:.1f} s for {direction} rank {name}, which is alive but silent ({text})")
        others = {self._names[each] for each in gone} - {name}
        return LinkFault(f"lost rank {name} ({text})" + "".join(f", and rank {each} has gone, too" for each in others))
