# SPDX-License-Identifier: Apache-2.0
"""Safetensors files, read and written one tensor at a time through the package `safetensors`.

    read     the package opens, checks and reads
    write    1  the package lays the file out: header, order, alignment, and zeros where the elements will be
             2  each tensor is written over its zeros

Note [what the package cannot do]: it writes a file from tensors that are all in memory at once, by their addresses, so
memory would have to hold a whole file. Here every address is that of one stretch of zeros, which the kernel holds once,
and the elements follow one tensor at a time. Where each belongs is said in the header alone, which the package does not
show: 8 bytes of length, then JSON. That is all of the format that is known here.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch import Tensor

from stratagem.checkpoint.foreign_picture import Leaf, Window
from stratagem.errors import CheckpointError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The file's words; the package has the same table, but not as something to import."""


def write(path: Path, leaves: Mapping[str, Leaf], metadata: Mapping[str, str]) -> None:
    """Writes one file; it is on disk when this returns. Holds one tensor at a time.

    Raises:
        CheckpointError: the format has no such dtype.
        OSError: the disk is full or the folder cannot be written to.
    """
    for name, leaf in leaves.items():
        if leaf.dtype not in _DTYPES.values():
            raise CheckpointError(
                f"{name!r} is {leaf.dtype}", where=str(path), allowed=", ".join(_DTYPES), do="choose a --dtype"
            )
    _lay_out(path, leaves, metadata)
    with open(path, "r+b") as file:
        header, start = _header(file)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            file.seek(start + entry["data_offsets"][0])
            file.write(_bytes(leaves[name].read()).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> tuple[dict[str, Leaf], dict[str, str]]:
    """The tensors of a file by name, and its metadata.

    Raises:
        CheckpointError: it is no such file, or damaged.
    """
    window = Window(lambda: _opened(path))

    def leaf(name: str) -> Leaf:
        about = window.get().get_slice(name)
        word = about.get_dtype()
        if word not in _DTYPES:
            raise CheckpointError(f"{name!r} is {word}", where=str(path), allowed=", ".join(_DTYPES))
        return Leaf(tuple(about.get_shape()), _DTYPES[word], lambda: _fetch(window, name))

    try:
        return {name: leaf(name) for name in window.get().keys()}, dict(window.get().metadata() or {})  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"it is no whole safetensors file ({error})", where=str(path)) from error


def _lay_out(path: Path, leaves: Mapping[str, Leaf], metadata: Mapping[str, str]) -> None:
    """The whole file with zeros for elements: see Note [what the package cannot do]."""
    largest = max((leaf.num_bytes for leaf in leaves.values()), default=0)
    with mmap.mmap(-1, max(largest, 1)) as zeros:  # only read, so no page of it is ever this process's own
        view = torch.frombuffer(zeros, dtype=torch.uint8)
        try:
            specs = {
                name: TensorSpec(
                    dtype=str(leaf.dtype).removeprefix("torch."),
                    shape=leaf.shape,
                    data_ptr=view.data_ptr(),
                    data_len=leaf.num_bytes,
                )
                for name, leaf in leaves.items()
            }
            serialize_file(specs, path, dict(metadata))
        except SafetensorError as error:  # what the system refused, in the package's words
            raise OSError(str(error)) from error
        finally:
            del view  # the memory cannot be given back while a tensor lies in it


def _header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Of a file that was just laid out: tensors by name, and where the bytes that their offsets count from begin."""
    length = int.from_bytes(file.read(8), "little")
    header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def _opened(path: Path) -> Any:
    return safe_open(path, framework="pt", backend="pread")  # mapped pages would count as this process's memory


def _fetch(window: Window, name: str) -> Tensor:
    found: Tensor = window.get().get_tensor(name)
    window.took(found.numel() * found.element_size())
    return found


def _bytes(tensor: Tensor) -> Tensor:
    """The elements of a contiguous tensor as bytes, the same memory."""
    return tensor.reshape(-1).view(torch.uint8)
