# SPDX-License-Identifier: Apache-2.0
"""Does your own module train to the same numbers under a strategy as in one process? A certificate, in float64.

    stratagem check --config run.yaml --trainer.strategy zero_2 --trainer.devices 2 --json certificate.json

The run is taken as `stratagem fit` takes it, but for a few steps, in float64, and with SGD in place of its optimizer
(the same parameter groups, rates and weight decay): an optimizer that divides by the gradient's size, and float32,
hide wrong gradients. Clipping, accumulation and the data stay the run's own. With --own leave optimizer and precision
as they are.

Exit codes: 0 the numbers are those of one process; 1 they are not, or the run failed; 2 something is written wrong.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from stratagem.cli._contestants import Contestant, check_all, write_all
from stratagem.cli.compare import say
from stratagem.comparison import page_words as words
from stratagem.comparison.engine import Options, compare
from stratagem.comparison.results import Comparison, Contender, Deviation
from stratagem.errors import ConfigError, UserError

TAKES_RUN_OPTIONS = True
"""What this verb's own parser does not know belongs to the run, and arrives as `options.run`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps (5)")
    parser.add_argument("--tolerance", type=float, help="relative difference that counts as equal (float64: 1e-10)")
    parser.add_argument("--own", action="store_true", help="the run's own optimizer and precision")
    parser.add_argument("--json", type=Path, help="write the certificate to this file")


def run(options: argparse.Namespace) -> int:
    """Check the config, train, say what was found; returns 0 if all numbers are those of one process, else 1.

    Raises:
        ConfigErrors: every fault of the config; no process was started.
            Or, after all is shown: the file that could not be written.
        RankError: the one process failed.
    """
    written = Contestant("", tuple(options.run)).strategy
    faults: list[UserError] = []
    if written is None:
        what = "the run names no strategy"
        faults.append(ConfigError(what, where="trainer.strategy", do="add --trainer.strategy zero_2"))
    name = written if isinstance(written, str) else str((written or {}).get("class_path", "")).rpartition(".")[2]
    contestant = Contestant(name or "auto", tuple(options.run))
    settings = Options(
        steps=options.steps,
        rounds=0,
        tolerance=options.tolerance,
        precision=None if options.own else "64-true",
        optimizer="own" if options.own else "sgd",
    )
    check_all([contestant], [options.json], faults)
    found = compare([contestant.candidate], settings, config=options.run, say=say)
    say("")
    show(found, Console(), with_sgd=not options.own)
    write_all([(options.json, lambda file: file.write_text(found.to_json(), encoding="utf-8"))])
    return 0 if found.passed else 1


def show(found: Comparison, console: Console, *, with_sgd: bool) -> None:
    """Print the certificate: the verdict, what was compared, how far it is off, and why it may be."""
    (contender,) = found.contenders
    says = {
        "equal": "trains to the numbers of one process",
        "differs": "does not train to the numbers of one process",
        "other data": "was not given the samples of one process",
        "nothing trained": "trained nothing, as one process did, so nothing is proved",
        "failed": "failed",
    }
    style = "green" if contender.verdict == "equal" else "bold red"
    console.print(
        f"[{style}]{contender.name}[/] on {found.ranks or 'no'} ranks {says[contender.verdict]}", soft_wrap=True
    )
    how = "SGD" if with_sgd else "its own optimizer"
    console.print(
        f"{len(contender.losses)} of {found.steps} steps of {how} in {found.precision}, "
        f"global batch {found.reference.global_batch}, {found.reference.num_parameters} parameters\n"
    )
    for quantity, deviation in (
        ("loss", contender.loss),
        ("gradient norm", contender.gradient_norm),
        ("final parameters", contender.parameters),
    ):
        console.print(f"  {quantity:18}{_off(deviation)}", highlight=False, soft_wrap=True)
    if contender.verdict == "equal":
        reach = words.reach(found, contender.strict_steps, contender.widest)
        console.print(f"\nequal: {reach}", highlight=False, soft_wrap=True)
    console.print(f"\nallowed: {found.tolerance:.0e}{_drift(found, contender)}", highlight=False, soft_wrap=True)
    notes = list(found.reference.notes)
    if found.reference.unclipped:
        notes.append(f"No gradient reached the bound of clipping, {found.reference.clip:g}: clipping was not checked.")
    for reason in [*contender.reasons, *notes]:
        console.print(f"- {reason}", markup=False, highlight=False, soft_wrap=True)


def _off(deviation: Deviation | None) -> str:
    if deviation is None:
        return "not compared"
    return f"{deviation.relative:.1e}" + (f"  largest in {deviation.where}" if deviation.relative else "")


def _drift(found: Comparison, contender: Contender) -> str:
    """Where rounding alone carries one process beyond the tolerance, that is said."""
    strict = found.reference.twin_strict_steps
    if strict >= len(contender.losses):
        return ""
    return f" in the first {strict} steps; from there on rounding alone carries one process further than that"
