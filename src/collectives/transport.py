# SPDX-License-Identifier: Apache-2.0
"""What a ring asks of the wire: one link to the right, one from the left, and a few messages under way in each.

The engine knows only this interface; `p2p` and `shared_memory` are its two implementations. Messages arrive in the
order in which they were sent. A link is used by one thread at a time (`abort` alone may come from another).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@final
class LinkFault(Exception):
    """A link cannot go on. `reason` is a clause that names the neighbour at fault.

    Where that neighbour gave up because of another, `origin` is what it said: the cause that is worth passing on.
    """

    def __init__(self, reason: str, *, origin: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.origin = reason, origin


@final
@dataclass(frozen=True, slots=True)
class Message:
    """A message that will come in: `numel` values of `dtype`; `into` is where its bits belong, if they can go there."""

    dtype: torch.dtype
    numel: int
    into: Tensor | None


class Link(ABC):
    """Both links of one rank: to its right neighbour and from its left one.

    Attributes:
        window: how many messages each direction holds unread; at least 2. A ring may use `window - 1` lanes.
        max_bytes: the largest message.
    """

    window: int
    max_bytes: int

    @abstractmethod
    def begin(self, tag: int, incoming: Iterator[Message]) -> None:
        """Open a collective. `tag` (2 to 255) is the same on all ranks that run the same collective."""

    @abstractmethod
    def pull(self, dtype: torch.dtype, numel: int) -> Tensor | None:
        """Wait for the next message and return its payload, or None if its bits already lie in `Message.into`.

        Raises:
            LinkFault: the left neighbour died, hung for longer than the timeout, or speaks of another collective.
        """

    @abstractmethod
    def release(self) -> None:
        """The message that was pulled last is done with; its memory may be used again."""

    @abstractmethod
    def claim(self, dtype: torch.dtype, numel: int, source: Tensor | None) -> Tensor:
        """Memory for the next message to the right, waiting for room if need be.

        Args:
            dtype: of the payload.
            numel: of the payload.
            source: a tensor that already holds, or is about to hold, exactly the payload and stays untouched until it
                has arrived. A link that can send from there returns `source` itself, and nothing is copied.
        """

    @abstractmethod
    def push(self) -> None:
        """Send the claimed message; its memory is filled."""

    @abstractmethod
    def end(self) -> None:
        """Close a collective: return when no memory of the caller is in use any more."""

    @abstractmethod
    def fail(self, cause: str) -> None:
        """Tell both neighbours, as far as they can still be reached, that this rank gives up, and why."""

    @abstractmethod
    def abort(self) -> None:
        """Wake whoever waits in this link, from any thread, without waiting for anybody."""

    @abstractmethod
    def close(self) -> None:
        """Give back memory and descriptors; all collectives have ended."""
