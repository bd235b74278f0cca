# SPDX-License-Identifier: Apache-2.0
"""State is always what one process would have: how a strategy's state goes into a checkpoint and comes out of it.

With `FaultTolerantCheckpointIO`, which is there unless the user gave another plugin, every rank states the parts that
it holds, under the names and shapes of the plain module, and reads back the parts that it wants: nothing is whole
anywhere. With Lightning's own plugin the state is put together whole on rank 0.

Note [who asks]: Lightning asks for the same state to save it and for other ends (the weights that a forked rank sends
home, a moving average). Only a save can use parts; so Lightning's function that composes a checkpoint is replaced, on
the one instance and until teardown, by one that says so first. `on_save_checkpoint` sees `Part`s where a rank has no
more.

Note [on the failing path]: a checkpoint that is taken when this rank has failed (`OnExceptionCheckpoint`) cannot count
on the others. Rank 0 alone puts it together, as it does with Lightning's plugin, and writes it.

Note [an open window]: a checkpoint may be taken between two micro-batches of a window. Gradients that are not averaged
yet are saved per rank; on as many ranks each gets its own back, bit for bit, and on another number of ranks every one
gets their mean, whose mean is the same. Those that are averaged already are saved in parts, like optimizer state. With
manual optimization the boundary is yours: what hangs on `.grad` when you save is not in the checkpoint.

Note [randomness]: each rank's random state is saved with the rest and set again right before the first training step
after a resume on as many ranks, since reading the checkpoint and filling the pipeline of data draw numbers too.
"""

from __future__ import annotations

import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from stratagem.checkpoint import tree
from stratagem.checkpoint.foreign_loaders import put_back
from stratagem.strategy.checkpoint_io import FaultTolerantCheckpointIO
from stratagem.strategy.opening import is_file, is_ours
from stratagem.technique import Context, DataTechnique

EXTRA = "stratagem"
"""The key of what this package adds to a checkpoint."""


class PlainState(ParallelStrategy, ABC):
    """The part of `MeshStrategy` that saves and loads."""

    context: Context | None = None
    _random_state: Mapping[str, Any] | None = None
    _window: Mapping[str, Any] | None = None
    _composing = False
    _connector: Any = None

    @property
    @abstractmethod
    def _data(self) -> DataTechnique | None:
        """The technique that owns the gradients."""

    # -- who writes ------------------------------------------------------------------------------------------------

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = FaultTolerantCheckpointIO()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def _by_parts(self) -> FaultTolerantCheckpointIO | None:
        """The checkpoint plugin, if every rank writes its own part with it."""
        found = self.checkpoint_io
        return found if isinstance(found, FaultTolerantCheckpointIO) else None

    def _join_crew(self) -> None:
        """Opens the communicator of the checkpoint's thread. Collective over the world."""
        if self._by_parts is None or self.context is None:
            return
        self._by_parts.join(self.context.communicator(*self.context.shape.sizes, lane="checkpoint"))
        assert self.lightning_module is not None
        connector = self._connector = self.lightning_module.trainer._checkpoint_connector
        theirs = connector.dump_checkpoint

        def dump_checkpoint(*args: Any, **kwargs: Any) -> dict[str, Any]:  # see Note [who asks]
            self._composing = not self._interrupted
            try:
                return theirs(*args, **kwargs)
            finally:
                self._composing = False

        connector.dump_checkpoint = dump_checkpoint  # type: ignore[method-assign]

    @property
    def _interrupted(self) -> bool:
        """See Note [on the failing path]."""
        return self._connector is not None and self._connector.trainer.interrupted

    def _leave_crew(self, failed: bool) -> None:
        """Waits for the save in flight, or on the failing path for nobody. Collective if not `failed`."""
        if self._by_parts is None or self._connector is None:  # the process that started the ranks joins none
            return
        self._connector.__dict__.pop("dump_checkpoint", None)
        self._connector = None
        self._by_parts.abandon() if failed else self._by_parts.leave()

    # -- out -------------------------------------------------------------------------------------------------------

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Under the indices that the plain optimizer has: whole on rank 0, or for a save in parts. Collective."""
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if self._data is None:
            return super().optimizer_state(inner)
        return self._data.optimizer_parts(inner) if self._composing else self._data.optimizer_state(inner)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Under the names of the plain module: whole on rank 0, or for a save in parts. Every rank calls it."""
        assert self.lightning_module is not None
        if self._data is None:
            return super().lightning_module_state_dict()
        module = self.lightning_module
        return self._data.module_parts(module) if self._composing else self._data.module_state(module)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Every rank calls it; with `FaultTolerantCheckpointIO` every rank writes."""
        if self._by_parts is None or self.context is None:  # no run is on: rank 0 has it all
            super().save_checkpoint(checkpoint, filepath, storage_options)
            if self._by_parts is not None:
                self._by_parts.settle()  # nobody else will wait for it
            return
        if self._interrupted:
            if self.is_global_zero:
                FaultTolerantCheckpointIO().save_checkpoint(checkpoint, filepath, storage_options)
            return
        checkpoint = {**checkpoint, EXTRA: self._extra()}
        self._by_parts.save_checkpoint(checkpoint, filepath, storage_options)

    def compose_checkpoint(self) -> dict[str, Any]:
        """The state of the run in parts, as a save has it, for whoever keeps it elsewhere. Every rank calls it.

        With another plugin than `FaultTolerantCheckpointIO`, too.
        """
        assert self.lightning_module is not None
        self._composing = True
        try:
            checkpoint = self.lightning_module.trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        finally:
            self._composing = False
        return {**checkpoint, EXTRA: self._extra()}

    def _extra(self) -> dict[str, Any]:
        assert self.context is not None
        names = self._data.names if self._data is not None else {}
        optimizers = [
            [
                names.get(id(getattr(parameter, "whole", parameter)), str(number))
                for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
            ]
            for optimizer in self.optimizers
        ]
        own, reduced = self._data.window_gradients() if self._data is not None and self._in_window() else ({}, {})
        return {
            "strategy": type(self).__name__,
            "mesh": self._mesh(),
            "optimizer_names": optimizers,
            "reduced": reduced,
            "rank": {"random": random_state(), "gradients": own},
        }

    def _mesh(self) -> str:
        """The axes along which there is more than one rank, in words."""
        assert self.context is not None
        return " ".join(f"{axis}={size}" for axis, size in self.context.shape.sizes.items() if size > 1)

    def _in_window(self) -> bool:
        """Whether gradients of some micro-batches wait for those of others."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        loop = trainer.fit_loop.epoch_loop
        return (
            trainer.state.fn == TrainerFn.FITTING
            and self.lightning_module.automatic_optimization
            and not (loop._accumulated_batches_reached() or loop._num_ready_batches_reached())
        )

    # -- in --------------------------------------------------------------------------------------------------------

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Every rank calls it; of a folder each reads what it needs of it, when it needs it, whatever the plugin."""
        weights_only = _wanted() if weights_only is None else weights_only
        io = self._by_parts
        if io is None and self.context is not None and is_ours(checkpoint_path):
            io = FaultTolerantCheckpointIO()
            io.join(self.context.communicator(*self.context.shape.sizes))
        if io is None or is_file(checkpoint_path):
            checkpoint = put_back(super().load_checkpoint(checkpoint_path, weights_only))
        else:
            checkpoint = io.open_checkpoint(checkpoint_path, weights_only)
        ranks = checkpoint.get(EXTRA, {}).get("ranks", [])
        self._random_state = tree.whole(ranks[self.global_rank]["random"]) if len(ranks) == self.world_size else None
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._data is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self._data.load_optimizer_state(optimizer, state)
        self._window = checkpoint.get(EXTRA)

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights go into the module as it will train: in its precision, and divided where it is."""
        return True

    def _resume_window(self, extra: Mapping[str, Any]) -> None:
        """See Note [an open window]."""
        assert self._data is not None
        ranks = [rank["gradients"] for rank in extra.get("ranks", [])]
        if len(ranks) == self.world_size and _model_axes(extra.get("mesh", "")) == _model_axes(self._mesh()):
            own = tree.whole(ranks[self.global_rank])
        else:
            names = dict.fromkeys(name for rank in ranks for name in rank)
            own = {name: sum(tree.whole(rank[name]) for rank in ranks if name in rank) / len(ranks) for name in names}
        if own or extra.get("reduced"):
            self._data.resume_window(own, extra.get("reduced", {}))

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        if self._data is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            self._data.load_module_state(self.lightning_module, checkpoint["state_dict"], strict=strict)

    def _resume_step(self) -> None:
        """Right before the first training step: Lightning clears gradients, and draws numbers, until then."""
        self._count_epoch()
        window, self._window = self._window, None
        if window is not None:
            self._resume_window(window)
        if self._random_state is not None:
            set_random_state(self._random_state)
            self._random_state = None

    @override
    def on_train_start(self) -> None:
        """A checkpoint between two epochs: the next one begins with these numbers, and with what its iterator draws."""
        super().on_train_start()
        assert self.lightning_module is not None
        loop = self.lightning_module.trainer.fit_loop
        if self._random_state is not None and loop.epoch_loop.batch_progress.is_last_batch:
            set_random_state(self._random_state)
            self._random_state = None
            assert loop._data_fetcher is not None
            iter(loop._data_fetcher)  # Lightning made one already, from other numbers

    def _count_epoch(self) -> None:
        """Lightning 2.6 begins an epoch without counting it where the checkpoint was taken after the last batch of the
        one before. A checkpoint of that epoch would then pass for one of an epoch that is over, and start it anew."""
        assert self.lightning_module is not None
        progress = self.lightning_module.trainer.fit_loop.epoch_progress
        current: Any = progress.current
        if current.ready == current.processed:
            progress.increment_ready()
            progress.increment_started()


def _wanted() -> bool | None:
    """What `Trainer.fit` and the others were told of `weights_only`. Lightning 2.6 does not hand it on to a strategy
    that restores after its setup; so who resumes from a checkpoint with objects of their own could not say so."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "_run" and isinstance(frame.f_locals.get("self"), Trainer):
            found: bool | None = frame.f_locals.get("weights_only")
            return found
        frame = frame.f_back
    return None


def random_state() -> dict[str, Any]:
    """The state of every random generator of this process, of types that load with `weights_only`."""
    name, keys, *rest = np.random.get_state(legacy=True)
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_random_state(state: Mapping[str, Any]) -> None:
    """The inverse of `random_state`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _model_axes(mesh: str) -> list[str]:
    """Of a mesh in words, what divides the model: with other such axes a rank's gradients were of other parts.

    >>> _model_axes("dp_replicate=2 tp=2")
    ['tp=2']
    """
    return [word for word in mesh.split() if not word.startswith("dp_")]
