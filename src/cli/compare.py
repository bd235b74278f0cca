# SPDX-License-Identifier: Apache-2.0
"""Several strategies beside one process, on one config: losses, gradients, parameters, time, bytes, memory.

    stratagem compare --config configs/gpt_tiny.yaml --strategies ring_ddp,zero_1,zero_2,ddp --html report.html

Every other word is the run's, as `stratagem fit` takes it: --config, --trainer.devices 4, --data.global_batch 32, ...
A strategy is a name (`stratagem strategies` lists them) or the path of a config file that sets trainer.strategy, so
that one strategy can be compared with itself under other options.

Exit codes: 0 all are equal to one process; 1 one is not, or failed; 2 something that was written is wrong.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from stratagem.cli._contestants import Contestant, check_all, write_all
from stratagem.comparison.engine import Options, compare
from stratagem.errors import ConfigError, UserError

TAKES_RUN_OPTIONS = True
"""What this verb's own parser does not know belongs to the run, and arrives as `options.run`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--strategies", required=True, help="names or config files, with commas between them")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps held against one process (50)")
    parser.add_argument("--rounds", type=int, default=3, help="turns at full speed of each strategy; 0: no timing (3)")
    parser.add_argument("--timed-steps", type=int, default=3, help="counted steps of each such turn (3)")
    parser.add_argument("--baseline", help="the strategy whose step time is 1 (ddp if it takes part, else the last)")
    parser.add_argument("--tolerance", type=float, help="relative difference that counts as equal (float32: 1e-5)")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    parser.add_argument("--html", type=Path, help="write one self-contained page to this file")
    parser.add_argument("--sequential", action="store_true", help="one strategy after the other: for large models")


def run(options: argparse.Namespace) -> int:
    """Check everything, compare, show; returns 0 if all are equal to one process, else 1.

    Raises:
        ConfigErrors: every fault of every strategy's config; no process was started.
            Or, after all is shown: files that could not be written.
        RankError: the one process that all are held against failed.
    """
    asked = [word.strip() for word in options.strategies.split(",") if word.strip()]
    contestants = [Contestant.of(word, options.run) for word in asked]
    names = [each.name for each in contestants]
    baseline = options.baseline or ("ddp" if "ddp" in names else names[-1] if names else "")
    settings = Options(
        steps=options.steps,
        rounds=options.rounds,
        turn=options.timed_steps,
        tolerance=options.tolerance,
        baseline=baseline,
        sequential=options.sequential,
    )
    check_all(contestants, [options.json, options.html], _faults(names, baseline))
    found = compare([each.candidate for each in contestants], settings, config=options.run, say=say)
    say("")
    from stratagem.comparison import report  # what draws is needed only now

    report.show(found, Console())
    write_all(
        [
            (options.json, lambda file: file.write_text(found.to_json(), encoding="utf-8")),
            (options.html, lambda file: report.write_page(found, file)),
        ]
    )
    return 0 if found.passed else 1


def _faults(names: list[str], baseline: str) -> list[UserError]:
    found: list[UserError] = []
    where = "--strategies"
    twice = sorted({name for name in names if names.count(name) > 1})
    if not names:
        found.append(ConfigError("no strategy is named", where=where, allowed="names or files, with commas between"))
    if twice:
        do = "name each once; two files need two names"
        found.append(ConfigError(f"{', '.join(twice)} would take part twice", where=where, do=do))
    if names and baseline not in names:
        found.append(ConfigError(f"{baseline} takes no part", where="--baseline", allowed=", ".join(names)))
    return found


def say(text: str) -> None:
    """One line of a terminal that is written over by the next one; no thread, since processes are forked."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
