# SPDX-License-Identifier: Apache-2.0
"""The verdict, from traces written by hand: no process."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from stratagem.comparison.causes import reasons
from stratagem.comparison.judge import HEADROOM, Judgement, allowed, judge, strict_steps
from stratagem.comparison.observation import Sketch, Sketcher
from stratagem.comparison.protocol import Facts, Observed, Ready
from stratagem.comparison.results import Departure, Deviation
from stratagem.comparison.trace import Step, Trace, compare_parameters, furthest, trace

SKETCHER = Sketcher()
TOLERANCE = 1e-5


def run(*losses: float, norm: float = 2.0, weight: float = 1.0, bias: float = 0.0) -> Trace:
    """One process with these losses; its parameters stay."""
    sketch = SKETCHER.sketch({"weight": torch.full((50,), weight), "bias": torch.full((3,), bias)})
    return Trace(tuple(Step(loss, norm, 16, 1234, sketch=sketch) for loss in losses), Facts(), 2)


def change(found: Trace, step: int, **values: object) -> Trace:
    """The same run with another step."""
    steps = list(found.steps)
    steps[step] = dataclasses.replace(steps[step], **values)  # type: ignore[arg-type]
    return dataclasses.replace(found, steps=tuple(steps))


def verdict(found: Trace, expected: Trace, twin: Trace | None = None, final: float = 0.0) -> Judgement:
    limit = allowed(expected, twin, TOLERANCE, {"weight": Deviation(0.0, 0.0)})
    return judge(found, expected, {"weight": Deviation(final, final, "weight")}, limit, failed=False)


def test_the_first_quantity_that_is_off_is_the_departure() -> None:
    one = run(4.0, 3.0, 2.0)
    assert verdict(one, one) == Judgement("equal", Deviation(0.0, 0.0, "step 0"), Deviation(0.0, 0.0, "step 0"))
    assert verdict(run(4.0, 3.00002, 2.0), one).verdict == "equal"

    found = verdict(run(4.0, 3.0003, 2.2), one)
    assert found.verdict == "differs"
    assert found.departure == Departure(1, "loss", 3.0003, 3.0)
    assert found.loss is not None
    assert (found.loss.where, round(found.loss.relative, 6)) == ("step 2", 0.1)

    # A step computes loss, norm, parameters in this order, and the first of them is told.
    moved = run(4.0, weight=1.5).steps[0].sketch
    both = change(change(one, 1, gradient_norm=4.0, sketch=moved), 2, loss=5.0)
    assert verdict(both, one).departure == Departure(1, "gradient norm", 4.0, 2.0)
    parameters = verdict(change(one, 1, sketch=moved), one).departure
    assert parameters is not None
    assert (parameters.step, parameters.quantity, parameters.parameter) == (1, "parameters", "weight")
    assert parameters.found == pytest.approx(1.5 * 50**0.5)
    assert parameters.expected == pytest.approx(50**0.5)
    assert strict_steps(both, one, TOLERANCE) == 1

    only_in_the_end = verdict(one, one, final=1e-3)
    assert (only_in_the_end.verdict, only_in_the_end.departure) == ("differs", None)


def test_what_rounding_does_to_one_process_is_allowed_and_no_more() -> None:
    """Two runs that began one rounding apart drift; before they do, nothing beyond the tolerance passes."""
    one, twin = run(4.0, 3.0, 2.0, 2.0), run(4.0, 3.0, 2.002, 2.0)
    drift = 1e-3 * HEADROOM
    assert verdict(run(4.0, 3.0, 2.0 * (1 + 0.9 * drift), 2.0), one, twin).verdict == "equal"
    assert (
        verdict(run(4.0, 3.0, 2.0, 2.0 * (1 + 0.9 * drift)), one, twin).verdict == "equal"
    )  # drift does not come back
    assert verdict(run(4.0, 3.0, 2.0 * (1 + 1.1 * drift), 2.0), one, twin).verdict == "differs"
    early = verdict(run(4.0, 3.001, 2.0, 2.0), one, twin)
    assert early.departure is not None
    assert early.departure.step == 1
    assert (strict_steps(twin, one, TOLERANCE), strict_steps(one, one, TOLERANCE)) == (2, 4)


def test_a_parameter_that_drifts_opens_no_limit_but_its_own() -> None:
    """A bias before a batch norm under Adam: in the twin it leaves by a quarter in the first step, all else stays."""

    def state(step: int, bias: float = 0.0, **off: float) -> dict[str, Sketch]:
        values = {name: 1.0 + 0.1 * step + off.get(name, 0.0) for name in ("first", "second", "third", "fourth")}
        return SKETCHER.sketch({name: torch.full((50,), each) for name, each in {**values, "bias": 1 + bias}.items()})

    def seen(*states: dict[str, Sketch]) -> Trace:
        return Trace(tuple(Step(3.0, 2.0, 16, 1234, sketch=each) for each in states), Facts(), 2)

    def drifting(sign: float, **off: float) -> Trace:
        return seen(*(state(step, sign * 0.3 * (step + 1), **(off if step == 2 else {})) for step in range(4)))

    one = seen(*(state(step) for step in range(4)))
    twin = drifting(1.0, first=1e-7, second=2e-7, third=2e-7, fourth=1e-7)
    final = {"bias": Deviation(0.28, 0.1, "bias"), "second": Deviation(2e-7, 2e-7, "second")}
    limit = allowed(one, twin, TOLERANCE, final)
    assert limit.loose == {"bias"}
    assert strict_steps(twin, one, TOLERANCE) == 0
    assert strict_steps(twin, one, TOLERANCE, limit.loose) == 4

    right = judge(drifting(-1.0), one, {"bias": Deviation(0.3, 0.1, "bias")}, limit, failed=False)
    assert (right.verdict, right.final) == ("equal", None)
    assert right.widest > 1.0  # and it is said
    wrong = judge(drifting(-1.0, second=0.01), one, {}, limit, failed=False)
    assert wrong.departure is not None
    assert (wrong.verdict, wrong.departure.step, wrong.departure.parameter) == ("differs", 2, "second")
    # In the end, too, each has its own; the one that is named is not the one that drifts most.
    ends = {"bias": Deviation(0.3, 0.1, "bias"), "second": Deviation(1e-3, 1e-3, "second")}
    last = judge(drifting(-1.0), one, ends, limit, failed=False)
    assert (last.verdict, last.departure, last.final) == ("differs", None, ends["second"])

    # Where most of them drift, one that by chance has not moved in the twin is not held to less than they are.
    rough = allowed(one, drifting(1.0, first=1e-3, second=1e-3, third=1e-3, fourth=1e-7), TOLERANCE)
    assert rough.loose == {"bias"}
    assert judge(drifting(-1.0, fourth=1e-3), one, {}, rough, failed=False).verdict == "equal"


def test_other_data_is_told_from_another_result() -> None:
    one = run(4.0, 3.0, 2.0)
    other = change(change(one, 1, samples_hash=99, loss=3.5), 2, loss=2.5)
    found = verdict(other, one)
    assert (found.verdict, found.departure) == (
        "other data",
        Departure(1, "samples", "16 samples of other content", "16 samples"),
    )
    # It had left before: the data are not why.
    assert verdict(change(other, 0, loss=4.5), one).verdict == "differs"
    # Samples that only look different, padded to another length, change no number.
    assert verdict(change(one, 1, samples_hash=99), one).verdict == "equal"
    fewer = change(one, 0, samples=8, samples_hash=5, loss=4.4)
    text = " ".join(reasons(fewer, one, verdict(fewer, one).departure, None))
    assert "8 samples" in text
    assert "16 samples" in text
    assert "run.batch_size" in text


def test_reasons_name_what_was_seen() -> None:
    one = run(4.0, 3.0, 2.0)
    for norm, words in ((4.0, "summed in place of averaged"), (1.0, "averaged twice"), (3.0, "the reduction")):
        found = change(one, 1, gradient_norm=norm)
        text = " ".join(reasons(found, one, verdict(found, one).departure, None))
        assert "step 1" in text
        assert words in text
        assert ("summed" in text or "twice" in text) == (norm != 3.0)
    drawn = change(one, 0, loss=5.0, draws=True)
    assert "dropout" in " ".join(reasons(drawn, one, verdict(drawn, one).departure, None))
    norms = dataclasses.replace(change(one, 0, loss=5.0), facts=Facts(batch_norms=("net.1",)))
    assert "sync_batchnorm" in " ".join(reasons(norms, one, verdict(norms, one).departure, None))
    synced = dataclasses.replace(norms, facts=Facts(batch_norms=("net.1",), synced_batchnorm=True))
    assert "sync_batchnorm" not in " ".join(reasons(synced, one, verdict(synced, one).departure, None))
    assert reasons(one, one, None, Deviation(1e-3, 1e-3, "weight"))[0].startswith("No step is off, but weight")


def test_a_value_near_zero_is_no_infinite_difference() -> None:
    """A bias that has hardly left zero, and a loss that has reached it."""
    one = run(4.0, 1e-9, bias=1e-9)
    found = change(run(4.0, 2e-9, bias=1e-9), 0, sketch=run(4.0, bias=2e-9).steps[0].sketch)
    assert verdict(found, one).verdict == "equal"
    assert verdict(run(4.0, math.nan), one).verdict == "differs"
    assert verdict(run(4.0, math.nan), run(4.0, math.nan)).verdict == "equal"


def test_a_run_that_proves_nothing_is_not_equal_or_says_so() -> None:
    """No parameter moved, though a buffer did; a loss that is no number on both sides."""

    def seen(weight: float, loss: float = 3.0, bias: float = 0.0) -> Trace:
        begun = SKETCHER.sketch({"weight": torch.ones(50), "bias": torch.zeros(3)})
        facts = Facts(parameters=("weight",))
        return dataclasses.replace(run(3.0, loss, weight=weight, bias=bias), facts=facts, initial=begun)

    still, moved = seen(1.0, bias=0.5), seen(1.5)
    assert verdict(still, still).verdict == "nothing trained"
    assert "nothing is proved" in reasons(still, still, None, None)[0]
    assert verdict(moved, still).verdict == "differs"
    assert (verdict(moved, moved).verdict, reasons(moved, moved, None, None)) == ("equal", ())

    numberless = seen(1.5, math.nan)
    assert verdict(numberless, numberless).verdict == "equal"
    assert reasons(numberless, numberless, None, None)[0].startswith("From step 1 on the loss of one process is no")


def test_uneven_shares_are_named_where_a_mean_over_ranks_is_wrong() -> None:
    one = run(4.0, 3.0, 2.0)
    for shares, named in (((6, 5, 5), True), ((4, 4, 4, 4), False)):
        found = change(one, 1, gradient_norm=2.1, rank_samples=shares)
        text = " ".join(reasons(found, one, verdict(found, one).departure, None))
        assert ("Its ranks had 6, 5, 5 samples" in text) == named


def test_a_huge_buffer_makes_no_difference_of_a_parameter_small() -> None:
    """A mask of the least number there is."""

    def seen(weight: float) -> Trace:
        sketch = SKETCHER.sketch({"weight": torch.full((50,), weight), "mask": torch.full((4,), -3e38)})
        return Trace((Step(4.0, 2.0, 16, 1234, sketch=sketch),), Facts(parameters=("weight",)))

    assert verdict(seen(1.5), seen(1.0)).verdict == "differs"


def test_ranks_become_one_run() -> None:
    """A rank weighs as much as it has samples; ranks that read the same ones count once; a torn step is left out."""
    ready = {rank: Ready(rank, 3, 0.0, data_rank=min(rank, 1), num_data_ranks=2) for rank in range(3)}
    seen = [
        Observed(0, 0, 1.0, 3, 10, 2.5),
        Observed(1, 0, 5.0, 1, 7, 2.5, draws=True),
        Observed(2, 0, 5.0, 1, 7, 2.5),
        Observed(0, 1, 1.0, 3, 10, 2.5),
    ]
    found = trace(ready, seen)
    (step,) = found.steps
    assert (step.loss, step.samples, step.samples_hash, step.gradient_norm, step.draws) == (2.0, 4, 17, 2.5, True)
    assert found.num_data_ranks == 2
    assert trace({}, []).steps == ()


def test_final_parameters_are_compared_whole(tmp_path: Path) -> None:
    mine, its = tmp_path / "mine.pt", tmp_path / "its.pt"
    weight = torch.linspace(-1, 1, 20).reshape(4, 5)
    state = {"weight": weight, "mask": torch.tensor([-math.inf, 0.0]), "count": torch.tensor(3)}
    torch.save(state, its)
    torch.save({**state, "weight": weight + torch.eye(4, 5) * 1e-4}, mine)
    found = furthest(compare_parameters(mine, its))
    assert (found.where, round(found.relative, 6), round(found.absolute, 6)) == ("weight", 1e-4, 1e-4)
    assert furthest(compare_parameters(its, its)).relative == 0.0
    torch.save({**state, "huge": torch.tensor([-3e38])}, its)
    torch.save({**state, "huge": torch.tensor([-3e38]), "weight": weight * 1.5}, mine)
    assert furthest(compare_parameters(mine, its, ("weight",))).relative == pytest.approx(0.5)
    torch.save(state, its)
    torch.save({**state, "count": torch.tensor(4)}, mine)
    assert furthest(compare_parameters(mine, its)).where == "count"
    torch.save({"weight": weight}, mine)
    assert math.isinf(furthest(compare_parameters(mine, its)).relative)
    torch.save({**state, "weight": weight * math.nan}, mine)
    assert not furthest(compare_parameters(mine, its)).relative <= 1.0
