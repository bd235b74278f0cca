# SPDX-License-Identifier: Apache-2.0
"""What rank 0 brings home: after a run in forked ranks, the caller's objects look as if the run had been here.

    weights       the module's whole state dict, as the strategy would save it, if it was trained
    parts         modules, parameters and buffers that came into being there (`new_parts`)
    progress      of all loops, so that `global_step` is right and a second `fit` goes on where the first ended
    metrics       `callback_metrics`, `logged_metrics`, `progress_bar_metrics`
    attributes    of the module and of each callback, where they have changed and pickle: `best_model_path`, a list
                  that a `training_step` appended to. Lists, dicts and sets are changed in place. Of loggers only
                  words and numbers, the version that was chosen among them, and what a `CSVLogger` has written
    results       what `validate`, `test` or `predict` returned on rank 0

It travels through a file without a name, so that nothing is left behind whatever dies. What does not come home: the
state of optimizers (a second `fit` makes new ones, as it does in one process), attributes that do not pickle or whose
pickle is larger than `LARGEST_ATTRIBUTE`, and what hangs neither on the module nor on a callback.

Note [one file of metrics]: a new writer of a `CSVLogger` deletes the file of an earlier one with the same version, and
ranks are new with every run. So the caller opens the writer before the first fork, and keeps it: all runs of a trainer
append to one file, as they do in one process, after a run that failed too. A `TensorBoardLogger` has a file of its own
in each run; tensorboardX would name it by the second alone, so that the rank's process id is added.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import logging
import os
import pickle
from collections.abc import Iterator
from typing import IO, Any, final

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import override

from stratagem.strategy.new_parts import NewParts, place

log = logging.getLogger(__name__)

LARGEST_ATTRIBUTE = 16 * 2**20
"""Bytes of the pickle of the largest attribute that comes home."""

_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")


@final
class Homecoming:
    """Collects in rank 0 and restores in the caller; made in the caller before the fork.

    Args:
        trainer: whose run it is.
        file: open for reading and writing in both processes.
    """

    def __init__(self, trainer: Trainer, file: IO[bytes]) -> None:
        self._trainer, self._file = trainer, file
        self._weights: dict[str, Any] | None = None
        self._before: dict[tuple[str, str], str] = {}
        for writer in _writers(trainer):  # see Note [one file of metrics]
            _know_columns(writer)
            writer.save()  # what the caller has logged is written here and once, not by the rank that inherits it

    def watch(self, *, collects: bool) -> None:
        """Begin in a rank, before the work; every rank calls it, and one of them collects."""
        strategy, teardown = self._trainer.strategy, self._trainer.strategy.teardown
        self._parts = NewParts(self._trainer.lightning_module)
        for logger in self._trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger._kwargs["filename_suffix"] = f"{logger._kwargs.get('filename_suffix', '')}.{os.getpid()}"
        if collects:
            self._before = {key: _digest(data) for key, data in self._attributes()}

        def teardown_with_weights() -> None:
            state = self._trainer.state
            if state.fn == TrainerFn.FITTING and state.status != TrainerStatus.INTERRUPTED:
                self._weights = strategy.lightning_module_state_dict()  # may gather, so every rank asks for it
            teardown()

        strategy.teardown = teardown_with_weights  # type: ignore[method-assign]

    def pack(self, results: Any) -> None:
        """Write everything; the collecting rank calls it when its work is done."""
        trainer = self._trainer
        connector = trainer._logger_connector
        _ = trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics  # brings them up to date
        parcel = {
            "parts": self._parts.pickled() if self._weights is not None else {},
            "weights": self._weights,
            "state": trainer.state,
            "should_stop": trainer.should_stop,
            "progress": {name: getattr(trainer, name).state_dict() for name in _LOOPS},
            "metrics": {name: _own(getattr(connector, name)) for name in _METRICS},
            "attributes": {k: data for k, data in self._attributes() if _digest(data) != self._before.get(k)},
            "results": _own(results),
        }
        torch.save(parcel, self._file)
        self._file.flush()

    def unpack(self) -> Any:
        """Read everything into the caller's objects; returns what the run returned on the collecting rank."""
        self._file.seek(0)
        parcel = torch.load(self._file, map_location="cpu", weights_only=False)  # written by our own child
        trainer = self._trainer
        module = trainer.lightning_module
        lost = place(module, parcel["parts"])
        if parcel["weights"] is not None:
            lost += module.load_state_dict(parcel["weights"], strict=False).unexpected_keys
        if lost:
            log.warning(
                "%s came into being during the run and cannot be brought back from the ranks: what follows in this "
                "process does without. Give `ckpt_path` to `test` or `predict`, or build it in `__init__`.",
                ", ".join(lost),
            )
        trainer.state, trainer.should_stop = parcel["state"], parcel["should_stop"]
        for name, state in parcel["progress"].items():
            _continue(getattr(trainer, name), state)
        for name, metrics in parcel["metrics"].items():
            getattr(trainer._logger_connector, name).update(metrics)
        for (owner, name), data in parcel["attributes"].items():
            self._restore(owner, name, data)
        return parcel["results"]

    # -- attributes ------------------------------------------------------------------------------------------------

    def _owners(self) -> dict[str, Any]:
        trainer: Any = self._trainer  # which does not declare all it has
        callbacks = {f"callback {number}": callback for number, callback in enumerate(trainer.callbacks)}
        loggers = {f"logger {number}": logger for number, logger in enumerate(trainer.loggers)}
        writers = {f"writer {number}": writer for number, writer in enumerate(_writers(trainer))}
        return {"module": trainer.lightning_module, **callbacks, **loggers, **writers}

    def _shared(self) -> dict[str, Any]:
        """Objects that attributes may refer to and that are never copied, by a name that both processes know."""
        trainer: Any = self._trainer
        module = trainer.lightning_module
        found = {**self._owners(), "trainer": trainer, "strategy": trainer.strategy, "datamodule": trainer.datamodule}
        found |= {f"part {name}": part for name, part in module.named_modules() if name}
        found |= {f"parameter {name}": parameter for name, parameter in module.named_parameters()}
        found |= {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
        return {name: thing for name, thing in found.items() if thing is not None}

    def _attributes(self) -> Iterator[tuple[tuple[str, str], bytes]]:
        """Every attribute that pickles, as bytes, under its owner and name."""
        names = {id(thing): name for name, thing in self._shared().items()}
        internal = vars(LightningModule()).keys()
        for owner, thing in self._owners().items():
            for name, value in list(vars(thing).items()):
                if owner == "module" and (name in internal or callable(value)):
                    continue
                if owner.startswith("logger") and not isinstance(value, str | int):
                    continue
                buffer = _Bounded()
                with contextlib.suppress(Exception):  # it does not pickle, or is too large
                    _Pickler(buffer, names).dump(value)
                    yield (owner, name), buffer.getvalue()

    def _restore(self, owner: str, name: str, data: bytes) -> None:
        shared = self._shared()
        if owner not in shared:  # a callback that `configure_callbacks` made in the ranks
            return
        attributes = vars(shared[owner])
        try:
            value = _Unpickler(io.BytesIO(data), shared).load()
        except Exception:  # it refers to a part that only ranks have
            return
        old = attributes.get(name)
        if type(old) is type(value) and isinstance(old, list | dict | set):
            old.clear()
            old.extend(value) if isinstance(old, list) else old.update(value)
        else:
            attributes[name] = value


class _Bounded(io.BytesIO):
    """Refuses to grow beyond the largest attribute."""

    @override
    def write(self, data: Any, /) -> int:
        if self.tell() + memoryview(data).nbytes > LARGEST_ATTRIBUTE:
            raise OverflowError("too large to come home")
        return super().write(data)


class _Pickler(pickle.Pickler):
    def __init__(self, file: IO[bytes], names: dict[int, str]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._names = names

    @override
    def persistent_id(self, obj: Any) -> str | None:
        return self._names.get(id(obj))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], things: dict[str, Any]) -> None:
        super().__init__(file)
        self._things = things

    @override
    def persistent_load(self, pid: str) -> Any:
        return self._things[pid]


def _writers(trainer: Trainer) -> list[ExperimentWriter]:
    found: list[Any] = [logger.experiment for logger in trainer.loggers if isinstance(logger, CSVLogger)]
    return [writer for writer in found if isinstance(writer, ExperimentWriter)]


def _know_columns(writer: ExperimentWriter) -> None:
    """Tell a writer which columns its file has: a rank that failed did not bring home those it added."""
    with contextlib.suppress(FileNotFoundError), writer._fs.open(writer.metrics_file_path, "r", newline="") as file:
        writer.metrics_keys = sorted({*writer.metrics_keys, *next(csv.reader(file), [])})


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _own(collection: Any) -> Any:
    """The same on the CPU, where each tensor owns no more memory than it shows."""
    return apply_to_collection(collection, Tensor, lambda tensor: tensor.detach().cpu().clone())


def _continue(loop: Any, state: dict[str, Any]) -> None:
    """Put a loop where the ranks' loop ended; unlike a resumed run, the next one starts afresh from there."""
    loop.load_state_dict(state)
    loop.restarting = False
    pending = [loop]
    while pending:
        part = pending.pop()
        part._loaded_from_state_dict = part._resuming_from_checkpoint = False
        if hasattr(part, "_combined_loader_states_to_load"):
            part._combined_loader_states_to_load = []
        pending += [value for value in vars(part).values() if isinstance(value, _Loop)]
