# SPDX-License-Identifier: Apache-2.0
"""The loss curves of a comparison, laid over each other.

Curves that coincide would hide each other. The reference is a broad pale band; every strategy that the eye cannot tell
from it draws its own share of each dash period, so that together they make one rope of all colours; the others are
drawn whole:

    reference  ================================    rope  aaabbbcccaaabbbcccaaabbbccc    apart  ------------
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from stratagem.comparison.page_style import (
    REFERENCE,
    Figure,
    Key,
    absent,
    axis,
    colour,
    layout,
    step_axis,
    text,
)
from stratagem.comparison.results import Comparison

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


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _said(loss: float) -> str:
    return f"{loss:.7g}"
