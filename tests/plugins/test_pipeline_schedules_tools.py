# SPDX-License-Identifier: Apache-2.0
"""Times against a second way to compute them; the choice against all there is to choose from; pictures."""

from __future__ import annotations

import io
import random
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from rich.console import Console

from stratagem.errors import ConfigError
from stratagem.plugins.pipeline.actions import Action, Schedule
from stratagem.plugins.pipeline.choose import choose
from stratagem.plugins.pipeline.draw import picture, svg
from stratagem.plugins.pipeline.schedules import NAMES, build_schedule, gpipe, one_f_one_b, zb_v
from stratagem.plugins.pipeline.simulate import Costs, simulate


def ends(schedule: Schedule, costs: Costs) -> dict[Action, float]:
    """When everything ends, the slow way: all ends are moved on until no rule moves any. No queue, no pairs."""
    before = {b: a for actions in schedule.ranks for a, b in pairwise(actions)}
    actions = [action for own in schedule.ranks for action in own]
    made = {given: action for action in actions for given in action.gives()}
    found = dict.fromkeys(actions, 0.0)
    moved = True
    while moved:
        moved = False
        for action in actions:
            starts = [found[before[action]]] if action in before else [0.0]
            for need in action.needs(schedule.num_stages):
                far = schedule.owners[need.stage] != schedule.owners[action.stage]
                starts.append(found[made[need]] + costs.latency * far)
            end = max(starts) + costs.of(action)
            moved |= end != found[action]
            found[action] = end
    return found


@pytest.mark.parametrize("name", NAMES)
def test_times_are_those_of_another_simulator(name: str) -> None:
    chunks = 1 if name in ("gpipe", "1f1b", "zb_h1") else 2
    draw = random.Random(name)
    schedule = build_schedule(name, 3, 6, chunks)
    for _ in range(3):
        forward, first, second = (tuple(draw.uniform(0, 2) for _ in range(3 * chunks)) for _ in range(3))
        costs = Costs(forward, first, second, latency=draw.uniform(0, 1))
        timeline = simulate(schedule, costs, pairs="in_turn")
        assert {span.action: span.end for spans in timeline.spans for span in spans} == ends(schedule, costs)
        assert simulate(schedule, costs, pairs="in_turn") == timeline


def test_a_message_takes_its_time() -> None:
    """Two ranks, one micro-batch: there and back are two messages, and nothing else waits."""
    timeline = simulate(one_f_one_b(2, 1), Costs(1.0, 2.0, 3.0, latency=10.0))
    assert timeline.makespan == 2 * (1 + 2 + 3) + 2 * 10
    assert timeline.busy == (6.0, 6.0)
    assert timeline.bubble == (26.0, 26.0)
    assert timeline.bubble_share == 26 / 32
    # The turn of a V sends nothing.
    assert simulate(zb_v(1, 1), Costs(latency=10.0)).makespan == 6


@pytest.mark.parametrize(
    ("costs", "text"),
    [
        (Costs(forward=(1.0, 1.0)), "costs.forward: 2 costs for 3 stages"),
        (Costs(weight_grad=-1.0), "costs.weight_grad: a cost is negative"),
        (Costs(input_grad=(1.0, -1.0, 1.0)), "costs.input_grad: a cost is negative"),
        (Costs(latency=-1.0), "costs.latency: it is negative"),
    ],
)
def test_costs_that_are_none_are_refused(costs: Costs, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        simulate(gpipe(3, 2), costs)
    with pytest.raises(ConfigError, match=text):
        choose(3, 2, {1: costs})


def test_the_shortest_that_fits_is_chosen() -> None:
    costs = {1: Costs(), 2: Costs.even(2), 3: Costs.even(3)}
    for bound in (None, 8.0, 5.0, 4.0):
        choice = choose(4, 8, costs, max_in_flight=bound)
        for other in choice.candidates:
            if other.timeline and (bound is None or other.peak <= bound):
                assert choice.best.makespan <= other.makespan
        assert bound is None or choice.best.peak <= bound
        assert len(choice.candidates) == len(NAMES) * len(costs)
        assert choice.why.startswith(str(choice.best))
    # Each bound that binds is said to.
    assert "gpipe (v=1) holds 8" in choice.why
    reasons = {c.title: c.refused for c in choice.candidates}
    assert reasons["zb_v (v=1)"] == "1 chunks per rank"
    assert reasons["gpipe (v=1)"] == "of 4 allowed in flight"
    assert not reasons["1f1b (v=1)"]


def test_what_the_choice_depends_on() -> None:
    costs = {1: Costs(), 2: Costs.even(2)}
    assert choose(4, 8, costs).best.name == "zb_v"
    # A backward that cannot be split leaves the others.
    assert choose(4, 8, costs, can_split=False).best.name == "interleaved_1f1b"
    # Of equals the one with the smaller peak: 1F1B, not GPipe.
    assert choose(4, 8, {1: Costs()}, can_split=False).best.name == "1f1b"
    # Where each message costs as much as a stage, fewer hops are worth more than smaller stages.
    dear = {1: Costs(latency=1.0), 2: Costs.even(2, latency=1.0)}
    assert choose(4, 4, dear, can_split=False).best.num_chunks == 1
    # A heavy last stage (a head) is in a V on rank 0, together with the first.
    heavy = {1: Costs((1.0, 1.0, 1.0, 3.0)), 2: Costs((0.5,) * 7 + (2.5,), 0.5, 0.5)}
    assert choose(4, 16, heavy).best.makespan == min(c.makespan for c in choose(4, 16, heavy).candidates)


def test_nothing_left_to_choose() -> None:
    with pytest.raises(ConfigError, match=r"no schedule is left.*4 micro-batches in flight or more \(1f1b\)"):
        choose(4, 8, {1: Costs(), 2: Costs.even(2)}, max_in_flight=3)
    with pytest.raises(ConfigError, match="no costs"):
        choose(4, 8, {})


@pytest.mark.parametrize("width", [1, 12, 40, 97, 300])
def test_pictures_fit_the_terminal(width: int) -> None:
    timeline = simulate(zb_v(4, 12), Costs.even(2))
    lines = picture(timeline, width).plain.split("\n")
    assert len(lines) == 5
    rows = lines[:4]
    assert {len(row) for row in rows} == {max(width, len("rank 0 ") + 1)}
    assert len(lines[4]) <= width
    if width == 300:
        # Wide enough for every number: each row names what its rank did, in order.
        for row, spans in zip(rows, timeline.spans, strict=True):
            assert row.split()[2:] == [str(span.action.micro_batch) for span in spans]


def test_pictures_tell_kinds_and_chunks_apart() -> None:
    text = picture(simulate(zb_v(2, 4)), 200)
    styles = {str(span.style) for span in text.spans if "on" in str(span.style).split()}
    assert len(styles) == 6  # F, I and W of either chunk
    console = Console(width=200, record=True, force_terminal=True, color_system="truecolor", file=io.StringIO())
    console.print(text)
    assert "zb_v: 2 ranks x 2 chunks, 4 micro-batches, makespan 25" in console.export_text()


def test_the_svg_draws_every_action_where_it_was() -> None:
    schedule = zb_v(3, 5)
    root = ElementTree.fromstring(svg(simulate(schedule), width=800))
    space = "{http://www.w3.org/2000/svg}"
    blocks = root.findall(f"{space}rect")
    assert len(blocks) == sum(map(len, schedule.ranks))
    assert len({block.get("fill") for block in blocks}) == 6
    edges = [float(block.get("x", 0)) + float(block.get("width", 0)) for block in blocks]
    assert max(edges) == pytest.approx(800, abs=0.01)
    assert blocks[0].findtext(f"{space}title") == "0F0: 0 to 1"
    # A name from a file cannot end the element.
    odd = Schedule("<script>&", 1, (0,), build_schedule("gpipe", 1, 1, 1).ranks)
    assert "<script>" not in svg(simulate(odd))
