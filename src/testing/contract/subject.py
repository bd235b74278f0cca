# SPDX-License-Identifier: Apache-2.0
"""What the contract is told about the strategy under test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, final

from lightning.pytorch.strategies import Strategy

from stratagem.strategy.base import MeshStrategy
from stratagem.strategy.settings import RunSettings


@final
@dataclass(frozen=True)
class Refuses:
    """A capability that the technique cannot have: asked for it, the strategy says so, on every rank, in bounded time.

    Args:
        why: the reason, for the reader of the test report.
    """

    why: str

    def __post_init__(self) -> None:
        if not self.why.strip():
            raise ValueError("Refuses needs a reason")


@final
@dataclass(frozen=True)
class Lacks:
    """A capability that the strategy neither has nor refuses; its tests are skipped with the reason.

    Weaker than `Refuses`, since a user who needs it is not warned. No strategy of this package uses it.

    Args:
        why: the reason, shown as the reason of the skip.
    """

    why: str

    def __post_init__(self) -> None:
        if not self.why.strip():
            raise ValueError("Lacks needs a reason")


Capability = Literal[True] | Refuses | Lacks
"""`True`, or why not. A bare `False` is no answer."""

NO_SKIPPED_STEPS = Refuses("Lightning 2.6 itself raises where a training step returns None on more than one rank")

Precision = Literal["32-true", "bf16-mixed", "bf16-true", "64-true"]


@final
@dataclass(frozen=True, kw_only=True)
class Subject:
    """The strategy under test, and what it claims. Pickles: it travels to the ranks.

    Args:
        strategy: a registered name, or a function or class of a module that builds the strategy without arguments.
        world_sizes: numbers of ranks to test with, 1 among them or not.
        manual_optimization: `automatic_optimization = False`, with several optimizers.
        accumulation: `accumulate_grad_batches`.
        clipping_by_norm: `gradient_clip_val`; the norm is that of the whole model.
        clipping_by_value: `gradient_clip_algorithm="value"`.
        unused_parameters: parameters without gradient, on some ranks or on all, and branches that differ between ranks.
        sync_batchnorm: `Trainer(sync_batchnorm=True)`.
        uneven_batches: a last batch that the ranks cannot share evenly counts by samples, as in one process.
        skipped_steps: a `training_step` that returns None on some ranks only.
        own_seeds: ranks may be seeded each in its own way; rank 0's initial weights count.
        resuming: `FaultTolerantCheckpointIO` saves and restores all of a run, in the middle of an epoch and a window.
        naming_the_peer: on a failure the other ranks name the one that failed, and the axis.
        bounded_hang: `set_timeout` bounds the wait for a rank that hangs.
        precisions: those that train.
        replicated: what all ranks of the data axes must hold bit-equal, but for what placements divide among them.
        tolerance: relative, in float64; never above 1e-10 without a reason.
    """

    strategy: str | Callable[[], Strategy]
    world_sizes: tuple[int, ...] = (1, 2, 3, 4)
    manual_optimization: Capability = True
    accumulation: Capability = True
    clipping_by_norm: Capability = True
    clipping_by_value: Capability = True
    unused_parameters: Capability = True
    sync_batchnorm: Capability = True
    uneven_batches: Capability = True
    skipped_steps: Capability = NO_SKIPPED_STEPS
    own_seeds: Capability = True
    resuming: Capability = True
    naming_the_peer: Capability = True
    bounded_hang: Capability = True
    precisions: tuple[Precision, ...] = ("32-true", "bf16-mixed", "bf16-true", "64-true")
    replicated: tuple[str, ...] = ("parameters", "buffers", "optimizer")
    tolerance: float = 1e-10

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if value is False:
                raise ValueError(f"{item.name} = False says nothing. Allowed: True, Refuses(why), Lacks(why).")

    @property
    def name(self) -> str:
        """The registered name, or that of the callable."""
        found = self.strategy
        return found if isinstance(found, str) else getattr(found, "__name__", type(found).__name__)


@final
@dataclass(frozen=True)
class Build:
    """How one run wants its strategy; what a foreign strategy cannot do is left out.

    Args:
        timeout: how long a rank waits for another one.
        transport: `p2p` puts every byte on a socket, where the kernel counts it.
        global_batch: a loader's `batch_size` means all ranks together.
    """

    timeout: timedelta = timedelta(seconds=45)
    transport: Literal["auto", "p2p"] = "auto"
    global_batch: bool = True


def build_strategy(subject: Subject, build: Build = Build()) -> Strategy:  # frozen
    """A fresh strategy as a Trainer that is given the name would build it, with the run's settings on top. Local."""
    if isinstance(subject.strategy, str):
        from lightning.pytorch.strategies import StrategyRegistry

        from stratagem.strategy.lightning_registry import register_strategies

        register_strategies()
        strategy: Any = StrategyRegistry.get(subject.strategy)
    else:
        strategy = subject.strategy()
    if isinstance(strategy, MeshStrategy):
        strategy.run = dataclasses.replace(
            strategy.run,
            timeout=build.timeout,
            transport=build.transport,
            batch_size="global" if build.global_batch else "per_rank",
        )
    elif hasattr(strategy, "_timeout"):  # Lightning's own DDP and FSDP, and what is built on them
        strategy._timeout = build.timeout
        if isinstance(getattr(strategy, "run", None), RunSettings):
            batch_size: Any = "global" if build.global_batch else "per_rank"
            strategy.run = dataclasses.replace(strategy.run, timeout=build.timeout, batch_size=batch_size)
    assert isinstance(strategy, Strategy), f"{subject.name} built {type(strategy)}, which is no Lightning strategy"
    return strategy


CAPABILITIES: tuple[str, ...] = tuple(
    item.name for item in dataclasses.fields(Subject) if "Capability" in str(item.type)
)
"""Names of the fields that hold a `Capability`."""
