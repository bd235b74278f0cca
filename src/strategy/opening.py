# SPDX-License-Identifier: Apache-2.0
"""Opening: a checkpoint's folder as the dict that Lightning knows, its tensors read when they are asked for, or whole.

names of optimizers' state     of parameters in the folder, positions in the dict: positions change, names do not
tensors                        `Stored`, which reads boxes; or all of each, where a reader knows only whole tensors
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from stratagem.checkpoint import commit, remote, tree
from stratagem.checkpoint.manifest import MANIFEST, OBJECTS
from stratagem.checkpoint.reading import Reader
from stratagem.errors import CheckpointError
from stratagem.strategy.crew import Alone, Crew

_BY_PARTS = (tree.STATE, tree.OPTIMIZERS, "stratagem")
"""What strategies read, of which a rank needs a part."""


def is_ours(path: Any) -> bool:
    """Whether a path, given as text or as a path, is a folder with a manifest, here or in a store that can be asked."""
    if not isinstance(path, str | Path):
        return False
    if not remote.is_remote(path):
        return (local_path(path) / MANIFEST).is_file()
    if str(path).startswith("http"):
        return False
    try:
        return remote.is_checkpoint(str(path))
    except CheckpointError:
        return False


def is_file(path: Any) -> bool:
    """Whether it is for Lightning to read: a file, an open file, something else than ours in a store."""
    if not isinstance(path, str | Path):
        return True
    return not is_ours(path) if remote.is_remote(path) else local_path(path).is_file()


def local_path(path: Any) -> Path:
    """The path of a local folder, which may be written `file://`, or `~` as fsspec reads it."""
    return Path(os.path.expanduser(str(path).removeprefix("file://").removeprefix("local://")))


def open_folder(folder: Path, weights_only: bool | None = None, hold: bool = False) -> dict[str, Any]:
    """A checkpoint; of the model and the optimizers tensors are read when they are asked for. Compares nothing. Local.

    Args:
        folder: of the checkpoint.
        weights_only: as `torch.load`'s.
        hold: the folder goes when this has returned.

    Raises:
        CheckpointError: there is none.
    """
    reader = Reader(folder)
    if hold:
        reader.hold()
    rest = torch.load(folder / OBJECTS, map_location="cpu", weights_only=weights_only)
    found: dict[str, Any] = {
        key: tree.put_together(item, lambda name: tree.Stored(reader, name))
        if key in _BY_PARTS
        else tree.put_together(item, reader.whole)  # callbacks and users know tensors
        for key, item in rest.items()
    }
    if tree.STATE in found:
        found[tree.STATE] = tree.StoredState(found[tree.STATE])
    return renamed(found, to_names=False)


def open_remote(url: str, crew: Crew, weights_only: bool | None = None) -> dict[str, Any]:
    """As `open_folder`, out of a store: every rank fetches all of it for itself; if one cannot, all know. Collective.

    Raises:
        CheckpointError: there is none, or it was damaged on its way; on every rank.
    """
    with TemporaryDirectory(prefix="stratagem-") as directory:
        folder, failure = Path(directory), None
        try:
            remote.fetch(url, folder)
            found = commit.faults(folder)
            if found:
                what = f"the checkpoint is damaged: {'; '.join(found[:3])}"
                failure = CheckpointError(what, where=url, do="name another one")
        except CheckpointError as error:
            failure = error
        for each in crew.gather_objects(failure):
            if each is not None:
                raise each
        return open_folder(folder, weights_only, hold=True)


def whole_one(folder: Path, crew: Crew, deep: bool) -> Path:
    """The newest whole checkpoint that is not newer than the one asked for; every rank chooses the same. Collective.

    Args:
        folder: the one asked for.
        crew: who loads; they share the work of reading.
        deep: compare checksums too.

    Raises:
        CheckpointError: there is none, here or before it.
    """
    tried: list[str] = []
    if crew.rank == 0 and os.path.lexists(folder):
        tried = [str(each) for each in (folder, *commit.before(folder))]
    for candidate in map(Path, crew.broadcast_object(tried)):
        mine = commit.faults(candidate, crew.rank, crew.size, deep=deep)
        found = list(dict.fromkeys(fault for faults in crew.gather_objects(mine) for fault in faults))
        if not found:
            if candidate != folder:
                rank_zero_warn(f"Resuming from {candidate} instead.")
            return candidate
        rank_zero_warn(f"{candidate} is damaged: {'; '.join(found[:3])}")
    raise CheckpointError(
        "there is no whole checkpoint, here or before it",
        where=str(folder),
        do="name another one, or start anew",
    )


def read_whole(path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
    """A checkpoint as `torch.load` gives one of a file: every tensor whole, where `map_location` wants it. Local.

    Every file's size is compared with what was written; checksums are not, since all of it would be read twice.

    Args:
        path: for which `is_ours` holds.
        map_location: as `torch.load`'s.
        weights_only: as `torch.load`'s.

    Raises:
        CheckpointError: it is damaged; it is named which older one is beside it, and not taken in its place.
    """
    if remote.is_remote(path):
        opened = open_remote(str(path), Alone(), weights_only)
    else:
        folder = local_path(path)
        found = commit.faults(folder, deep=False)
        if found:
            older = [str(path) for path in commit.before(folder)]
            raise CheckpointError(
                f"the checkpoint is damaged: {'; '.join(found[:3])}",
                where=str(folder),
                do=f"take the one before it, {older[0]}" if older else "name another one",
            )
        opened = open_folder(folder, weights_only)
    return {key: moved(tree.whole(value), map_location) for key, value in opened.items()}


def moved(value: Any, where: Any) -> Any:
    """A tree of tensors, each of them where `map_location`'s rules, said of one that was saved on the CPU, want it.

    >>> moved({"w": [torch.zeros(2)]}, torch.device("meta"))["w"][0].device.type
    'meta'
    """
    if isinstance(value, Tensor):
        return value.to(_device(value, where))
    if isinstance(value, dict):
        found = {key: moved(item, where) for key, item in value.items()}
        return found if type(value) is dict else tree.like(value, found)
    return type(value)(moved(item, where) for item in value) if type(value) in (list, tuple) else value


def _device(tensor: Tensor, where: Any) -> torch.device:
    if where is None:
        return tensor.device
    if isinstance(where, Mapping):
        return torch.device(where.get("cpu", tensor.device))
    if callable(where):
        found = where(tensor.untyped_storage(), "cpu")
        return tensor.device if found is None else torch.device(found.device)
    return torch.device(where)


def renamed(checkpoint: dict[str, Any], *, to_names: bool) -> dict[str, Any]:
    """The optimizers' state under the names of parameters where they are known, or back."""
    states = checkpoint.get(tree.OPTIMIZERS)
    if states is None:
        return checkpoint
    names = checkpoint.get("stratagem", {}).get("optimizer_names")
    return {**checkpoint, tree.OPTIMIZERS: tree.renamed_state(states, names, to_names=to_names)}
