# SPDX-License-Identifier: Apache-2.0
"""Faults at a chosen place: one rank raises, dies, hangs or slows down at one step of a real run.

    trainer = Trainer(strategy=..., callbacks=[Faults().kill_at(rank=1, step=3)])

and the same from a config:

    trainer:
      callbacks:
        - class_path: stratagem.testing.Faults
          init_args: {faults: [{kind: kill, rank: 1, step: 3}]}

A save has places of its own, so that it can be rehearsed what is left of it: `moment: save_written` is struck when the
checkpoint of that many steps is taken with `FaultTolerantCheckpointIO`.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, final

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from stratagem.checkpoint.manifest import rank_file
from stratagem.strategy.checkpoint_io import FaultTolerantCheckpointIO

Kind = Literal["raise", "kill", "hang", "slow", "full", "corrupt"]
Moment = Literal[
    "before_forward",
    "before_backward",
    "after_backward",
    "after_step",
    "save_staged",
    "save_drafted",
    "save_writing",
    "save_written",
    "save_agreed",
    "save_described",
    "save_manifest",
    "save_renamed",
    "save_committed",
    "save_settled",
]


class InjectedFault(RuntimeError):
    """The exception of `raise_at`: nothing but the test wanted it."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: what happens: an exception, SIGKILL, waiting for ever, a pause, a disk that is full, or one bit of this
            rank's file in the checkpoint that turns over; the last two in a save only.
        rank: the rank to which it happens.
        step: the number of optimizer steps made before the one in which it happens; in a save, those that it saves.
        moment: where in the step. With accumulation, at the first such moment. From `save_described` to
            `save_committed` rank 0 alone is there.
        seconds: the length of the pause of `slow`.
        attempt: in which attempt of a run that restarts, from 0, as `TORCHELASTIC_RESTART_COUNT` counts; None for each.
    """

    kind: Kind
    rank: int
    step: int
    moment: Moment = "before_forward"
    seconds: float = 1.0
    attempt: int | None = 0

    def __post_init__(self) -> None:
        if self.rank < 0 or self.step < 0 or self.seconds < 0:
            raise ValueError(f"{self}: rank, step and seconds must be 0 or more")
        if self.kind in ("full", "corrupt") and not self.moment.startswith("save_"):
            raise ValueError(f"{self}: this happens to a save only, so its moment begins with save_")


@final
class Faults(Callback):
    """A Lightning callback that makes chosen ranks fail at chosen steps; each fault happens once.

    Args:
        faults: what is to happen. The methods below return a copy with one more, so that a test reads as a sentence.
    """

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self.faults = tuple(faults)
        self._left = list(self.faults)
        self._attempt = 0

    def raise_at(self, *, rank: int, step: int, moment: Moment = "before_forward") -> Faults:
        """Raise `InjectedFault`."""
        return Faults([*self.faults, Fault("raise", rank, step, moment)])

    def kill_at(self, *, rank: int, step: int, moment: Moment = "before_forward") -> Faults:
        """End the process by SIGKILL, as the kernel does when memory runs out."""
        return Faults([*self.faults, Fault("kill", rank, step, moment)])

    def hang_at(self, *, rank: int, step: int, moment: Moment = "before_forward") -> Faults:
        """Wait for ever; only a signal ends it."""
        return Faults([*self.faults, Fault("hang", rank, step, moment)])

    def slow_at(self, *, rank: int, step: int, pause: timedelta, moment: Moment = "before_forward") -> Faults:
        """Wait for `pause`, then go on."""
        return Faults([*self.faults, Fault("slow", rank, step, moment, pause.total_seconds())])

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))  # torchrun's, and `--resume`'s
        io = trainer.strategy.checkpoint_io
        if isinstance(io, FaultTolerantCheckpointIO):
            io.watcher = partial(self.strike_save, trainer.global_rank)

    def strike_save(self, rank: int, point: str, step: int, folder: Path) -> None:
        """The watcher of this rank's saves, for who saves without a Trainer."""
        self._strike(rank, f"save_{point}", step, folder)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._strike(trainer.global_rank, "before_forward", trainer.global_step)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        self._strike(trainer.global_rank, "before_backward", trainer.global_step)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._strike(trainer.global_rank, "after_backward", trainer.global_step)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._strike(trainer.global_rank, "after_step", trainer.global_step - 1)  # the step that has just been made

    def _strike(self, rank: int, moment: str, step: int, folder: Path | None = None) -> None:
        for fault in list(self._left):
            due = fault.attempt is None or fault.attempt == self._attempt
            if due and (fault.rank, fault.step, fault.moment) == (rank, step, moment):
                self._left.remove(fault)
                _happen(fault, folder)


def _happen(fault: Fault, folder: Path | None) -> None:
    if fault.kind == "raise":
        raise InjectedFault(f"rank {fault.rank} was told to raise at step {fault.step}")
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "hang":
        while True:
            time.sleep(3600)
    if fault.kind == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if fault.kind == "corrupt":
        assert folder is not None
        with open(folder / rank_file(fault.rank), "r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
        return
    time.sleep(fault.seconds)
