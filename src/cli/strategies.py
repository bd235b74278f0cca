# SPDX-License-Identifier: Apache-2.0
"""A table of every strategy: what it is, where it comes from, whether it can run here.

Ours, those of other installed packages, and Lightning's own. A class may say why it cannot run on this machine by a
class method `unavailable()` that returns the reason, or the empty string.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from stratagem.cli._availability import Row, rows

_TABLE_WIDTH = 120  # columns below which the table would break names and words
_NAME_WIDTH = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of a table")
    parser.add_argument("--no-import", action="store_true", help="do not try whether the plugins can be imported")


def run(options: argparse.Namespace) -> int:
    """Print the table; returns 0 also where a plugin is broken, since the table is what says so."""
    found = rows(load=not options.no_import)
    if options.json:
        print(json.dumps([asdict(row) for row in found], indent=2))
    else:
        console = Console()
        # In a pipe there is no width to fit into, and a cut line would be a lost one.
        console = console if console.is_terminal else Console(width=200)
        if console.width < _TABLE_WIDTH:
            print("\n".join(_list(found, console.width)))
        else:
            console.print(_table(found))
        print("`stratagem explain NAME` tells more; a config names one by `trainer.strategy: NAME`.")
    return 0


def _list(found: list[Row], width: int) -> Iterator[str]:
    """The same for a narrow terminal: names and what they are, below each package; why not, where it is so."""
    yield "strategies (* cannot run here)"
    for before, row in zip([None, *found], found, strict=False):
        package = f"{row.distribution} {row.version}"
        if before is None or package != f"{before.distribution} {before.version}":
            yield f"\n{package}"
        mark, told = ("*", row.why_not) if row.why_not else (" ", row.what)
        head = f" {mark} {row.name}".ljust(_NAME_WIDTH)
        if len(head) > _NAME_WIDTH:
            yield head
            head = ""
        indent = " " * _NAME_WIDTH
        yield from textwrap.wrap(told, width, initial_indent=head or indent, subsequent_indent=indent) or [head]
    yield ""


def _table(found: list[Row]) -> Table:
    table = Table("name", "runs here", "from", "what it is", title="strategies", title_justify="left")
    for before, row in zip([None, *found], found, strict=False):
        if before is not None and before.origin != row.origin:
            table.add_section()
        here = f"no: {row.why_not}" if row.why_not else "yes"
        table.add_row(row.name, here, f"{row.distribution} {row.version}", row.what, style="dim" if row.why_not else "")
    return table
