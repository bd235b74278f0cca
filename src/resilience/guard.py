# SPDX-License-Identifier: Apache-2.0
"""The guard: one callback that watches a run, says what is wrong with which rank, and does what was agreed about it.

    heartbeat     who hangs, in which phase, on which line, in which collective           guard_heartbeat, guard_where
    stragglers    who is slow, by own time without waiting                                guard_stragglers, guard_pulse
    bad_steps     a loss or gradient that is not finite, or a spike: stop, skip, roll back guard_policy, guard_rollback
    drift         replicas that are no replicas any more                                  guard_drift
    summary       where the time went, over all attempts of the run                       guard_summary

    trainer:
      callbacks:
        - class_path: stratagem.resilience.guard.Guard
          init_args:
            heartbeat: {hang_after: 00:05:00}
            bad_steps: {action: skip, spike_factor: 4}
            drift: {every: 100}

What a step costs: with `bad_steps` one maximum of two numbers over all ranks, and under ZeRO the norm of the gradient
(one number, and again one in clipping); with `stragglers` one number per rank every `every` steps; the heartbeat sends
nothing.

Note [a skipped step]: the gradients are cleared right before the optimizer's step, on all ranks, so that the optimizer
finds nothing to do: parameters, moments and step counts stay as they were, bit for bit, and so do buffers, which the
forward may have spoiled. `global_step`, the schedules and the data go on, as when a loss scaler skips.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from stratagem.errors import DivergedError, DriftError
from stratagem.resilience.guard_drift import Sentinel
from stratagem.resilience.guard_heartbeat import Monitor
from stratagem.resilience.guard_limits import check, check_optimizers, gradient_norm
from stratagem.resilience.guard_peers import Peers
from stratagem.resilience.guard_policy import Judge
from stratagem.resilience.guard_pulse import Pulse, Sampler
from stratagem.resilience.guard_rollback import Checkpoints, roll_back, settle
from stratagem.resilience.guard_settings import BadSteps, Drift, Heartbeat, Stragglers
from stratagem.resilience.guard_stragglers import Scores
from stratagem.resilience.guard_summary import Attempt, Logbook, show

log = logging.getLogger(__name__)

_DEFAULT_HEARTBEAT, _DEFAULT_STRAGGLERS = Heartbeat(), Stragglers()
_WRITE_EVERY = 5.0  # seconds between two notes of a running attempt


@final
class Guard(Callback):
    """Watches a fit. Put it before callbacks whose time is to be counted as part of a step, after those that act.

    Args:
        heartbeat: who hangs; null: nobody looks.
        stragglers: who is slow; null: nobody measures.
        bad_steps: what to do about losses and gradients that are not finite or too large; null: nothing.
        drift: whether replicas are equal; null: nobody compares.
        folder: for reports, shared by all ranks and all attempts of the run; `guard` in the Trainer's
            `default_root_dir` where left out.

    Raises:
        ConfigError: at the start of a fit, for what the strategy or the module cannot do.
        DivergedError: on every rank: a bad step, if those stop the run, or too many of them.
        DriftError: on every rank: replicas differ.
        HangError: on the rank that hung; `CommunicationError` on the others.
    """

    def __init__(
        self,
        heartbeat: Heartbeat | None = _DEFAULT_HEARTBEAT,
        stragglers: Stragglers | None = _DEFAULT_STRAGGLERS,
        bad_steps: BadSteps | None = None,
        drift: Drift | None = None,
        folder: str | None = None,
    ) -> None:
        self.heartbeat, self.stragglers, self.bad_steps, self.drift = heartbeat, stragglers, bad_steps, drift
        self.folder = folder
        self.attempt = Attempt(0.0, 0.0)
        self._judge = Judge(bad_steps) if bad_steps is not None else None
        self._forget()

    def _forget(self) -> None:
        """As before a fit: nothing that runs, and nothing that could not travel between processes."""
        self._pulse = Pulse()
        self._peers: Peers | None = None
        self._monitor: Monitor | None = None
        self._sampler: Sampler | None = None
        self._sentinel: Sentinel | None = None
        self._scores: Scores | None = None
        self._logbook: Logbook | None = None
        self._checkpoints = Checkpoints()
        self._handles: list[Any] = []
        self._hangs: list[str] = []
        self._loss: Tensor | None = None
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._in_window = self._closed = False
        self._bad_at: int | None = None
        self._exchanged: tuple[int, float] | None = None  # steps and own seconds at the last exchange
        self._last_gradient = 0.0

    # -- start and end ---------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begins to watch; every rank calls it, and tells the others one small object."""
        if stage != "fit":
            return
        check(trainer, pl_module, self.heartbeat, self.bad_steps, self.drift)
        self._forget()
        self._peers = peers = Peers(trainer)
        began = peers.objects(time.time())[0]
        folder = Path(self.folder or Path(trainer.default_root_dir) / "guard")
        self.attempt, self._hangs = Attempt(began, began), []
        if trainer.is_global_zero:
            self._logbook = Logbook(folder, resumes=trainer.ckpt_path is not None)
        if self.heartbeat is not None:
            self._monitor = Monitor(
                self._pulse,
                peers.rank,
                peers.size,
                folder / "beats",
                self.heartbeat,
                token=str(began),
                on_hang=self._hear_of_hang,
            )
        if self.stragglers is not None and peers.size > 1:
            self._sampler, self._scores = Sampler(self._pulse), Scores(self.stragglers)
        self._watch_saves(trainer)

    def _watch_saves(self, trainer: Trainer) -> None:
        """Callbacks save through this one method; there is no hook after a save."""
        theirs, pulse = trainer.save_checkpoint, self._pulse

        def save_checkpoint(*args: Any, **kwargs: Any) -> None:
            before = pulse.phase
            pulse.mark("save")
            try:
                theirs(*args, **kwargs)
            finally:
                pulse.mark(before)

        trainer.save_checkpoint = save_checkpoint  # type: ignore[method-assign]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._peers is not None
        self.attempt.first = self.attempt.last = trainer.global_step
        if trainer.ckpt_path is not None:
            self._checkpoints.add(str(trainer.ckpt_path), trainer.global_step)
        if self.drift is not None:
            self._sentinel = Sentinel(trainer, pl_module, self._peers, self.drift)
        check_optimizers(trainer, self.bad_steps)
        if self._sampler is not None and isinstance(trainer.strategy, DDPStrategy):  # see `Sampler`
            trained = [parameter for parameter in pl_module.parameters() if parameter.requires_grad]
            self._handles = [each.register_post_accumulate_grad_hook(self._on_gradient) for each in trained]
        self._pulse.mark("data", step=trainer.global_step)

    def _on_gradient(self, parameter: Tensor) -> None:
        self._last_gradient = time.perf_counter()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pulse.mark("end")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end(trainer, "finished")

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        for hang in self._hangs:  # a peer that gave up first may have ended this rank, with words about itself
            if hang not in str(exception):
                exception.add_note(hang)
        self._end(trainer, type(exception).__name__)

    def _end(self, trainer: Trainer, outcome: str) -> None:
        """Ends the threads, on the failing path too, and tells what became of the time. Local."""
        if self._peers is None:
            return
        trainer.__dict__.pop("save_checkpoint", None)
        for handle in self._handles:
            handle.remove()
        for each in (self._monitor, self._sampler):
            if each is not None:
                each.close()
        self._pulse.mark("end")
        self.attempt.outcome = outcome
        if self._logbook is not None:
            self._tell()
            show(self._logbook.close(self.attempt))
        self._forget()

    def _note(self, text: str) -> None:
        self.attempt.notes.append(text)

    def _hear_of_hang(self, report: dict[str, Any]) -> None:
        self._hangs.append(report["words"][0])
        self._note(report["words"][0])

    def _tell(self) -> None:
        pulse, attempt = self._pulse, self.attempt
        attempt.training, attempt.saving = pulse.training, pulse.seconds["save"]
        attempt.validating = pulse.seconds["validation"]
        attempt.waiting = pulse.waiting if self._sampler is not None else None
        if self._logbook is not None:
            self._logbook.write(attempt)

    # -- one step --------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._in_window:
            self._in_window, self._closed, self._loss = True, False, None
            if self.bad_steps is not None and self.bad_steps.action != "stop":
                self._buffers = [(buffer, buffer.detach().clone()) for buffer in pl_module.buffers()]
        self._pulse.mark("forward", step=trainer.global_step, batch=batch_idx)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Lightning has divided the loss by the number of micro-batches, so that their sum is the window's mean."""
        if self._judge is not None:
            mine = loss.detach().double()
            self._loss = mine if self._loss is None else self._loss + mine
        self._pulse.mark("backward")

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._last_gradient:
            self._pulse.waiting += time.perf_counter() - self._last_gradient
            self._last_gradient = 0.0
        self._pulse.mark("step")

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Judges the step, together; see Note [a skipped step]. Collective over the world."""
        self._in_window, self._closed = False, True
        if self._judge is None:
            return
        assert self.bad_steps is not None
        assert self._peers is not None
        loss, norm = float(self._loss) if self._loss is not None else 0.0, 0.0
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:  # gradients that are not finite are its own business
            loss /= scaler.get_scale()
        elif self.bad_steps.gradient:
            norm = gradient_norm(trainer, optimizer)
        reason = self._judge.verdict(*self._peers.largest([loss, norm]))
        if reason:
            self._avert(trainer, optimizer, f"step {trainer.global_step + 1}: {reason}")

    def _avert(self, trainer: Trainer, optimizer: Optimizer, what: str) -> None:
        settings, judge = self.bad_steps, self._judge
        assert settings is not None
        assert judge is not None
        self._note(what)
        if settings.action == "stop" or judge.in_a_row >= settings.limit:
            text = what if settings.action == "stop" else f"{what}; it is the {judge.in_a_row}th bad step in a row"
            raise DivergedError(text)
        if trainer.is_global_zero:
            log.warning("%s. No step is made.", what)
        optimizer.zero_grad()
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        self.attempt.skipped += 1
        if settings.action == "roll_back":
            self._bad_at = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Between two steps: goes back if need be, compares, exchanges. Collective over the world when one is due."""
        self.attempt.last = trainer.global_step
        self._checkpoints.look(trainer)
        self._pulse.mark("data", step=trainer.global_step, batch=batch_idx)
        if not self._closed:
            return
        self._closed = self._in_window = False
        if self._bad_at is not None:
            self._go_back(trainer, pl_module, self._bad_at)
            self._bad_at = None
        if self.drift is not None and trainer.global_step % self.drift.every == 0:
            self._compare(trainer)
        if self._scores is not None:
            self._exchange(trainer, self._scores)
        if self._logbook is not None and time.time() - self.attempt.told > _WRITE_EVERY:
            self._tell()

    def _go_back(self, trainer: Trainer, pl_module: LightningModule, bad: int) -> None:
        assert self.bad_steps is not None
        assert self._peers is not None
        settle(trainer)
        found = self._peers.objects(self._checkpoints.newest(bad=bad, back=self.bad_steps.back))[0]
        if found is None:
            raise DivergedError(
                f"{self.attempt.notes[-1]}; and there is no checkpoint of this run that is {self.bad_steps.back} steps "
                "older: let a ModelCheckpoint save more often and keep more (every_n_train_steps, save_top_k)"
            )
        path, step = found
        roll_back(trainer, pl_module, path)
        self._checkpoints.forget_after(step)
        self.attempt.rolled_back += bad - step
        self._note(f"back to step {step}: {path}")
        if trainer.is_global_zero:
            log.warning("Model and optimizer are back at step %s (%s); the data goes on.", step, path)

    def _compare(self, trainer: Trainer) -> None:
        assert self.drift is not None
        assert self._sentinel is not None
        found = self._sentinel.check()
        if found:
            text = f"after step {trainer.global_step}: {found}"
            self._note(text)
            if self.drift.action == "stop":
                raise DriftError(text)
            if trainer.is_global_zero:
                log.warning("%s", text)

    def _exchange(self, trainer: Trainer, scores: Scores) -> None:
        """One number per rank, if it is time for it."""
        assert self._peers is not None
        assert self.stragglers is not None
        own = self._pulse.training - self._pulse.waiting
        if self._exchanged is None:  # the first step loads, compiles and allocates: it is none to judge by
            self._exchanged = (trainer.global_step, own)
            return
        steps, seconds = self._exchanged
        if trainer.global_step - steps < self.stragglers.every:
            return
        mine = max(own - seconds, 0.0) / (trainer.global_step - steps)
        self._exchanged = (trainer.global_step, own)
        everyone = [each for (each,) in self._peers.everyone([mine])]
        for rank in scores.add(everyone):
            text = (
                f"after step {trainer.global_step}: rank {rank} is slow, {everyone[rank]:.3g} s of its own per step, "
                f"{scores.last[rank]:.3g} times the median"
            )
            self._note(text)
            if trainer.is_global_zero:
                log.warning("%s", text)
        for logger in trainer.loggers:
            logger.log_metrics({"guard/straggler_score": max(scores.last)}, step=trainer.global_step)

    # -- phases that interrupt -------------------------------------------------------------------------------------

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pulse.mark("validation")

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._pulse.mark("validation", batch=batch_idx)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pulse.mark("start" if trainer.sanity_checking else "data")

    # -- over a restart --------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """What good steps looked like; equal on all ranks."""
        return {} if self._judge is None else {"judge": self._judge.state_dict()}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if self._judge is not None and "judge" in state_dict:
            self._judge.load_state_dict(state_dict["judge"])
