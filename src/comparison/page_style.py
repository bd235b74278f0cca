# SPDX-License-Identifier: Apache-2.0
"""What all figures of the page share: one colour per strategy, tints of it for its parts, one layout.

The colours are those of Okabe and Ito and of Tol, which stay apart under the common kinds of colour blindness; black
and yellow are left out, the one being the ink of the page and the other invisible on it. Nothing is told by colour
alone: curves have dashes and symbols too, bars carry their name.
"""

from __future__ import annotations

import html
import textwrap
from dataclasses import dataclass
from typing import Any, final

import plotly.graph_objects as go

from stratagem.comparison import page_words as words
from stratagem.comparison.results import Comparison, Contender

PALETTE = (
    "#0072b2",  # blue
    "#d55e00",  # vermilion
    "#009e73",  # green
    "#cc79a7",  # pink
    "#e69f00",  # orange
    "#56b4e9",  # sky
    "#882255",  # wine
    "#999933",  # olive
    "#332288",  # indigo
    "#44aa99",  # teal
    "#661100",  # brown
    "#7b8794",  # slate
)
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "pentagon", "star")
REFERENCE = "#cfd6df"
INK, MUTED, GRID, ALARM = "#1c2733", "#5b6875", "#e4e9ef", "#b3261e"
_TINTS = (0.0, 0.42, 0.72, 0.22, 0.58, 0.84)
_NAME_WIDTH = 34  # characters of a strategy's name in one line of an axis


@final
@dataclass(frozen=True)
class Key:
    """One entry of a figure's legend that is not a strategy.

    Attributes:
        name: what the mark stands for.
        colour: of its swatch.
        mark: `block`, `line`, `tick` or `whisker`.
    """

    name: str
    colour: str
    mark: str = "block"


@final
@dataclass(frozen=True)
class Figure:
    """One figure of the page.

    Attributes:
        chart: what plotly draws; each trace of a strategy carries the strategy's index as `meta`.
        height: in pixels; the width follows the window.
        keys: its legend beside that of the strategies.
        notes: what a reader would miss otherwise: who is not drawn, what is cut off.
    """

    chart: go.Figure
    height: int
    keys: tuple[Key, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """For a script element: plotly writes `<`, `>` and `&` as escapes, so no text can end the element."""
        text: str = self.chart.to_json()
        return text


def colour(index: int) -> str:
    """The colour of the strategy with this index.

    Example:
        >>> colour(0) == colour(len(PALETTE))
        True
    """
    return PALETTE[index % len(PALETTE)]


def tint(base: str, part: int) -> str:
    """The same colour mixed with white, for the part with this index.

    Example:
        >>> tint("#0072b2", 0), tint("#000000", 1)
        ('#0072b2', '#6b6b6b')
    """
    white = _TINTS[part % len(_TINTS)]
    channels = (int(base[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (255 - channel) * white):02x}" for channel in channels)


def text(raw: str) -> str:
    """Text from outside for plotly, which reads tags and entities in every label.

    Example:
        >>> text("<b>ddp</b>")
        '&lt;b&gt;ddp&lt;/b&gt;'
    """
    return html.escape(words.plain(raw), quote=False)


def name_label(index: int, contender: Contender, below: str) -> str:
    """A strategy's label on an axis: its colour and name, and what there is to say in a second line."""
    lines = textwrap.wrap(words.plain(contender.name), _NAME_WIDTH) or [words.NONE]
    name = "<br>".join(html.escape(line, quote=False) for line in lines)
    return (
        f'<span style="color:{colour(index)}">■</span> <b>{name}</b>'
        f'<br><span style="color:{MUTED};font-size:11px">{text(below)}</span>'
    )


def layout(**changes: Any) -> dict[str, Any]:
    """The layout that all figures start from; `changes` are plotly's own words."""
    return {
        "template": "none",
        "font": {
            "family": "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', sans-serif",
            "size": 13,
            "color": INK,
        },
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 64, "r": 20, "t": 26, "b": 46},
        "showlegend": False,
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#b8c2cc", "activecolor": MUTED},
        "hoverlabel": {
            "bgcolor": "#ffffff",
            "bordercolor": "#b8c2cc",
            "font": {"color": INK, "size": 12},
            "namelength": -1,
        },
    } | changes


def axis(**changes: Any) -> dict[str, Any]:
    """An axis with pale lines and without a zero line."""
    return {
        "gridcolor": GRID,
        "linecolor": "#b8c2cc",
        "zeroline": False,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": "#b8c2cc",
        "title_font_size": 13,
        "title_standoff": 8,
    } | changes


def step_axis(comparison: Comparison, **changes: Any) -> dict[str, Any]:
    """The axis of optimizer steps; whole numbers, also where there is one step only."""
    last = max(comparison.steps - 1, 0)
    margin = max(last * 0.015, 0.4)
    few = {"dtick": 1} if last <= 12 else {}
    return axis(title_text="optimizer step", range=[-margin, last + margin], **few, **changes)


def absent(comparison: Comparison, missing: list[int], what: str) -> tuple[str, ...]:
    """The note that names the strategies of which there is nothing to draw."""
    names = [f"{comparison.contenders[index].name} ({_why(comparison.contenders[index])})" for index in missing]
    return (f"Not drawn, for want of {what}: {', '.join(names)}.",) if names else ()


def _why(contender: Contender) -> str:
    return {"failed": "it failed", "other data": "other data"}.get(contender.verdict, "not measured")
