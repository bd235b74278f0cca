# SPDX-License-Identifier: Apache-2.0
"""What a rank measures at full speed: durations of optimizer steps, bytes sent, bytes held, the peak of its memory.

The first step of a turn is not counted: caches are cold, and another contender's last bytes may still be on their way.
A duration lasts from one step's end to the next one's, so that loading the batch is part of it.

Note [peak memory]: the kernel keeps the highest resident size of a process. Pages of files (the libraries' code, which
a forked rank faults in while it runs) are no one's training memory, and what the process had before the module was
built is everybody's; both are taken off. What the comparison itself kept while it watched is freed before.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Literal, final

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.optim import Optimizer

from stratagem.collectives.traffic import TrafficSnapshot
from stratagem.comparison.protocol import Timed
from stratagem.measure import WireBytes, held_bytes, process_memory
from stratagem.strategy.base import MeshStrategy


def anonymous_bytes() -> int:
    """Resident bytes of this process that are pages of no file, after freed memory was given back; 0 if unknown."""
    with contextlib.suppress(RuntimeError, OSError, KeyError):
        process_memory()
        return _status("RssAnon")
    return 0


@final
class Meter:
    """Measures turns of one rank.

    Args:
        before: `anonymous_bytes` of the process before the module was built; None where nobody looked.
    """

    def __init__(self, before: int | None) -> None:
        self._before = before
        self._held: dict[str, int] = {}
        self._sent_formula: dict[str, float] = {}
        self._held_formula: dict[str, float] = {}
        self._marks: list[float] = []
        self._books: TrafficSnapshot | None = None
        self._wire: WireBytes | None = None
        self._first = True

    def begin(self, trainer: Trainer) -> None:
        """A turn begins: local, nothing is sent."""
        if self._first and self._before is not None:
            with contextlib.suppress(RuntimeError, OSError):
                process_memory()  # gives back what is free
                with open("/proc/self/clear_refs", "w") as file:  # the peak counts from here
                    file.write("5")
        strategy = trainer.strategy
        if isinstance(strategy, MeshStrategy):
            assert strategy.context is not None
            self._books = strategy.context.traffic.snapshot()
        else:
            with contextlib.suppress(RuntimeError):
                self._wire = WireBytes().__enter__()
        self._marks = [time.perf_counter()]

    def gradients_complete(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> None:
        """Counts what is held, once in a run, in a step whose duration does not count. Local."""
        if not self._held and self._first and len(self._marks) == 1:
            self._held = held_by_kind(trainer, module, optimizer)
            self._sent_formula, self._held_formula = formulas(trainer, module, optimizer)

    def lap(self) -> None:
        """An optimizer step has ended."""
        self._marks.append(time.perf_counter())

    def end(self, trainer: Trainer) -> Timed:
        """What the turn has shown. Local."""
        steps = len(self._marks) - 1
        sent: dict[str, float] = {}
        source: Literal["books", "kernel"] = "books"
        strategy = trainer.strategy
        if isinstance(strategy, MeshStrategy):
            assert strategy.context is not None
            assert self._books is not None
            since = strategy.context.traffic.snapshot() - self._books
            for axis, _ in since.records:
                sent[axis] = since.total(axis).num_bytes / steps
        elif self._wire is not None:
            source = "kernel"
            with contextlib.suppress(RuntimeError):  # a connection was closed meanwhile: its bytes are lost
                self._wire.__exit__(None, None, None)
                sent["world"] = self._wire.total / steps
        self._first, self._wire = False, None
        return Timed(
            trainer.global_rank,
            tuple(later - earlier for earlier, later in zip(self._marks[1:], self._marks[2:], strict=False)),
            sent,
            source,
            self._sent_formula,
            self._held,
            self._held_formula,
            self._peak(),
        )

    def _peak(self) -> int | None:
        if self._before is None:
            return None
        with contextlib.suppress(RuntimeError, OSError, KeyError):
            return _status("VmHWM") - _status("RssFile") - self._before
        return None


def held_by_kind(trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> dict[str, int]:
    """Bytes of unique storages: `parameters`, `gradients`, `optimizer`. Local.

    What a foreign strategy holds is seen only where it keeps tensors as Lightning's `ddp` does; another one may say so
    itself, by `held_bytes_now() -> dict` of the same kinds, else nothing is reported.
    """
    theirs = getattr(trainer.strategy, "held_bytes_now", None)
    if callable(theirs):
        return dict(theirs())
    if not isinstance(trainer.strategy, MeshStrategy | DDPStrategy | SingleDeviceStrategy):
        return {}
    tensors = [*module.parameters(), *_stepped(optimizer)]
    states = [[value for value in state.values() if isinstance(value, Tensor)] for state in optimizer.state.values()]
    return {
        "parameters": held_bytes([tensor.detach() for tensor in tensors]),
        "gradients": held_bytes([tensor.grad.detach() for tensor in tensors if tensor.grad is not None]),
        "optimizer": held_bytes(states),
    }


def held_parameters(trainer: Trainer, module: LightningModule) -> int:
    """Parameters of which this rank holds the values now. Local."""
    stepped = [tensor for optimizer in trainer.optimizers for tensor in _stepped(optimizer)]
    sizes = {}
    for tensor in [*module.parameters(), *stepped]:
        if tensor.device.type != "meta":
            storage = tensor.detach().untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes() // max(tensor.element_size(), 1)
    return sum(sizes.values())


def _stepped(optimizer: Optimizer) -> list[Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"] if isinstance(tensor, Tensor)]


def formulas(
    trainer: Trainer, module: LightningModule, optimizer: Optimizer
) -> tuple[dict[str, float], dict[str, float]]:
    """What this rank should send per step by axis, and hold by kind. Local; empty where nobody says.

    A technique states `wire_bytes_per_step` and `held_bytes`, of the optimizer one moment of its state. A foreign
    strategy may state the same. Of Lightning's own `ddp` they are known: a ring all-reduce, and everything whole.
    """
    strategy: Any = trainer.strategy
    trained = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    ours = isinstance(strategy, MeshStrategy)
    owner = strategy._data if ours else strategy
    sent, held = _stated(owner, "wire_bytes_per_step"), _stated(owner, "held_bytes")
    if type(strategy) is DDPStrategy:
        ranks = trainer.world_size
        sent = {"world": 2 * (ranks - 1) / ranks * trained}
        held = {"parameters": float(sum(p.numel() * p.element_size() for p in module.parameters()))}
        held |= {"gradients": float(trained), "optimizer": float(trained)}
    elif ours and held and not any(place.shard_axes for place in strategy.context.placements.values()):
        held.setdefault("optimizer", float(trained))  # whole replicas
    if "optimizer" in held:
        held["optimizer"] *= _moments(optimizer)
    return sent, held


def _moments(optimizer: Optimizer) -> int:
    """Tensors of a parameter's own size in its state: 2 with Adam."""
    counts = [
        sum(isinstance(value, Tensor) and value.numel() == tensor.numel() for value in state.values())
        for tensor, state in optimizer.state.items()
        if isinstance(tensor, Tensor) and tensor.numel() > 1
    ]
    return max(counts, default=0)


def _stated(owner: Any, name: str) -> dict[str, float]:
    formula = getattr(owner, name, None)
    return {key: float(value) for key, value in formula().items()} if callable(formula) else {}


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        rows = dict(line.split(":", 1) for line in file)
    return int(rows[key].split()[0]) * 1024
