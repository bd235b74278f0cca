# SPDX-License-Identifier: Apache-2.0
"""The callback in every rank of a contender: it watches the training, and stops it where another one has its turn.

It is the first callback, so that what it measures ends before others begin. It changes nothing that is trained. Where
the data's order is Lightning's own it puts ours in its place, for every strategy alike: `WholeOrder` for the one
process that reads what all ranks together read.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from stratagem.comparison.meter import Meter, held_parameters
from stratagem.comparison.observation import Sketcher, batch_hash, num_rows, random_state, whole_gradient_norm
from stratagem.comparison.protocol import Facts, Observed, Paused, Ready, Turn
from stratagem.comparison.whole_order import WholeOrder
from stratagem.data.sampler import Mode
from stratagem.strategy.base import MeshStrategy
from stratagem.strategy.loaders import LoaderOrder


@final
@dataclass(frozen=True)
class Place:
    """What a contender process knows before its ranks start.

    Attributes:
        address: the socket at which the comparing process listens.
        final: where rank 0 writes the final parameters.
        before: resident bytes before the module was built.
        stands_for: data ranks whose batches this one process reads; 0 for a contender.
        mode: what a loader's batch size means where the strategy does not say.
        nudged: every parameter begins one rounding away from where the run puts it.
    """

    address: str
    final: Path
    before: int | None = None
    stands_for: int = 0
    mode: Mode = "per_rank"
    nudged: bool = False


@final
class Conductor(Callback):
    """See the module; one per contender, copied into each of its ranks.

    Args:
        place: of this contender.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._pipe: Connection | None = None
        self._turn = Turn("stop")
        self._left = 0
        self._meter = Meter(place.before)
        self._sketcher: Sketcher | None = None
        self._shapes: dict[str, torch.Size] = {}
        self._facts = Facts()
        self._order: LoaderOrder | WholeOrder | None = None
        self._steps = self._global_step = self._random = 0
        self._met = False
        self._clear()

    def _clear(self) -> None:
        """A new optimizer step: nothing seen."""
        self._loss: float | None = None
        self._samples = self._hash = 0
        self._norm: float | None = None
        self._draws = False

    # -- start and end ---------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Meet the comparing process; before the strategy touches the module."""
        pipe = Client(self._place.address, "AF_UNIX")
        assert isinstance(pipe, Connection)
        self._pipe = pipe
        self._shapes = {name: parameter.shape for name, parameter in pl_module.named_parameters()}
        norms = [name for name, part in pl_module.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
        owner: Any = trainer.strategy
        self._facts = Facts(
            sum(parameter.numel() for parameter in pl_module.parameters()),
            pl_module.automatic_optimization,
            tuple(norms),
            getattr(owner, "_layer_sync", None) is not None,
            trainer.accumulate_grad_batches,
            trainer.gradient_clip_val,
            tuple(self._shapes),
        )
        if self._place.stands_for:
            self._order = WholeOrder(trainer, self._place.stands_for, self._place.mode)
        elif (
            not isinstance(owner, MeshStrategy)
            and getattr(owner, "distributed_sampler_kwargs", None)
            and "_prepare_dataloader" not in vars(trainer._data_connector)  # it has an order of its own
        ):
            self._order = LoaderOrder(owner, trainer, self._place.mode)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The twin of the reference begins one rounding apart; and nothing ends a run early that steps by itself."""
        if not pl_module.automatic_optimization:  # Lightning counts the steps of all optimizers, and we count batches
            trainer.fit_loop.epoch_loop.max_steps = -1
        self._facts = dataclasses.replace(self._facts, notes=tuple(_loosened(trainer)))
        if self._place.nudged:
            _nudge(pl_module)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave."""
        if self._order is not None:
            self._order.restore()
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    # -- a step ----------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Before the first step: wait. Before every watched one: look at the samples."""
        if not self._met:
            self._met = True
            self._send(self._ready(trainer, pl_module))
            self._wait(trainer)
        if self._turn.kind == "observe":
            self._random = random_state()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Gradients are complete and not yet clipped."""
        if self._turn.kind == "time":
            self._meter.gradients_complete(trainer, pl_module, optimizer)
        elif pl_module.automatic_optimization:
            offered = getattr(trainer.strategy, "gradient_norm", None)
            if callable(offered):
                self._norm = offered(optimizer)
            elif all(p.shape == self._shapes.get(name, p.shape) for name, p in pl_module.named_parameters()):
                self._norm = whole_gradient_norm(pl_module.parameters())

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a micro-batch; after the last one of an optimizer step say what was seen, and maybe wait."""
        if self._turn.kind == "observe":
            self._look(trainer, pl_module, outputs, batch)
        stepped = trainer.global_step > self._global_step or not pl_module.automatic_optimization
        if not stepped:
            return
        self._global_step = trainer.global_step
        final: Mapping[str, Any] = {}
        if self._turn.kind == "observe":
            final = self._observed(trainer)
        else:
            self._meter.lap()
        self._steps += 1
        self._left -= 1
        if self._left == 0:
            self._pause(trainer, final)

    def _look(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any) -> None:
        self._draws |= random_state() != self._random
        context = getattr(trainer.strategy, "context", None)
        if context is not None and getattr(context, "idle", False):
            return  # a filler that counts for nothing
        rows = num_rows(batch)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            scale = trainer.accumulate_grad_batches if module.automatic_optimization else 1  # Lightning has divided it
            done = self._loss * self._samples if self._loss is not None else 0.0
            self._loss = (done + float(loss.detach()) * scale * rows) / (self._samples + rows)
        self._samples += rows
        self._hash = (self._hash + batch_hash(batch)) % 2**64

    def _observed(self, trainer: Trainer) -> Mapping[str, Any]:
        """Tell about one watched step. Collective: the strategy may gather its parameters."""
        after = getattr(trainer.strategy, "gradient_norm_after_step", None)
        if self._norm is None and callable(after):
            self._norm = after()
        state: Mapping[str, Any] = trainer.strategy.lightning_module_state_dict()
        sketch = {}
        if trainer.is_global_zero:
            self._sketcher = self._sketcher or Sketcher()
            sketch = self._sketcher.sketch(state)
        seen = (self._loss, self._samples, self._hash, self._norm, self._draws)
        self._send(Observed(trainer.global_rank, self._steps, *seen, sketch))
        self._clear()
        return state

    # -- turns -----------------------------------------------------------------------------------------------------

    def _pause(self, trainer: Trainer, final: Mapping[str, Any]) -> None:
        file = ""
        if self._turn.kind == "time":
            self._send(self._meter.end(trainer))
        elif trainer.is_global_zero:
            file = str(self._place.final)
            torch.save({name: value for name, value in final.items() if isinstance(value, Tensor)}, file)
        self._send(Paused(trainer.global_rank, file))
        self._wait(trainer)

    def _wait(self, trainer: Trainer) -> None:
        assert self._pipe is not None
        self._global_step = trainer.global_step
        turn = self._pipe.recv()
        assert isinstance(turn, Turn)
        self._turn, self._left = turn, turn.steps
        if turn.kind == "stop":
            trainer.should_stop = True
        elif turn.kind == "time":
            self._sketcher = None
            self._meter.begin(trainer)

    def _send(self, message: Any) -> None:
        assert self._pipe is not None
        self._pipe.send(message)

    def _ready(self, trainer: Trainer, module: LightningModule) -> Ready:
        at, strategy, rank = time.monotonic(), trainer.strategy, trainer.global_rank
        ours = strategy if isinstance(strategy, MeshStrategy) else None
        place: Any = getattr(strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        return Ready(
            rank,
            trainer.world_size,
            at,
            int(place["rank"]),
            int(place["num_replicas"]),
            ours.run.batch_size if ours else self._place.mode,
            ours.shape.coordinate(rank) if ours else {},
            held_parameters(trainer, module),
            str(trainer.precision),
            self._facts,
            Sketcher().sketch(strategy.lightning_module_state_dict()) if self._place.stands_for else {},
        )


def _loosened(trainer: Trainer) -> Iterator[str]:
    """Schedules that wait for a metric of the validation, which a comparison leaves out, may go without it."""
    for each in trainer.lr_scheduler_configs:
        if each.reduce_on_plateau and each.strict:
            each.strict = False
            yield (
                f"{type(each.scheduler).__name__} waits for {each.monitor}: where only the validation logs it, the "
                "schedule does not act here."
            )


@torch.no_grad()
def _nudge(module: nn.Module) -> None:
    """Move every element of every parameter by one rounding, up or down; draws nothing from anybody's generator."""
    generator = torch.Generator().manual_seed(7)
    for parameter in module.parameters():
        up = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
        parameter.mul_(1 + (2 * up - 1) * torch.finfo(parameter.dtype).eps)
