# SPDX-License-Identifier: Apache-2.0
"""How numbers and findings of a comparison are said, in the terminal and on the page alike.

A column or a figure has one unit, chosen by its largest value, so that its numbers can be compared by eye. Text that
came from outside (names, errors, config) loses its terminal escapes here; escaping for HTML is the page's business.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from stratagem.comparison.results import Comparison, Contender, Deviation, Held, Reference, Sent, Verdict

NONE = "-"
"""What stands where there is no number."""

TIMES = "\u00d7"
"""The sign of multiplication."""

VERDICTS: dict[Verdict, str] = {
    "equal": "equal",
    "differs": "differs",
    "other data": "other data",
    "nothing trained": "nothing trained",
    "failed": "FAILED",
}
"""The verdicts as they are shown."""

HOW: dict[Verdict, str] = {
    "equal": "equals one process",
    "differs": "differs",
    "other data": "had other data",
    "nothing trained": "trained nothing",
    "failed": "failed",
}
"""The verdicts as what a strategy does."""

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|.)")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@final
@dataclass(frozen=True)
class Unit:
    """A unit of bytes or time.

    Attributes:
        name: as it is written behind the number.
        size: bytes or seconds in it.
    """

    name: str
    size: float


_BYTES = (Unit("B", 1), Unit("KiB", 2**10), Unit("MiB", 2**20), Unit("GiB", 2**30), Unit("TiB", 2**40))
_SECONDS = (Unit("µs", 1e-6), Unit("ms", 1e-3), Unit("s", 1))


def byte_unit(values: Iterable[float | None]) -> Unit:
    """The unit in which the largest of these numbers of bytes is at least 1; MiB where there is none.

    Example:
        >>> byte_unit([3 * 2**20, 12, None]).name
        'MiB'
    """
    return _unit(values, _BYTES, _BYTES[2])


def time_unit(values: Iterable[float | None]) -> Unit:
    """The unit in which the largest of these seconds is at least 1; ms where there is none.

    Example:
        >>> time_unit([0.4, 0.002]).name
        'ms'
    """
    return _unit(values, _SECONDS, _SECONDS[1])


def _unit(values: Iterable[float | None], units: Sequence[Unit], otherwise: Unit) -> Unit:
    largest = max((abs(value) for value in values if value and math.isfinite(value)), default=0.0)
    if not largest:
        return otherwise
    return next((unit for unit in reversed(units) if largest >= unit.size), units[0])


def number(value: float | None) -> str:
    """Three significant digits without an exponent; whole numbers from 100 on.

    Example:
        >>> [number(value) for value in (0.02034, 1.0, 65.04, 438.2, 12345.6, None)]
        ['0.0203', '1.00', '65.0', '438', '12346', '-']
    """
    if value is None:
        return NONE
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    rounded = float(f"{value:.3g}")  # 9.999 has as many digits as 10.0, into which it rounds
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"


def ratio(value: float | None) -> str:
    """One number over another, two decimals of it.

    Example:
        >>> ratio(0.87041)
        '0.87'
    """
    return NONE if value is None else f"{value:.2f}"


def num_bytes(value: float | None) -> str:
    """A number of bytes with its own unit.

    Example:
        >>> num_bytes(68_157_440)
        '65.0 MiB'
    """
    return NONE if value is None else in_unit(value, byte_unit([value]))


def seconds(value: float | None) -> str:
    """A duration with its own unit.

    Example:
        >>> seconds(0.4382)
        '438 ms'
    """
    return NONE if value is None else in_unit(value, time_unit([value]))


def in_unit(value: float, unit: Unit) -> str:
    """A number of bytes or seconds in this unit, with its name."""
    return f"{number(value / unit.size)} {unit.name}"


def relative(value: Deviation | float | None) -> str:
    """A relative difference, two digits of it; `0` where the two are bit-equal.

    Example:
        >>> [relative(value) for value in (1.234e-7, 0.0, 0.25, float("nan"), None)]
        ['1.2e-7', '0', '0.25', 'nan', '-']
    """
    if isinstance(value, Deviation):
        value = value.relative
    if value is None:
        return NONE
    if value == 0 or not math.isfinite(value) or value >= 0.01:
        return f"{value:.2g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def plain(text: str) -> str:
    """Text from outside without terminal escapes and control characters; line ends and tabs stay.

    Example:
        >>> plain("\x1b[31mred\x1b[0m\x07")
        'red'
    """
    return _CONTROLS.sub("", _ESCAPES.sub("", text).replace("\r\n", "\n"))


@final
@dataclass(frozen=True)
class Total:
    """Bytes of several kinds or axes together.

    Attributes:
        num_bytes: measured.
        formula: None unless every part has one.
    """

    num_bytes: float
    formula: float | None

    @property
    def ratio(self) -> float | None:
        """Measured over formula; None where there is none, or where it says nothing but something was measured."""
        if self.formula is None:
            return None
        if not self.formula:
            return None if self.num_bytes else 1.0
        return self.num_bytes / self.formula


def sent(contender: Contender) -> tuple[Sent, ...]:
    """What is shown of the bytes sent: the books, and the kernel's count only where there are no books.

    The kernel counts every socket, so the two are never added.
    """
    books = tuple(part for part in contender.sent if part.source == "books")
    return books or contender.sent


def total(parts: Sequence[Sent | Held]) -> Total | None:
    """All parts together; None where there are none.

    Example:
        >>> total([Held("parameters", 10, 10.0), Held("gradients", 4)])
        Total(num_bytes=14, formula=None)
    """
    if not parts:
        return None
    formulas = [part.formula for part in parts if part.formula is not None]
    return Total(sum(part.num_bytes for part in parts), sum(formulas) if len(formulas) == len(parts) else None)


def spread(contender: Contender) -> float | None:
    """Half the distance between the quartiles of the steps, in seconds."""
    quartiles = contender.spread_s
    return None if quartiles is None else (quartiles[1] - quartiles[0]) / 2


def value(found: float | str) -> str:
    """One side of a departure."""
    return plain(found) if isinstance(found, str) else f"{found:.9g}"


def departed(contender: Contender) -> str:
    """Where it first left the reference, in one sentence; empty if it never did.

    Example:
        >>> from stratagem.comparison.results import Departure
        >>> departed(Contender("x", "", "differs", departure=Departure(12, "loss", 1.5, 1.25)))
        'It first left the reference at step 12, in the loss: found 1.5, expected 1.25.'
    """
    departure = contender.departure
    if departure is None:
        return ""
    what = f"the {departure.quantity}" + (f" ({plain(departure.parameter)})" if departure.parameter else "")
    sides = f"found {value(departure.found)}, expected {value(departure.expected)}"
    return f"It first left the reference at step {departure.step}, in {what}: {sides}."


def verdict(comparison: Comparison) -> str:
    """The whole comparison in one sentence.

    Example:
        >>> ddp = Contender("ddp", "", "equal")
        >>> verdict(Comparison((), 2, 50, "32-true", 1e-5, "ddp", Reference((), ()), (ddp,)))
        'The only strategy, ddp, equals one process within 1e-05 over 50 steps.'
    """
    contenders = comparison.contenders
    num_equal = sum(contender.verdict == "equal" for contender in contenders)
    equal = [contender for contender in contenders if contender.verdict == "equal"]
    strict = min((contender.strict_steps for contender in equal), default=comparison.steps)
    within = f"one process {reach(comparison, strict, max((one.widest for one in equal), default=0.0))}"
    if not contenders:
        return "No strategy was compared."
    if num_equal == len(contenders) == 1:
        return f"The only strategy, {plain(contenders[0].name)}, equals {within}."
    if num_equal == len(contenders):
        return f"All {num_equal} strategies equal {within}."
    rest = "; ".join(filter(None, (_others(contenders, kind) for kind in HOW if kind != "equal")))
    if len(contenders) == 1:
        return f"The only strategy does not equal {within}: {rest}."
    count = "None" if not num_equal else str(num_equal)
    return f"{count} of {len(contenders)} strategies equal{'s' if num_equal == 1 else ''} {within}: {rest}."


def reach(comparison: Comparison, strict_steps: int, widest: float) -> str:
    """How close to one process is meant by `equal`: in how many steps the tolerance held, and what was allowed then.

    Args:
        comparison: whose steps and tolerance they are.
        strict_steps: in which all was within the tolerance.
        widest: the largest limit that was needed; 0 if the tolerance was enough.

    Example:
        >>> found = Comparison((), 2, 50, "32-true", 1e-5, "ddp", Reference((), ()), ())
        >>> reach(found, 19, 0.02)
        'within 1e-05 for the first 19 of 50 steps, then within what rounding alone does (up to 0.02)'
    """
    steps = f"{comparison.steps} step{'' if comparison.steps == 1 else 's'}"
    tolerance, rounding = f"{comparison.tolerance:g}", f"within what rounding alone does (up to {relative(widest)})"
    if widest <= comparison.tolerance:
        return f"within {tolerance} over {steps}"
    if strict_steps >= comparison.steps:
        return f"within {tolerance} over {steps}, but for single parameters {rounding}"
    if not strict_steps:
        return f"in no step within {tolerance}, only {rounding}, over {steps}"
    return f"within {tolerance} for the first {strict_steps} of {steps}, then {rounding}"


def loose(reference: Reference) -> str:
    """The parameters that rounding alone decides, the first few by name.

    Example:
        >>> loose(Reference((), (), loose=("a", "b", "c", "d")))
        'a, b, c and 1 more, which rounding alone decides'
    """
    names, rest = [plain(name) for name in reference.loose[:3]], len(reference.loose) - 3
    return ", ".join(names) + (f" and {rest} more" if rest > 0 else "") + ", which rounding alone decides"


def twin(reference: Reference) -> list[tuple[str, Deviation]]:
    """How far rounding alone carries one process, by quantity; empty where no twin ran."""
    found = {
        "loss": reference.twin_loss,
        "gradient norm": reference.twin_gradient_norm,
        "final parameters": reference.twin_parameters,
    }
    return [(name, off) for name, off in found.items() if off is not None]


def _others(contenders: Sequence[Contender], kind: Verdict) -> str:
    names = [plain(contender.name) for contender in contenders if contender.verdict == kind]
    if not names:
        return ""
    return f"{', '.join(names)} {'differ' if kind == 'differs' and len(names) > 1 else HOW[kind]}"
