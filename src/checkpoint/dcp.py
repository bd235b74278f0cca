# SPDX-License-Identifier: Apache-2.0
"""The same files, described for torch.distributed.checkpoint, so that its readers and tools open them as their own."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from stratagem.checkpoint.manifest import METADATA, OBJECTS, Manifest
from stratagem.checkpoint.parts import Box

OBJECTS_KEY = "lightning"
"""The name under which torch.distributed.checkpoint finds what is no tensor; with underscores behind it
where a tensor has that name."""


def describe(manifest: Manifest) -> Metadata:
    """A manifest in the words of torch.distributed.checkpoint; tied tensors under all of their names."""
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    names = {name: name for name in manifest.entries} | dict(manifest.aliases)
    for name, stored in names.items():
        entry = manifest.entries[stored]
        chunks = [ChunkStorageMetadata(_offsets(chunk.box), _sizes(chunk.box)) for chunk in entry.chunks]
        properties = TensorProperties(dtype=entry.dtype)
        state[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        for number, chunk in enumerate(entry.chunks):
            index = MetadataIndex(name, _offsets(chunk.box), number)
            storage[index] = _StorageInfo(chunk.file, chunk.offset, chunk.length)
    if OBJECTS in manifest.files:
        key = OBJECTS_KEY
        while key in state:  # a parameter may be called so
            key += "_"
        state[key] = BytesStorageMetadata()
        storage[MetadataIndex(key)] = _StorageInfo(OBJECTS, 0, manifest.files[OBJECTS].num_bytes)
    planner: Mapping[str, tuple[str, ...]] = {name: (name,) for name in state}
    return Metadata(state, planner_data=dict(planner), storage_data=storage)


def write_metadata(folder: Path, manifest: Manifest) -> None:
    """Writes the description into the folder; it is on disk when this returns."""
    with open(folder / METADATA, "wb") as file:
        pickle.dump(describe(manifest), file)
        file.flush()
        os.fsync(file.fileno())


def _offsets(box: Box) -> torch.Size:
    return torch.Size([start for start, _ in box])


def _sizes(box: Box) -> torch.Size:
    return torch.Size([stop - start for start, stop in box])
