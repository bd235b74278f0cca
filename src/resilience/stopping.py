# SPDX-License-Identifier: Apache-2.0
"""`GracefulStop`: at a signal, or when its time is up, a run saves and ends, on all ranks at the same batch.

    any rank    signal, or time is up: takes a note, no more
    all ranks   after each batch, one vote of one number: has anybody a note? Then save, settle, leave

A handler of a signal may come at any moment, in the middle of a collective too; so it only writes down that it was
called. What a signal does not reach are ranks that hang: for those there is the launcher's patience, or torchrun's.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, final

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import _TunerExitException  # Lightning's one way to end a run at once
from typing_extensions import override

from stratagem.errors import ConfigError
from stratagem.strategy.checkpoint_io import FaultTolerantCheckpointIO

SignalName = Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"]
STOPPED_BY_SIGNAL = 128 + signal.SIGTERM
"""The exit code of a run that a signal has stopped, whichever it was."""

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(text: str) -> timedelta:
    """A time in words: a number and `s`, `m`, `h` or `d`, or Lightning's `DD:HH:MM:SS`.

    Raises:
        ConfigError: it is neither, or nothing.

    Example:
        >>> duration("90s"), duration("1.5h"), duration("00:12:00:00")
        (datetime.timedelta(seconds=90), datetime.timedelta(seconds=5400), datetime.timedelta(seconds=43200))
    """
    found = timedelta(0)
    if match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd])\s*", text):
        found = timedelta(seconds=float(match[1]) * _UNITS[match[2]])
    elif match := re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", text):
        days, hours, minutes, seconds = map(int, match.groups())
        found = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    if found <= timedelta(0):
        raise ConfigError(f"{text!r} is no time", where="max_duration", allowed="90s, 15m, 6h, 2d or DD:HH:MM:SS")
    return found


@final
class GracefulStop(Callback):
    """Saves a checkpoint and ends a fit on all ranks together, at a signal or after a time.

    The checkpoint is taken after a batch, in the middle of an epoch or of a window of accumulated gradients too, as a
    `ModelCheckpoint` takes it; what callbacks that are listed later and the module do at the end of that batch is left
    out. The run is not brought to its end: there is no validation and no `on_train_end`. While validation runs, a
    signal waits for the next batch of training.

    Costs one all-reduce of one number after each batch.

    A run that was stopped by its time ends as one that is done, with exit code 0. One that a signal stopped ends with
    143 (`STOPPED_BY_SIGNAL`). The parent of forked ranks passes SIGTERM on, and gives them 30 s. In those ranks SIGUSR1
    asks where they hang, so it is heeded by the parent of `--resume`, and by ranks that others have started.

    Args:
        max_duration: how long a run may take: `90s`, `15m`, `6h`, `2d` or `DD:HH:MM:SS`; restarts by `--resume`
            included.
        signals: what stops it.
        dirpath: where the checkpoint goes; that of the first `ModelCheckpoint`, or `default_root_dir/checkpoints`,
            where left out.

    Attributes:
        stopped: the checkpoint, after a stop; else an empty text.
        began: when the time began (`time.monotonic`); None for the beginning of the fit.

    Raises:
        ConfigError: a time that is none.

    Example:
        >>> GracefulStop(max_duration="6h").limit
        datetime.timedelta(seconds=21600)
    """

    def __init__(
        self,
        max_duration: str | None = None,
        signals: tuple[SignalName, ...] = ("SIGTERM", "SIGUSR1"),
        dirpath: str | None = None,
    ) -> None:
        self.limit = duration(max_duration) if max_duration is not None else None
        self.signals, self.dirpath = tuple(signals), dirpath
        self.stopped, self.began = "", None
        self._noted: str = ""
        self._before: dict[int, Any] = {}

    began: float | None

    # -- notes -----------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the signals over; Lightning has put its own handlers before."""
        self.began, self._noted = self.began or time.monotonic(), ""
        if threading.current_thread() is not threading.main_thread():
            return  # signals are the main thread's; the time still counts
        for name in self.signals:
            signum = signal.Signals[name]
            if signum == signal.SIGUSR1 and _is_forked(trainer):
                continue
            self._before[signum] = signal.signal(signum, self._note)

    def _note(self, signum: int, frame: Any) -> None:
        self._noted = signal.Signals(signum).name

    def _is_late(self) -> bool:
        assert self.began is not None
        return self.limit is not None and time.monotonic() - self.began >= self.limit.total_seconds()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._give_back()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._give_back()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._give_back()

    def _give_back(self) -> None:
        before, self._before = self._before, {}
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)

    # -- the vote --------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Collective: every rank votes, and all leave together."""
        vote = trainer.strategy.reduce_boolean_decision
        if not vote(bool(self._noted) or self._is_late(), all=False):
            return
        by_signal = vote(bool(self._noted), all=False)
        self.stopped = self._save(trainer)
        if trainer.is_global_zero:
            why = "a signal" if by_signal else f"its {self.limit} are over"
            print(
                f"\nStopped after {trainer.global_step} steps ({why}): the checkpoint is {self.stopped}; "
                f"go on with --resume auto, or --ckpt_path {self.stopped}",
                flush=True,
            )
        if by_signal and not _is_forked(trainer) and not (_started_by_rank_0(trainer) and trainer.global_rank):
            raise SystemExit(STOPPED_BY_SIGNAL)
        if by_signal and _is_forked(trainer) and trainer.is_global_zero:
            os.kill(os.getppid(), signal.SIGTERM)  # it ends with 143, wherever the signal came first
        raise _TunerExitException

    def _save(self, trainer: Trainer) -> str:
        """Collective; the checkpoint is committed when it returns. An earlier stop's is not needed any more."""
        kept = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
        folder = self.dirpath or next((each.dirpath for each in kept if each.dirpath), None)
        folder = trainer.strategy.broadcast(str(folder or Path(trainer.default_root_dir) / "checkpoints"))
        path = Path(folder) / f"stopped-step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(path)
        io = trainer.strategy.checkpoint_io
        if isinstance(io, FaultTolerantCheckpointIO):
            io.settle()
        if trainer.is_global_zero:
            for old in Path(folder).glob("stopped-step=*.ckpt"):
                if old != path:
                    io.remove_checkpoint(old)
        return str(path)


def _is_forked(trainer: Trainer) -> bool:
    """Whether this is a rank that `WarmLauncher` has forked: it has put its own function in place of Lightning's."""
    return "_sigterm_notifier_fn" in vars(trainer._signal_connector)


def _started_by_rank_0(trainer: Trainer) -> bool:
    """Collective: whether rank 0 has started the others as Lightning's `ddp` does: it dies if one of them leaves with
    another code than 0 before it is gone itself."""
    found: bool = trainer.strategy.broadcast(bool(getattr(trainer.strategy.launcher, "procs", ())))
    return found
