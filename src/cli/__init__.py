# SPDX-License-Identifier: Apache-2.0
"""The command line: `stratagem VERB ...`.

    fit validate test predict     LightningCLI's own verbs, with every config error reported at once
    strategies explain ...        ours: one module of this package each

A new verb is a new module here: its name is the verb, the first line of its docstring is the help, `add_arguments`
declares its options and `run` does the work and returns the exit code. Where it says `TAKES_RUN_OPTIONS = True`, words
that it does not declare are those of a run, and arrive as `options.run`. Modules whose name begins with an underscore
are no verbs. Only the module of the verb that was asked for is imported.

Exit codes: 0 it worked; 1 the run failed; 2 something the user wrote is wrong, and one line on stderr says what.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_only

import stratagem
from stratagem.errors import CommunicationError, ConfigError, RankError, UserError
from stratagem.registry import near

RUN_VERBS = {
    "fit": "train a model",
    "validate": "one pass over the validation data",
    "test": "one pass over the test data",
    "predict": "one pass over the prediction data",
}
"""LightningCLI's own verbs, and what they do in one line."""


class Verb(Protocol):
    """What a module of this package offers to be a verb."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options of the verb."""
        ...

    def run(self, options: argparse.Namespace) -> int:
        """Do the work; returns the exit code, and raises `UserError` for what the user can mend."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Args:
        argv: the words after `stratagem`; those of this process where left out.

    Returns:
        The exit code; nothing is raised but `KeyboardInterrupt`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    show_traceback = "--traceback" in words or os.environ.get("STRATAGEM_TRACEBACK", "0") not in ("", "0")
    words = [word for word in words if word != "--traceback"]
    try:
        return _dispatch(words)
    except SystemExit as done:  # argparse: help and version were printed, or the usage was
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except Exception as error:
        return _report(error, " ".join(["stratagem", *(word for word in words[:1] if word in verbs())]), show_traceback)


def verbs() -> dict[str, str]:
    """Every verb with its one line of help, ours in alphabetical order; imports none of them."""
    ours = {}
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            source = (Path(__path__[0]) / f"{module.name}.py").read_text(encoding="utf-8")
            ours[module.name] = (ast.get_docstring(ast.parse(source)) or "").split("\n")[0].rstrip(".")
    return {**RUN_VERBS, **ours}


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"stratagem {stratagem.__version__}")
        return 0
    verb, rest = words[0], words[1:]
    known = verbs()
    if verb in RUN_VERBS:
        from stratagem.cli._run import run

        return run(verb, rest)
    if verb not in known:
        close = near(verb, known)
        hint = f" (did you mean {' or '.join(close)}?)" if close else ""
        what = f"{verb!r} is no verb{hint}" if not verb.startswith("-") else f"the verb comes before {verb}"
        raise ConfigError(what, allowed=", ".join(known))
    module = cast(Verb, importlib.import_module(f"{__name__}.{verb}"))
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        f"stratagem {verb}", description=cast(str, module.__doc__), formatter_class=formatter
    )
    module.add_arguments(parser)
    if not getattr(module, "TAKES_RUN_OPTIONS", False):
        return module.run(parser.parse_args(rest))
    parser.allow_abbrev = False
    options, options_of_the_run = parser.parse_known_args(rest)
    options.run = options_of_the_run
    return module.run(options)


def _report(error: Exception, command: str, show_traceback: bool) -> int:
    """Say what went wrong, on stderr and from one rank only; returns the exit code."""
    users_fault = isinstance(error, UserError | MisconfigurationException)
    tells_all = users_fault or isinstance(error, CommunicationError | RankError)
    if show_traceback or not tells_all:
        traceback.print_exception(error)
    elif not getattr(rank_zero_only, "rank", 0):
        print(f"{command}: {error}", file=sys.stderr)
    return 2 if users_fault else 1


def _help() -> str:
    width = max(map(len, verbs())) + 2
    lines = [f"  {verb:{width}}{text}" for verb, text in verbs().items()]
    return "\n".join(
        [
            "stratagem VERB ...: train one ordinary LightningModule under any parallel strategy, by config alone",
            "",
            *lines,
            "",
            "Example:",
            "  stratagem fit --config configs/gpt_tiny.yaml --config configs/strategy/ring_ddp.yaml",
            "  stratagem fit --config configs/gpt_tiny.yaml --trainer.strategy ddp",
            "",
            "`stratagem VERB --help` lists the options of a verb. Later --config files and options win.",
            "--traceback, or STRATAGEM_TRACEBACK=1, shows where an error comes from.",
        ]
    )
