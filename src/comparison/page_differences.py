# SPDX-License-Identifier: Apache-2.0
"""What separates the curves of a comparison from the reference, step by step.

no number  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒  a lane per strategy: one side is nan or infinite
     1e-3              /
     1e-5  - - - - - -/- - - - - -   allowed
     1e-7  ~~~~~~~~~~/~~~~~~~~~~~~
    exact  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒  a lane per strategy: bit-equal
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, final

import plotly.graph_objects as go

from stratagem.comparison import page_words as words
from stratagem.comparison.judge import HEADROOM
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

_NEAR_ZERO = 0.01  # of the largest value of a curve: a smaller one divides nothing, as in the verdict's own measure


def differences(comparison: Comparison) -> Figure:
    """Relative differences of loss and gradient norm from the reference, per step, on a log scale.

    A zero has no place on such a scale, and neither has what is no number: they are drawn in two bands of their own
    below and above, one lane per strategy.
    """
    panels = [
        [_apart(contender.losses, comparison.reference.losses) for contender in comparison.contenders],
        [_apart(contender.gradient_norms, comparison.reference.gradient_norms) for contender in comparison.contenders],
    ]
    limits = _limits(comparison)
    values = [value for panel in panels for series in panel for _, value in series]
    scale = _scale(values, [comparison.tolerance, *(limit for panel in limits for limit in panel)])
    chart = go.Figure()
    _add_rounding(chart, comparison, limits, scale)
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
        _rounding_keys(comparison),
        absent(comparison, missing, "steps to compare"),
    )


def _twin(comparison: Comparison) -> list[tuple[int, float]]:
    return _apart(comparison.reference.twin_losses, comparison.reference.losses)


def _limits(comparison: Comparison) -> tuple[list[float], list[float]]:
    """What is allowed of loss and gradient norm at each step.

    Of the twin's gradient norms only the largest difference is known: theirs is what is allowed in the end.
    """
    twin, num_steps = _twin(comparison), max(comparison.steps, 1)
    loss = [max(comparison.tolerance, HEADROOM * off) for off in accumulate((off for _, off in twin), max)]
    norm = comparison.reference.twin_gradient_norm
    least = [comparison.tolerance] * num_steps
    return loss or least, [max(each, HEADROOM * norm.relative if norm else 0.0) for each in least]


def _add_rounding(
    chart: go.Figure, comparison: Comparison, limits: tuple[list[float], list[float]], scale: _Scale
) -> None:
    """Behind the strategies: the twin's difference in loss, and what is allowed."""
    twin = [(step, math.log10(off)) for step, off in _twin(comparison) if off > 0 and math.isfinite(off)]
    if twin:
        chart.add_scatter(
            x=[step for step, _ in twin],
            y=[height for _, height in twin],
            mode="lines",
            line={"color": REFERENCE, "width": 7},
            name="rounding alone",
            customdata=[words.relative(10**height) for _, height in twin],
            hovertemplate="%{customdata}",
        )
    for panel, limit in enumerate(limits):
        if limit[-1] > 0:
            chart.add_scatter(
                x=[-0.5, *range(len(limit)), len(limit) - 0.5],
                y=[min(math.log10(max(each, 1e-300)), scale.high) for each in (limit[0], *limit, limit[-1])],
                xaxis=("x", "x2")[panel],
                yaxis=("y", "y2")[panel],
                mode="lines",
                line={"color": ALARM, "width": 1.5, "dash": "dash", "shape": "hvh"},
                name="allowed",
                hoverinfo="skip",
            )


def _rounding_keys(comparison: Comparison) -> tuple[Key, ...]:
    limit = Key(f"allowed: {comparison.tolerance:g}", ALARM, "dash")
    if not words.twin(comparison.reference):
        return (limit,)
    limit = Key(f"allowed: {comparison.tolerance:g}, or {HEADROOM:g} times what rounding alone does", ALARM, "dash")
    return (limit, Key("rounding alone, in the loss", REFERENCE, "line"))


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


def _scale(values: Sequence[float], limits: Sequence[float]) -> _Scale:
    seen = [math.log10(value) for value in [*values, *limits] if value > 0 and math.isfinite(value)]
    low, high = math.floor(min(seen, default=-7)) - 0.3, max(seen, default=-5) + 0.5
    return _Scale(low, high, max(0.8, (high - low) * 0.1), any(not math.isfinite(value) for value in values))


def _apart(found: Sequence[float | None], expected: Sequence[float | None]) -> list[tuple[int, float]]:
    """Steps and relative differences; `inf` where one of the two is no number and the other one is."""
    scale = _NEAR_ZERO * max((abs(it) for it in expected if it is not None and math.isfinite(it)), default=0.0)
    apart = []
    for step, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one is None or other is None:
            continue
        if one == other or (math.isnan(one) and math.isnan(other)):
            apart.append((step, 0.0))
        elif math.isfinite(one) and math.isfinite(other):
            divisor = max(abs(other), scale)
            apart.append((step, abs(one - other) / divisor if divisor else math.inf))
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
    for horizontal, vertical in (("x domain", "y"), ("x2 domain", "y2")):
        here = {"xref": horizontal, "yref": vertical, "x0": 0, "x1": 1}
        band = {"type": "rect", "layer": "below", "line": {"width": 0}}
        shapes.append(here | band | {"y0": scale.bottom, "y1": scale.low, "fillcolor": "#eef6f1"})
        if scale.has_numberless:
            shapes.append(here | band | {"y0": scale.high, "y1": scale.top, "fillcolor": "#fbeceb"})
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
