# SPDX-License-Identifier: Apache-2.0
"""Every rule seen red, each by a schedule that is right but for one change; and files, line by line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stratagem.errors import ConfigError
from stratagem.plugins.pipeline.actions import Action, Schedule
from stratagem.plugins.pipeline.from_file import parse_schedule, read_schedule
from stratagem.plugins.pipeline.messages import programs
from stratagem.plugins.pipeline.schedules import NAMES, build_schedule, dual_pipe_v, gpipe, one_f_one_b, zb_h1
from stratagem.plugins.pipeline.simulate import simulate
from stratagem.plugins.pipeline.validate import faults, rendezvous_faults, validate

Change = Callable[[list[Action]], object]


def changed(schedule: Schedule, change: Change, rank: int = 0) -> Schedule:
    """The schedule with one rank's order changed in place."""
    order = list(schedule.ranks[rank])
    change(order)
    ranks = [*schedule.ranks]
    ranks[rank] = tuple(order)
    return replace(schedule, ranks=tuple(ranks))


def swap(first: str, second: str) -> Change:
    def change(order: list[Action]) -> None:
        a, b = order.index(Action.parse(first)), order.index(Action.parse(second))
        order[a], order[b] = order[b], order[a]

    return change


def insert(action: str) -> Change:
    return lambda order: order.append(Action.parse(action))


def remove(action: str) -> Change:
    return lambda order: order.remove(Action.parse(action))


PIPE, SPLIT, DUAL = one_f_one_b(2, 3), zb_h1(2, 3), dual_pipe_v(2, 4)

RED = {
    "stage of another rank": (changed(PIPE, insert("1F0")), "[place] rank 0: 1F0, but stage 1 is not on this rank"),
    "no such stage": (changed(PIPE, insert("7F0")), "[place] rank 0: 7F0, but stage 7 is not on this rank"),
    "no such rank": (replace(PIPE, owners=(0, 5)), "[place] stage 1 is on rank 5 of 2"),
    "unequal": (replace(PIPE, owners=(0, 0)), "[place] ranks hold unequal numbers of stages: {0: 2, 1: 0}"),
    "no such micro-batch": (changed(PIPE, insert("0F3")), "[complete] 0F3: there are 3 micro-batches"),
    "lost forward": (changed(PIPE, remove("0F1")), "[complete] 0F1 is there 0 times, not once"),
    "doubled forward": (changed(PIPE, insert("0F1")), "[complete] 0F1 is there 2 times, not once"),
    "lost backward": (changed(PIPE, remove("0B2")), "[complete] the backward 0B2 is 0 x B, 0 x I, 0 x W"),
    "lost weights": (changed(SPLIT, remove("0W2")), "[complete] the backward 0B2 is 0 x B, 1 x I, 0 x W"),
    "weights twice": (changed(PIPE, insert("0W2")), "[complete] the backward 0B2 is 1 x B, 0 x I, 1 x W"),
    "backward first": (changed(PIPE, swap("1F0", "1B0"), 1), "[order] rank 1: 1B0 comes before 1F0, which it needs"),
    "weights first": (changed(SPLIT, swap("0I1", "0W1")), "[order] rank 0: 0W1 comes before 0I1, which it needs"),
    "no pair": (replace(PIPE, pairs=frozenset({Action("F", 0, 0)})), "[order] rank 0: 0F0 and 0F1 make no pair"),
    "lone pair": (replace(PIPE, pairs=frozenset({Action("B", 0, 2)})), "[order] rank 0: 0B2 and nothing make no pair"),
    "ring": (
        changed(gpipe(2, 2), swap("0F1", "0B0")),
        "[deadlock] rank 0 at 0B0 waits for 1I0 on rank 1, rank 1 at 1F1",
    ),
    "ring of a pair": (
        replace(gpipe(2, 1), pairs=frozenset({Action("F", 0, 0)})),
        "[deadlock] rank 0 at 0F0 waits for 1I0",
    ),
}


@pytest.mark.parametrize("case", RED)
def test_each_rule_is_seen_red(case: str) -> None:
    schedule, expected = RED[case]
    found = [str(fault) for fault in faults(schedule)]
    assert any(text.startswith(expected) for text in found), found
    with pytest.raises(ConfigError, match=r"schedule .*mend the order"):
        validate(schedule)


def test_all_faults_are_said_at_once() -> None:
    wrong = changed(changed(PIPE, remove("0F2")), swap("1F0", "1B0"), 1)
    with pytest.raises(ConfigError) as caught:
        validate(wrong, max_in_flight=0.5)
    for rule in ("complete", "order", "memory"):
        assert f"[{rule}]" in str(caught.value)
    many = replace(PIPE, num_micro_batches=30)
    with pytest.raises(ConfigError, match="; and 100 more"):
        validate(many)


def test_a_deadlock_ends_the_simulation_as_well() -> None:
    with pytest.raises(ConfigError, match="never ends: all wait, rank 0 at 0B0, rank 1 at 1F1"):
        simulate(RED["ring"][0])


def test_memory_is_bound_on_every_rank() -> None:
    assert [fault.rule for fault in faults(gpipe(3, 4), max_in_flight=3.5)] == ["memory"] * 3
    assert faults(gpipe(3, 4), max_in_flight=4) == ()
    found = faults(one_f_one_b(3, 4), max_in_flight=2)
    assert [str(fault) for fault in found] == ["[memory] rank 0 holds 3 micro-batches at once, of 2 allowed"]


def test_sends_that_wait_deadlock_where_they_are_placed_naively() -> None:
    """Neighbours in 1F1B send to each other at once. In one line for all messages somebody can always move."""
    (fault,) = faults(one_f_one_b(2, 3), placement="naive")
    assert fault.rule == "rendezvous"
    assert "rank 0 at `send 0F1 to rank 1`, rank 1 at `send 1B0 to rank 0`" in fault.what
    assert faults(gpipe(2, 3), placement="naive") == ()
    for name in NAMES:
        chunks = 1 if name in ("gpipe", "1f1b", "zb_h1") else 2
        for num_ranks in (1, 2, 4):
            steps = programs(build_schedule(name, num_ranks, 8, chunks))
            assert rendezvous_faults(steps) == ()
            sent = sorted((s.action, rank, s.peer) for rank, own in enumerate(steps) for s in own if s.what == "send")
            got = sorted((s.action, s.peer, rank) for rank, own in enumerate(steps) for s in own if s.what == "receive")
            assert sent == got


@pytest.mark.parametrize("name", NAMES)
def test_programs_hold_what_is_computed_after_what_it_needs(name: str) -> None:
    schedule = build_schedule(name, 3, 6, 1 if name in ("gpipe", "1f1b", "zb_h1") else 2)
    for rank, own in enumerate(programs(schedule)):
        assert tuple(step.action for step in own if step.what == "compute") == schedule.ranks[rank]
        here: set[Action] = set()
        for step in own:
            if step.what == "compute":
                assert here.issuperset(step.action.needs(schedule.num_stages)), step
            if step.what == "send":
                assert here.issuperset(step.action.gives()), step
            here.update(step.action.gives())


def test_a_mutated_program_deadlocks() -> None:
    first, second = programs(one_f_one_b(2, 2))
    steps = list(second)
    steps[0], steps[1] = steps[1], steps[0]
    (fault,) = rendezvous_faults((first, tuple(steps)))
    assert fault.rule == "rendezvous"
    # One side that ends early, too.
    assert rendezvous_faults((first, second[:1]))


@pytest.mark.parametrize("schedule", [PIPE, SPLIT, DUAL], ids=lambda schedule: schedule.name)
def test_files_are_read_as_they_are_written(schedule: Schedule, tmp_path: Path) -> None:
    path = tmp_path / f"{schedule.name}.csv"
    path.write_text(f"{schedule}\n\n", encoding="utf-8-sig")
    assert read_schedule(path) == schedule


WRONG = {
    "0F0,0B0\n1F0,1X0\n2F0,-1B0": ["line 2, entry 2: '1X0' is no action", "line 3, entry 2: '-1B0' is no action"],
    "0F0,(0F1;0Q0)OVERLAP_F_B": ["line 1, entry 2: '0Q0' is no action"],
    "0F0,(0F1;0B0)": ["line 1, entry 2: '(0F1;0B0)' is no action"],
    "0F0,0B0\n\n1F0,1B0": ["line 2: it is empty"],
    "0F0,0B0\n0F1,0B1": ["line 2: 0F1, but stage 0 is on line 1 already"],
    "0F0,0B0\n2F0,2B0": ["stage 1 is on no line, but stage 2 is"],
    "0F0,0B999999999999": ["above 100000"],
    "": ["there is no action in it"],
    ",,": ["there is no action in it"],
    "0F0,0F2,0B0,0B2": ["[complete] 0F1 is there 0 times"],
    "0B0,0F0": ["[order] rank 0: 0B0 comes before 0F0"],
    "\n".join(["0X0"] * 20): ["line 8, entry 1: '0X0' is no action; and 12 more"],
}


@pytest.mark.parametrize("text", WRONG)
def test_files_that_are_wrong_are_refused_by_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_schedule(text, where="own.csv")
    assert str(caught.value).startswith("own.csv: ")
    for expected in WRONG[text]:
        assert expected in str(caught.value)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_schedule(tmp_path / "nothing.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(ConfigError, match=r"binary\.csv: it cannot be read"):
        read_schedule(tmp_path / "binary.csv")
    (tmp_path / "large.csv").write_text(str(gpipe(2, 5)))
    with pytest.raises(ConfigError, match=r"large\.csv: \[memory\] rank 0 holds 5"):
        read_schedule(tmp_path / "large.csv", max_in_flight=4)
