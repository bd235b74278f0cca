# SPDX-License-Identifier: Apache-2.0
"""Reading: any part of any tensor out of the chunks that some other layout wrote, without unpickling anything.

Files are mapped into memory, so a rank reads from disk what it asks for and no more, and a tensor that lies in one
chunk is not even copied.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from stratagem.checkpoint.manifest import MANIFEST, Chunk, Entry, Manifest
from stratagem.checkpoint.parts import Box, Part, overlap, whole_box, within
from stratagem.errors import CheckpointError


@final
class Reader:
    """A committed checkpoint, open for reading. Local: every rank reads for itself.

    Args:
        folder: of the checkpoint.

    Attributes:
        manifest: what it holds.

    Raises:
        CheckpointError: there is no manifest, or it cannot be understood.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            text = (folder / MANIFEST).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"there is no readable manifest ({error})", where=str(folder)) from error
        self.manifest = Manifest.from_json(text, str(folder / MANIFEST))
        self._maps: dict[str, mmap.mmap] = {}

    def hold(self) -> None:
        """Maps every file now, so that the folder may be removed."""
        for file in {chunk.file for entry in self.manifest.entries.values() for chunk in entry.chunks}:
            self._map(file)

    def entry(self, name: str) -> Entry:
        """What is known of a tensor, by its name or an alias.

        Raises:
            CheckpointError: there is none of that name.
        """
        entry = self.manifest.entries.get(self.manifest.aliases.get(name, name))
        if entry is None:
            raise CheckpointError(f"there is no tensor {name!r}", where=str(self.folder))
        return entry

    def whole(self, name: str) -> Tensor:
        """A whole tensor, on the CPU: mapped if it is one chunk, put together otherwise."""
        entry = self.entry(name)
        if len(entry.chunks) == 1:
            return self._mapped(entry, entry.chunks[0])
        return self.box(name, whole_box(entry.shape))

    def box(self, name: str, box: Box) -> Tensor:
        """One box of a tensor, in memory of its own."""
        entry = self.entry(name)
        found = torch.empty([stop - start for start, stop in box], dtype=entry.dtype)
        self._fill(entry, box, found)
        return found

    def read_into(self, name: str, part: Part) -> None:
        """Fills the tensors of a part, wherever they lie, in place.

        Raises:
            CheckpointError: the tensor has another shape.
        """
        entry = self.entry(name)
        if entry.shape != part.shape:
            raise CheckpointError(
                f"{name!r} has shape {entry.shape} there and {part.shape} here",
                where=str(self.folder),
                do="resume with the model that wrote the checkpoint",
            )
        with torch.no_grad():
            for box, tensor in zip(part.boxes, part.tensors, strict=True):
                self._fill(entry, box, tensor)

    def _fill(self, entry: Entry, box: Box, tensor: Tensor) -> None:
        for chunk in entry.chunks:
            common = overlap(chunk.box, box) if box else ()
            if common is not None:
                within(tensor, box, common).copy_(within(self._mapped(entry, chunk), chunk.box, common))

    def _mapped(self, entry: Entry, chunk: Chunk) -> Tensor:
        shape = [stop - start for start, stop in chunk.box]
        count = 1
        for size in shape:
            count *= size
        if not count:
            return torch.empty(shape, dtype=entry.dtype)
        memory = self._map(chunk.file)
        end = chunk.data + count * entry.dtype.itemsize
        if end > len(memory):
            raise CheckpointError(f"{chunk.file} ends before its data", where=str(self.folder))
        return torch.frombuffer(memory, dtype=entry.dtype, count=count, offset=chunk.data).view(shape)

    def _map(self, file: str) -> mmap.mmap:
        if file not in self._maps:
            try:
                with open(self.folder / file, "rb") as opened:
                    # Copied on write: who changes a tensor changes memory, not the checkpoint.
                    self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{file} cannot be read ({error})", where=str(self.folder)) from error
        return self._maps[file]
