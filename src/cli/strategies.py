# SPDX-License-Identifier: Apache-2.0
"""A table of every strategy: what it is, where it comes from, whether it can run here.

Ours, those of other installed packages, and Lightning's own. A class may say why it cannot run on this machine by a
class method `unavailable()` that returns the reason, or the empty string.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from stratagem.cli._availability import Row, rows


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
        console.print(_table(found))
        console.print(
            "`stratagem explain NAME` tells more; a config names one by `trainer.strategy: NAME`.", highlight=False
        )
    return 0


def _table(found: list[Row]) -> Table:
    table = Table("name", "runs here", "from", "what it is", title="strategies", title_justify="left")
    for before, row in zip([None, *found], found, strict=False):
        if before is not None and before.origin != row.origin:
            table.add_section()
        here = f"no: {row.why_not}" if row.why_not else "yes"
        table.add_row(row.name, here, f"{row.distribution} {row.version}", row.what, style="dim" if row.why_not else "")
    return table
