# SPDX-License-Identifier: Apache-2.0
"""The schedules, without a process: the picture of the docstring, and a simulator that runs any of them on symbols."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Generator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.collectives import chunk_bounds, ring
from stratagem.collectives.ring import (
    Action,
    Bounds,
    Collective,
    Schedule,
    broadcast_schedule,
    check_bounds,
    ring_schedule,
)

Value = Counter[int]  # how often each rank's contribution is in a sum
RING = [Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER]


@st.composite
def any_bounds(draw: st.DrawFn, max_ranks: int = 8) -> Bounds:
    """Uneven bounds, with empty chunks, for 1 to 8 ranks."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=max_ranks))
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return tuple(pairwise(edges))


def simulate(schedules: list[Schedule], start: list[list[Value]], *, capacity: int, seed: int) -> list[list[Value]]:
    """Run the schedules of all ranks on symbols, over links that hold `capacity` messages, in any order of the ranks.

    A claimed place counts as taken until the receiver gives it back, as in the real links.
    """
    n = len(schedules)
    values = [[Counter(v) for v in row] for row in start]
    links: list[deque[list[Value]]] = [deque() for _ in range(n)]  # links[r]: messages from r to r + 1
    taken = [0] * n

    def rank_body(r: int) -> Generator[None]:
        left = (r - 1) % n
        for hop in schedules[r].hops:
            mine = values[r][hop.lo : hop.hi]
            out = mine
            if hop.action.receives:
                while not links[left]:
                    yield
                got = links[left].popleft()
                assert len(got) == len(mine), "the message is not of the piece that the receiver expects"
                if hop.action in (Action.KEEP, Action.KEEP_PASS):
                    out = got
                else:
                    out = [a + b for a, b in zip(got, mine, strict=True)]
                if hop.action is not Action.ADD_PASS:
                    values[r][hop.lo : hop.hi] = out
            if hop.action.sends:
                while taken[r] >= capacity:
                    yield
                taken[r] += 1
                links[r].append(out)
            if hop.action.receives:
                taken[left] -= 1

    chance = random.Random(seed)
    running = {r: rank_body(r) for r in range(n)}
    idle = 0
    while running:
        r = chance.choice(list(running))
        before = (len(links[r]), len(links[(r - 1) % n]), taken[r])
        try:
            next(running[r])
        except StopIteration:
            del running[r]
        moved = before != (len(links[r]), len(links[(r - 1) % n]), taken[r])
        idle = 0 if moved or r not in running else idle + 1
        assert idle < 50 * n, f"deadlock: ranks {sorted(running)} wait for each other"
    assert not any(links), "a message was never received"
    return values


@pytest.mark.parametrize("collective", RING)
@settings(max_examples=150, deadline=None)
@given(bounds=any_bounds(), piece=st.integers(1, 4), lanes=st.integers(1, 4), seed=st.integers(0, 2**16))
def test_every_chunk_takes_each_contribution_once_and_nothing_blocks(
    collective: Collective, bounds: Bounds, piece: int, lanes: int, seed: int
) -> None:
    n, numel = len(bounds), bounds[-1][1]
    schedules = [ring_schedule(collective, r, bounds, piece=piece, lanes=lanes) for r in range(n)]
    for schedule in schedules:
        schedule.validate(numel)
    start = [[Counter({r: 1}) for _ in range(numel)] for r in range(n)]
    ends = simulate(schedules, start, capacity=lanes + 1, seed=seed)
    owner = [r for r, (lo, hi) in enumerate(bounds) for _ in range(lo, hi)]
    for r, row in enumerate(ends):
        for i, value in enumerate(row):
            if collective is Collective.ALL_GATHER:
                assert value == Counter({owner[i]: 1})
            elif collective is Collective.ALL_REDUCE or owner[i] == r:
                assert value == Counter(range(n))


def test_one_place_less_than_promised_blocks() -> None:
    """Shows that the simulator sees a deadlock, and that the note on `lanes + 1` is not too careful."""
    bounds = chunk_bounds(12, 3)
    schedules = [ring_schedule(Collective.ALL_REDUCE, r, bounds, piece=1, lanes=2) for r in range(3)]
    start = [[Counter({r: 1}) for _ in range(12)] for r in range(3)]
    with pytest.raises(AssertionError, match="deadlock"):
        simulate(schedules, start, capacity=2, seed=0)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 8),
    src=st.integers(0, 7),
    numel=st.integers(0, 9),
    piece=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_broadcast_reaches_everybody(n: int, src: int, numel: int, piece: int, seed: int) -> None:
    src %= n
    schedules = [broadcast_schedule((r - src) % n, n, numel, piece=piece, lanes=1) for r in range(n)]
    ends = simulate(schedules, [[Counter({r: 1})] * numel for r in range(n)], capacity=2, seed=seed)
    assert ends == [[Counter({src: 1})] * numel] * n


@given(bounds=any_bounds(), piece=st.integers(1, 4), lanes=st.integers(1, 4))
def test_each_rank_sends_all_but_one_chunk_per_phase(bounds: Bounds, piece: int, lanes: int) -> None:
    n, numel = len(bounds), bounds[-1][1]
    for r in range(n):
        sent = {c: sum(ring_schedule(c, r, bounds, piece=piece, lanes=lanes).sent_sizes) for c in RING}
        own, right = bounds[r], bounds[(r + 1) % n]
        assert sent[Collective.REDUCE_SCATTER] == numel - (own[1] - own[0])
        assert sent[Collective.ALL_GATHER] == numel - (right[1] - right[0])
        assert sent[Collective.ALL_REDUCE] == sent[Collective.REDUCE_SCATTER] + sent[Collective.ALL_GATHER]


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_message_i_hands_on_what_came_in_as_message_i_minus_lanes(n: int, lanes: int) -> None:
    """Also across the boundary between reducing and gathering."""
    bounds = chunk_bounds(n * 2 * lanes, n)  # two full blocks
    for r in range(n):
        received = sent = handed_on = 0
        for hop in ring_schedule(Collective.ALL_REDUCE, r, bounds, piece=1, lanes=lanes).hops:
            if hop.action.receives and hop.action.sends:
                assert sent == received + lanes
                handed_on += 1
            received += hop.action.receives
            sent += hop.action.sends
        assert sent == received == 2 * (n - 1) * 2 * lanes
        assert handed_on == (2 * (n - 1) - 1) * 2 * lanes


def test_the_picture_is_what_is_scheduled() -> None:
    bounds = chunk_bounds(3, 3)
    sends = []
    for r in range(3):
        hops = ring_schedule(Collective.ALL_REDUCE, r, bounds, piece=1, lanes=1).hops
        sends.append([_drawn(hop.action, hop.lo) for hop in hops if hop.action.sends])
    lines = [f"{step:<8}{sends[0][step]:<16}{sends[1][step]:<16}{sends[2][step]:<16}" for step in range(4)]
    assert ring.__doc__ is not None
    drawn = [line[4:60] for line in ring.__doc__.splitlines() if line[4:5].isdigit()]
    assert drawn == lines


def test_the_picture_of_the_lanes_is_what_is_scheduled() -> None:
    hops = ring_schedule(Collective.REDUCE_SCATTER, 0, chunk_bounds(6, 2), piece=1, lanes=2).hops
    words = {Action.SEND: "send", Action.ADD_KEEP: "add"}
    drawn = "   ".join(f"{words[hop.action]} c{hop.lo // 3}.{hop.lo % 3}" for hop in hops)
    assert ring.__doc__ is not None
    assert f"\n        {drawn}\n" in ring.__doc__


def _drawn(action: Action, chunk: int) -> str:
    if action is Action.SEND:
        return f"c{chunk}"
    return f"c{chunk}'" if action is Action.ADD_PASS else f"[c{chunk}]"


@given(numel=st.integers(0, 10**6), n=st.integers(1, 64))
def test_chunks_cover_everything_once_and_evenly(numel: int, n: int) -> None:
    bounds = chunk_bounds(numel, n)
    assert check_bounds(bounds, numel, n) == bounds
    sizes = [hi - lo for lo, hi in bounds]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([(0, 2)], "1 slices for 2 ranks"),
        ([(0, 1), (2, 4)], r"bounds\[1\] is \(2, 4\)"),
        ([(0, 3), (2, 4)], r"bounds\[1\] is \(2, 4\)"),
        ([(0, 3), (3, 2)], r"bounds\[1\] is \(3, 2\)"),
        ([(0, 1), (1, 3)], r"cover \[0, 3\) but the tensor has 4"),
    ],
)
def test_bounds_that_do_not_cover_once_are_refused(bounds: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_bounds(bounds, 4, 2)


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="numel must be 0 or more"):
        chunk_bounds(-1, 2)
