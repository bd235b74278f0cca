# SPDX-License-Identifier: Apache-2.0
"""Writing: which chunks are this rank's to write, a copy of them that the next step cannot change, and the file.

    choose    the rank's parts -> chunks; equal copies share the work, so a checkpoint holds each element once
    stage     chunks -> a buffer of the host that is used again at every save; after it, training may go on
    write     chunks -> one file, from first byte to last, on disk when it returns

No rank asks another one anything here: who writes what follows from the parts alone.
"""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast, final

import torch
from torch import Tensor
from typing_extensions import override

from stratagem.checkpoint.manifest import Chunk, Entry, File, Written, rank_file
from stratagem.checkpoint.parts import Box, Part, numel, within

CHUNK_BYTES = 2**25
"""A box larger than this is cut along its first dims, so that copies share the work evenly."""


@final
@dataclass(frozen=True)
class Choice:
    """One chunk that this rank writes.

    Args:
        name: the tensor's.
        part: the tensor's.
        box: which of its elements.
        tensor: they, of the box's shape.
    """

    name: str
    part: Part
    box: Box
    tensor: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements."""
        return self.tensor.numel() * self.tensor.element_size()


def choose(parts: Mapping[str, Part]) -> list[Choice]:
    """The chunks that this rank writes.

    Ranks with equal copies go through the same chunks in the same order, and each chunk falls to the copy that has the
    fewest bytes so far. So a rank writes its share, up to one chunk.

    Args:
        parts: by name.
    """
    loads: dict[int, list[int]] = {}
    chosen = []
    for name in sorted(parts):
        part = parts[name]
        load = loads.setdefault(part.num_copies, [0] * part.num_copies)
        for box, tensor in zip(part.boxes, part.tensors, strict=True):
            for piece in cut(box, CHUNK_BYTES // part.dtype.itemsize):
                lightest = min(range(part.num_copies), key=load.__getitem__)
                load[lightest] += max(numel(piece) * part.dtype.itemsize, 1)
                if lightest == part.copy:
                    chosen.append(Choice(name, part, piece, within(tensor, box, piece)))
    return chosen


def cut(box: Box, max_numel: int) -> list[Box]:
    """A box in boxes of at most so many elements (one row of the last dim at least), in order.

    >>> cut(((0, 4), (0, 3)), 6)
    [((0, 2), (0, 3)), ((2, 4), (0, 3))]
    """
    if numel(box) <= max_numel or not box:
        return [box]
    (start, stop), *rest = box
    inner = numel(tuple(rest))
    if inner > max_numel and rest:
        return [((row, row + 1), *piece) for row in range(start, stop) for piece in cut(tuple(rest), max_numel)]
    rows = max(max_numel // max(inner, 1), 1)
    return [((row, min(row + rows, stop)), *rest) for row in range(start, stop, rows)]


@final
class Stage:
    """Host memory that takes a copy of what is saved, so that training goes on while it is written.

    It grows to what a save needs and is kept for the next one; pinned where there is a GPU.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, choices: Sequence[Choice]) -> list[Choice]:
        """The same chunks with tensors of this memory; those of the save before are overwritten."""
        align = 64
        sizes = [-(-choice.num_bytes // align) * align for choice in choices]
        if sum(sizes) > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)  # frees before it asks
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        taken, position = [], 0
        for choice, size in zip(choices, sizes, strict=True):
            memory = self._memory[position : position + choice.num_bytes]
            tensor = memory.view(choice.tensor.dtype).view(choice.tensor.shape)
            tensor.copy_(choice.tensor, non_blocking=True)
            taken.append(replace(choice, tensor=tensor))
            position += size
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return taken


def write(folder: Path, rank: int, choices: Iterable[Choice]) -> Written:
    """Writes this rank's file; it is on disk when this returns.

    Args:
        folder: of the draft.
        rank: whose file.
        choices: gone through once, and no tensor is kept, so that they may be made one at a time.

    Raises:
        OSError: the disk is full, the folder cannot be written to.
    """
    name = rank_file(rank)
    places: list[tuple[str, Entry, Box, int, int]] = []
    with open(folder / name, "wb") as file:
        counted = _Counted(file)
        for choice in choices:
            start = counted.num_bytes
            torch.save(_bare(choice.tensor), cast(IO[bytes], counted))
            empty = Entry(choice.part.shape, choice.part.dtype, ())
            places.append((choice.name, empty, choice.box, start, counted.num_bytes - start))
        file.flush()
        os.fsync(file.fileno())
    entries: dict[str, Entry] = {}
    with open(folder / name, "rb") as file:
        for tensor, empty, box, offset, length in places:
            chunk = Chunk(box, name, offset, length, offset + _find_data(file, offset, length))
            known = entries.get(tensor, empty)
            entries[tensor] = replace(known, chunks=(*known.chunks, chunk))
    return Written(entries, {name: File(counted.num_bytes, counted.crc)})


def frozen(value: Any) -> bytes:
    """One object as `torch.save` writes it, now: who changes it afterwards changes nothing that is saved."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def write_object(path: Path, value: Any) -> File:
    """Writes one object by `torch.save`, or the bytes of a `frozen` one; it is on disk when this returns."""
    with open(path, "wb") as file:
        counted = _Counted(file)
        if isinstance(value, bytes):
            counted.write(value)
        else:
            torch.save(value, cast(IO[bytes], counted))
        file.flush()
        os.fsync(file.fileno())
    return File(counted.num_bytes, counted.crc)


def _bare(tensor: Tensor) -> Tensor:
    """The tensor on a storage of exactly its elements: `torch.save` writes all of a storage, whatever is a view."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()  # elements, not a view that says "negate"
    storage = tensor.untyped_storage()
    if storage.nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    as_bytes = torch.from_numpy(tensor.view(-1).view(torch.uint8).numpy())  # a storage of its own, the same memory
    return as_bytes.view(tensor.dtype).view(tensor.shape)


@final
class _Counted:
    """A file that knows how many bytes it was given, and their checksum."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.num_bytes, self.crc = file, 0, 0

    def write(self, data: Any) -> int:
        """As a file's."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        self.num_bytes += len(view)
        self.crc = zlib.crc32(view, self.crc)
        return len(view)

    def flush(self) -> None:
        """As a file's."""
        self._file.flush()


@final
class _Window(io.RawIOBase):
    """Bytes `[start, start + length)` of a file, as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        return self._position

    @override
    def tell(self) -> int:
        return self._position

    @override
    def read(self, size: int = -1) -> bytes:
        left = self._length - self._position
        self._file.seek(self._start + self._position)
        data = self._file.read(left if size < 0 else min(size, left))
        self._position += len(data)
        return data


def _find_data(file: IO[bytes], offset: int, length: int) -> int:
    """Where, from `offset` on, the bare elements lie: what `torch.save` writes is a zip archive that packs nothing."""
    with zipfile.ZipFile(_Window(file, offset, length)) as archive:
        info = next((each for each in archive.infolist() if each.filename.endswith("/data/0")), None)
    if info is None:
        return 0
    file.seek(offset + info.header_offset)
    header = file.read(30)  # of the local file header; the lengths of name and extra field end it
    return info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
