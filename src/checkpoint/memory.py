# SPDX-License-Identifier: Apache-2.0
"""One host's memory of a run: snapshots in shared memory that outlive the processes that wrote them (Gemini, 2023).

    /dev/shm/stratagem-1000-RUN/          mode 0700, of one run
        owner                             the process whose end is the end of the run
        rank-00000/                       rank 0's memory
            step=20/                      clean: renamed when all of it was there
                rank-00000.bin            its own share, the file that a save to disk would write
                rank-00001.bin            what its partner has put here: the partner's share
                objects.pt, manifest.json as on disk; the manifest has the CRC of every file
            .draft/                       dirty: being written, or what a death has left of that
        view/                             one whole checkpoint of links to intact files, for whoever resumes

A snapshot takes the place of the one before only when every rank has its own clean. So whenever all processes die, one
snapshot is clean everywhere; and since a share lies in two memories, any one memory may be lost.

Nothing here talks to anybody: `stratagem.strategy.replicas` does.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from stratagem.checkpoint import commit
from stratagem.checkpoint.manifest import MANIFEST, Manifest
from stratagem.errors import CheckpointError, ConfigError

SHARED_MEMORY = Path("/dev/shm")
_PREFIX, _OWNER, _DRAFT, _VIEW, _YOUNG = "stratagem", "owner", ".draft", "view", 60.0


def holders(rank: int, hosts: Sequence[str], copies: int) -> list[int]:
    """The ranks that hold a rank's share: itself first, then its partners along the ring, on other hosts if there are.

    Args:
        rank: whose share.
        hosts: of all ranks, in order.
        copies: how many in all; fewer where there are not so many ranks.

    >>> holders(1, ["a", "a", "a"], 2), holders(0, ["a", "a", "b", "b"], 2), holders(0, ["a"], 2)
    ([1, 2], [0, 2], [0])
    """
    ring = [(rank + offset) % len(hosts) for offset in range(1, len(hosts))]
    ring.sort(key=lambda other: hosts[other] == hosts[rank])  # stable: in the ring's order, other hosts first
    return [rank, *ring][:copies]


@final
@dataclass(frozen=True)
class Snapshot:
    """What one host has of one snapshot.

    Args:
        step: of the snapshot.
        created: when, as rank 0 said.
        digest: of its manifest: shares go together only if it is the same.
        files: the intact ones by name, and where each is.
        wanted: all that the manifest names.
    """

    step: int
    created: float
    digest: int
    files: Mapping[str, Path]
    wanted: frozenset[str]

    @property
    def key(self) -> tuple[int, float, int]:
        """What makes two hosts' snapshots the same; the newest is the largest."""
        return (self.step, self.created, self.digest)


@final
class Memory:
    """One host's memory of one run. Every process of the run opens it; none keeps anything open.

    Args:
        run: the name of the run.
        root: where it lies.

    Attributes:
        folder: of the run.
    """

    def __init__(self, run: str, root: Path = SHARED_MEMORY) -> None:
        if not run or "/" in run or run.startswith("."):
            raise ConfigError(f"{run!r} cannot name a folder", where="run", do="use letters, digits and dashes")
        self.folder = root / f"{_PREFIX}-{os.getuid()}-{run}"

    # -- writing ---------------------------------------------------------------------------------------------------

    def claim(self, owner: int) -> None:
        """Makes the folder, and says whose end is the end of the run.

        Args:
            owner: a process id.

        Raises:
            CheckpointError: something of that name is there that is not this user's folder, or it cannot be made.
        """
        with commit.reported("kept in memory", self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.folder.lstat()
            if self.folder.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise CheckpointError("this is not a folder of this user alone", where=str(self.folder), do="remove it")
            draft = self.folder / f"{_OWNER}-{os.getpid()}"
            commit.write_text(draft, json.dumps([owner, _started(owner)]))
            os.replace(draft, self.folder / _OWNER)

    def draft(self, rank: int) -> Path:
        """The folder of a rank's dirty snapshot."""
        return self.folder / f"rank-{rank:05d}" / _DRAFT

    def begin(self, rank: int) -> None:
        """An empty dirty snapshot, in place of one that was left."""
        shutil.rmtree(self.draft(rank), ignore_errors=True)
        self.draft(rank).mkdir(parents=True, mode=0o700)

    def finish(self, rank: int, step: int) -> None:
        """Makes a rank's dirty snapshot, which is whole, its clean one of that step."""
        for file in self.draft(rank).iterdir():
            file.chmod(0o600)
        commit.replace_folder(self.draft(rank), self.draft(rank).parent / f"step={step}")

    def forget(self, rank: int, but: int) -> None:
        """Removes a rank's snapshots but one."""
        for path in list(self.draft(rank).parent.iterdir()):
            if path.name != f"step={but}":
                commit.remove(path)

    def forget_ranks(self, but: Sequence[int]) -> None:
        """Removes the memories of ranks that are no more, and the view that was made for a resume."""
        kept = {self.draft(rank).parent for rank in but}
        for path in [*self.folder.glob("rank-*"), self.folder / _VIEW]:
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def end(self) -> None:
        """Removes all: the run is over, and well."""
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- reading ---------------------------------------------------------------------------------------------------

    def survey(self, share: int = 0, num_shares: int = 1) -> list[Snapshot]:
        """What is intact here, by checksum; every rank's own copy of its share goes before its partner's.

        Args:
            share: of the files, in order of their names, every `num_shares`-th from this one on is looked at, so that
                the ranks of a host can share the work.
            num_shares: see above.
        """
        found: dict[tuple[int, float, int], dict[str, Path]] = {}
        wanted: dict[tuple[int, float, int], Manifest] = {}
        places = sorted(self.folder.glob("rank-*/step=*"))
        for place in places:
            try:
                text = (place / MANIFEST).read_text(encoding="utf-8")
                manifest = Manifest.from_json(text, str(place))
            except (OSError, UnicodeDecodeError, CheckpointError):
                continue
            about = manifest.about
            key = (int(about["global_step"]), float(about["created"]), zlib.crc32(text.encode()))
            wanted[key] = manifest
            found.setdefault(key, {})
        for key, manifest in wanted.items():
            for name, file in sorted(manifest.files.items())[share::num_shares]:
                own = sorted(places, key=lambda place, name=name: place.parent.name != Path(name).stem)  # type: ignore[misc]
                for path in (place / name for place in own if place.name == f"step={key[0]}"):
                    if path.is_file() and path.stat().st_size == file.num_bytes and commit.checksum(path) == file.crc:
                        found[key][name] = path
                        break
        return [Snapshot(*key, found[key], frozenset(manifest.files)) for key, manifest in wanted.items()]

    def view(self, key: tuple[int, float, int], files: Mapping[str, Path]) -> Path:
        """A folder that is a checkpoint as any on disk, made of links to intact files; one that was there goes.

        Args:
            key: of a snapshot of which this host has a manifest, or which was given one by `receive`.
            files: by name.
        """
        view = self.folder / f"{_VIEW}" / f"step={key[0]}"
        shutil.rmtree(view.parent, ignore_errors=True)
        view.mkdir(parents=True, mode=0o700)
        for name, path in files.items():
            os.link(path, view / name)
        return view

    def manifest_of(self, key: tuple[int, float, int]) -> str | None:
        """The text of a snapshot's manifest, if this host has one."""
        for place in sorted(self.folder.glob(f"rank-*/step={key[0]}")):
            text = (place / MANIFEST).read_text(encoding="utf-8") if (place / MANIFEST).is_file() else ""
            if zlib.crc32(text.encode()) == key[2]:
                return text
        return None


def sweep(root: Path = SHARED_MEMORY, but: str = "") -> list[Path]:
    """Removes the memories of this user's runs whose owner has ended; returns them.

    Args:
        root: where they lie.
        but: the name of a run that is to be resumed.
    """
    removed = []
    kept = f"{_PREFIX}-{os.getuid()}-{but}"
    for folder in root.glob(f"{_PREFIX}-{os.getuid()}-*"):
        if folder.name != kept and folder.is_dir() and not folder.is_symlink() and _is_over(folder):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def _is_over(folder: Path) -> bool:
    try:
        owner, started = json.loads((folder / _OWNER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return time.time() - folder.stat().st_mtime > _YOUNG  # it may be about to say
    return started != _started(owner)


def _started(process: int) -> int:
    """When a process began, in ticks since the machine did; 0 if there is none. Ids are used again, these are not."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])
