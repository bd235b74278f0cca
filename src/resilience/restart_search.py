# SPDX-License-Identifier: Apache-2.0
"""Where the checkpoints of a run are, which of them is the newest whole one, and whether it is of this model.

Note [of this run]: a run finds the checkpoints of every run that keeps them in the same place:

    a ModelCheckpoint with `dirpath`        in that folder
    one without, the Trainer has a logger   in `save_dir/name/*/checkpoints`, all versions of the first logger
    one without, and there is no logger     in `default_root_dir/checkpoints`
    GracefulStop                            in its `dirpath`, else where the first ModelCheckpoint keeps its own

A `ModelCheckpoint(save_weights_only=True)` counts for nothing: no run goes on from it. The newest checkpoint is the one
of the highest step, and of those the youngest. So another experiment needs a place of its own, and a run that has
ended, started again, ends at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn

from stratagem.checkpoint import commit
from stratagem.checkpoint.manifest import MANIFEST
from stratagem.checkpoint.reading import Reader
from stratagem.errors import CheckpointError, ConfigError
from stratagem.resilience.stopping import GracefulStop
from stratagem.strategy.checkpoint_io import FaultTolerantCheckpointIO

_SHOWN = 3


@final
@dataclass(frozen=True)
class Found:
    """A committed checkpoint: its folder, the optimizer steps in it, and when it was committed (`time.time`)."""

    path: Path
    step: int
    created: float


def places(trainer: Trainer) -> tuple[str, ...]:
    """Globs of the folders that hold the run's checkpoints: see Note [of this run].

    Raises:
        ConfigError: nothing in this run keeps a checkpoint from which it could go on.
    """
    found: list[str] = []
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and not callback.save_weights_only:
            found.append(str(callback.dirpath) if callback.dirpath is not None else _usual(trainer))
    owner: list[object] = vars(trainer)["callbacks"]
    found += [str(each.dirpath) for each in owner if isinstance(each, GracefulStop) and each.dirpath]
    if not found:
        raise ConfigError(
            "this run keeps no checkpoint, so there would be nothing to resume from",
            where="--resume",
            do="add lightning.pytorch.callbacks.ModelCheckpoint to trainer.callbacks, not with save_weights_only, "
            "for instance with every_n_train_steps: 100",
        )
    return tuple(dict.fromkeys(found))


def make_resumable(trainer: Trainer) -> None:
    """Gives Lightning's own strategies checkpoints that are committed, where the user gave no plugin for them.

    Raises:
        ConfigError: the strategy, or the user's plugin, writes checkpoints of which nobody can tell whether they are
            whole.
    """
    strategy = trainer.strategy
    foreign = isinstance(strategy, DeepSpeedStrategy | FSDPStrategy | ModelParallelStrategy)
    if not foreign and type(strategy.checkpoint_io).__name__ == "TorchCheckpointIO":
        strategy.checkpoint_io = FaultTolerantCheckpointIO()
    if foreign or not isinstance(strategy.checkpoint_io, FaultTolerantCheckpointIO):
        writer = strategy if foreign else strategy.checkpoint_io
        raise ConfigError(
            f"{type(writer).__name__} writes checkpoints without a manifest, so a whole one cannot be told from a half",
            where="--resume",
            do="use a strategy of stratagem's own or ddp, with no other checkpoint plugin; or give --ckpt_path",
        )


def newest(places: Iterable[str], since: float = 0.0) -> Found | None:
    """The newest whole checkpoint in these places; one that is damaged is passed over, aloud.

    Sizes are compared here. Checksums are too where no other checkpoint lies beside, since the checkpoint plugin, which
    compares them later, falls back to a neighbour only.

    Args:
        places: globs of folders.
        since: not those that were committed earlier.
    """
    for found in _all(places):
        if found.created < since:
            continue
        faults = commit.faults(found.path, deep=not commit.before(found.path))
        if not faults:
            return found
        rank_zero_warn(f"{found.path} is damaged, and passed over: {'; '.join(faults[:_SHOWN])}")
    return None


def check_model(path: Path, module: LightningModule) -> None:
    """Whether the checkpoint is of this model, as far as the model is built before the run.

    Raises:
        CheckpointError: it has other names or shapes.
    """
    here = module.state_dict()
    if not here or not module.strict_loading or not (path / MANIFEST).is_file():
        return
    manifest = Reader(path).manifest
    there = {name: manifest.entries.get(manifest.aliases.get(name, name)) for name in here}
    faults = []
    for name, tensor in here.items():
        entry = there[name]
        if entry is None and tensor.numel() > 1:  # a single number is not stored as a tensor
            faults.append(f"{name!r} is not in it")
        elif entry is not None and entry.shape != tuple(tensor.shape):
            faults.append(f"{name!r} has shape {entry.shape} there and {tuple(tensor.shape)} here")
    known = {*here, *(manifest.aliases.get(name, name) for name in here)}
    foreign = [name for name in manifest.entries if name not in known and "/" not in name]
    faults += [f"{name!r} is not in the model" for name in foreign]
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise CheckpointError(
            f"this checkpoint is of another model: {'; '.join(faults[:_SHOWN])}{more}",
            where=str(path),
            do="keep the checkpoints of each experiment in a place of their own (dirpath, or the logger's name)",
        )


def _usual(trainer: Trainer) -> str:
    """Where a ModelCheckpoint without `dirpath` puts its own, in all versions."""
    if not trainer.loggers:
        return str(Path(trainer.default_root_dir) / "checkpoints")
    logger = trainer.loggers[0]
    return str(Path(logger.save_dir or trainer.default_root_dir) / str(logger.name) / "*" / "checkpoints")


def _all(places: Iterable[str]) -> list[Found]:
    found = []
    for folder in {folder for place in places for folder in _folders(place)}:
        for path in commit.candidates(folder):
            try:
                about = Reader(path).manifest.about
            except CheckpointError as error:
                rank_zero_warn(f"{path} is damaged, and passed over: {error.what}")
                continue
            found.append(Found(path, int(about.get("global_step", -1)), float(about.get("created", 0.0))))
    return sorted(found, key=lambda each: (each.step, each.created, str(each.path)), reverse=True)


def _folders(place: str) -> list[Path]:
    path = Path(place)
    if path.parent.name != "*":
        return [path]
    return list(path.parent.parent.glob(f"*/{path.name}"))
