# SPDX-License-Identifier: Apache-2.0
"""One HTML page that shows a comparison and needs nothing else.

The template holds the words and the order, the other `page_*` modules the figures; here the two meet. plotly's script
is written into the page once, a content policy forbids the page to ask for anything else, and the template escapes
whatever came from outside.
"""

from __future__ import annotations

import datetime
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import jinja2
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from stratagem.comparison import page_bars, page_curves, page_differences
from stratagem.comparison import page_words as words
from stratagem.comparison.judge import HEADROOM
from stratagem.comparison.page_style import Figure, colour
from stratagem.comparison.results import Comparison, Contender, Deviation, Place

_FIGURES: dict[str, Callable[[Comparison], Figure]] = {
    "losses": page_curves.losses,
    "differences": page_differences.differences,
    "time": page_bars.step_time,
    "memory": page_bars.memory,
    "wire": page_bars.wire,
}
_ICONS = {"equal": "✓", "differs": "≠", "other data": "?", "nothing trained": "?", "failed": "✕"}


def render(comparison: Comparison) -> str:
    """The page of this comparison, as one HTML text of about 5 MB, nearly all of it plotly's script."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"plain": words.plain, "breakable": _breakable}
    figures = {name: draw(comparison) for name, draw in _FIGURES.items()}
    return environment.get_template("template.html").render(
        comparison=comparison,
        title=words.verdict(comparison),
        facts=_facts(comparison),
        bests=_bests(comparison),
        rows=[_row(index, contender, comparison) for index, contender in enumerate(comparison.contenders)],
        twin=dict(words.twin(comparison.reference)),
        relative=words.relative,
        headroom=f"{HEADROOM:g}",
        never_left=[one.name for one in comparison.contenders if one.verdict == "equal"],
        figures=figures,
        json={name: Markup(figure.to_json()) for name, figure in figures.items()},
        command=_command(comparison),
        plotly=Markup(get_plotlyjs()),
    )


def _breakable(text: str) -> Markup:
    """A long name may be broken after its dots and underscores."""
    return Markup("<wbr>").join(escape(part) for part in re.split(r"(?<=[._])", text))


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    reference, machine = comparison.reference, comparison.machine
    facts = [
        ("config", " ".join(comparison.config)),
        ("ranks", str(comparison.ranks)),
        ("steps", str(comparison.steps)),
        ("precision", comparison.precision),
        ("tolerance", f"{comparison.tolerance:g}, relative"),
        ("global batch", f"{reference.global_batch} samples" if reference.global_batch else ""),
        ("model", f"{reference.num_parameters:,} parameters" if reference.num_parameters else ""),
        ("baseline", comparison.baseline),
        ("machine", ", ".join(f"{key} {value}" for key, value in machine.items())),
        ("date", _date(comparison.created)),
        ("took", words.seconds(comparison.seconds) if comparison.seconds else ""),
    ]
    return [(name, value) for name, value in facts if value]


def _date(created: str) -> str:
    try:
        moment = datetime.datetime.fromisoformat(created)
    except ValueError:
        return created
    return moment.strftime("%Y-%m-%d %H:%M") + (f" {moment.tzname()}" if moment.tzinfo else "")


def _bests(comparison: Comparison) -> list[dict[str, Any]]:
    """Who is fastest, smallest and quietest among those that are right, where there is a choice."""

    def held(contender: Contender) -> float | None:
        total = words.total(contender.held)
        return None if total is None else total.num_bytes

    def sent(contender: Contender) -> float | None:
        total = words.total(words.sent(contender))
        return None if total is None else total.num_bytes

    asked: list[tuple[str, Callable[[Contender], float | None], Callable[[float | None], str]]] = [
        ("fastest step", lambda contender: contender.median_s, words.seconds),
        ("least memory held", held, words.num_bytes),
        ("fewest bytes sent", sent, words.num_bytes),
    ]
    bests = []
    for title, ask, say in asked:
        values = [(ask(one), index) for index, one in enumerate(comparison.contenders) if one.verdict == "equal"]
        known = [(value, index) for value, index in values if value is not None]
        if len(known) > 1:
            least = min(known)[0]
            # Equal to a thousandth is no lead.
            names = [(comparison.contenders[at].name, colour(at)) for value, at in known if value <= least * 1.001]
            if len(names) < len(known):
                bests.append({"title": title, "value": say(least), "names": names})
    return bests


@final
@dataclass(frozen=True)
class _Row:
    """A strategy, as the table, the layout and the findings name it."""

    contender: Contender
    colour: str
    icon: str
    verdict: str
    departed: str
    numbers: list[tuple[str, str, str]]  # head, number, what stands small below it
    ranks: _Ranks


@final
@dataclass(frozen=True)
class _Cell:
    """One rank in the layout; `percent` is the share of the parameters that it holds."""

    place: Place
    coordinates: tuple[str, ...]
    percent: float | None
    share: str


@final
@dataclass(frozen=True)
class _Ranks:
    """The ranks of one strategy: as many columns as its innermost axis is long; without a mesh one row that wraps."""

    cells: list[_Cell]
    num_columns: int | None
    axes: str


def _row(index: int, contender: Contender, comparison: Comparison) -> _Row:
    return _Row(
        contender,
        colour(index),
        _ICONS[contender.verdict],
        words.VERDICTS[contender.verdict],
        words.departed(contender),
        _numbers(contender, comparison),
        _ranks(contender, comparison.reference.num_parameters),
    )


def _ranks(contender: Contender, num_parameters: int) -> _Ranks:
    axes = list(contender.layout[0].coordinates) if contender.layout else []
    sizes = {axis: 1 + max(place.coordinates.get(axis, 0) for place in contender.layout) for axis in axes}
    real = [axis for axis in axes if sizes[axis] > 1]
    cells = [
        _Cell(
            place,
            tuple(f"{axis} {index}" for axis, index in place.coordinates.items() if sizes.get(axis, 2) > 1),
            100 * place.parameters / num_parameters if num_parameters else None,
            _share(place.parameters, num_parameters),
        )
        # The innermost axis varies fastest, whatever the numbers of the ranks are.
        for place in sorted(contender.layout, key=lambda place: (*place.coordinates.values(), place.rank))
    ]
    is_grid = len(real) > 1 and len(cells) == math.prod(sizes.values())
    said = f" {words.TIMES} ".join(f"{axis} {sizes[axis]}" for axis in real or axes) or "no mesh"
    return _Ranks(cells, sizes[real[-1]] if is_grid else None, said)


def _share(parameters: int, num_parameters: int) -> str:
    return f"{100 * parameters / num_parameters:.3g} %" if num_parameters else f"{parameters:,}"


def _numbers(contender: Contender, comparison: Comparison) -> list[tuple[str, str, str]]:
    spread, ratio = words.spread(contender), contender.ratio
    sent, held = words.total(words.sent(contender)), words.total(contender.held)
    deviations = [
        ("loss", contender.loss),
        ("gradient norm", contender.gradient_norm),
        ("final parameters", contender.parameters),
    ]
    return [
        *((name, words.relative(deviation), _where(deviation, contender)) for name, deviation in deviations),
        (
            f"within {comparison.tolerance:g}",
            f"{contender.strict_steps} of {comparison.steps} steps" if contender.losses else words.NONE,
            f"else up to {words.relative(contender.widest)} by rounding" if contender.widest else "",
        ),
        (
            "step",
            words.seconds(contender.median_s),
            "" if spread is None else f"± {words.seconds(spread)}".replace(" ", "\u00a0"),
        ),
        ("ratio", words.NONE if ratio is None else words.ratio(ratio) + words.TIMES, ""),
        ("sent by a rank, per step", words.num_bytes(sent.num_bytes if sent else None), _of_formula(sent)),
        ("held by a rank", words.num_bytes(held.num_bytes if held else None), _of_formula(held)),
        ("peak", words.num_bytes(contender.peak_bytes), ""),
        ("start-up", words.seconds(contender.startup_s), ""),
    ]


def _where(deviation: Deviation | None, contender: Contender) -> str:
    """Of interest only where something is wrong: the largest rounding error has to be somewhere."""
    return deviation.where if deviation is not None and contender.verdict != "equal" else ""


def _of_formula(total: words.Total | None) -> str:
    if total is None:
        return ""
    return "no formula" if total.ratio is None else f"{words.ratio(total.ratio)} of formula"


def _command(comparison: Comparison) -> str:
    names = ",".join(contender.name for contender in comparison.contenders)
    options = ["--strategies", names, "--steps", str(comparison.steps), "--tolerance", f"{comparison.tolerance:g}"]
    return shlex.join(["stratagem", "compare", *comparison.config, *options, "--baseline", comparison.baseline])
