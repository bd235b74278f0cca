# SPDX-License-Identifier: Apache-2.0
"""Pictures of a schedule: plain text for a docstring, colours for a terminal, SVG for a page.

In all of them a row is a rank, time runs to the right, and what is empty is idle. Colours: F blue, B orange, I green,
W violet; chunks after the first are lighter, so that the laps of a loop or the two arms of a V can be told apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from rich.text import Text

from stratagem.plugins.pipeline.actions import Action, Schedule
from stratagem.plugins.pipeline.simulate import Costs, Span, Timeline, simulate

_COLOURS = {
    "F": ("#1f6fb4", "#8fc1ea"),
    "B": ("#d9720f", "#f7bb80"),
    "I": ("#2a8c4a", "#98d4ab"),
    "W": ("#7d54a8", "#c9b2e0"),
}
"""By kind: the first chunk of a rank, and the others."""

_ROW, _LEFT = 26, 64
"""Of the SVG, in pixels: height of a row, width of the rank's name."""


def plain(schedule: Schedule, costs: Costs = Costs()) -> str:
    """The picture as plain text, for costs that are whole numbers.

    A column is one unit of time; an action that takes longer is drawn on with `-`, idle time is `.`. The stage is
    written only where a rank has more than one.

    Example:
        >>> from stratagem.plugins.pipeline.schedules import one_f_one_b
        >>> print(plain(one_f_one_b(2, 2)))
        0  F0 F1 .  .  B0 -- .  B1 --
        1  .  F0 B0 -- F1 B1 --
    """
    timeline = simulate(schedule, costs)
    label = str if schedule.num_chunks > 1 else _short
    width = max((len(label(a)) for actions in schedule.ranks for a in actions), default=1)
    lines = []
    for rank, spans in enumerate(timeline.spans):
        cells = ["."] * round(timeline.makespan)
        for action, start, end in spans:
            cells[round(start) : round(end)] = [label(action)] + ["-" * width] * (round(end - start) - 1)
        while cells and cells[-1] == ".":
            cells.pop()
        lines.append(f"{rank}  " + " ".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(lines)


def picture(timeline: Timeline, width: int = 100) -> Text:
    """The picture in colours for a terminal of `width` columns, to be printed by rich.

    The number of a micro-batch is written where its block is wide enough for it; lines never exceed `width`.
    """
    names = [f"rank {rank} " for rank in range(len(timeline.spans))]
    left = max(map(len, names), default=0)
    columns = max(1, width - left)
    scale = columns / timeline.makespan if timeline.makespan else 0.0
    text = Text(no_wrap=True, overflow="crop")
    for name, spans in zip(names, timeline.spans, strict=True):
        text.append(name.ljust(left), "bold")
        at = 0
        for span in spans:
            start, end = round(span.start * scale), round(span.end * scale)
            text.append(" " * (start - at))
            number = str(span.action.micro_batch)
            fits = len(number) < end - start or len(number) == end - start == 1
            text.append((number if fits else "").ljust(end - start), f"black on {_colour(timeline.schedule, span)}")
            at = end
        text.append(" " * (columns - at) + "\n")
    text.append(_summary(timeline)[:width])
    return text


def svg(timeline: Timeline, width: int = 1000) -> str:
    """The picture as one SVG element of `width` pixels that needs nothing else; a block's title says when it ran."""
    height = _ROW * len(timeline.spans) + 28
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="11">',
        f'<text x="0" y="14">{escape(_summary(timeline))}</text>',
        *_blocks(timeline, (width - _LEFT) / timeline.makespan if timeline.makespan else 0.0),
        "</svg>",
    ]
    return "\n".join(parts)


def _blocks(timeline: Timeline, scale: float) -> Iterator[str]:
    for rank, spans in enumerate(timeline.spans):
        top = 24 + _ROW * rank
        yield f'<text x="0" y="{top + 16}">rank {rank}</text>'
        for span in spans:
            left, wide = _LEFT + span.start * scale, (span.end - span.start) * scale
            title = f"<title>{span.action}: {span.start:g} to {span.end:g}</title>"
            yield (
                f'<rect x="{left:.2f}" y="{top}" width="{wide:.2f}" height="{_ROW - 3}" stroke="white"'
                f' fill="{_colour(timeline.schedule, span)}">{title}</rect>'
            )
            number = str(span.action.micro_batch)
            if wide > 7 * len(number) + 2:
                at = f'x="{left + wide / 2:.2f}" y="{top + 16}" text-anchor="middle"'
                yield f'<text {at} pointer-events="none">{number}</text>'


def _summary(timeline: Timeline) -> str:
    schedule = timeline.schedule
    return (
        f"{schedule.name}: {schedule.num_ranks} ranks x {schedule.num_chunks} chunks, "
        f"{schedule.num_micro_batches} micro-batches, makespan {timeline.makespan:g}, "
        f"bubble {timeline.bubble_share:.1%}, at most {max(schedule.peak_in_flight(), default=0):g} in flight"
    )


def _colour(schedule: Schedule, span: Span) -> str:
    first = schedule.stages_of(schedule.owners[span.action.stage])[0]
    return _COLOURS[span.action.kind][0 if span.action.stage == first else 1]


def _short(action: Action) -> str:
    return f"{action.kind}{action.micro_batch}"
