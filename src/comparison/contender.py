# SPDX-License-Identifier: Apache-2.0
"""The inside of a contender's process: build the run as its user would, change what a comparison must, and fit.

Changed are only things that are no part of the training: no logger, no checkpoints, no validation, no bar. Callbacks
that exist for one of these, or that would end the run, are left out; all others are kept. `max_steps` stays what the
run says where that is enough, so that a schedule over the whole run has the rates that `fit` would give it.

Ranks are always forked from this process, whatever launcher the strategy would choose, also those of Lightning's own
strategies: a fresh start of the script would start the comparison again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, final

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import ParallelStrategy
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from stratagem.comparison.conductor import Conductor, Place
from stratagem.comparison.meter import anonymous_bytes
from stratagem.errors import ConfigError
from stratagem.strategy.launcher import WarmLauncher

Change = Callable[[dict[str, Any]], dict[str, Any]]
"""Makes the arguments of the comparison's Trainer out of the user's."""

_RATE = 1e-3  # of an optimizer that finds its own
_LEFT_OUT = (Checkpoint, DeviceStatsMonitor, EarlyStopping, LearningRateMonitor, ModelSummary, ProgressBar, Timer)


@final
@dataclass(frozen=True)
class Built:
    """A run that is ready to be fitted.

    Attributes:
        trainer: built from the changed arguments.
        module: what is trained.
        data: keyword arguments of `Trainer.fit` that name the data.
    """

    trainer: Trainer
    module: LightningModule
    data: Mapping[str, Any] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Candidate:
    """One strategy that takes part.

    Args:
        name: in the report.
        build: builds the run in the contender's own process; it must give its Trainer what the `Change` makes of its
            arguments, and seed as its user does.
        about: one line about the strategy.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> def build(change):
        ...     trainer = Trainer(**change({"strategy": "ring_ddp", "devices": 2, "accelerator": "cpu"}))
        ...     return Built(trainer, BoringModel())
        >>> Candidate("ring_ddp", build).name
        'ring_ddp'
    """

    name: str
    build: Callable[[Change], Built]
    about: str = ""


@final
@dataclass(frozen=True)
class Override:
    """What all contenders, and the reference, do in place of what their run says.

    Args:
        steps: optimizer steps that must be possible.
        precision: the Trainer's word; None for the run's own.
        optimizer: `sgd` puts SGD with the same groups, rates and weight decay in place of every optimizer.
    """

    steps: int
    precision: str | None = None
    optimizer: Literal["own", "sgd"] = "own"


def fit(candidate: Candidate, override: Override, place: Place) -> None:
    """Run the contender to its end; in a process of its own, which the comparing process has forked."""
    before = anonymous_bytes()
    conductor = Conductor(dataclasses.replace(place, before=before or None))
    built = candidate.build(
        functools.partial(changed, conductor=conductor, override=override, alone=place.stands_for > 0)
    )
    if override.optimizer == "sgd":
        _train_with_sgd(built.module)
    _launch_warm(built.trainer)
    built.trainer.fit(built.module, **built.data)


def changed(arguments: dict[str, Any], *, conductor: Callback, override: Override, alone: bool) -> dict[str, Any]:
    """The arguments of the comparison's Trainer.

    Args:
        arguments: the user's.
        conductor: comes first among the callbacks.
        override: what all contenders share.
        alone: for the reference: one process.

    Example:
        >>> found = changed({"max_steps": 400, "logger": True}, conductor=Callback(), override=Override(50), alone=True)
        >>> found["max_steps"], found["devices"]
        (400, 1)
    """
    own = arguments.get("max_steps") or -1
    callbacks = arguments.get("callbacks") or []
    written = callbacks if isinstance(callbacks, list) else [callbacks]
    kept = [each for each in written if not isinstance(each, _LEFT_OUT)]
    averaged = any(isinstance(each, StochasticWeightAveraging) for each in kept)  # it asks for the last epoch
    epochs = (arguments.get("max_epochs") or 1000) if averaged else -1
    one = {"strategy": "auto", "devices": 1, "num_nodes": 1, "sync_batchnorm": False} if alone else {}
    precision = {"precision": override.precision} if override.precision else {}
    return {
        **arguments,
        "callbacks": [conductor, *kept],
        "logger": DummyLogger(),  # takes all that a module says to its own
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "max_steps": max(own, override.steps),
        "max_epochs": epochs,
        "max_time": None,
        "min_epochs": None,
        "min_steps": None,
        "fast_dev_run": False,
        "barebones": False,
        **precision,
        **one,
    }


def _launch_warm(trainer: Trainer) -> None:
    strategy = trainer.strategy
    if not isinstance(strategy, ParallelStrategy) or len(strategy.parallel_devices or ()) < 2:
        return
    devices = {device.type for device in strategy.parallel_devices or ()}
    if not isinstance(strategy.cluster_environment, LightningEnvironment) or devices != {"cpu"}:
        raise ConfigError(
            "a comparison forks its ranks itself",
            where="trainer",
            allowed="several CPU ranks of one host, started by nothing else; or one device of any kind",
            do="set accelerator: cpu, and run it without torchrun",
        )
    strategy._launcher = WarmLauncher(strategy, "warm")


def _rate(group: Mapping[str, Any]) -> float:
    """The rate that a group is meant to have: a warm-up has set it to its beginning, often 0."""
    rate = group.get("initial_lr", group.get("lr"))
    return _RATE if rate is None else float(rate)


def _train_with_sgd(module: LightningModule) -> None:
    configure: Callable[[], Any] = module.configure_optimizers

    def with_constant(found: list[Any], num: int = 1) -> Any:
        """A module that steps its schedules by itself still finds as many."""
        optimizers = [swapped(each) for each in found]
        return optimizers, [LambdaLR(optimizers[min(n, len(optimizers) - 1)], lambda step: 1.0) for n in range(num)]

    def swapped(found: Any) -> Any:
        if isinstance(found, Optimizer):
            groups = [
                {"params": g["params"], "lr": _rate(g), "weight_decay": float(g.get("weight_decay") or 0.0)}
                for g in found.param_groups
            ]
            return SGD(groups, lr=_RATE)
        if isinstance(found, Mapping):  # with a schedule, which belongs to the optimizer that is gone
            return swapped(found["optimizer"]) if module.automatic_optimization else with_constant([found["optimizer"]])
        if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list):
            optimizers, schedules = found
            if module.automatic_optimization:
                return [swapped(each) for each in optimizers]
            return with_constant(optimizers, len(schedules))
        return [swapped(each) for each in found] if isinstance(found, list | tuple) else found

    module.configure_optimizers = lambda: swapped(configure())  # type: ignore[method-assign]
