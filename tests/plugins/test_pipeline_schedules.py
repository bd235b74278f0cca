# SPDX-License-Identifier: Apache-2.0
"""Every schedule against what is known of it: makespans, bubbles, peaks, messages, legal numbers, torch's orders."""

from __future__ import annotations

import csv
import io
from itertools import accumulate, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.errors import ConfigError
from stratagem.plugins.pipeline.actions import Action, Schedule, loop, v_shape
from stratagem.plugins.pipeline.from_file import parse_schedule
from stratagem.plugins.pipeline.messages import links
from stratagem.plugins.pipeline.schedules import NAMES, build_schedule, interleaved_1f1b, zb_interleaved
from stratagem.plugins.pipeline.schedules.interleaved import interleaved_order
from stratagem.plugins.pipeline.simulate import Costs, simulate
from stratagem.plugins.pipeline.validate import faults

# Name, (p, m, v), makespan, bubble, peak per rank, in units of F = I = W = 1 for all chunks of a rank together.
GOLDEN = [
    ("interleaved_1f1b", (2, 4, 2), 13.5, 1.5, (2.5, 1.5)),
    ("interleaved_1f1b", (4, 8, 2), 28.5, 4.5, (5.5, 4.5, 3.5, 2.5)),
    ("interleaved_1f1b", (4, 8, 4), 26.25, 2.25, (4.75, 4.25, 3.75, 3.25)),
    ("interleaved_1f1b", (4, 16, 2), 52.5, 4.5, (5.5, 4.5, 3.5, 2.5)),
    ("interleaved_1f1b", (4, 10, 2), 34.5, 4.5, (6.0, 5.0, 4.0, 3.0)),
    ("looped_bfs", (4, 8, 2), 28.5, 4.5, (8.0,) * 4),
    ("zb_interleaved", (4, 8, 2), 25.5, 1.5, (4.0,) * 4),
    ("zb_interleaved", (4, 16, 2), 49.5, 1.5, (4.0,) * 4),
    ("zb_v", (2, 4, 2), 12.5, 0.5, (2.0,) * 2),
    ("zb_v", (4, 8, 2), 25.5, 1.5, (4.0,) * 4),
    ("zb_v", (4, 16, 2), 49.5, 1.5, (4.0,) * 4),
    ("zb_v", (4, 4, 2), 15.0, 3.0, (2.5, 3.0, 3.5, 4.0)),
    ("dual_pipe_v", (2, 4, 2), 13.0, 1.0, (2.5,) * 2),
    ("dual_pipe_v", (4, 10, 2), 33.0, 3.0, (4.5,) * 4),
    ("dual_pipe_v", (4, 16, 2), 51.0, 3.0, (4.5,) * 4),
]


@pytest.mark.parametrize(("name", "counts", "makespan", "bubble", "peak"), GOLDEN)
def test_the_golden_table(
    name: str, counts: tuple[int, int, int], makespan: float, bubble: float, peak: tuple[float, ...]
) -> None:
    schedule = build_schedule(name, *counts)
    timeline = simulate(schedule, Costs.even(counts[2]))
    assert timeline.makespan == makespan
    assert timeline.bubble == (bubble,) * counts[0]
    assert schedule.peak_in_flight() == peak


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(2, 4), (3, 8), (4, 8), (4, 10)])
@pytest.mark.parametrize(("forward", "first", "second"), [(3.0, 4.0, 2.0), (2.0, 1.0, 1.0), (1.0, 1.0, 1.0)])
def test_the_formulas_of_the_docstrings(
    num_ranks: int, num_micro_batches: int, forward: float, first: float, second: float
) -> None:
    """Bubbles for costs that differ by kind, per chunk; peaks by rank. p, m and v are written as in the docstrings."""
    p, m, v, costs = num_ranks, num_micro_batches, 2, Costs(forward, first, second)
    group = m // max(1, m // p)
    whole, split = (p - 1) * (forward + first + second), (p - 1) * (forward + first - second)
    expected = {
        "gpipe": (1, whole, [m] * p),
        "1f1b": (1, whole, [min(m, p - rank) for rank in range(p)]),
        "zb_h1": (1, split, [min(m, p)] * p),
        "interleaved_1f1b": (v, whole, [min(m, ((v - 1) * group + 2 * (p - 1 - r) + 1) / v) for r in range(p)]),
        "looped_bfs": (v, whole, [m] * p),
        "zb_interleaved": (v, split, [((v - 1) * group + p) / v] * p),
    }
    if m >= 2 * p:
        expected["dual_pipe_v"] = (2, (p - 1) * (2 * forward + first - second), [p + 0.5] * p)
    for name, (chunks, bubble, peaks) in expected.items():
        schedule = build_schedule(name, p, m, chunks)
        assert simulate(schedule, costs).bubble == (bubble,) * p, name
        assert schedule.peak_in_flight() == tuple(peaks), name


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(2, 3), (3, 5), (4, 12)])
def test_zero_bubble_in_a_v_has_none(num_ranks: int, num_micro_batches: int) -> None:
    """From its first action to its last, no rank waits."""
    for spans in simulate(build_schedule("zb_v", num_ranks, num_micro_batches, 2)).spans:
        assert all(before.end == after.start for before, after in pairwise(spans))


def test_fewer_micro_batches_than_ranks() -> None:
    for name in ("gpipe", "1f1b", "zb_h1"):
        assert max(build_schedule(name, 4, 2, 1).peak_in_flight()) == 2, name
    assert simulate(build_schedule("1f1b", 4, 1, 1)).makespan == 12
    with pytest.raises(ConfigError, match="7 micro-batches are fewer than the 8 stages"):
        build_schedule("dual_pipe_v", 4, 7, 2)
    with pytest.raises(ConfigError, match="no schedule is called 'pipedream'"):
        build_schedule("pipedream", 4, 8, 1)
    with pytest.raises(ConfigError, match="0 ranks"):
        build_schedule("gpipe", 0, 1, 1)


def test_two_of_a_pair_in_turn_halve_the_bubble() -> None:
    timeline = simulate(build_schedule("dual_pipe_v", 4, 16, 2), Costs.even(2), pairs="in_turn")
    assert timeline.bubble == (1.5,) * 4


@pytest.mark.parametrize(
    ("num_ranks", "group"), [(1, 1), (2, 2), (2, 4), (4, 4), (4, 5), (8, 9), (8, 11)], ids=lambda number: f"{number}"
)
@pytest.mark.parametrize("num_micro_batches", [8, 32])
@pytest.mark.parametrize("num_chunks", [None, 2, 4, 8])
def test_the_legality_grid(num_ranks: int, group: int, num_micro_batches: int, num_chunks: int | None) -> None:
    """Forwards and backwards balance, and no backward comes before its forward. A group larger than the batch is the
    batch. A last group smaller than the ranks has an order too, but the generator refuses it."""
    counts = (num_ranks, num_micro_batches, num_chunks or 1)
    if num_chunks is None:
        ranks = build_schedule("1f1b", *counts).ranks
    else:
        ranks = tuple(interleaved_order(rank, counts, group) for rank in range(num_ranks))
        if num_chunks == 2:  # The others are alike, and take long.
            assert not faults(Schedule("grid", num_micro_batches, loop(num_ranks, num_chunks), ranks))
        if (num_ranks, group, num_micro_batches) in {(4, 5, 8), (4, 5, 32), (8, 9, 32)}:
            with pytest.raises(ConfigError, match=f"groups of {num_ranks} or more, the last one too"):
                interleaved_1f1b(*counts, group=group)
        else:
            assert interleaved_1f1b(*counts, group=group).ranks == ranks
    for order in ranks:
        sums = list(accumulate(1 if action.kind == "F" else -1 for action in order))
        assert len(order) == 2 * num_micro_batches * counts[2]
        assert sums[-1] == 0
        assert min(sums) >= 0


def test_micro_batches_that_do_not_fill_the_ranks_are_refused() -> None:
    for generate in (interleaved_1f1b, zb_interleaved):
        with pytest.raises(ConfigError, match="7 micro-batches in groups of 4"):
            generate(4, 7, 2, group=4)
        with pytest.raises(ConfigError, match="leave a group smaller"):
            generate(4, 8, 2, group=0)
        with pytest.raises(ConfigError, match=r"9 micro-batches do not make 2 equal groups.*8 or 10 micro-batches"):
            generate(4, 9, 2)
        # Without a named group, 7 are one group of 7, as 3 are one of 3.
        assert not faults(generate(4, 7, 2))
        assert not faults(generate(4, 3, 2))


TORCH = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "zb_interleaved": "InterleavedZeroBubble",
    "zb_v": "ZBVZeroBubble",
    "dual_pipe_v": "DualPipeV",
}
CHUNKS = {name: (1,) if name in ("gpipe", "1f1b") else (2,) if name.endswith("_v") else (2, 3) for name in TORCH}


@pytest.mark.parametrize("name", TORCH)
def test_the_orders_are_those_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same order to the last action for all seven, not only the same makespan, and each side reads what the other
    writes. One exception: the order that torch 2.13 gives for 1F1B numbers the last rank's forwards from 1, so 1 is
    taken off there."""
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    from torch.distributed.pipelining import schedules as theirs

    # Communication is not compared here, and torch takes long to place it.
    monkeypatch.setattr(theirs._PipelineScheduleRuntime, "_prepare_schedule_with_comms", lambda *_, **__: None)
    for num_chunks, (num_ranks, num_micro_batches) in product(CHUNKS[name], [(2, 4), (3, 6), (4, 8), (4, 10)]):
        ours = build_schedule(name, num_ranks, num_micro_batches, num_chunks)
        rows = visualizer.get_schedule_ops(TORCH[name], num_ranks, num_micro_batches, num_chunks)
        forwards = [a for a in rows[-1] if a is not None and a.computation_type == theirs.FORWARD]
        if name == "1f1b" and forwards[0].microbatch_index == 1:
            rows[-1] = [a._replace(microbatch_index=a.microbatch_index - 1) if a in forwards else a for a in rows[-1]]
        read = parse_schedule(_csv(rows))
        assert (read.ranks, read.owners, read.pairs) == (ours.ranks, ours.owners, ours.pairs)
        kept = [[a for a in row if a is not None and a.computation_type != theirs.REDUCE_GRAD] for row in rows]
        assert [[theirs._Action.from_str(cell) for cell in line.split(",")] for line in str(ours).split("\n")] == kept


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zb_v"])
def test_files_with_torchs_communication_are_read(name: str) -> None:
    """torch joins an I and a W that touch to a B before it adds communication, so halves are compared."""
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    ours = build_schedule(name, 2, 4, 2)
    text = _csv(visualizer.get_schedule_ops(TORCH[name], 2, 4, 2, with_comms=True))
    assert "SEND_F" in text
    assert "RECV_B" in text
    read = parse_schedule(text)
    assert (_halves(read), read.owners) == (_halves(ours), ours.owners)


def _csv(rows: list[list[object]]) -> str:
    file = io.StringIO()
    csv.writer(file).writerows(rows)
    return file.getvalue()


def _halves(schedule: Schedule) -> list[list[Action]]:
    return [[given for action in actions for given in action.gives()] for actions in schedule.ranks]


def _check(name: str, counts: tuple[int, int, int], costs: Costs) -> None:
    """Valid, or refused with a reason; work conserved; no faster than the slowest rank and the longest chain."""
    num_ranks, num_micro_batches, num_chunks = counts
    try:
        schedule = build_schedule(name, *counts)
    except ConfigError as refused:
        reason = refused
        schedule = None
    if schedule is None:
        assert reason.what
        assert reason.where == f"schedule {name}"
        assert reason.allowed
        return
    assert (schedule.num_ranks, schedule.num_chunks) == (num_ranks, num_chunks)
    assert faults(schedule, max_in_flight=num_micro_batches) == ()
    is_v = name in ("zb_v", "dual_pipe_v")
    assert schedule.owners == (v_shape if is_v else loop)(num_ranks, num_chunks)
    hops = num_ranks * num_chunks - 1 - (num_chunks - 1 if is_v or num_ranks == 1 else 0)
    assert sum(links(schedule).values()) == 2 * num_micro_batches * hops
    assert parse_schedule(str(schedule)).ranks == schedule.ranks

    timeline = simulate(schedule, costs)
    cells = [Action(kind, stage, 0) for kind in ("F", "I", "W") for stage in range(schedule.num_stages)]
    work = num_micro_batches * sum(costs.of(action) for action in cells)
    assert sum(timeline.busy) == pytest.approx(work)
    chain = sum(costs.of(a) for a in cells if a.kind != "W") + 2 * costs.latency * hops
    assert timeline.makespan >= max(*timeline.busy, chain) - 1e-9
    for spans in timeline.spans:
        assert all(a.end <= b.start for a, b in pairwise(spans))


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    counts=st.tuples(st.integers(1, 6), st.integers(1, 16), st.integers(1, 3)),
    data=st.data(),
)
def test_any_numbers_make_a_valid_schedule_or_a_reason(
    name: str, counts: tuple[int, int, int], data: st.DataObject
) -> None:
    each = st.tuples(*[st.integers(1, 9).map(float)] * (counts[0] * counts[2]))
    _check(
        name, counts, Costs(data.draw(each), data.draw(each), data.draw(each), data.draw(st.sampled_from([0.0, 2.5])))
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_all_numbers_make_a_valid_schedule_or_a_reason(name: str) -> None:
    for counts in product(range(1, 7), range(1, 17), range(1, 4)):
        _check(name, counts, Costs())
