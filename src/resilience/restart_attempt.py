# SPDX-License-Identifier: Apache-2.0
"""One attempt of a run that restarts: a forked process that builds everything anew, and what it tells its parent.

    parent (Restarts)      fork --------------------------- hears Begun, Ended; builds nothing, holds no thread
    attempt                 RunCLI: Trainer, module, data -- finds its checkpoint -- fit
    ranks                                                     forked from the attempt, by its launcher
    memory                  a slot per rank, shared by all: steps made, and when the first batch began

A dead attempt leaves nothing behind in the next one, because the parent never had any of it.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from typing_extensions import override

from stratagem.errors import ConfigError, DivergedError, DriftError, MeshError, RankError, UserError
from stratagem.resilience import restart_search as search
from stratagem.resilience.stopping import GracefulStop
from stratagem.strategy.base import MeshStrategy

_SLOT = struct.Struct("qd")
MOST_RANKS = 1024


@final
class Slots:
    """Memory that the parent, the attempt and its ranks share: how far each rank is. Nameless, so it ends with them."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SLOT.size * MOST_RANKS)
        self.clear()

    def clear(self) -> None:
        """Before an attempt."""
        for rank in range(MOST_RANKS):
            _SLOT.pack_into(self._memory, rank * _SLOT.size, -1, 0.0)

    def put(self, rank: int, steps: int, began: float) -> None:
        """A rank has made so many optimizer steps; its first batch began then (`time.time`)."""
        if rank < MOST_RANKS:
            _SLOT.pack_into(self._memory, rank * _SLOT.size, steps, began)

    def reached(self) -> int:
        """Optimizer steps made by the rank that is farthest; -1 if none has begun."""
        return max(steps for steps, _ in _SLOT.iter_unpack(self._memory[:]))

    def began(self) -> float:
        """When the first batch began; 0.0 if none has."""
        return min((began for steps, began in _SLOT.iter_unpack(self._memory[:]) if steps >= 0), default=0.0)


@final
class Progress(Callback):
    """Writes down how far this rank is, where it survives this rank."""

    def __init__(self, slots: Slots) -> None:
        self._slots, self._began = slots, 0.0

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._began = self._began or time.time()
        self._slots.put(trainer.global_rank, trainer.global_step, self._began)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._slots.put(trainer.global_rank, trainer.global_step, self._began)


@final
@dataclass(frozen=True)
class Begun:
    """What an attempt says before it trains.

    Args:
        devices: how many it uses; 0 if that is no number.
        fitting: the numbers of devices that keep the global batch, from `--min-devices` on; none without it.
        places: where its checkpoints are.
        folder: of the run's reports.
        resumed: the checkpoint from which it goes on, empty if it begins anew, and the steps in it, -1 then.
        step: see above.
    """

    devices: int
    fitting: tuple[int, ...]
    places: tuple[str, ...]
    folder: str
    resumed: str
    step: int


@final
@dataclass(frozen=True)
class Ended:
    """How an attempt ended.

    Args:
        kind: it returned; left with an exit code, by a signal or by itself; was refused by what the user wrote; or a
            rank failed.
        code: the exit code.
        error: what the user can mend, if it was refused.
        rank: which rank failed, of how many.
        cause: of a failure, in one line, and `details`: the rank's traceback.
        died: how many ranks' processes were gone; of ranks that were not forked here, nobody knows it.
        hopeless: the same would come of the same.
        drifted: replicas differed, and a checkpoint taken since they were compared may hold it.
    """

    kind: Literal["returned", "left", "refused", "failed"]
    code: int = 0
    error: BaseException | None = None
    rank: tuple[int, int] = (0, 1)
    cause: str = ""
    details: str = ""
    died: int = 0
    hopeless: bool = False
    drifted: bool = False


@final
@dataclass
class Attempt:
    """What `Restarts` gives to the work of one attempt; without `tell`, one that others restart (torchrun).

    Args:
        number: from 0.
        began: when the first attempt began (`time.monotonic`, and `time.time`).
        named: a checkpoint named by the user; empty for `auto`.
        devices: to be used in place of the config's; 0 for those.
        min_devices: as the user allows; 0 for no other number.
        tell: takes what the parent must know.
        slots: how far ranks are.
    """

    number: int = 0
    began: tuple[float, float] = field(default_factory=lambda: (time.monotonic(), time.time()))
    named: str = ""
    devices: int = 0
    min_devices: int = 0
    tell: Callable[[Begun], None] = lambda _: None
    slots: Slots | None = None

    @property
    def words(self) -> list[str]:
        """What this attempt adds to the command line of the run."""
        words = ["--trainer.devices", str(self.devices)] if self.devices else []
        return [*words, "--ckpt_path", self.named] if self.named else words

    @property
    def callbacks(self) -> list[Callback]:
        """What it adds to those of the run."""
        return [Progress(self.slots)] if self.slots is not None else []

    def prepare(self, trainer: Trainer, module: LightningModule, data: LightningDataModule | None) -> str | None:
        """Finds the checkpoint to go on from, and tells the parent; called when all is built, before the fit.

        Under torchrun every rank calls it for itself, on the same files.

        Raises:
            ConfigError: there will be nothing to resume from, or fewer devices would change the global batch.
            CheckpointError: the checkpoint is of another model.
        """
        search.make_resumable(trainer)
        places = search.places(trainer)
        fitting = fitting_devices(trainer, data, self.min_devices) if self.min_devices else ()
        found = search.newest(places, since=self.began[1] if self.named else 0.0)
        path = str(found.path) if found is not None else self.named
        if path:
            search.check_model(Path(path), module)
        callbacks: list[Callback] = vars(trainer)["callbacks"]
        for callback in callbacks:
            if isinstance(callback, GracefulStop):
                callback.began = self.began[0]
        folder = str(Path(trainer.default_root_dir) / "guard")
        devices = trainer.num_devices if isinstance(trainer.num_devices, int) else 0
        step = found.step if found is not None else -1
        self.tell(Begun(devices, fitting, places, folder, path, step))
        return path or None


def fitting_devices(trainer: Trainer, data: LightningDataModule | None, least: int) -> tuple[int, ...]:
    """The numbers of devices, from `least` to that of the run, on which an optimizer step takes the same samples.

    A data module says so by `global_batch`, as those of `stratagem.models` do; a strategy of ours by
    `run.batch_size: global`. Where a loader states `batch_size` per rank, more accumulation would keep the global batch
    too, but not the position: Lightning counts micro-batches, and those would have another size in the middle of an
    epoch. So that is refused.

    Raises:
        ConfigError: there is no smaller number that fits, or the batch is stated per rank.
    """
    strategy, most = trainer.strategy, trainer.num_devices
    if trainer.num_nodes != 1 or least > most:
        what = f"{least} devices at least, on {trainer.num_nodes} hosts" if least <= most else f"{least} of {most}"
        raise ConfigError(what, where="--min-devices", allowed=f"1 to {most}, on one host", do="use torchrun for more")
    global_batch = getattr(data, "global_batch", None)
    per_rank = getattr(getattr(strategy, "run", None), "batch_size", "per_rank") == "per_rank"
    if global_batch is None and per_rank:
        raise ConfigError(
            "the batch is stated per rank, so that fewer devices would make another global batch",
            where="--min-devices",
            allowed="with a data module that has global_batch, or with run.batch_size: global in the strategy",
            do="set trainer.strategy.init_args.run.batch_size: global, and the global size in the DataLoader",
        )
    fitting = []
    for number in range(least, most + 1):
        ranks = _data_ranks(strategy, number)
        if ranks and (global_batch is None or global_batch % (ranks * trainer.accumulate_grad_batches) == 0):
            fitting.append(number)
    if least < most and fitting[:1] in ([], [most]):
        raise ConfigError(
            f"no number of devices from {least} to {most - 1} divides the global batch of {global_batch}",
            where="--min-devices",
            do="choose a global_batch that more numbers divide, such as 12 or 24, or allow fewer devices",
        )
    return tuple(fitting)


def _data_ranks(strategy: Any, devices: int) -> int:
    """Ranks that read different samples on so many devices; 0 if there can be no such run."""
    if not isinstance(strategy, MeshStrategy):
        return devices
    try:
        return strategy.mesh_shape(devices).data_size
    except MeshError:
        return 0


def outcome(work: Callable[[], Any], begun: Callable[[], Begun | None]) -> Ended:
    """Does the work of an attempt, in its process; what became of it."""
    try:
        work()
    except KeyboardInterrupt:
        return Ended("left", 130)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        return Ended("left", code)
    except (UserError, MisconfigurationException) as error:
        return Ended("refused", 2, error)
    except RankError as error:
        return Ended(
            "failed",
            1,
            rank=(error.rank, error.num_ranks),
            cause=error.summary,
            details=error.details,
            died=max(len(error.dead), int(error.exitcode is not None and error.cause is None)),
            hopeless=isinstance(error.cause, DivergedError),
            drifted=isinstance(error.cause, DriftError),
        )
    except Exception as error:  # of the only rank, which is this process, or of one that others started
        known = begun()
        return Ended(
            "failed",
            1,
            rank=(0, max(1, known.devices if known is not None else 1)),
            cause=f"{type(error).__name__}: {error}",
            details=traceback.format_exc(),
            hopeless=known is None or isinstance(error, DivergedError),
            drifted=isinstance(error, DriftError),
        )
    return Ended("returned")


def for_fresh_ranks(words: list[str], named: str, path: str | None) -> None:
    """Lets a launcher that starts this command afresh for each rank start this attempt, not the whole run again.

    Such a rank reads `--resume` too, so that it writes and reads checkpoints as rank 0 does; where ranks are started by
    others, it restarts nothing.

    Args:
        words: of the attempt's command line, verb first.
        named: the checkpoint that the user named; empty for `auto`, whose rule finds each rank the same one.
        path: the checkpoint that the attempt goes on from.
    """
    if words[0] in sys.argv:
        rest = words[:-2] if named else words  # without the `--ckpt_path` of `Attempt.words`
        sys.argv[1:] = [*rest, "--resume", (path or named) if named else "auto"]


def number_for_ranks(number: int) -> None:
    """Tells ranks, in the words of torchrun, which attempt this is."""
    os.environ.update(TORCHELASTIC_RESTART_COUNT=str(number))
