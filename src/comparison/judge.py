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

Note [each name its own]: some parameters have no gradient but rounding noise (a bias before a batch norm, the bias of
keys in attention), and an Adam moves them at random from the first step on, while all others stay where they are. So
every parameter and buffer has a limit by its own name, and one that drifts opens none but its own. Two runs do not
drift alike, and a small one may by chance not have moved in the twin; a name is therefore taken to drift no less than
the median name does, which a few of them cannot lift. Those that leave the tolerance while the median name does not
come near it are *loose*: `strict_steps` leaves them out, since they say nothing about a strategy.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
        parts: of parameters, the relative difference of each name in each step.
    """

    relative: tuple[float | None, ...]
    absolute: tuple[float | None, ...]
    parts: tuple[Mapping[str, float], ...] = ()

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
        steps: of loss and gradient norm, for each step.
        parts: of each parameter and buffer, for each step; a name that is not there has the tolerance.
        final: of each one in the end; likewise.
        tolerance: what is always allowed.
        loose: names that rounding alone decides; see Note [each name its own].
    """

    steps: Mapping[Quantity, tuple[float, ...]]
    parts: tuple[Mapping[str, float], ...]
    final: Mapping[str, float]
    tolerance: float
    loose: frozenset[str] = frozenset()

    def of(self, quantity: Quantity, step: int, name: str = "") -> float:
        """The limit of a quantity in a step; of `parameters` that of one name."""
        if quantity != "parameters":
            return self.steps[quantity][step]
        return self.parts[step].get(name, self.tolerance) if step < len(self.parts) else self.tolerance


@final
@dataclass(frozen=True)
class Judgement:
    """What is said about one contender; the fields are those of `Contender`.

    Attributes:
        final: of the final parameters that one which is furthest beyond its limit; None if none is.
    """

    verdict: Verdict
    loss: Deviation | None = None
    gradient_norm: Deviation | None = None
    departure: Departure | None = None
    final: Deviation | None = None
    widest: float = 0.0


def allowed(
    reference: Trace, twin: Trace | None, tolerance: float, final: Mapping[str, Deviation] | None = None
) -> Allowed:
    """How far off a contender may be: see Note [what rounding does].

    Args:
        reference: one process.
        twin: the same, begun one rounding apart; None where there is none.
        tolerance: what is always allowed.
        final: how far the twin's final parameters are from the reference's, by name.
    """
    twins = curves(twin, reference) if twin is not None else {}
    steps: dict[Quantity, tuple[float, ...]] = {}
    quantities: tuple[Quantity, ...] = ("loss", "gradient norm")
    for quantity in quantities:
        drift = [value or 0.0 for value in twins[quantity].relative] if quantity in twins else []
        drift += [0.0] * (len(reference.steps) - len(drift))
        steps[quantity] = tuple(_limit(high, tolerance) for high in accumulate(drift, max))
    parts: list[dict[str, float]] = []
    loose: set[str] = set()
    so_far: dict[str, float] = {}
    for step in twins["parameters"].parts if twins else ():
        so_far = {name: max(value, so_far.get(name, 0.0)) for name, value in step.items()}
        least = _median(so_far.values())
        if least <= tolerance / HEADROOM:
            loose |= {name for name, value in so_far.items() if value > tolerance}
        parts.append({name: _limit(max(value, least), tolerance) for name, value in so_far.items()})
    last = {name: max(each.relative, so_far.get(name, 0.0)) for name, each in (final or {}).items()}
    least = _median(last.values())
    ends = {name: _limit(max(value, least), tolerance) for name, value in last.items()}
    return Allowed(steps, tuple(parts), ends, tolerance, frozenset(loose))


def _limit(drift: float, tolerance: float) -> float:
    return max(tolerance, HEADROOM * drift)


def _median(drifts: Iterable[float]) -> float:
    found = list(drifts)
    return statistics.median_low(found) if found else 0.0


def curves(found: Trace, expected: Trace) -> dict[Quantity, Curve]:
    """The differences of the steps that both runs have done."""
    pairs = list(zip(found.steps, expected.steps, strict=False))
    names = frozenset(expected.facts.parameters)
    sketches = [_sketch_differences(mine.sketch, its.sketch, names) for mine, its in pairs]
    worst = [max(each.values(), default=(None, None)) for each in sketches]
    return {
        "loss": _curve([(mine.loss, its.loss) for mine, its in pairs]),
        "gradient norm": _curve([(mine.gradient_norm, its.gradient_norm) for mine, its in pairs]),
        "parameters": Curve(
            tuple(each[0] for each in worst),
            tuple(each[1] for each in worst),
            tuple({name: relative for name, (relative, _) in each.items()} for each in sketches),
        ),
    }


def strict_steps(found: Trace, expected: Trace, tolerance: float, loose: frozenset[str] = frozenset()) -> int:
    """Steps from the first on in which all is within the tolerance itself, but for the `loose` parameters."""
    off = [
        step
        for quantity, step, name, value in _every(curves(found, expected))
        if not value <= tolerance and not (quantity == "parameters" and name in loose)
    ]
    return min(off, default=min(len(found.steps), len(expected.steps)))


def _every(differences: Mapping[Quantity, Curve]) -> Iterator[tuple[Quantity, int, str, float]]:
    """Quantity, step, name and relative difference of all that was compared, in the order in which a run computes."""
    for step in range(len(differences["loss"].relative)):
        for quantity, curve in differences.items():
            value = curve.relative[step]
            if quantity == "parameters":
                for name, part in curve.parts[step].items():
                    yield quantity, step, name, part
            elif value is not None:
                yield quantity, step, "", value


def judge(
    found: Trace, expected: Trace, final: Mapping[str, Deviation] | None, limit: Allowed, *, failed: bool
) -> Judgement:
    """The verdict on a contender.

    Args:
        found: its steps.
        expected: the reference's.
        final: how far its final parameters are from the reference's, by name; None where it has none.
        limit: how far it may be off.
        failed: it ended before its last step.
    """
    differences = curves(found, expected)
    departure = _departure(found, expected, differences, limit)
    ends = [(each.relative, limit.final.get(name, limit.tolerance), each) for name, each in (final or {}).items()]
    off = [(_over(value, bound), each) for value, bound, each in ends if not value <= bound]
    beyond = max(off, key=lambda each: each[0])[1] if off else None
    every = [(limit.of(quantity, step, name), value) for quantity, step, name, value in _every(differences)]
    used = [bound for bound, value in every if value > limit.tolerance]
    used += [bound for value, bound, _ in ends if value > limit.tolerance]
    loss, norm = differences["loss"].worst(), differences["gradient norm"].worst()
    data = _first_other_samples(found, expected)
    verdict: Verdict = "equal" if expected.trained else "nothing trained"
    if departure is not None or beyond is not None:
        verdict = "differs"
        # Samples that only look different (padding, say) change no number; the first number that is off decides.
        if data is not None and departure is not None and data.step <= departure.step:
            verdict, departure = "other data", data
    return Judgement("failed" if failed else verdict, loss, norm, departure, beyond, max(used, default=0.0))


def _departure(
    found: Trace, expected: Trace, differences: Mapping[Quantity, Curve], limit: Allowed
) -> Departure | None:
    """The first quantity that is off; of parameters that are off in one step the one furthest beyond its limit."""
    all_off = (each for each in _every(differences) if not each[3] <= limit.of(*each[:3]))
    first = next(all_off, None)
    if first is None:
        return None
    quantity, step, _, _ = first
    mine, its = found.steps[step], expected.steps[step]
    if quantity == "parameters":
        same = [first, *(each for each in all_off if each[1] == step)]
        name = max(same, key=lambda each: _over(each[3], limit.of(*each[:3])))[2]
        return Departure(step, quantity, _shown(mine.sketch.get(name)), _shown(its.sketch.get(name)), name)
    values = (mine.loss, its.loss) if quantity == "loss" else (mine.gradient_norm, its.gradient_norm)
    assert values[0] is not None
    assert values[1] is not None
    return Departure(step, quantity, values[0], values[1])


def _shown(sketch: Sketch | None) -> float:
    """The norm as it is told: of a parameter that is not all numbers it is none."""
    return 0.0 if sketch is None else math.nan if sketch.numberless else sketch.norm


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


def _sketch_differences(
    mine: Mapping[str, Sketch], its: Mapping[str, Sketch], parameters: frozenset[str]
) -> dict[str, tuple[float, float]]:
    """The relative and the absolute difference of each parameter after one step; none where a side has no sketch."""
    if not mine or not its:
        return {}
    odd = sorted(mine.keys() ^ its.keys())
    if odd:
        return {odd[0]: (math.inf, math.inf)}
    # A buffer may be huge (a mask of the least number) and would make every difference small.
    floor = _SMALL * max((each.norm for name, each in its.items() if name in parameters or not parameters), default=0.0)
    found = {}
    for name, expected in its.items():
        off = 0.0 if mine[name] == expected else mine[name].distance(expected)
        found[name] = (_over(off, max(expected.norm, floor)), off)
    return found


def _over(off: float, scale: float) -> float:
    return 0.0 if off == 0.0 else off / scale if scale > 0.0 and math.isfinite(scale) else math.inf
