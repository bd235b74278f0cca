# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in one file, as Lightning writes them, read and written one tensor at a time.

    write   1  torch.save with room for the tensors but without their bytes
            2  the file is mapped, shared, and each tensor is copied into its room

The file is what `torch.save` of the whole would be, but that the archive's checksums of tensors, which `torch.load`
does not look at, are empty.
"""

from __future__ import annotations

import mmap
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stratagem.checkpoint import commit, tree
from stratagem.checkpoint.foreign_picture import Leaf, Picture, Window, is_leaf, load_file, loaded, replaced, walk
from stratagem.errors import CheckpointError


def read(path: Path, *, trust: bool = False) -> Picture:
    """A single-file checkpoint, or a bare `state_dict` in a file.

    Raises:
        CheckpointError: it is no checkpoint, or needs `trust`.
    """
    window = Window(lambda: load_file(path, trust=trust))
    known: dict[tuple[Any, ...], Leaf] = {}

    def leaf(at: tree.Path, value: Any) -> Any:
        if not is_leaf(value):
            return value.detach().clone() if isinstance(value, Tensor) else value
        place = value.untyped_storage().data_ptr(), value.storage_offset(), tuple(value.shape), value.stride()
        if place not in known:
            known[place] = Leaf(tuple(value.shape), value.dtype, lambda: _fetch(window, at))
        return known[place]

    found = window.get()
    if not isinstance(found, Mapping):
        raise CheckpointError(f"it holds a {type(found).__name__}", where=str(path), allowed="a Lightning checkpoint")
    if tree.STATE not in found and all(isinstance(value, Tensor) for value in found.values()):
        window = Window(lambda: {tree.STATE: load_file(path, trust=trust)})
        found = window.get()
    picture = Picture(replaced(dict(found), leaf), "single file")
    window.took(2**63)
    return picture


def write(picture: Picture, path: Path) -> None:
    """Writes it; it is on disk when this returns.

    Raises:
        OSError: the disk is full or the folder cannot be written to.
    """
    room: dict[int, Tensor] = {}  # by leaf

    def empty(at: tree.Path, value: Any) -> Any:
        if not isinstance(value, Leaf):
            return value
        if id(value) not in room:
            room[id(value)] = torch.empty(value.shape, dtype=value.dtype)  # never touched, so it takes no memory
        return room[id(value)]

    skeleton = replaced(picture.tree, empty)
    with torch.serialization.skip_data():
        torch.save(skeleton, path)
    made = {id(tensor) for tensor in room.values()}
    inline = [at for at, value in walk(skeleton) if isinstance(value, Tensor) and id(value) not in made]
    if _num_storages(path) != len(room) + len(inline):
        # Objects with tensors inside, or tensors that are no plain numbers: nobody but pickle finds their bytes.
        torch.save(replaced(picture.tree, lambda at, value: value.read() if isinstance(value, Leaf) else value), path)
        return _sync(path)
    with open(path, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, os.path.getsize(path))  # a full disk is told here, not by a signal
    window = Window(lambda: _shared(path))
    for at in inline:
        _at(window.get(), at).copy_(_at(skeleton, at))
    room.clear()
    del skeleton
    for at, leaf in picture.leaves().items():
        _at(window.get(), at).copy_(leaf.read())
        window.took(leaf.num_bytes)
    del window
    return _sync(path)


def _num_storages(path: Path) -> int:
    with zipfile.ZipFile(path) as archive:
        return sum("/data/" in name for name in archive.namelist())


def _sync(path: Path) -> None:
    with open(path, "r+b") as file:
        os.fsync(file.fileno())
    commit.sync_folder(path.parent)


def _shared(path: Path) -> Any:
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        return loaded(path, weights_only=False, mmap=True)  # written by this process just now


def _fetch(window: Window, at: tree.Path) -> Tensor:
    found = _at(window.get(), at).detach().clone(memory_format=torch.contiguous_format)
    window.took(found.numel() * found.element_size())
    return found


def _at(node: Any, path: tree.Path) -> Any:
    for step in path:
        node = node[step]
    return node
