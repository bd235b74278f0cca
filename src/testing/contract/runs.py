# SPDX-License-Identifier: Apache-2.0
"""One training run inside a gang, and what the contract writes down about it.

    parent                                   every rank
      train(gangs, subject, case, runs) ---->  fit(...)   a plain Trainer, a plain loader, one recording callback
      [[Record of run 0, ...] per rank] <----

The same function trains the reference, on one rank with Lightning's single-device strategy. Nothing here asks the
strategy under test for a number that the contract then believes: losses, gradients and states are read off the module.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any, Literal, final

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from typing_extensions import override

from stratagem.placement import Placement
from stratagem.strategy.base import MeshStrategy
from stratagem.strategy.settings import RunSettings
from stratagem.testing.contract.cases import Case
from stratagem.testing.contract.subject import Build, Precision, Subject, build_strategy
from stratagem.testing.ranks import RanksFailed, run_ranks
from stratagem.testing.replicas import _digests

_AS_USUAL = Build()

EPOCHS = 2
"""Every run crosses an epoch's end, and what an uneven last batch did shows in the steps after it."""

STEPS = "optimizer steps"
"""Under which digest the step counts of divided optimizer state are kept."""


@final
@dataclass(frozen=True, kw_only=True)
class Run:
    """The settings of one run; the same for the reference and for the strategy under test.

    Args:
        batches: whole global batches per epoch.
        tail: samples of a last, uneven batch per epoch.
        accumulate: micro-batches per optimizer step.
        clip: the highest norm, or value, of the gradient; None for no clipping.
        clip_by: what `clip` bounds.
        sync_batchnorm: as the Trainer's.
        precision: as the Trainer's.
        order: `global`: the loader's batch size counts all ranks; `slices`: a sampler of the contract's own gives each
            rank its share of every global batch, and the strategy must leave it alone.
        own_seeds: each rank is seeded by its number, so that ranks build different weights.
    """

    batches: int = 3
    tail: int = 0
    accumulate: int = 1
    clip: float | None = None
    clip_by: Literal["norm", "value"] = "norm"
    sync_batchnorm: bool = False
    precision: Precision = "64-true"
    order: Literal["global", "slices"] = "global"
    own_seeds: bool = False

    @property
    def label(self) -> str:
        """The run in words, for messages."""
        parts = [f"accumulate={self.accumulate}"]
        parts += [f"clip by {self.clip_by} {self.clip}"] if self.clip is not None else []
        parts += [f"uneven last batch of {self.tail}"] if self.tail else []
        parts += ["sync_batchnorm"] if self.sync_batchnorm else []
        return ", ".join([*parts, self.precision])


@final
@dataclass
class Record:
    """What one rank wrote down in one run.

    Attributes:
        losses: per batch, this rank's mean loss; None where the step gave none.
        samples: per batch, this rank's samples.
        norms: per optimizer step, the norm of the whole gradient as the optimizer hooks see it, before clipping.
        rates: per optimizer step, the learning rates of the groups.
        state: the full state of the module at the end; empty on ranks other than 0.
        digests: hashes of what this rank holds at the end: `parameter ...`, `buffer ...`, `optimizer ...`.
        model_part: which part of the model this rank holds; ranks with the same one are replicas of each other.
    """

    losses: list[float | None] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    model_part: tuple[int, ...] = ()


@final
class Gangs:
    """Runs bodies on ranks and turns a failed gang into one readable test failure.

    Args:
        modules: what the ranks inherit beside the usual, pytest's setting `ranks_preload`.
        patience: an upper bound on every deadline, for who expects a run to hang.
    """

    def __init__(self, modules: Sequence[str] = (), *, patience: timedelta | None = None) -> None:
        self.modules = tuple(modules)
        self.patience = patience

    def run(self, num_ranks: int, body: Any, kwargs: Mapping[str, Any], **options: Any) -> list[Any]:
        """As `run_ranks`; a rank that raises, dies or hangs fails the test with the report of all ranks."""
        failed = ""
        try:
            return self.attempt(num_ranks, body, kwargs, **options)
        except RanksFailed as error:
            failed = str(error)
        pytest.fail(failed, pytrace=False)

    def attempt(self, num_ranks: int, body: Any, kwargs: Mapping[str, Any], **options: Any) -> list[Any]:
        """As `run_ranks`, for tests that expect `RanksFailed`."""
        if self.patience is not None:
            options["deadline"] = min(self.patience, options.get("deadline", self.patience))
        return run_ranks(num_ranks, body, kwargs, modules=self.modules, **options)


def train(gangs: Gangs, subject: Subject, case: Case, runs: Sequence[Run], num_ranks: int) -> list[list[Record]]:
    """Trains `case` once per run, one after the other in one gang; returns `[run][rank]`."""
    kwargs = {"subject": subject, "case": case, "runs": tuple(runs)}
    per_rank = gangs.run(num_ranks, fit_all, kwargs, deadline=timedelta(seconds=90))
    return [list(records) for records in zip(*per_rank, strict=True)]


def reference(gangs: Gangs, case: Case, runs: Sequence[Run]) -> list[Record]:
    """The same runs in one process under Lightning's single-device strategy; kept for the session."""
    return _reference(gangs.modules, case, tuple(runs))


@cache
def _reference(modules: tuple[str, ...], case: Case, runs: tuple[Run, ...]) -> list[Record]:
    kwargs = {"subject": None, "case": case, "runs": runs}
    return list(Gangs(modules).run(1, fit_all, kwargs, group=False, deadline=timedelta(seconds=90))[0])


def fit_all(subject: Subject | None, case: Case, runs: Sequence[Run]) -> list[Record]:
    """The body of every rank: trains `case` once per run; without a subject as one process. Collective."""
    return [fit(subject, case, run) for run in runs]


def fit(subject: Subject | None, case: Case, run: Run, *callbacks: Callback, **options: Any) -> Record:
    """One `Trainer.fit` with everything off that the contract does not look at. Collective.

    Args:
        subject: the strategy under test; None for one process.
        case: what is trained.
        run: how.
        callbacks: more of them.
        options: for the Trainer.
    """
    seed_everything(1 + int(os.environ["RANK"]) if run.own_seeds else 1, verbose=False)
    module, record = case.module(), Recorder()
    trainer = make_trainer(subject, run, *callbacks, record, **options)
    samples = run.batches * case.global_batch + run.tail
    trainer.fit(module, make_loader(subject, case.data(samples), case.global_batch, run.order))
    return record.record


def make_trainer(
    subject: Subject | None, run: Run, *callbacks: Callback, build: Build = _AS_USUAL, **options: Any
) -> Trainer:
    """A Trainer for this rank, quiet and without files unless told otherwise. Local."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # what hardware there is, at every run
    defaults: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": EPOCHS,
        "num_sanity_val_steps": 0,
    }
    single = subject is None
    strategy = SingleDeviceStrategy("cpu") if subject is None else build_strategy(subject, build)
    return Trainer(
        **{**defaults, **options},
        accelerator="cpu",
        devices=1 if single else dist_size(),
        strategy=strategy,
        precision=run.precision,
        accumulate_grad_batches=run.accumulate,
        gradient_clip_val=run.clip,
        gradient_clip_algorithm=run.clip_by if run.clip is not None else None,
        sync_batchnorm=run.sync_batchnorm and not single,
        callbacks=list(callbacks),
    )


def make_loader(
    subject: Subject | None, data: Dataset[Any], global_batch: int, order: Literal["global", "slices"] = "global"
) -> DataLoader[Any]:
    """The loader a user writes, without shuffling; its batches, over all ranks, are those of one process. Local."""
    if subject is None or (order == "global" and is_ours(subject)):
        return DataLoader(data, batch_size=global_batch, shuffle=False)
    sampler = RankSlices(data, global_batch)
    return DataLoader(data, batch_size=global_batch // dist_size(), sampler=sampler)


def is_ours(subject: Subject) -> bool:
    """Whether the strategy can take a loader's batch size as that of all ranks."""
    return isinstance(getattr(build_strategy(subject), "run", None), RunSettings)


def dist_size() -> int:
    """Ranks of this gang."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


class RankSlices(DistributedSampler[Any]):
    """Rank r reads the r-th contiguous share of every global batch; for strategies that order no data themselves.

    Args:
        data: a multiple of `global_batch` samples.
        global_batch: a multiple of the number of ranks.
    """

    def __init__(self, data: Dataset[Any], global_batch: int) -> None:
        super().__init__(data, dist_size(), int(os.environ["RANK"]), shuffle=False)  # no group is open yet, maybe
        assert global_batch % self.num_replicas == 0, "the contract's global batch must divide by the ranks"
        assert len(data) % global_batch == 0, "only a strategy that weighs its ranks can take an uneven batch"  # type: ignore[arg-type]
        self.global_batch = global_batch

    @override
    def __iter__(self) -> Iterator[Any]:
        share = self.global_batch // self.num_replicas
        for start in range(self.rank * share, len(self.dataset), self.global_batch):  # type: ignore[arg-type]
            yield from range(start, start + share)


@final
class Recorder(Callback):
    """Writes down losses, norms and rates while a run goes on, and the state at its end."""

    def __init__(self) -> None:
        self.record = Record()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self.record.losses.append(None if loss is None else float(loss))
        self.record.samples.append(num_samples(batch))

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.record.norms.append(gradient_norm(trainer, pl_module, optimizer))
        self.record.rates.append([float(group["lr"]) for group in optimizer.param_groups])

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        whole = trainer.strategy.lightning_module_state_dict()  # a sharded strategy gathers: every rank calls it
        if trainer.global_rank == 0:
            self.record.state = {name: value.detach().clone() for name, value in whole.items()}
        self.record.digests = replicated_digests(trainer, pl_module)
        self.record.model_part = model_part(trainer)


def num_samples(batch: Any) -> int:
    """Rows of a batch: those of its first tensor."""
    if isinstance(batch, Tensor):
        return len(batch)
    parts = batch.values() if isinstance(batch, Mapping) else batch
    return num_samples(next(iter(parts)))


def model_part(trainer: Trainer) -> tuple[int, ...]:
    """This rank's coordinates on the axes that divide the model; ranks that have the same are replicas. Local."""
    strategy = trainer.strategy
    if not isinstance(strategy, MeshStrategy):
        return ()
    coordinate = strategy.shape.coordinate(trainer.global_rank)
    return tuple(coordinate[axis] for axis in ("pp", "tp"))


def replicated_digests(trainer: Trainer, module: LightningModule) -> dict[str, str]:
    """Hashes of all that this rank holds and no placement divides; of divided optimizer state, the step counts."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    divided = [f"parameter {name}" for name, p in module.named_parameters() if is_divided(trainer, names, p)]
    steps: set[float] = set()
    for number, optimizer in enumerate(trainer.optimizers):
        for index, group in enumerate(optimizer.param_groups):
            for position, tensor in enumerate(group["params"]):
                if is_divided(trainer, names, tensor):
                    owner = names.get(id(tensor), f"parameter {position}")
                    divided.append(f"optimizer {number} group {index} {owner} ")
                    steps |= {float(value) for key, value in optimizer.state[tensor].items() if key == "step"}
    kept = {key: value for key, value in _digests(module, trainer.optimizers) if not key.startswith(tuple(divided))}
    return {**kept, STEPS: repr(sorted(steps))} if steps else kept


def is_divided(trainer: Trainer, names: Mapping[int, str], tensor: Tensor) -> bool:
    """Whether a parameter, or what an optimizer steps in its place, lies on this rank in part only. Local."""
    place = placement(trainer, names, tensor)
    return place is not None and bool(place.shard_axes)


def placement(trainer: Trainer, names: Mapping[int, str], tensor: Tensor) -> Placement | None:
    """Where a parameter, or what an optimizer steps in its place, lies; None where the strategy states none. Local."""
    context: Any = getattr(trainer.strategy, "context", None)
    data: Any = getattr(trainer.strategy, "_data", None)
    found = context.placements.get(names.get(id(tensor), "")) if context is not None else None
    return data.placement_of(tensor) if found is None and data is not None else found


def gradient_norm(trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> float:
    """The 2-norm of the gradient of everything that `optimizer` steps, each element of the model counted once.

    Recomputed here in float64, from `.grad` of what the optimizer holds (a technique may have put pieces of parameters
    in its groups) and from where placements say that its elements lie. Collective over the world; it moves one number.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    context: Any = getattr(trainer.strategy, "context", None)
    shared, divided = 0.0, 0.0
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.grad is None:
            continue
        square = float(parameter.grad.detach().double().square().sum())
        place = placement(trainer, names, parameter)
        if place is None or not place.shard_axes:
            shared += square
        else:
            copies = math.prod(size for axis, size in context.shape.sizes.items() if axis not in place.shard_axes)
            divided += square / copies
    if context is not None and context.shape.size > 1:
        total = torch.tensor(divided, dtype=torch.float64)
        dist.all_reduce(total)
        divided = float(total)
    return math.sqrt(shared + divided)
