# SPDX-License-Identifier: Apache-2.0
"""From traces to a verdict: pure functions, no process.

Note [the measure]: a relative difference is `|found - expected| / max(|expected|, scale)`. Of losses and gradient norms
`scale` is 1 % of the largest expected one of the run; of a parameter the difference is the largest of its elements, or
in a sketch its 2-norm, over the same magnitude of the whole parameter, and `scale` 0.1 % of the largest one of the
model, so that a bias that has hardly left zero does not count as infinitely wrong.

Note [what rounding does]: training amplifies differences. An optimizer that divides by the gradient's own size moves a
weight whose gradient is only rounding noise by a whole step in a random direction, and where the loss is rough two runs
that began one rounding apart drift apart exponentially. No strategy can do better than that: the sum over ranks is
rounded otherwise than the sum over one batch. So the reference runs twice. The *twin* begins with every parameter one
rounding away, and is the same run in all else. A step of a contender is equal if its difference is within the
tolerance, or within `HEADROOM` times the largest difference that the twin has had until then. Real faults show in the
first steps, where the twin's differences are near 1e-7; what lies beyond can be no stricter and be true.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, final

from stratagem.comparison.observation import Sketch
from stratagem.comparison.results import Departure, Deviation, Verdict
from stratagem.comparison.trace import Trace

HEADROOM = 10.0
"""How much further than the reference's twin a contender may drift; see Note [what rounding does]."""

_TOLERANCES = {"64": 1e-10, "32": 1e-5, "bf16": 1e-2, "16": 2e-3}
_NEAR_ZERO = 0.01  # of the largest value of a curve
_SMALL = 1e-3  # of the largest parameter

Quantity = Literal["loss", "gradient norm", "parameters"]


def tolerance_for(precision: str) -> float:
    """Relative difference up to which two runs count as equal in a precision.

    Some hundred roundings: of float32 6e-8 each, of float64 1e-16 and a reserve, of bfloat16 4e-3, so only a few.

    Example:
        >>> tolerance_for("32-true"), tolerance_for("64-true")
        (1e-05, 1e-10)
    """
    return _TOLERANCES.get(precision.partition("-")[0], 1e-5)


@final
@dataclass(frozen=True)
class Curve:
    """One quantity's relative and absolute differences, step by step.

    Attributes:
        relative: see Note [the measure]; None where one side has no value.
        absolute: likewise.
        names: of parameters, the worst one in each step.
    """

    relative: tuple[float | None, ...]
    absolute: tuple[float | None, ...]
    names: tuple[str, ...] = ()

    def worst(self) -> Deviation | None:
        """The largest relative difference, and where; None where there is none at all."""
        found = [(value, step) for step, value in enumerate(self.relative) if value is not None]
        if not found:
            return None
        value, step = max(found, key=lambda each: (math.isnan(each[0]), each[0]))
        return Deviation(value, max(each for each in self.absolute if each is not None), f"step {step}")


@final
@dataclass(frozen=True)
class Allowed:
    """How far a contender may be off, by quantity and step.

    Attributes:
        steps: per quantity, for each step.
        final: for the final parameters.
    """

    steps: Mapping[Quantity, tuple[float, ...]]
    final: float


@final
@dataclass(frozen=True)
class Judgement:
    """What is said about one contender; the fields are those of `Contender`."""

    verdict: Verdict
    loss: Deviation | None = None
    gradient_norm: Deviation | None = None
    departure: Departure | None = None


def allowed(reference: Trace, twin: Trace | None, tolerance: float, final: Deviation | None = None) -> Allowed:
    """How far off a contender may be: see Note [what rounding does].

    Args:
        reference: one process.
        twin: the same, begun one rounding apart; None where there is none.
        tolerance: what is always allowed.
        final: how far the twin's final parameters are from the reference's.
    """
    twins = curves(twin, reference) if twin is not None else {}
    steps: dict[Quantity, tuple[float, ...]] = {}
    for quantity in ("loss", "gradient norm", "parameters"):
        drift = [value or 0.0 for value in twins[quantity].relative] if quantity in twins else []
        drift += [0.0] * (len(reference.steps) - len(drift))
        steps[quantity] = tuple(max(tolerance, HEADROOM * high) for high in accumulate(drift, max))
    return Allowed(steps, max(tolerance, HEADROOM * final.relative if final is not None else 0.0))


def curves(found: Trace, expected: Trace) -> dict[Quantity, Curve]:
    """The differences of the steps that both runs have done."""
    pairs = list(zip(found.steps, expected.steps, strict=False))
    sketches = [_sketch_difference(mine.sketch, its.sketch) for mine, its in pairs]
    return {
        "loss": _curve([(mine.loss, its.loss) for mine, its in pairs]),
        "gradient norm": _curve([(mine.gradient_norm, its.gradient_norm) for mine, its in pairs]),
        "parameters": Curve(
            tuple(each[0] for each in sketches),
            tuple(each[1] for each in sketches),
            tuple(each[2] for each in sketches),
        ),
    }


def strict_steps(found: Trace, expected: Trace, tolerance: float) -> int:
    """Steps from the first on in which every quantity is within the tolerance itself."""
    differences = curves(found, expected).values()
    off = [
        step
        for each in differences
        for step, value in enumerate(each.relative)
        if value is not None and value > tolerance
    ]
    return min(off, default=min(len(found.steps), len(expected.steps)))


def judge(found: Trace, expected: Trace, final: Deviation | None, limit: Allowed, *, failed: bool) -> Judgement:
    """The verdict on a contender.

    Args:
        found: its steps.
        expected: the reference's.
        final: how far its final parameters are from the reference's; None where it has none.
        limit: how far it may be off.
        failed: it ended before its last step.
    """
    differences = curves(found, expected)
    departure = next(_departures(found, expected, differences, limit), None)
    loss, norm = differences["loss"].worst(), differences["gradient norm"].worst()
    data = _first_other_samples(found, expected)
    verdict: Verdict = "equal"
    if departure is not None or (final is not None and not final.relative <= limit.final):
        verdict = "differs"
        # Samples that only look different (padding, say) change no number; the first number that is off decides.
        if data is not None and departure is not None and data.step <= departure.step:
            verdict, departure = "other data", data
    return Judgement("failed" if failed else verdict, loss, norm, departure)


def _departures(
    found: Trace, expected: Trace, differences: Mapping[Quantity, Curve], limit: Allowed
) -> Iterator[Departure]:
    """Every step and quantity that is off, in the order in which a run computes them."""
    for step, (mine, its) in enumerate(zip(found.steps, expected.steps, strict=False)):
        for quantity in ("loss", "gradient norm", "parameters"):
            off = differences[quantity].relative[step]
            if off is None or off <= limit.steps[quantity][step]:
                continue
            if quantity == "parameters":
                name = differences[quantity].names[step]
                nothing = Sketch(0.0, ())
                yield Departure(
                    step, quantity, mine.sketch.get(name, nothing).norm, its.sketch.get(name, nothing).norm, name
                )
            else:
                values = (mine.loss, its.loss) if quantity == "loss" else (mine.gradient_norm, its.gradient_norm)
                assert values[0] is not None
                assert values[1] is not None
                yield Departure(step, quantity, values[0], values[1])


def _first_other_samples(found: Trace, expected: Trace) -> Departure | None:
    for step, (mine, its) in enumerate(zip(found.steps, expected.steps, strict=False)):
        if (mine.samples, mine.samples_hash) != (its.samples, its.samples_hash):
            which = "of other content" if mine.samples == its.samples else ""
            return Departure(step, "samples", f"{mine.samples} samples {which}".strip(), f"{its.samples} samples")
    return None


def _curve(pairs: Sequence[tuple[float | None, float | None]]) -> Curve:
    scale = _NEAR_ZERO * max((abs(its) for _, its in pairs if its is not None and math.isfinite(its)), default=0.0)
    relative: list[float | None] = []
    absolute: list[float | None] = []
    for mine, its in pairs:
        if mine is None or its is None:
            relative.append(None)
            absolute.append(None)
            continue
        same = mine == its or (math.isnan(mine) and math.isnan(its))
        off = 0.0 if same else abs(mine - its)
        off = off if math.isfinite(off) else math.inf
        absolute.append(off)
        relative.append(_over(off, max(abs(its), scale)))
    return Curve(tuple(relative), tuple(absolute))


def _sketch_difference(mine: Mapping[str, Sketch], its: Mapping[str, Sketch]) -> tuple[float | None, float | None, str]:
    """The parameter that is off most in one step: its relative and absolute difference, and its name."""
    if not mine or not its:
        return None, None, ""
    odd = sorted(mine.keys() ^ its.keys())
    if odd:
        return math.inf, math.inf, odd[0]
    floor = _SMALL * max((each.norm for each in its.values() if math.isfinite(each.norm)), default=0.0)
    found = []
    for name, expected in its.items():
        off = 0.0 if mine[name] == expected else mine[name].distance(expected)
        found.append((_over(off, max(expected.norm, floor)), off, name))
    return max(found)


def _over(off: float, scale: float) -> float:
    return 0.0 if off == 0.0 else off / scale if scale > 0.0 and math.isfinite(scale) else math.inf
