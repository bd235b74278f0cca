# SPDX-License-Identifier: Apache-2.0
"""In-memory replicas: a checkpoint every few steps that costs a copy in memory, and is read after processes have died.

    every n steps    each rank writes its share, the same chunks that a save to disk would write, into shared memory of
                     its host, and once more into its partner's; when every rank has both, the snapshot before goes
    after a death    the newest snapshot whose every share is intact in one memory or the other; else the disk

Memory: while a snapshot is taken two of them are there, each of `copies` shares per rank: `2 * copies` shares. Traffic:
none within a host; between hosts each share is broadcast, together as much as one all-gather of the state.

Put it into the Trainer's callbacks, and resume from what `open_newest` finds; the path that it returns is a checkpoint
as any other, for any number of ranks and any strategy of ours:

    memory = ReplicaSettings(run="big", every_n_steps=10)
    newest = open_newest(memory, disk=Path("runs/big"))
    trainer = Trainer(strategy="zero_3", callbacks=[InMemoryReplicas(memory)])
    trainer.fit(module, ckpt_path=newest and newest.path)

A snapshot that cannot be taken (the memory is full) is passed over, aloud, and training goes on. Memory goes at the
clean end of a run; after a failure it stays, and the next run of another name removes it when its owner has ended.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from stratagem.checkpoint import commit
from stratagem.checkpoint.manifest import MANIFEST, OBJECTS, Manifest, Written, rank_file
from stratagem.checkpoint.memory import SHARED_MEMORY, Memory, holders, sweep
from stratagem.checkpoint.reading import Reader
from stratagem.checkpoint.writing import write, write_object
from stratagem.errors import ConfigError
from stratagem.strategy.composing import compose
from stratagem.strategy.crew import Alone, Crew
from stratagem.strategy.plain_state import PlainState

Where = Literal["memory", "partners", "disk"]
Key = tuple[int, float, int]


@dataclass(frozen=True)
class ReplicaSettings:
    """What is kept in memory.

    Args:
        run: names the run; the run that resumes has the same name.
        every_n_steps: optimizer steps from one snapshot to the next.
        copies: memories in which each share lies; one copy survives no loss of a memory, but every death of a process.
        owner: the process whose end is the end of the run; the one that started the ranks, if left out.
        root: the folder of shared memory.

    Raises:
        ConfigError: a number below 1.
    """

    run: str
    every_n_steps: int = 10
    copies: int = 2
    owner: int | None = None
    root: str = str(SHARED_MEMORY)

    def __post_init__(self) -> None:
        for name in ("every_n_steps", "copies"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{getattr(self, name)}", where=f"replicas.{name}", allowed="1 or more")
        self.memory()

    def memory(self) -> Memory:
        """This host's."""
        return Memory(self.run, Path(self.root))


@final
class Replicas:
    """Takes the snapshots of one run. Every rank of the crew has one and calls its methods in the same order.

    Args:
        settings: see there.
        crew: all ranks.
        host: names this rank's host; tests say otherwise.

    Attributes:
        at: told where a snapshot is: `written`, `copied`, `whole`, `renamed`, `agreed`. For tests.
    """

    def __init__(self, settings: ReplicaSettings, crew: Crew, host: str = "") -> None:
        self._crew, self._settings, self._memory = crew, settings, settings.memory()
        self.at: Any = lambda point: None
        self._host = host or _this_host(settings)
        self._hosts: list[str] = []

    def open(self) -> None:
        """Claims the memory and learns who is where. Collective.

        Raises:
            CheckpointError: see `Memory.claim`; on the rank that it concerns.
        """
        sweep(Path(self._settings.root), but=self._settings.run)
        owner = self._settings.owner
        self._memory.claim(os.getppid() if owner is None else owner)
        self._hosts = self._crew.gather_objects(self._host)

    def take(self, checkpoint: dict[str, Any]) -> bool:
        """Takes a snapshot; False, and said aloud, if it cannot be taken: the one before stays then. Collective.

        Args:
            checkpoint: Lightning's, with tensors or `Part`s.
        """
        crew, memory, me = self._crew, self._memory, self._crew.rank
        picture = compose(checkpoint, crew)
        written, failure = Written({}, {}), ""
        try:
            memory.begin(me)
            written = write(memory.draft(me), me, picture.choices)
        except OSError as error:
            failure = f"rank {me}: {error.strerror}"
        self.at("written")
        words = crew.gather_objects((written, picture.own, failure))
        if self._failed([each for *_, each in words]):
            return False
        objects = crew.broadcast_object(self._objects(picture.complete([own for _, own, _ in words])))
        about, aliases = crew.broadcast_object((dict(picture.about), dict(picture.aliases)))
        try:
            parts = [part for part, *_ in words]
            parts.append(Written({}, {OBJECTS: objects[0]}))
            self._complete(Manifest.join(parts, aliases, about), objects)
        except OSError as error:
            failure = f"rank {me}: {error.strerror}"
        self._send_abroad()
        self.at("copied")
        if self._failed(crew.gather_objects(failure)):
            return False
        self.at("whole")
        memory.finish(me, picture.step)
        self.at("renamed")
        crew.gather_objects(None)  # from here on nobody needs the one before
        self.at("agreed")
        memory.forget(me, but=picture.step)
        if me == self._hosts.index(self._host):
            memory.forget_ranks(but=[rank for rank, host in enumerate(self._hosts) if host == self._host])
        return True

    def end(self) -> None:
        """The run is over, and well: its memory goes. Called by every rank, after they have met for the last time."""
        self._memory.end()

    def _failed(self, failures: Sequence[str]) -> bool:
        found = [failure for failure in failures if failure]
        if found:
            rank_zero_warn(f"No snapshot was taken in {self._memory.folder}: {'; '.join(found)}")
        return bool(found)

    def _objects(self, objects: Any) -> Any:
        """Rank 0 writes them, and everyone has them: the entry of the manifest, and the bytes."""
        if self._crew.rank != 0:
            return None
        path = self._memory.draft(0) / OBJECTS
        return write_object(path, objects), path.read_bytes()

    def _complete(self, manifest: Manifest, objects: tuple[Any, bytes]) -> None:
        """Puts into this rank's memory all but its own share, and its share into those of its partners on this host."""
        memory, me = self._memory, self._crew.rank
        (memory.draft(me) / OBJECTS).write_bytes(objects[1])
        commit.write_text(memory.draft(me) / MANIFEST, manifest.to_json())
        for partner in holders(me, self._hosts, self._settings.copies)[1:]:
            if self._hosts[partner] == self._host:
                shutil.copyfile(memory.draft(me) / rank_file(me), memory.draft(partner) / rank_file(me))

    def _send_abroad(self) -> None:
        """Gives partners on other hosts their copies. Collective."""
        me = self._crew.rank
        for rank in range(self._crew.size):
            there = [
                r for r in holders(rank, self._hosts, self._settings.copies) if self._hosts[r] != self._hosts[rank]
            ]
            if there:
                share = (self._memory.draft(me) / rank_file(rank)).read_bytes() if me == rank else None
                data = self._crew.broadcast_object(share, src=rank)
                if me in there:
                    (self._memory.draft(me) / rank_file(rank)).write_bytes(data)


@final
@dataclass(frozen=True)
class Newest:
    """What a run goes on from.

    Args:
        path: a checkpoint's folder, for `ckpt_path`.
        step: its `global_step`.
        where: `memory`; `partners` if some rank's share was its partner's copy; or `disk`.
        told: what was lost, a line each.
    """

    path: Path
    step: int
    where: Where
    told: tuple[str, ...] = ()


def open_newest(
    settings: ReplicaSettings, disk: Path | None = None, crew: Crew | None = None, host: str = ""
) -> Newest | None:
    """The newest state of a run: from memory if it is whole there and not older than the disk's; None if there is none.

    On one host one process can ask for all ranks, before they are started. On several, one rank of each has to.

    Args:
        settings: of the run that ended.
        disk: a folder of checkpoints.
        crew: who asks together; every rank of it calls this and gets the same answer.
        host: as in `Replicas`.
    """
    crew, memory = crew or Alone(), settings.memory()
    host = host or _this_host(settings)
    hosts = crew.gather_objects(host)
    mine = [rank for rank, each in enumerate(hosts) if each == host]
    snapshots = crew.gather_objects(memory.survey(mine.index(crew.rank), len(mine)))
    found: dict[Key, dict[str, dict[str, Path]]] = {}  # by key and host, the intact files
    wanted: dict[Key, frozenset[str]] = {}
    for where, each in ((hosts[rank], each) for rank, seen in enumerate(snapshots) for each in seen):
        found.setdefault(each.key, {}).setdefault(where, {}).update(each.files)
        wanted[each.key] = each.wanted
    told: list[str] = []
    on_disk = _on_disk(disk, crew)
    for key in sorted(found, reverse=True):
        if on_disk is not None and on_disk.step > key[0]:
            break
        lost = sorted(wanted[key] - {name for files in found[key].values() for name in files})
        if lost:
            told.append(f"step {key[0]} is not whole in memory: {', '.join(lost)} lost with every copy")
            continue
        partners = _from_partners(found[key])
        path = _gather(memory, key, found[key], wanted[key], hosts, host, crew)
        told += [f"{name} was lost and is read from its partner's memory" for name in partners]
        return _said(Newest(path, key[0], "partners" if partners else "memory", tuple(told)))
    if on_disk is None:
        return None
    return _said(Newest(on_disk.path, on_disk.step, "disk", tuple(told)))


def _said(newest: Newest) -> Newest:
    for line in newest.told:
        rank_zero_warn(line)
    rank_zero_info(f"Going on from step {newest.step}, from {newest.where}: {newest.path}")
    return newest


def _on_disk(disk: Path | None, crew: Crew) -> Newest | None:
    """Rank 0 looks."""
    found: tuple[str, int] | None = None
    if crew.rank == 0 and disk is not None:
        for path in commit.candidates(disk):
            if not commit.faults(path, deep=False):
                found = (str(path), int(Reader(path).manifest.about.get("global_step", -1)))
                break
    found = crew.broadcast_object(found)
    return None if found is None else Newest(Path(found[0]), found[1], "disk")


def _from_partners(files: dict[str, dict[str, Path]]) -> list[str]:
    """The shares of which no rank's own copy is left."""
    places: dict[str, set[str]] = {}
    for name, path in (item for each in files.values() for item in each.items()):
        places.setdefault(name, set()).add(path.parent.parent.name)
    return sorted(name for name, at in places.items() if name != OBJECTS and Path(name).stem not in at)


def _gather(
    memory: Memory,
    key: Key,
    found: dict[str, dict[str, Path]],
    wanted: frozenset[str],
    hosts: Sequence[str],
    host: str,
    crew: Crew,
) -> Path:
    """Makes the view on every host; what one lacks is broadcast. Collective."""
    first = hosts.index(host) == crew.rank
    extra: dict[str, bytes] = {}
    for name in (MANIFEST, *sorted(wanted)):
        has = [name in found.get(each, {}) if name != MANIFEST else each in found for each in hosts]
        if all(has):
            continue
        source, data = has.index(True), None
        if crew.rank == source:
            data = (memory.manifest_of(key) or "").encode() if name == MANIFEST else found[host][name].read_bytes()
        data = crew.broadcast_object(data, src=source)
        if first and not has[crew.rank]:
            extra[name] = data
    path = memory.folder / "view" / f"step={key[0]}"
    if first:
        memory.view(key, found.get(host, {}))
        for name, data in {MANIFEST: (memory.manifest_of(key) or "").encode(), **extra}.items():
            (path / name).write_bytes(data)
    crew.gather_objects(None)
    return path


def _this_host(settings: ReplicaSettings) -> str:
    found = os.stat(settings.root)
    return f"{platform.node()}:{found.st_dev}:{found.st_ino}"  # containers may share a name, but not the memory


@final
class InMemoryReplicas(Callback):
    """Keeps snapshots of the run in memory; see the module's documentation. For our strategies.

    Args:
        settings: see there.
    """

    def __init__(self, settings: ReplicaSettings) -> None:
        self.settings = settings
        self._replicas: Replicas | None = None
        self._taken = -1

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, PlainState):
            raise ConfigError(
                f"{type(trainer.strategy).__name__} saves no shares",
                where="callbacks: InMemoryReplicas",
                allowed="the strategies of stratagem, but DeepSpeed's",
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, PlainState)
        assert strategy.context is not None
        crew = strategy.context.communicator(*strategy.context.shape.sizes, lane="replicas")
        self._replicas, self._taken = Replicas(self.settings, crew), trainer.global_step
        self._replicas.open()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self._replicas is None or step == self._taken or step % self.settings.every_n_steps:
            return
        self._taken = step
        strategy = trainer.strategy
        assert isinstance(strategy, PlainState)
        self._replicas.take(strategy.compose_checkpoint())

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After the strategy's teardown, in which all ranks settle the last save together."""
        if self._replicas is not None:
            self._replicas.end()
            self._replicas = None
