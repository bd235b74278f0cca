# SPDX-License-Identifier: Apache-2.0
"""Commit: a checkpoint is not there until all of it is there, whenever the machine stops.

    begin     .step=100.ckpt.tmp-k3x9    a folder beside the target, with a lock that dies with its owner
    (ranks write their files into it, each on disk before it says so)
    commit    manifest.json, on disk     the last file
              rename                     one step of the file system: before it there is the old, after it the new
    sweep     removes folders whose owner died before its rename

So a folder of the target's name with a manifest in it is whole, or was damaged later: `faults` tells, by the sizes and
checksums that the manifest states. Nothing older is removed before something newer has been committed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, final

from stratagem.checkpoint.manifest import MANIFEST, Manifest
from stratagem.checkpoint.reading import Reader
from stratagem.errors import CheckpointError

_LOCK = ".lock"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h


Step = Literal["manifest", "renamed"]


@final
class Draft:
    """A checkpoint that is being written. One rank holds it; the others only write into its folder.

    Args:
        target: the folder that it will be. Its parent is made if it is not there.

    Raises:
        CheckpointError: the folder cannot be made, with the system's reason.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        with reported("made", target):
            while not self._is_held():  # another run in this folder may sweep up what is not locked yet
                pass

    def _is_held(self) -> bool:
        self.folder = _beside(self.target, "tmp")
        self.folder.mkdir(parents=True)
        try:
            self._lock = open(self.folder / _LOCK, "wb")  # noqa: SIM115  # held as long as the draft
        except FileNotFoundError:
            if self.folder.exists():
                raise
            return False
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        if (self.folder / _LOCK).exists():
            return True
        self._lock.close()
        return False

    def commit(self, manifest: Manifest, at: Callable[[Step, Path], None] = lambda *_: None) -> None:
        """Makes it a checkpoint; one of that name that was there is gone afterwards.

        Args:
            manifest: of all ranks.
            at: told when the last file is there, and when the name is: between them lies the commit.

        Raises:
            CheckpointError: the disk is full or the folder was taken away; what was there before is untouched.
        """
        with reported("committed", self.target):
            write_text(self.folder / MANIFEST, manifest.to_json())
            sync_folder(self.folder)
            at("manifest", self.folder)
            old = _take_name(self.folder, self.target)
            (self.target / _LOCK).unlink(missing_ok=True)  # not before: without it the draft would pass for an orphan
            at("renamed", self.target)
            if old is not None:
                _remove(old)
        self._lock.close()

    def discard(self) -> None:
        """Gives it up, and what was written."""
        self._lock.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def reported(what: str, where: Path) -> Iterator[None]:
    """Turns the system's refusal into an error that says what could not be done, where, and what to do."""
    try:
        yield
    except OSError as error:
        raise refusal(what, where, error) from error


def refusal(what: str, where: Path, error: OSError) -> CheckpointError:
    """The error for a refusal of the system; see `reported`."""
    hints = {
        errno.ENOSPC: "free some space; checkpoints committed before are untouched",
        errno.EDQUOT: "free some of the quota; checkpoints committed before are untouched",
        errno.EFBIG: "raise the limit on the size of files; checkpoints committed before are untouched",
        errno.EROFS: "choose a folder that can be written to",
        errno.EACCES: "choose a folder that can be written to",
        errno.EPERM: "choose a folder that can be written to",
        errno.ENOTDIR: "choose a folder: a part of this path is a file",
    }
    reason = error.strerror or str(error)
    return CheckpointError(
        f"the checkpoint cannot be {what}: {reason}", where=str(where), do=hints.get(error.errno or 0, "")
    )


def write_text(path: Path, text: str) -> None:
    """A small file, on disk when this returns."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Puts a folder's list of names on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_folder(new: Path, target: Path) -> None:
    """Renames a folder to a name that another folder, or file, may have, which is removed then.

    Where the system can exchange two names at once there is no moment without a checkpoint of that name. Elsewhere the
    old one is moved aside first, under a name that `candidates` also looks at.
    """
    old = _take_name(new, target)
    if old is not None:
        _remove(old)


def remove(target: Path) -> None:
    """Removes a checkpoint such that no half of it keeps its name: first the name, then the files."""
    if not os.path.lexists(target):
        return
    doomed = _beside(target, "tmp")
    os.rename(target, doomed)
    _remove(doomed)


def sweep(folder: Path) -> list[Path]:
    """Removes what saves left behind whose process died, in one folder; returns what it removed.

    Drafts of processes that live, of whatever run, hold a lock and are left alone. What was moved aside goes when one
    that is not older has its name again.
    """
    removed = []
    for orphan in folder.glob(".*.tmp-*"):
        with contextlib.suppress(OSError):
            lock = orphan / _LOCK
            if lock.exists():
                with open(lock, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where the owner lives
                    _remove(orphan)  # while it is held, so that who waits for it sees that it is gone
            else:
                _remove(orphan)
            removed.append(orphan)
    for path, age in ages(folder).items():
        for old in folder.glob(f"{glob.escape(_veiled(path))}.old-*"):
            if (_age(old) or (-1, 0.0)) <= (age or (-2, 0.0)):
                _remove(old)
                removed.append(old)
    return removed


def faults(folder: Path, share: int = 0, num_shares: int = 1, *, deep: bool = True) -> list[str]:
    """What is wrong with a checkpoint, one line each; nothing if it is whole.

    Args:
        folder: of the checkpoint.
        share: of the files, in order of their names, every `num_shares`-th from this one on is read, so that ranks can
            share the work; sizes are always compared, of all files.
        num_shares: see above.
        deep: read and compare checksums too.
    """
    try:
        manifest = Reader(folder).manifest
    except CheckpointError as error:
        return [error.what]
    found = []
    for number, (name, file) in enumerate(sorted(manifest.files.items())):
        path = folder / name
        try:
            size = path.stat().st_size
            if size != file.num_bytes:
                found.append(f"{name} has {size} bytes, {file.num_bytes} were written")
            elif deep and number % num_shares == share and checksum(path) != file.crc:
                found.append(f"{name} was changed: its checksum is another one")
        except OSError as error:
            found.append(f"{name} cannot be read: {error.strerror}")
    return found


def checksum(path: Path) -> int:
    """CRC-32 of a file's bytes."""
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(2**22):
            crc = zlib.crc32(block, crc)
    return crc


def candidates(folder: Path) -> list[Path]:
    """Every folder with a manifest, newest first by the step and the time that it states. Looks into `folder` only.

    A link to one of them (`last.ckpt`, of `save_last: link`) is a second name for it and is not listed.
    """
    known = ages(folder)
    return sorted(known, key=lambda path: known[path] or (-1, 0.0), reverse=True)


def ages(folder: Path) -> dict[Path, tuple[int, float] | None]:
    """Of every folder with a manifest the step and the time that it states; None for one that cannot be read."""
    real = folder.resolve()
    return {
        path.parent: _age(path.parent)
        for path in _manifests(folder)
        if not path.parent.is_symlink() or path.parent.resolve().parent != real
    }


def before(target: Path) -> list[Path]:
    """Checkpoints beside this one that are not newer, newest first. One that cannot say its age has that of its files.

    Args:
        target: a checkpoint, damaged or not.
    """
    link = target.lstat().st_mtime if target.is_symlink() and not target.exists() else 0.0  # set before its commit
    target = _without_link(target)
    mine = _age(target)
    written = min((path.stat().st_mtime for path in target.glob("*") if path.is_file()), default=link)
    found = []
    for path in candidates(target.parent):
        age = _age(path)
        if age is not None and path != target and (age <= mine if mine is not None else age[1] <= written):
            found.append(path)
    return found


def _without_link(target: Path) -> Path:
    """The folder that a name stands for, under the name of its parent's; also where the link leads nowhere."""
    if not target.is_symlink():
        return target
    led = Path(os.path.normpath(target.parent / target.readlink()))
    return led if led.parent == Path(os.path.normpath(target.parent)) else target


def _beside(target: Path, why: str) -> Path:
    """A hidden name beside a target. Underscores go: Lightning takes every name with `ckpt_` in it for a checkpoint of
    a Slurm job, and the digits behind it for its number."""
    return target.parent / f"{_veiled(target)}.{why}-{secrets.token_hex(4)}"


def _veiled(target: Path) -> str:
    return f".{target.name.replace('_', '-')}"


def _manifests(folder: Path) -> list[Path]:
    found = [*folder.glob(f"*/{MANIFEST}"), *folder.glob(f".*.old-*/{MANIFEST}")]
    return [path for path in found if ".tmp-" not in path.parent.name]


def _age(folder: Path) -> tuple[int, float] | None:
    """Step and time that a checkpoint states; None if it cannot be read."""
    try:
        about = Reader(folder).manifest.about
    except CheckpointError:
        return None
    return int(about.get("global_step", -1)), float(about.get("created", 0.0))


def _take_name(new: Path, target: Path) -> Path | None:
    """Gives `new` the name `target`; returns where what had that name is now."""
    aside: Path | None = None
    if not os.path.lexists(target):
        os.rename(new, target)
    elif _exchange(new, target):
        aside = new
    else:
        aside = _beside(target, "old")
        os.rename(target, aside)
        os.rename(new, target)
    sync_folder(target.parent)
    return aside


def _exchange(one: Path, other: Path) -> bool:
    """Gives two names to each other in one step; False where the system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    done: int = libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return done == 0


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
