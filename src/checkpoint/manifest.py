# SPDX-License-Identifier: Apache-2.0
"""The manifest: what lies where in a checkpoint's folder, as frozen data and as JSON.

    step=100.ckpt/
        manifest.json       what is described here; the last file to be written, so without it there is no checkpoint
        rank-00000.bin      chunks that rank 0 wrote, one after the other, each a tensor as `torch.save` writes it
        rank-00001.bin
        objects.pt          everything that is no tensor, by `torch.save`, with `Leaf`s where the tensors were
        .metadata           the same for torch.distributed.checkpoint, whose tools read these files too

A chunk is one box of one tensor; `data` is where its elements lie, row-major, in the file, so that a reader can map
them into memory without copying or unpickling anything.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch

from stratagem.checkpoint.parts import Box, numel
from stratagem.errors import CheckpointError

FORMAT = 1
MANIFEST, OBJECTS, METADATA = "manifest.json", "objects.pt", ".metadata"


def rank_file(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank:05d}.bin"


@final
@dataclass(frozen=True)
class Chunk:
    """One box of one tensor in one file.

    Args:
        box: of the whole tensor.
        file: within the folder.
        offset: first byte of the serialised tensor.
        length: its bytes.
        data: first byte of the bare elements, which lie within.
    """

    box: Box
    file: str
    offset: int
    length: int
    data: int


@final
@dataclass(frozen=True)
class Entry:
    """One tensor: its whole shape, dtype, and the chunks that make it up."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@final
@dataclass(frozen=True)
class File:
    """One file, as it was written: its size, and the CRC-32 of its bytes."""

    num_bytes: int
    crc: int


@final
@dataclass(frozen=True)
class Written:
    """What one rank has written: its part of the manifest."""

    entries: Mapping[str, Entry]
    files: Mapping[str, File]


@final
@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint.

    Args:
        entries: by name; the parameters and buffers under the names of the plain module.
        files: by name, but for the manifest itself and what is made from it.
        aliases: further names of tied tensors, and the name under which each is stored.
        about: facts for people and tools: step, mesh, strategy, versions.
    """

    entries: Mapping[str, Entry]
    files: Mapping[str, File]
    aliases: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def join(cls, parts: Iterable[Written], aliases: Mapping[str, str], about: Mapping[str, Any]) -> Manifest:
        """What all ranks have written together.

        Raises:
            CheckpointError: ranks disagree about a tensor, or some of its elements were written by nobody or twice.
        """
        entries: dict[str, Entry] = {}
        files: dict[str, File] = {}
        for part in parts:
            files.update(part.files)
            for name, entry in part.entries.items():
                known = entries.get(name, Entry(entry.shape, entry.dtype, ()))
                if (known.shape, known.dtype) != (entry.shape, entry.dtype):
                    raise CheckpointError(
                        f"ranks disagree about {name!r}: {known.shape} {known.dtype}, {entry.shape} {entry.dtype}",
                        where="the state that is saved",
                        do="build the same module and optimizer on every rank",
                    )
                entries[name] = Entry(known.shape, known.dtype, (*known.chunks, *entry.chunks))
        for name, entry in entries.items():
            written, wanted = sum(numel(chunk.box) for chunk in entry.chunks), numel(tuple((0, n) for n in entry.shape))
            if written != wanted:
                raise CheckpointError(
                    f"{written} of the {wanted} elements of {name!r} were written", where="the state that is saved"
                )
        return cls(entries, files, aliases, about)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(numel(tuple((0, n) for n in e.shape)) * e.dtype.itemsize for e in self.entries.values())

    def to_json(self) -> str:
        """As text, whose first entry is the CRC-32 of the rest."""
        text = json.dumps(
            {
                "format": FORMAT,
                "about": dict(self.about),
                "files": {name: [file.num_bytes, file.crc] for name, file in self.files.items()},
                "aliases": dict(self.aliases),
                "tensors": {name: _entry_to_json(entry) for name, entry in self.entries.items()},
            },
            indent=1,
        )
        return f'{{\n "checksum": {zlib.crc32(text.encode())},{text[1:]}'

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """From text.

        Args:
            text: of a manifest.
            where: the file, for errors.

        Raises:
            CheckpointError: it is not a manifest, or one of a later format.
        """
        try:
            found = json.loads(text)
            if found["format"] > FORMAT:
                raise CheckpointError(
                    f"it has format {found['format']}", where=where, allowed=f"up to {FORMAT}", do="update stratagem"
                )
            if "checksum" in found and not _is_as_written(text):
                raise ValueError("it was changed: its checksum is another one")
            files = {_bare_name(name): File(*pair) for name, pair in found["files"].items()}
            entries = {name: _entry_from_json(name, entry, files) for name, entry in found["tensors"].items()}
            aliases, about = dict(found["aliases"]), dict(found["about"])
            if not entries.keys() >= set(aliases.values()):
                raise ValueError("a name stands for a tensor that is not there")
            int(about.get("global_step", -1)), float(about.get("created", 0.0))
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"this is no manifest ({type(error).__name__}: {error})", where=where) from error
        return cls(entries, files, aliases, about)


_CHECKSUM = re.compile(r'\{\n "checksum": (\d+),')


def _is_as_written(text: str) -> bool:
    found = _CHECKSUM.match(text)
    return found is not None and zlib.crc32(("{" + text[found.end() :]).encode()) == int(found[1])


def _bare_name(name: str) -> str:
    """A file's name, if it is one within the folder: nothing else is ever read, or written, on a manifest's word."""
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"{name!r} is not the name of a file in this folder")
    return name


def _entry_to_json(entry: Entry) -> dict[str, Any]:
    chunks = [
        [list(map(list, chunk.box)), chunk.file, chunk.offset, chunk.length, chunk.data] for chunk in entry.chunks
    ]
    return {"shape": list(entry.shape), "dtype": str(entry.dtype).removeprefix("torch."), "chunks": chunks}


def _entry_from_json(name: str, found: Mapping[str, Any], files: Mapping[str, File]) -> Entry:
    """One tensor, of which every chunk lies within a file that is known, and which they make up."""
    chunks = tuple(Chunk(tuple((a, b) for a, b in box), *place) for box, *place in found["chunks"])
    shape, dtype = tuple(found["shape"]), getattr(torch, found["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{found['dtype']!r} is no type of elements")
    for chunk in chunks:
        inside = all(0 <= start <= stop <= size for (start, stop), size in zip(chunk.box, shape, strict=True))
        end = chunk.data + numel(chunk.box) * dtype.itemsize if inside else -1
        if not 0 <= chunk.offset <= chunk.data <= end <= chunk.offset + chunk.length <= files[chunk.file].num_bytes:
            raise ValueError(f"a part of {name!r} lies outside of its file or of the tensor")
    if sum(numel(chunk.box) for chunk in chunks) != numel(tuple((0, size) for size in shape)):
        raise ValueError(f"the parts of {name!r} are not all of it")
    return Entry(shape, dtype, chunks)
