# SPDX-License-Identifier: Apache-2.0
"""The curves of a comparison: losses laid over each other, and what separates them from the reference.

Curves that coincide would hide each other. The reference is a broad pale band; every strategy that the eye cannot tell
from it draws its own share of each dash period, so that together they make one rope of all colours; the others are
drawn whole:

    reference  ================================    rope  aaabbbcccaaabbbcccaaabbbccc    apart  ------------
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import plotly.graph_objects as go

from stratagem.comparison import page_words as words
from stratagem.comparison.page_style import (
    ALARM,
    MUTED,
    REFERENCE,
    SYMBOLS,
    Figure,
    Key,
    absent,
    axis,
    colour,
    layout,
    step_axis,
    text,
)
from stratagem.comparison.results import Comparison, Contender

_TINY = 1e-30  # below it a reference value divides nothing
_MAX_EXCESS = 1.0  # how far a departing curve may stretch the axis, in spans of the reference's curve
_EYE = 0.008  # of the axis: what is closer than that the eye does not tell apart


def losses(comparison: Comparison) -> Figure:
    """The loss of every strategy and of the reference over the steps."""
    chart = go.Figure()
    low, high, is_cut = _loss_range(comparison)
    reference = comparison.reference.losses
    chart.add_scatter(
        x=list(range(len(reference))),
        y=[_finite(loss) for loss in reference],
        mode="lines+markers" if len(reference) == 1 else "lines",
        line={"color": REFERENCE, "width": 11},
        marker={"color": REFERENCE, "size": 18},
        name="one process",
        customdata=[_said(loss) for loss in reference],
        hovertemplate="%{customdata}",
    )
    is_strand = [_coincides(contender.losses, reference, high - low) for contender in comparison.contenders]
    rope = [index for index, is_one in enumerate(is_strand) if is_one]
    order = [*rope, *(index for index in range(len(comparison.contenders)) if index not in rope)]
    missing = [index for index in order if not comparison.contenders[index].losses]
    for index in order:
        if index not in missing:
            _add_loss(chart, comparison, index, rope)
            _add_ends(chart, comparison, index, high)
    chart.update_layout(
        layout(
            hovermode="x unified",
            xaxis=step_axis(comparison),
            yaxis=axis(title_text="loss", range=[low, high]),
        )
    )
    notes = absent(comparison, missing, "losses")
    if is_cut:
        notes += ("A curve leaves the figure; a double click shows all of it.",)
    if any(not math.isfinite(loss) for contender in comparison.contenders for loss in contender.losses):
        notes += ("A cross at the upper edge: the loss of this step is no number.",)
    return Figure(chart, 400, (Key("one process", REFERENCE, "line"),), notes)


def _coincides(found: Sequence[float], expected: Sequence[float], span: float) -> bool:
    """Whether a curve lies on the reference to the eye; one that ended early would leave a gap in the rope."""
    if not found or len(found) != len(expected):
        return False
    return all(one == other or abs(one - other) <= _EYE * span for one, other in zip(found, expected, strict=True))


def _add_loss(chart: go.Figure, comparison: Comparison, index: int, rope: Sequence[int]) -> None:
    contender = comparison.contenders[index]
    is_single = len(contender.losses) == 1
    chart.add_scatter(
        x=list(range(len(contender.losses))),
        y=[_finite(loss) for loss in contender.losses],
        mode="lines+markers" if is_single else "lines",
        line={"color": colour(index), "width": 3.5 if index in rope else 2, "dash": _strand(index, rope)},
        # Of single points that coincide only rings of different size can all be seen.
        marker={"symbol": "circle-open", "size": 8 + 5 * index, "color": colour(index), "line": {"width": 2}},
        name=text(contender.name),
        meta=index,
        customdata=[_said(loss) for loss in contender.losses],
        hovertemplate="%{customdata}",
    )


def _strand(index: int, rope: Sequence[int], length: int = 12) -> str:
    """The dash pattern with which a strategy draws its own share of each period; solid for one outside the rope.

    Example:
        >>> [_strand(index, [0, 1, 2]) for index in (0, 2, 3)]
        ['0px,0px,12px,24px', '0px,24px,12px,0px', 'solid']
    """
    if index not in rope or len(rope) == 1:
        return "solid"
    place = rope.index(index)
    return f"0px,{place * length}px,{length}px,{(len(rope) - 1 - place) * length}px"


def _add_ends(chart: go.Figure, comparison: Comparison, index: int, high: float) -> None:
    """Crosses: where a run ended early, and at the upper edge where its loss is no number."""
    contender = comparison.contenders[index]
    marks = [(step, high, f"loss {loss}") for step, loss in enumerate(contender.losses) if not math.isfinite(loss)]
    if contender.verdict == "failed" and math.isfinite(contender.losses[-1]):
        last = len(contender.losses) - 1
        marks.append((last, contender.losses[last], "its last step"))
    if marks:
        chart.add_scatter(
            x=[step for step, _, _ in marks],
            y=[height for _, height, _ in marks],
            mode="markers",
            marker={"symbol": "x", "size": 10, "color": colour(index), "line": {"color": "#ffffff", "width": 1}},
            name=text(contender.name),
            meta=index,
            customdata=[what for _, _, what in marks],
            hovertemplate="%{customdata}",
            cliponaxis=False,
        )


def _loss_range(comparison: Comparison) -> tuple[float, float, bool]:
    """Lower and upper end of the loss axis, and whether a curve leaves it."""
    core = [loss for loss in comparison.reference.losses if math.isfinite(loss)]
    every = [*core, *(loss for one in comparison.contenders for loss in one.losses if math.isfinite(loss))]
    if not every:
        return 0.0, 1.0, False
    core = core or every
    low, high = min(core), max(core)
    span = (high - low) or abs(high) * 0.1 or 1.0
    shown_low = max(min(every), low - _MAX_EXCESS * span)
    shown_high = min(max(every), high + _MAX_EXCESS * span)
    margin = 0.06 * ((shown_high - shown_low) or span)
    return shown_low - margin, shown_high + margin, min(every) < shown_low or max(every) > shown_high


def differences(comparison: Comparison) -> Figure:
    """Relative differences of loss and gradient norm from the reference, per step, on a log scale.

    A zero has no place on such a scale, and neither has what is no number: they are drawn in two bands of their own
    below and above, one lane per strategy.
    """
    panels = [
        [_apart(contender.losses, comparison.reference.losses) for contender in comparison.contenders],
        [_apart(contender.gradient_norms, comparison.reference.gradient_norms) for contender in comparison.contenders],
    ]
    scale = _scale([value for panel in panels for series in panel for _, value in series], comparison.tolerance)
    chart = go.Figure()
    for number, panel in enumerate(panels):
        for index, series in enumerate(panel):
            if series:
                _add_difference(chart, comparison, index, series, number, scale)
    vertical = axis(range=[scale.bottom, scale.top], tickvals=scale.ticks, ticktext=scale.labels)
    chart.update_layout(
        layout(
            hovermode="x unified",
            margin={"l": 92, "r": 20, "t": 40, "b": 46},
            xaxis=step_axis(comparison, domain=[0, 0.485]),
            xaxis2=step_axis(comparison, domain=[0.515, 1], anchor="y2", matches="x"),
            yaxis=vertical | {"title_text": "relative difference"},
            yaxis2=vertical | {"matches": "y", "anchor": "x2", "showticklabels": False},
            shapes=_bands(comparison, scale),
            annotations=_titles(comparison, scale),
        )
    )
    missing = [index for index in range(len(comparison.contenders)) if not panels[0][index] and not panels[1][index]]
    return Figure(
        chart,
        400,
        (Key(f"tolerance {comparison.tolerance:g}", ALARM, "dash"),),
        absent(comparison, missing, "steps to compare"),
    )


@final
@dataclass(frozen=True)
class _Scale:
    """The vertical axis of the differences, in powers of ten.

    Attributes:
        low: upper end of the band in which zeros are drawn.
        high: lower end of the band for what is no number.
        band: the height of such a band.
        has_numberless: whether the upper band is there.
    """

    low: float
    high: float
    band: float
    has_numberless: bool

    @property
    def bottom(self) -> float:
        return self.low - self.band

    @property
    def top(self) -> float:
        return self.high + (self.band if self.has_numberless else 0.0)

    @property
    def _decades(self) -> list[int]:
        stride = max(1, round((self.high - self.low) / 7))
        return [decade for decade in range(math.ceil(self.low), math.floor(self.high) + 1, stride) if decade > self.low]

    @property
    def ticks(self) -> list[float]:
        above = [self.high + self.band / 2] if self.has_numberless else []
        return [self.low - self.band / 2, *self._decades, *above]

    @property
    def labels(self) -> list[str]:
        return ["exact", *(f"1e{at}" for at in self._decades), *(["no number"] if self.has_numberless else [])]


def _scale(values: Sequence[float], tolerance: float) -> _Scale:
    seen = [math.log10(value) for value in [*values, tolerance] if value > 0 and math.isfinite(value)]
    low, high = math.floor(min(seen, default=-7)) - 0.3, max(seen, default=-5) + 0.5
    return _Scale(low, high, max(0.8, (high - low) * 0.1), any(not math.isfinite(value) for value in values))


def _apart(found: Sequence[float | None], expected: Sequence[float | None]) -> list[tuple[int, float]]:
    """Steps and relative differences; `inf` where one of the two is no number and the other one is."""
    apart = []
    for step, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one is None or other is None:
            continue
        if one == other or (math.isnan(one) and math.isnan(other)):
            apart.append((step, 0.0))
        elif math.isfinite(one) and math.isfinite(other):
            apart.append((step, abs(one - other) / max(abs(other), _TINY)))
        else:
            apart.append((step, math.inf))
    return apart


def _add_difference(
    chart: go.Figure,
    comparison: Comparison,
    index: int,
    series: Sequence[tuple[int, float]],
    panel: int,
    scale: _Scale,
) -> None:
    lane = scale.band * (0.1 + 0.8 * (index + 0.5) / len(comparison.contenders))
    x: list[int | None] = []
    y: list[float | None] = []
    said: list[str] = []
    bands: list[int] = []
    for step, value in series:
        band = -1 if value == 0 else 0 if math.isfinite(value) else 1
        if bands and bands[-1] != band:  # no line between a band and the scale
            x, y, said = [*x, None], [*y, None], [*said, ""]
        bands.append(band)
        x.append(step)
        y.append((scale.bottom + lane, math.log10(value) if band == 0 else 0.0, scale.high + lane)[band + 1])
        said.append(("exact", words.relative(value), "no number on one side")[band + 1])
    chart.add_scatter(
        x=x,
        y=y,
        xaxis=("x", "x2")[panel],
        yaxis=("y", "y2")[panel],
        mode="lines+markers",
        line={"color": colour(index), "width": 1.4},
        marker={"symbol": SYMBOLS[index % len(SYMBOLS)], "size": 4 if len(series) > 1 else 9, "color": colour(index)},
        name=text(comparison.contenders[index].name),
        meta=index,
        customdata=said,
        hovertemplate="%{customdata}",
    )


def _bands(comparison: Comparison, scale: _Scale) -> list[dict[str, Any]]:
    shapes: list[dict[str, Any]] = []
    tolerance = math.log10(comparison.tolerance) if comparison.tolerance > 0 else scale.low
    for horizontal, vertical in (("x domain", "y"), ("x2 domain", "y2")):
        here = {"xref": horizontal, "yref": vertical, "x0": 0, "x1": 1}
        band = {"type": "rect", "layer": "below", "line": {"width": 0}}
        shapes.append(here | band | {"y0": scale.bottom, "y1": scale.low, "fillcolor": "#eef6f1"})
        if scale.has_numberless:
            shapes.append(here | band | {"y0": scale.high, "y1": scale.top, "fillcolor": "#fbeceb"})
        line = {"color": ALARM, "width": 1.5, "dash": "dash"}
        shapes.append(here | {"type": "line", "y0": tolerance, "y1": tolerance, "line": line})
        for step in _departures(comparison):
            shapes.append(
                {"type": "line", "xref": horizontal.split()[0], "yref": f"{vertical} domain", "x0": step, "x1": step}
                | {"y0": 0, "y1": 1, "line": {"color": MUTED, "width": 1, "dash": "dot"}, "layer": "below"}
            )
    return shapes


def _departures(comparison: Comparison) -> dict[int, list[Contender]]:
    steps: dict[int, list[Contender]] = {}
    for contender in comparison.contenders:
        if contender.departure is not None and contender.verdict == "differs":
            steps.setdefault(contender.departure.step, []).append(contender)
    return steps


def _titles(comparison: Comparison, scale: _Scale) -> list[dict[str, Any]]:
    plain: dict[str, Any] = {"showarrow": False, "xanchor": "left", "yanchor": "bottom"}
    titles = [
        plain | {"xref": "x domain", "yref": "y domain", "x": 0, "y": 1, "yshift": 4, "text": "<b>loss</b>"},
        plain | {"xref": "x2 domain", "yref": "y2 domain", "x": 0, "y": 1, "yshift": 4, "text": "<b>gradient norm</b>"},
    ]
    for step, contenders in _departures(comparison).items():
        names = text(", ".join(contender.name for contender in contenders))
        titles.append(
            plain
            | {"xref": "x", "yref": "y", "x": step, "y": scale.low, "xshift": 3}
            | {"text": f"{names} leaves", "font": {"size": 11, "color": MUTED}}
        )
    return titles


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _said(loss: float) -> str:
    return f"{loss:.7g}"
