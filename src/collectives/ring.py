# SPDX-License-Identifier: Apache-2.0
"""Who sends what to whom, and when: the schedules of the ring collectives, as frozen data.

The ranks of an axis stand in a ring. Each sends only to its right neighbour, `(rank + 1) % n`, and receives only
from its left one. The tensor is cut into `n` chunks; chunk `c` belongs to rank `c`. Reduce-scatter on three ranks,
seen by chunk (`c0'` is a sum that grows, `[c0]` the finished sum):

    step    rank 0 sends    rank 1 sends    rank 2 sends    then
    0       c2              c0              c1              each adds its own value to what came in
    1       c1'             c2'             c0'             each adds, and owns the finished sum: [c0] [c1] [c2]

and all-gather, which also is the second half of all-reduce:

    2       [c0]            [c1]            [c2]            each keeps what came in
    3       [c2]            [c0]            [c1]            each keeps what came in; everybody has everything

So reduce-scatter and all-gather send `(n-1)/n` of the tensor from every rank, all-reduce `2(n-1)/n`: no algorithm
can do with less. Every rank is busy in every step, and no rank talks to more than two others.

Note [pieces, lanes and blocks]
    A chunk travels in pieces that fit the caches. `lanes` pieces of every chunk are under way at once, and make a
    block; blocks follow each other without a pause. Message `i` of a rank is (block, step, lane), counted with the
    lane fastest, so within a block message `i` hands on what came in as message `i - lanes` (also across the
    boundary between reducing and gathering): a rank adds its own value to a piece and passes it on while the piece
    is still in its cache. The n = 2 reduce-scatter of 3 pieces with 2 lanes, for rank 0:

        send c1.0   send c1.1   add c0.0   send c1.2   add c0.1   add c0.2

Note [why no ring deadlocks]
    Everybody first sends `lanes` messages, then receives message `i` and sends message `i + lanes`, in this order.
    A link that holds `lanes + 1` unread messages never blocks for good: if everybody has received message `i - 1`,
    there is room for message `i - 1 + lanes` everywhere, so everybody can send it, so everybody can receive
    message `i`. (One more than `lanes`, because the outgoing place is claimed before the incoming one is given
    back: the sum is written straight from the one to the other.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import final

Bounds = tuple[tuple[int, int], ...]


@final
class Collective(StrEnum):
    """The collectives that have a ring schedule."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"


@final
class Action(Enum):
    """What a rank does with one piece. At most one message in, at most one message out, always of the same piece."""

    SEND = "send my contribution"
    SEND_FINAL = "send my finished piece"
    ADD_PASS = "receive a sum, add my contribution, pass it on"
    ADD_KEEP = "receive a sum, add my contribution: finished, keep it"
    ADD_KEEP_PASS = "receive a sum, add my contribution: finished, keep it and pass it on"
    KEEP = "receive a finished piece, keep it"
    KEEP_PASS = "receive a finished piece, keep it and pass it on"

    @property
    def receives(self) -> bool:
        """Whether a message comes in from the left."""
        return self not in (Action.SEND, Action.SEND_FINAL)

    @property
    def sends(self) -> bool:
        """Whether a message goes out to the right."""
        return self not in (Action.ADD_KEEP, Action.KEEP)


@final
@dataclass(frozen=True, slots=True)
class Hop:
    """One action on the piece `[lo, hi)` (element indices) of the flat tensor."""

    action: Action
    lo: int
    hi: int


@final
@dataclass(frozen=True)
class Schedule:
    """All hops of one rank, in the order in which it runs them. `lanes` is how many it sends before it receives."""

    hops: tuple[Hop, ...]
    lanes: int

    @property
    def sent_sizes(self) -> Iterator[int]:
        """The number of elements of each message this rank sends."""
        return (hop.hi - hop.lo for hop in self.hops if hop.action.sends)

    def validate(self, numel: int) -> None:
        """Assert that every hop lies in `[0, numel)` and moves at least one element."""
        for hop in self.hops:
            assert 0 <= hop.lo < hop.hi <= numel, f"{hop} is empty or outside [0, {numel})"


def chunk_bounds(numel: int, n: int) -> Bounds:
    """Cut `[0, numel)` into `n` consecutive chunks whose sizes differ by at most one; the first ones are the larger.

    Args:
        numel: how many elements there are; may be smaller than `n`, then the last chunks are empty.
        n: the number of chunks, 1 or more.

    Example:
        >>> chunk_bounds(7, 3)
        ((0, 3), (3, 5), (5, 7))
        >>> chunk_bounds(1, 2)
        ((0, 1), (1, 1))
    """
    if numel < 0 or n < 1:
        raise ValueError(f"chunk_bounds({numel}, {n}): numel must be 0 or more and n must be 1 or more")
    size, larger = divmod(numel, n)
    return tuple(pairwise(c * size + min(c, larger) for c in range(n + 1)))


def check_bounds(bounds: Sequence[tuple[int, int]], numel: int, n: int) -> Bounds:
    """Return `bounds` as tuples if they are `n` consecutive slices that cover `[0, numel)` exactly once.

    Raises:
        ValueError: if there are not `n` of them, or they overlap, leave a gap or run outside.
    """
    checked = tuple((int(lo), int(hi)) for lo, hi in bounds)
    if len(checked) != n:
        raise ValueError(f"bounds has {len(checked)} slices for {n} ranks: give one (start, stop) per rank")
    edge = 0
    for rank, (lo, hi) in enumerate(checked):
        if lo != edge or hi < lo:
            raise ValueError(
                f"bounds[{rank}] is ({lo}, {hi}): slices must follow each other, the next starts at {edge}"
            )
        edge = hi
    if edge != numel:
        raise ValueError(f"bounds cover [0, {edge}) but the tensor has {numel} elements: cover each exactly once")
    return checked


@lru_cache(maxsize=1024)
def ring_schedule(collective: Collective, rank: int, bounds: Bounds, *, piece: int, lanes: int) -> Schedule:
    """The hops of `rank` in a ring of `len(bounds)` ranks. A pure function: no process, no tensor.

    Args:
        collective: all-reduce, reduce-scatter or all-gather (a broadcast has `broadcast_schedule`).
        rank: the place in the ring, 0 to n - 1.
        bounds: the chunk `[lo, hi)` of each rank, in elements; chunks may be uneven or empty.
        piece: the largest message, in elements.
        lanes: how many messages are under way at once, see the notes above.

    Example:
        >>> hops = ring_schedule(Collective.REDUCE_SCATTER, 0, ((0, 3), (3, 6)), piece=1, lanes=2).hops
        >>> [(hop.action.name, hop.lo) for hop in hops]
        [('SEND', 3), ('SEND', 4), ('ADD_KEEP', 0), ('SEND', 5), ('ADD_KEEP', 1), ('ADD_KEEP', 2)]
    """
    assert collective is not Collective.BROADCAST, "a broadcast is a chain: see broadcast_schedule"
    n = len(bounds)
    assert 0 <= rank < n
    assert min(piece, lanes) > 0
    pieces = max(-(-(hi - lo) // piece) for lo, hi in bounds)
    cuts = [[(lo + a, lo + b) for a, b in chunk_bounds(hi - lo, max(pieces, 1))] for lo, hi in bounds]
    first, last = _steps(collective, n)
    opening = Action.SEND_FINAL if collective is Collective.ALL_GATHER else Action.SEND
    hops: list[Hop] = []

    def add(action: Action, chunk: int, number: int) -> None:
        lo, hi = cuts[chunk % n][number]
        if hi > lo:  # an empty piece is no message; both ends of the link know it
            hops.append(Hop(action, lo, hi))

    if n > 1:
        for number in range(min(lanes, pieces)):
            add(opening, rank - 1 - first, number)
        for block in range(0, pieces, lanes):
            for step in range(first, last):
                for number in range(block, min(block + lanes, pieces)):
                    add(_receive(step, n, last), rank - 2 - step, number)
                    if step == last - 1 and number + lanes < pieces:
                        add(opening, rank - 1 - first, number + lanes)
    return Schedule(tuple(hops), lanes)


@lru_cache(maxsize=1024)
def broadcast_schedule(place: int, n: int, numel: int, *, piece: int, lanes: int) -> Schedule:
    """The hops of a broadcast along the ring: the source sends, the last rank keeps, those between pass on at once.

    Args:
        place: how far this rank stands to the right of the source, 0 to n - 1.
        n: the number of ranks.
        numel: the number of elements; each rank but the last sends them once.
        piece: the largest message, in elements.
        lanes: only recorded; a chain has no cycle that could block.

    Example:
        >>> [hop.action.name for hop in broadcast_schedule(1, 3, 4, piece=2, lanes=2).hops]
        ['KEEP_PASS', 'KEEP_PASS']
    """
    action = Action.SEND_FINAL if place == 0 else Action.KEEP if place == n - 1 else Action.KEEP_PASS
    cuts = chunk_bounds(numel, max(1, -(-numel // piece)))
    return Schedule(tuple(Hop(action, lo, hi) for lo, hi in cuts if hi > lo and n > 1), lanes)


def _steps(collective: Collective, n: int) -> tuple[int, int]:
    """First and one past the last step, on the clock of the picture: reducing is [0, n-1), gathering [n-1, 2n-2)."""
    first = n - 1 if collective is Collective.ALL_GATHER else 0
    last = n - 1 if collective is Collective.REDUCE_SCATTER else 2 * n - 2
    return first, last


def _receive(step: int, n: int, last: int) -> Action:
    """What is done with the message that comes in at `step`."""
    if step < n - 2:
        return Action.ADD_PASS
    if step == n - 2:
        return Action.ADD_KEEP if last == n - 1 else Action.ADD_KEEP_PASS
    return Action.KEEP if step == last - 1 else Action.KEEP_PASS
