# SPDX-License-Identifier: Apache-2.0
"""The ranks that save a checkpoint together: all of a run under our strategies, one alone under Lightning's own."""

from __future__ import annotations

from typing import Any, Protocol, final


class Crew(Protocol):
    """The ranks that save together; a `Communicator` is one."""

    @property
    def rank(self) -> int:
        """This one's number among them."""
        ...

    @property
    def size(self) -> int:
        """How many."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Everyone's value, on every rank. Collective."""
        ...

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Rank `src`'s value. Collective."""
        ...


@final
class Alone:
    """A crew of one."""

    rank, size = 0, 1

    def gather_objects(self, value: Any) -> list[Any]:
        """The value."""
        return [value]

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """The value."""
        return value
