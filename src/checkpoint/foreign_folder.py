# SPDX-License-Identifier: Apache-2.0
"""Our own folders, read and written one tensor at a time by one process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stratagem.checkpoint import commit, dcp, tree
from stratagem.checkpoint.foreign_picture import EXTRA, Leaf, Picture, Window, load_file, replaced
from stratagem.checkpoint.manifest import MANIFEST, OBJECTS, Manifest, Written
from stratagem.checkpoint.parts import Part
from stratagem.checkpoint.reading import Reader
from stratagem.checkpoint.writing import Choice, choose, write_object
from stratagem.checkpoint.writing import write as write_chunks
from stratagem.errors import CheckpointError


def read(folder: Path, *, trust: bool = False, deep: bool = True) -> Picture:
    """A checkpoint of ours, whoever wrote it.

    Args:
        folder: of the checkpoint.
        trust: let pickles run; needed where hyper-parameters or callbacks hold objects of the user's classes.
        deep: compare checksums, which reads every file once.

    Raises:
        CheckpointError: it is damaged, or needs `trust`.
    """
    found = commit.faults(folder, deep=deep)
    if found:
        raise CheckpointError(
            f"it is damaged: {'; '.join(found[:3])}", where=str(folder), do="convert another one; this one is lost"
        )
    reader = Reader(folder)
    window = Window(lambda: Reader(folder))
    known: dict[str, Leaf] = {}

    def leaf(name: str) -> Leaf:
        stored = reader.manifest.aliases.get(name, name)
        if stored not in known:
            entry = reader.entry(stored)
            known[stored] = Leaf(entry.shape, entry.dtype, lambda: _fetch(window, stored))
        return known[stored]

    found_tree = tree.put_together(load_file(folder / OBJECTS, trust=trust), leaf)
    own = replaced(found_tree, lambda at, value: value.clone() if isinstance(value, Tensor) else value)
    names = own.get(EXTRA, {}).get("optimizer_names")
    if tree.OPTIMIZERS in own:
        own[tree.OPTIMIZERS] = tree.renamed_state(own[tree.OPTIMIZERS], names, to_names=False)
    return Picture(own, "stratagem folder")


def write(picture: Picture, draft: commit.Draft) -> None:
    """Writes a checkpoint of ours and commits it.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written to.
    """
    source = dict(picture.tree)
    extra = dict(source.get(EXTRA, {}))
    aliases = picture.aliases()
    if tree.OPTIMIZERS in source:
        source[tree.OPTIMIZERS] = tree.renamed_state(
            source[tree.OPTIMIZERS], extra.get("optimizer_names"), to_names=True
        )
    leaves: dict[int, tuple[str, Leaf]] = {}
    named = tree.Names(source)

    def leaf(at: tree.Path, value: Any) -> Any:
        if not isinstance(value, Leaf):
            return value
        if id(value) not in leaves:
            leaves[id(value)] = (named(at), value)
        name, _ = leaves[id(value)]
        return {tree.LEAF: tree.name_of(at) if len(at) == 2 and at[0] == tree.STATE else name}

    rest = replaced(source, leaf)
    with commit.reported("written", draft.folder):
        written = write_chunks(draft.folder, 0, _choices(dict(leaves.values())))
        objects = write_object(draft.folder / OBJECTS, rest)
    written = Written(written.entries, {**written.files, OBJECTS: objects})
    about = {
        "global_step": source.get("global_step", -1),
        "epoch": source.get("epoch", -1),
        "created": time.time(),
        "ranks": 1,
        "torch": torch.__version__,
        "lightning": source.get("pytorch-lightning_version", ""),
        "converted_from": picture.kind,
        **{key: value for key, value in extra.items() if isinstance(value, str | int | float)},
    }
    manifest = Manifest.join([written], aliases, about)
    dcp.write_metadata(draft.folder, manifest)
    draft.commit(manifest)


def is_one(folder: Path) -> bool:
    """Whether there is a checkpoint of ours."""
    return (folder / MANIFEST).is_file()


def _choices(leaves: dict[str, Leaf]) -> Iterator[Choice]:
    for name in sorted(leaves):
        yield from choose({name: Part.whole(leaves[name].read())})


def _fetch(window: Window, name: str) -> Tensor:
    found: Tensor = window.get().whole(name).clone()
    window.took(found.numel() * found.element_size())
    return found
