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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from lightning.pytorch.strategies import StrategyRegistry
from rich.console import Console

from stratagem import config
from stratagem.cli._quiet import quiet
from stratagem.cli._run import RunCLI, check_words
from stratagem.comparison.contender import Built, Candidate, Change
from stratagem.comparison.engine import Options, compare
from stratagem.errors import ConfigError, UserError
from stratagem.registry import strategies

TAKES_RUN_OPTIONS = True
"""What this verb's own parser does not know belongs to the run, and arrives as `options.run`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--strategies", required=True, help="names or config files, with commas between them")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps held against one process (50)")
    parser.add_argument("--rounds", type=int, default=3, help="turns at full speed of each strategy; 0: no timing (3)")
    parser.add_argument("--timed-steps", type=int, default=5, help="counted steps of each such turn (5)")
    parser.add_argument("--baseline", help="the strategy whose step time is 1 (ddp if it takes part, else the last)")
    parser.add_argument("--tolerance", type=float, help="relative difference that counts as equal (float32: 1e-5)")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    parser.add_argument("--html", type=Path, help="write one self-contained page to this file")
    parser.add_argument("--sequential", action="store_true", help="one strategy after the other: for large models")


def run(options: argparse.Namespace) -> int:
    """Check everything, compare, show; returns 0 if all are equal to one process, else 1.

    Raises:
        ConfigErrors: every fault of every strategy's config; no process was started.
        RankError: the one process that all are held against failed.
    """
    asked = [word.strip() for word in options.strategies.split(",") if word.strip()]
    contenders = [Contestant.of(word, options.run) for word in asked]
    names = [each.name for each in contenders]
    baseline = options.baseline or ("ddp" if "ddp" in names else names[-1] if names else "")
    _check(contenders, baseline, [options.json, options.html])
    found = compare(
        [Candidate(each.name, each.build, _about(each)) for each in contenders],
        Options(
            steps=options.steps,
            rounds=options.rounds,
            turn=options.timed_steps,
            tolerance=options.tolerance,
            baseline=baseline,
            sequential=options.sequential,
        ),
        config=options.run,
        say=_say,
    )
    _say("")
    from stratagem.comparison import report  # what draws is needed only now

    report.show(found, Console())
    if options.json:
        options.json.write_text(found.to_json(), encoding="utf-8")
    if options.html:
        report.write_page(found, options.html)
    return 0 if found.passed else 1


@final
@dataclass(frozen=True)
class Contestant:
    """One strategy, as the command line names it.

    Attributes:
        name: in the report: the registered name, or the stem of its config file.
        words: of a `fit` under it.
        overlay: its config file; empty for a name.
    """

    name: str
    words: tuple[str, ...]
    overlay: str = ""

    @classmethod
    def of(cls, word: str, run: list[str]) -> Contestant:
        """From a word of `--strategies`.

        Example:
            >>> Contestant.of("zero_1", ["--config", "a.yaml"]).words
            ('--config', 'a.yaml', '--trainer.strategy', 'zero_1')
            >>> Contestant.of("tuned/small_buckets.yaml", []).name
            'small_buckets'
        """
        if word.endswith((".yaml", ".yml")):
            return cls(Path(word).stem, (*run, "--config", word), word)
        return cls(word, (*run, "--trainer.strategy", word))

    def build(self, change: Change) -> Built:
        """Build the run as `fit` does; in the process of its own."""
        with quiet():
            cli = RunCLI(["fit", *self.words], change=change)
        arguments = cli._prepare_subcommand_kwargs("fit")
        return Built(cli.trainer, arguments.pop("model"), arguments)


def _check(contenders: list[Contestant], baseline: str, files: list[Path | None]) -> None:
    """Every fault at once. Raises `ConfigErrors`."""
    names, faults = [each.name for each in contenders], []
    where = "--strategies"
    twice = sorted({name for name in names if names.count(name) > 1})
    if not names:
        faults.append(ConfigError("no strategy is named", where=where, allowed="names or files, with commas between"))
    if twice:
        do = "name each once; two files need two names"
        faults.append(ConfigError(f"{', '.join(twice)} would take part twice", where=where, do=do))
    if names and baseline not in names:
        faults.append(ConfigError(f"{baseline} takes no part", where="--baseline", allowed=", ".join(names)))
    for file in files:
        if file is not None and not file.parent.is_dir():
            faults.append(ConfigError(f"there is no folder {file.parent}", where=str(file), do="make it first"))
    found: dict[str, UserError] = {str(fault): fault for fault in faults}
    for number, each in enumerate(contenders):
        if each.overlay:
            trainer = config.read(["--config", each.overlay]).values.get("trainer")
            if Path(each.overlay).is_file() and not (isinstance(trainer, dict) and trainer.get("strategy")):
                fault = ConfigError("it sets no trainer.strategy", where=each.overlay, do="name one there")
                found.setdefault(str(fault), fault)
        for problem in check_words(list(each.words), confirm=number == 0 or bool(each.overlay)):
            found.setdefault(str(problem), problem)  # a fault of the run is every contender's
    if found:
        raise config.ConfigErrors(list(found.values()))


def _about(contestant: Contestant) -> str:
    """The first line of what the strategy says about itself."""
    trainer = config.read(contestant.words).values.get("trainer")
    named: Any = trainer.get("strategy") if isinstance(trainer, dict) else None
    if not isinstance(named, str):
        return f"{(named or {}).get('class_path')}, from {contestant.overlay or 'the config'}"
    ours = strategies()
    theirs: Any = dict(StrategyRegistry).get(str(named).lower(), {})  # its `get` would build the strategy
    cls: Any = ours[named].load() if named in ours else theirs.get("strategy")
    return (getattr(cls, "__doc__", None) or "").strip().split("\n")[0].rstrip(".")


def _say(text: str) -> None:
    """One line of a terminal that is written over by the next one; no thread, since processes are forked."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
