# SPDX-License-Identifier: Apache-2.0
"""Back to an earlier checkpoint within the run: weights and optimizer go back, data and counters go on.

    step        1 ... 6 | 7 8 9 x            x: a spike, whose step is not made
    weights     .......W6 ------> W6 | 10 11 ...     taken from the checkpoint of step 6
    data        b1 ... b10 ---------> b11 b12 ...    the bad batch, and those since step 6, are not seen again

`global_step`, the data's position and the learning rate schedules go on as if the lost steps had been made: a lost step
costs its data, never its place in a schedule. What comes from the checkpoint is the module's state and the optimizers'
state with their step counts; the settings of their groups (the learning rate among them) stay as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from stratagem.strategy.checkpoint_io import FaultTolerantCheckpointIO
from stratagem.strategy.plain_state import PlainState


@final
class Checkpoints:
    """Which checkpoints this run has written or begun with, as its `ModelCheckpoint`s tell. Local.

    Example:
        >>> known = Checkpoints()
        >>> known.add("a", 3), known.add("b", 6)
        (None, None)
        >>> known.newest(bad=7, back=2, exists=lambda _: True)
        ('a', 3)
    """

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}

    def add(self, path: str, step: int) -> None:
        """One more."""
        self._steps[path] = step

    def look(self, trainer: Trainer) -> None:
        """Takes in what was written since the last look."""
        for callback in trainer.checkpoint_callbacks:
            if not isinstance(callback, ModelCheckpoint) or callback.save_weights_only:
                continue
            if callback._last_checkpoint_saved:
                self._steps.setdefault(callback._last_checkpoint_saved, callback._last_global_step_saved)

    def newest(self, *, bad: int, back: int, exists: Any = lambda path: Path(path).exists()) -> tuple[str, int] | None:
        """Path and step of the newest one that is there and at least `back` steps older than step `bad`."""
        fitting = [(step, path) for path, step in self._steps.items() if bad - step >= back and exists(path)]
        step, path = max(fitting, default=(-1, ""))
        return (path, step) if path else None

    def forget_after(self, step: int) -> None:
        """Those of a branch that was given up are not gone back to."""
        self._steps = {path: theirs for path, theirs in self._steps.items() if theirs <= step}


def settle(trainer: Trainer) -> None:
    """Waits for the save in flight, if the plugin has one. Collective."""
    if isinstance(trainer.strategy.checkpoint_io, FaultTolerantCheckpointIO):
        trainer.strategy.checkpoint_io.settle()


def roll_back(trainer: Trainer, module: LightningModule, path: str) -> None:
    """Takes model and optimizers back to a checkpoint. Every rank calls it, between two optimizer steps.

    Raises:
        CheckpointError: it cannot be read.
    """
    strategy = trainer.strategy
    checkpoint = strategy.load_checkpoint(path, weights_only=False)  # this run has written it itself
    settings = [
        [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        for optimizer in trainer.optimizers
    ]
    strategy.load_model_state_dict(checkpoint, strict=module.strict_loading)
    strategy.load_optimizer_state_dict(checkpoint)
    for optimizer, groups in zip(trainer.optimizers, settings, strict=True):
        for group, kept in zip(optimizer.param_groups, groups, strict=True):
            group.update(kept)
        optimizer.zero_grad()
    if isinstance(strategy, PlainState):  # neither the window nor the random numbers of then are gone back to
        strategy._window = strategy._random_state = None
