# SPDX-License-Identifier: Apache-2.0
"""The costs of a comparison as bars: time, memory, bytes on the wire.

    zero_1     [parameters|gradients|optimizer ]          |  [peak              ]
                          ^         ^          ^ formula  |

One row per strategy, in the same order everywhere, its number below its name; one trace per strategy, so that one click
hides it. A black tick stands where a part would end if the formula were met.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import plotly.graph_objects as go

from stratagem.comparison import page_words as words
from stratagem.comparison.page_style import (
    INK,
    MUTED,
    Figure,
    Key,
    absent,
    axis,
    colour,
    layout,
    name_label,
    text,
    tint,
)
from stratagem.comparison.results import Comparison, Contender, Held, Sent

_ROW = 50  # pixels
_WIDTH = 0.46  # of a bar, in rows
_KINDS = ("parameters", "gradients", "optimizer")
_GREY = "#3f4b57"
_TICK = Key("formula", INK, "tick")


def step_time(comparison: Comparison) -> Figure:
    """The median step with its quartiles."""
    contenders = comparison.contenders
    unit = words.time_unit(contender.median_s for contender in contenders)
    chart, missing, labels = go.Figure(), [], []
    for index, contender in enumerate(contenders):
        median = contender.median_s
        if median is None:
            missing.append(index)
            labels.append("not measured")
            continue
        low, high = contender.spread_s or (median, median)
        ratio = "" if contender.ratio is None else f" · {words.ratio(contender.ratio)}{words.TIMES}"
        labels.append(words.in_unit(median, unit) + ratio)
        chart.add_bar(
            **_bar(contender, index),
            x=[median / unit.size],
            y=[index],
            width=[_WIDTH],
            marker={"color": colour(index)},
            error_x={
                "type": "data",
                "array": [(high - median) / unit.size],
                "arrayminus": [(median - low) / unit.size],
                "color": INK,
                "thickness": 1.5,
                "width": 5,
            },
            customdata=[
                f"median {words.in_unit(median, unit)} of {len(contender.step_s)} steps<br>"
                f"quartiles {words.in_unit(low, unit)} to {words.in_unit(high, unit)}<br>"
                f"all {words.in_unit(min(contender.step_s), unit)} to {words.in_unit(max(contender.step_s), unit)}"
            ],
        )
    keys = [Key("quartiles", INK, "whisker")]
    base = next((one.median_s for one in contenders if one.name == comparison.baseline and one.median_s), None)
    changes: dict[str, Any] = {}
    if base is not None:
        keys.append(Key(f"baseline {words.plain(comparison.baseline)}", MUTED, "dash"))
        line = {"color": MUTED, "width": 1.5, "dash": "dash"}
        changes["shapes"] = [
            {
                "type": "line",
                "x0": base / unit.size,
                "x1": base / unit.size,
                "yref": "paper",
                "y0": 0,
                "y1": 1,
                "line": line,
            }
        ]
    return _finish(
        comparison, chart, labels, f"median step, {unit.name}", keys, absent(comparison, missing, "steps"), changes
    )


def memory(comparison: Comparison) -> Figure:
    """Bytes held by kind, and beside them the largest growth of the process."""
    contenders = comparison.contenders
    kinds = _ordered([part.kind for contender in contenders for part in contender.held], _KINDS)
    unit = words.byte_unit(
        [*(_size(contender.held) for contender in contenders), *(contender.peak_bytes for contender in contenders)]
    )
    chart, missing, labels = go.Figure(), [], []
    ticks: list[tuple[float, int, str]] = []
    for index, contender in enumerate(contenders):
        parts = sorted(contender.held, key=lambda part: kinds.index(part.kind))
        peak = contender.peak_bytes
        if not parts and peak is None:
            missing.append(index)
            labels.append("not measured")
            continue
        labels.append(_label(parts, unit) + ("" if peak is None else f" · peak {words.in_unit(peak, unit)}"))
        _add_stack(chart, contender, index, unit, [(part, part.kind, kinds.index(part.kind)) for part in parts])
        if peak is not None:
            chart.add_bar(
                **_bar(contender, index),
                x=[peak / unit.size],
                y=[index],
                xaxis="x2",
                width=[_WIDTH],
                marker={"color": tint(colour(index), 2), "line": {"color": colour(index), "width": 1}},
                customdata=[f"peak {words.in_unit(peak, unit)}"],
            )
        ticks += _ticks(index, parts, unit)
    _add_ticks(chart, ticks)
    keys = [*(Key(kind, tint(_GREY, part)) for part, kind in enumerate(kinds)), _TICK]
    # The peak has a scale of its own: of a small model it is many times what is held.
    right = axis(title_text=f"peak growth, {unit.name}", rangemode="tozero", domain=[0.7, 1], nticks=5)
    changes = {"xaxis2": right | {"anchor": "y"}}
    title = f"held by one rank, {unit.name}"
    notes = absent(comparison, missing, "numbers")
    return _finish(comparison, chart, labels, title, keys, notes, changes, end=0.64)


def wire(comparison: Comparison) -> Figure:
    """Bytes that one rank sends in one step, by axis."""
    contenders = comparison.contenders
    axes = _ordered([part.axis for contender in contenders for part in words.sent(contender)], ())
    # Only axes that share a bar need tints; a bar of one axis has the strategy's own colour and names the axis.
    shares = any(len(words.sent(contender)) > 1 for contender in contenders)
    tints = {axis: part for part, axis in enumerate(axis for axis in axes if axis != "world")} if shares else {}
    unit = words.byte_unit(_size(words.sent(contender)) for contender in contenders)
    chart, missing, labels = go.Figure(), [], []
    ticks: list[tuple[float, int, str]] = []
    for index, contender in enumerate(contenders):
        parts = sorted(words.sent(contender), key=lambda part: axes.index(part.axis))
        if not parts:
            missing.append(index)
            labels.append("not measured")
            continue
        by_kernel = any(part.source == "kernel" for part in parts)
        labels.append(_label(parts, unit) + (" · counted by the kernel" if by_kernel else ""))
        _add_stack(chart, contender, index, unit, [(part, part.axis, tints.get(part.axis, 0)) for part in parts])
        ticks += _ticks(index, parts, unit)
    _add_ticks(chart, ticks)
    keys = [*(Key(f"axis {name}", tint(_GREY, part)) for name, part in tints.items()), _TICK]
    title = f"sent by one rank in one step, {unit.name}"
    return _finish(comparison, chart, labels, title, keys, absent(comparison, missing, "numbers"))


def _bar(contender: Contender, index: int) -> dict[str, Any]:
    return {
        "orientation": "h",
        "name": text(contender.name),
        "meta": index,
        "hovertemplate": "<b>%{fullData.name}</b><br>%{customdata}<extra></extra>",
    }


def _add_stack(
    chart: go.Figure,
    contender: Contender,
    index: int,
    unit: words.Unit,
    parts: Sequence[tuple[Sent | Held, str, int]],
) -> None:
    """One trace: the parts end to end."""
    sizes = [part.num_bytes / unit.size for part, _, _ in parts]
    starts = [0.0, *accumulate(sizes)][: len(sizes)]
    colours = [tint(colour(index), part) for _, _, part in parts]
    names = [text(name) for _, name, _ in parts]
    chart.add_bar(
        **_bar(contender, index),
        x=sizes,
        base=starts,
        y=[index] * len(sizes),
        width=[_WIDTH] * len(sizes),
        marker={"color": colours, "line": {"color": "#ffffff", "width": 1}},
        text=names,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        insidetextfont={"size": 11},
        customdata=[_said(part, text(name), unit) for part, name, _ in parts],
    )


def _said(part: Sent | Held, name: str, unit: words.Unit) -> str:
    measured = f"{name}: {words.in_unit(part.num_bytes, unit)}"
    by = ", counted by the kernel" if isinstance(part, Sent) and part.source == "kernel" else ""
    if part.formula is None:
        return f"{measured}{by}<br>no formula"
    ratio = words.total([part])
    times = f" ({ratio.ratio:.4f} of it)" if ratio is not None and ratio.ratio is not None else ""
    return f"{measured}{by}<br>formula {words.in_unit(part.formula, unit)}{times}"


def _ticks(index: int, parts: Sequence[Sent | Held], unit: words.Unit) -> list[tuple[float, int, str]]:
    """Where each part would end by its formula, from where the parts before it do end."""
    ticks, start = [], 0.0
    for part in parts:
        if part.formula is not None:
            end = (start + part.formula) / unit.size
            ticks.append((end, index, f"formula {words.in_unit(part.formula, unit)}"))
        start += part.num_bytes
    return ticks


def _add_ticks(chart: go.Figure, ticks: Sequence[tuple[float, int, str]]) -> None:
    chart.add_scatter(
        x=[end for end, _, _ in ticks],
        y=[index for _, index, _ in ticks],
        mode="markers",
        marker={"symbol": "line-ns", "size": 26, "line": {"color": INK, "width": 2}},
        name="formula",
        customdata=[said for _, _, said in ticks],
        hovertemplate="%{customdata}<extra></extra>",
        cliponaxis=False,
    )


def _label(parts: Sequence[Sent | Held], unit: words.Unit) -> str:
    total = words.total(parts)
    if total is None:
        return words.NONE
    ratio = "" if total.ratio is None else f" · {total.ratio:.2f} of formula"
    return words.in_unit(total.num_bytes, unit) + ratio


def _size(parts: Sequence[Sent | Held]) -> float | None:
    total = words.total(parts)
    return None if total is None else total.num_bytes


def _ordered(names: Sequence[str], first: Sequence[str]) -> list[str]:
    """Each name once: those of `first`, then the others as they come."""
    return list(dict.fromkeys([*(name for name in first if name in names), *names]))


def _finish(
    comparison: Comparison,
    chart: go.Figure,
    labels: Sequence[str],
    title: str,
    keys: Sequence[Key],
    notes: tuple[str, ...],
    changes: dict[str, Any] | None = None,
    end: float = 1.0,
) -> Figure:
    names = [name_label(index, one, labels[index]) for index, one in enumerate(comparison.contenders)]
    height = 70 + _ROW * max(len(names), 1)
    chart.update_layout(
        layout(
            height=height,
            barmode="overlay",
            bargap=0,
            hovermode="closest",
            uniformtext={"mode": "hide", "minsize": 10},
            margin={"l": 20, "r": 24, "t": 8, "b": 46},
            xaxis=axis(title_text=title, rangemode="tozero", domain=[0, end]),
            yaxis=axis(
                tickvals=list(range(len(names))),
                ticktext=names,
                range=[len(names) - 0.4, -0.6],
                automargin=True,
                showgrid=False,
                ticks="",
                ticklabelposition="outside",
            ),
            **(changes or {}),
        )
    )
    return Figure(chart, height, tuple(keys), notes)
