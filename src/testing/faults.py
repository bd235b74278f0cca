# SPDX-License-Identifier: Apache-2.0
"""Faults at a chosen place: one rank raises, dies, hangs or slows down at one step of a real run.

    trainer = Trainer(strategy=..., callbacks=[Faults().kill_at(rank=1, step=3)])

and the same from a config:

    trainer:
      callbacks:
        - class_path: stratagem.testing.Faults
          init_args: {faults: [{kind: kill, rank: 1, step: 3}]}
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, final

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

Kind = Literal["raise", "kill", "hang", "slow"]
Moment = Literal["before_forward", "before_backward", "after_backward", "after_step"]


class InjectedFault(RuntimeError):
    """The exception of `raise_at`: nothing but the test wanted it."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: what happens: an exception, SIGKILL, waiting for ever, or a pause.
        rank: the rank to which it happens.
        step: the number of optimizer steps made before the one in which it happens.
        moment: where in the step. With accumulation, at the first such moment.
        seconds: the length of the pause of `slow`.
    """

    kind: Kind
    rank: int
    step: int
    moment: Moment = "before_forward"
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if self.rank < 0 or self.step < 0 or self.seconds < 0:
            raise ValueError(f"{self}: rank, step and seconds must be 0 or more")


@final
class Faults(Callback):
    """A Lightning callback that makes chosen ranks fail at chosen steps; each fault happens once.

    Args:
        faults: what is to happen. The methods below return a copy with one more, so that a test reads as a sentence.
    """

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self.faults = tuple(faults)
        self._left = list(self.faults)

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
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._strike(trainer, "before_forward", trainer.global_step)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        self._strike(trainer, "before_backward", trainer.global_step)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._strike(trainer, "after_backward", trainer.global_step)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._strike(trainer, "after_step", trainer.global_step - 1)  # the step that has just been made

    def _strike(self, trainer: Trainer, moment: Moment, step: int) -> None:
        for fault in list(self._left):
            if (fault.rank, fault.step, fault.moment) == (trainer.global_rank, step, moment):
                self._left.remove(fault)
                _happen(fault)


def _happen(fault: Fault) -> None:
    if fault.kind == "raise":
        raise InjectedFault(f"rank {fault.rank} was told to raise at step {fault.step}")
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "hang":
        while True:
            time.sleep(3600)
    time.sleep(fault.seconds)
