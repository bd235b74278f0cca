# SPDX-License-Identifier: Apache-2.0
"""What `stratagem compare` shows: a table in the terminal and one page.

The verdict comes first and the costs after it. Where the terminal is too narrow for one table the same columns stand in
two, correctness above cost; nothing is left out and no name is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stratagem.comparison import page_words as words
from stratagem.comparison.results import Comparison, Contender, Verdict

_STYLES: dict[Verdict, str] = {
    "equal": "green",
    "differs": "bold red",
    "other data": "bold yellow",
    "nothing trained": "bold yellow",
    "failed": "bold red",
}
_LEGEND = """\
Δ: largest relative difference from one process. step: median ± half the distance of the quartiles.
sent: by one rank in one step. held: by one rank when its gradients are complete.
strict steps: from the first on, in which all is within the tolerance itself."""
_MAX_LINES = 12  # of one reason in the terminal; the page has every line


@final
@dataclass(frozen=True)
class _Column:
    """One column: its two-line head, and what it says of a contender."""

    head: str
    cell: Callable[[Contender], str | Text]
    is_text: bool = False


def show(comparison: Comparison, console: Console) -> None:
    """Print the table, then where and why strategies left the reference, then the verdict in one sentence.

    Args:
        comparison: what was found.
        console: where to; the layout follows its width, from 80 columns on.
    """
    name = _Column("strategy", lambda contender: words.plain(contender.name), is_text=True)
    parity, cost = _parity(), _cost(comparison)
    one = _table(comparison, [name, *parity, *cost])
    # A table that does not fit would be squeezed silently, names first.
    if console.measure(one, options=console.options.update(width=10_000)).maximum <= console.width:
        tables = [one]
    else:
        tables = [_table(comparison, [name, *parity]), _table(comparison, [name, *cost])]
    for table in tables:
        console.print(table)
    console.print(Text(f"\n{_LEGEND}", "dim"))
    twin = [f"{name} {words.relative(off)}" for name, off in words.twin(comparison.reference)]
    if twin:
        console.print(Text(f"Rounding alone carries one process as far as this: {', '.join(twin)}.", "dim"))
    if comparison.reference.loose:
        console.print(Text(f"Left out of strict steps: {words.loose(comparison.reference)}.", "dim"))
    for note in comparison.reference.notes:
        console.print(Text(words.plain(note), "dim"))
    console.print()
    for contender in comparison.contenders:
        if contender.verdict != "equal" or contender.reasons:
            _explain(contender, console)
    for contender in comparison.contenders:
        if contender.verdict == "equal" and contender.widest:
            reach = words.reach(comparison, contender.strict_steps, contender.widest)
            console.print(Text(f"{words.plain(contender.name)}: {reach}"))
    style = "bold green" if comparison.passed and comparison.contenders else "bold red"
    console.print(Text(words.verdict(comparison), style))


def write_page(comparison: Comparison, path: Path) -> None:
    """Write one HTML file that needs nothing else: no network, no other file.

    Args:
        comparison: what was found.
        path: the file; its folder is made where it is missing.
    """
    from stratagem.comparison.page import render  # plotly and jinja2 only where a page is asked for

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(comparison), encoding="utf-8")


def _parity() -> list[_Column]:
    return [
        _Column("verdict", _verdict, is_text=True),
        _Column("Δ\nloss", lambda contender: words.relative(contender.loss)),
        _Column("Δ grad\nnorm", lambda contender: words.relative(contender.gradient_norm)),
        _Column("Δ para-\nmeters", lambda contender: words.relative(contender.parameters)),
        _Column("strict\nsteps", lambda contender: str(contender.strict_steps) if contender.losses else words.NONE),
    ]


def _verdict(contender: Contender) -> Text:
    return Text(words.VERDICTS[contender.verdict], _STYLES[contender.verdict])


def _cost(comparison: Comparison) -> list[_Column]:
    contenders = comparison.contenders
    time = words.time_unit(contender.median_s for contender in contenders)
    totals = [(words.total(words.sent(contender)), words.total(contender.held)) for contender in contenders]
    wire = words.byte_unit(sent.num_bytes for sent, _ in totals if sent)
    memory = words.byte_unit(
        [*(held.num_bytes for _, held in totals if held), *(contender.peak_bytes for contender in contenders)]
    )

    def step(contender: Contender) -> str:
        median, spread = contender.median_s, words.spread(contender)
        if median is None:
            return words.NONE
        said = words.number(median / time.size)
        num_decimals = len(said.partition(".")[2])
        return said + ("" if spread is None else f" ±{spread / time.size:.{num_decimals}f}")

    def sent(contender: Contender) -> str:
        return _size(words.total(words.sent(contender)), wire)

    def held(contender: Contender) -> str:
        return _size(words.total(contender.held), memory)

    def peak(contender: Contender) -> str:
        return words.NONE if contender.peak_bytes is None else words.number(contender.peak_bytes / memory.size)

    return [
        _Column(f"step\n{time.name}", step),
        _Column("over\nbase", lambda contender: words.ratio(contender.ratio)),
        _Column(f"sent\n{wire.name}", sent),
        _Column("over\nformula", lambda contender: _ratio(words.total(words.sent(contender)))),
        _Column(f"held\n{memory.name}", held),
        _Column("over\nformula", lambda contender: _ratio(words.total(contender.held))),
        _Column(f"peak\n{memory.name}", peak),
        _Column("start\ns", _start),
    ]


def _start(contender: Contender) -> str:
    return words.NONE if contender.startup_s is None else f"{contender.startup_s:.1f}"


def _size(total: words.Total | None, unit: words.Unit) -> str:
    return words.NONE if total is None else words.number(total.num_bytes / unit.size)


def _ratio(total: words.Total | None) -> str:
    return words.NONE if total is None else words.ratio(total.ratio)


def _table(comparison: Comparison, columns: Iterable[_Column]) -> Table:
    columns = list(columns)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    for column in columns:
        table.add_column(
            Text(column.head),
            justify="left" if column.is_text else "right",
            vertical="bottom",
            no_wrap=not column.is_text,
            overflow="fold",
        )
    for contender in comparison.contenders:
        style = "bold" if contender.name == comparison.baseline else ""
        cells = [column.cell(contender) for column in columns]
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells), style=style)
    return table


def _explain(contender: Contender, console: Console) -> None:
    title = Text.assemble(
        words.plain(contender.name), " ", (words.HOW[contender.verdict], _STYLES[contender.verdict]), "."
    )
    departed = words.departed(contender)
    console.print(Text.assemble(title, f" {departed}" if departed else ""))
    for reason in contender.reasons:
        lines = words.plain(reason).strip().splitlines() or [words.NONE]
        if len(lines) > _MAX_LINES:  # of a traceback the end is the cause
            num_left_out = len(lines) - _MAX_LINES
            lines = [
                lines[0],
                f"... ({num_left_out} lines left out here; the page has them all)",
                *lines[1 - _MAX_LINES :],
            ]
        console.print(Padding(Text("\n".join(lines)), (0, 0, 0, 2)))
    console.print()
