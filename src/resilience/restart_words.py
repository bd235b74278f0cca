# SPDX-License-Identifier: Apache-2.0
"""The options of a `fit` that restarts, `--resume`, `--max-restarts`, `--min-devices`, out of its command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from stratagem.errors import ConfigError
from stratagem.resilience.restart import Resume

OPTIONS = {
    "resume": (
        "auto|FOLDER",
        "go on from the newest checkpoint of this run, or from this one, and again when a rank fails; the callback "
        "ModelCheckpoint keeps them. Not with --ckpt_path",
    ),
    "max-restarts": ("N", "restarts without a newer checkpoint in between, at most, 3 if left out; 0 for none"),
    "min-devices": (
        "N",
        "after a rank has died go on with fewer devices, N at least, where they divide the global batch; if left out, "
        "with the same number",
    ),
}
"""What their values are called, and what they do."""


def take(verb: str, words: Sequence[str]) -> tuple[Resume | None, list[str]]:
    """What is said of restarts, None if nothing is; and the other words.

    Raises:
        ConfigError: an option without its value, without `--resume`, or for a verb that trains nothing.

    Example:
        >>> take("fit", ["--config", "run.yaml", "--resume=auto", "--min-devices", "2"])
        (Resume(source='auto', max_restarts=3, min_devices=2), ['--config', 'run.yaml'])
        >>> take("fit", ["--config", "run.yaml"])
        (None, ['--config', 'run.yaml'])
    """
    found: dict[str, str] = {}
    rest, left = [], list(words)
    while left:
        word = left.pop(0)
        name, assigned, value = word.partition("=")
        option = name.removeprefix("--").replace("_", "-")
        if not name.startswith("--") or option not in OPTIONS:
            rest.append(word)
            continue
        if not assigned:
            if not left or left[0].startswith("--"):
                raise ConfigError("it has no value", where=name, allowed=_allowed(option))
            value = left.pop(0)
        found[option] = value
    if not found:
        return None, rest
    if verb != "fit":
        raise ConfigError(f"{verb} has nothing to resume", where=f"--{next(iter(found))}", do="give --ckpt_path")
    if "resume" not in found:
        raise ConfigError("it says nothing without --resume", where=f"--{next(iter(found))}", do="add --resume auto")
    restarts, devices = _number(found, "max-restarts", 3, 0), _number(found, "min-devices", 0, 1)
    return Resume(found["resume"], restarts, devices), rest


def describe(parser: argparse.ArgumentParser) -> None:
    """Adds the options to a help text; a parser that parses a run must not know them, or it would hand them on."""
    group = parser.add_argument_group("Restarts")
    for option, (metavar, text) in OPTIONS.items():
        group.add_argument(f"--{option}", metavar=metavar, help=text, default=argparse.SUPPRESS)


def refuse_where_others_restart(options: Resume, words: Sequence[str]) -> bool:
    """Whether somebody else has started this process as a rank, and restarts it.

    Raises:
        ConfigError: then `--max-restarts` and `--min-devices` say nothing.
    """
    environments = (SLURMEnvironment, TorchElasticEnvironment, LSFEnvironment, MPIEnvironment)
    other = next((each.__name__ for each in environments if each.detect()), "")
    if not other and LightningEnvironment().creates_processes_externally:
        other = "whoever has set LOCAL_RANK"
    if other and any(word.startswith(("--max-restarts", "--min-devices")) for word in words):
        raise ConfigError(
            f"ranks are started by {other.removesuffix('Environment')}, and restarted by it alone",
            where="--max-restarts, --min-devices",
            do="leave them out, and tell whoever starts the ranks (torchrun --max-restarts 3 --nnodes 1:2)",
        )
    return bool(other)


def _allowed(option: str) -> str:
    return "auto, or the folder of a checkpoint" if option == "resume" else "a whole number"


def _number(found: dict[str, str], option: str, default: int, least: int) -> int:
    text = found.get(option, str(default))
    if not text.isdecimal() or (option in found and int(text) < least):
        raise ConfigError(f"it is {text!r}", where=f"--{option}", allowed=f"whole numbers from {least}")
    return int(text)
