# SPDX-License-Identifier: Apache-2.0
"""Safetensors files, read and written one tensor at a time.

    8 bytes     length of the header, little-endian
    header      JSON: name -> dtype, shape, [first byte, one past the last] counted from the end of the header
    the rest    the elements, one tensor after the other, row-major

The format is that small, so nothing needs to be installed for it; the tests compare with the package `safetensors`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stratagem.checkpoint.foreign_picture import Leaf
from stratagem.errors import CheckpointError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_LONGEST_HEADER = 100 * 2**20  # more is refused by the format's own readers


def write(path: Path, leaves: Mapping[str, Leaf], metadata: Mapping[str, str]) -> None:
    """Writes one file; it is on disk when this returns.

    Raises:
        CheckpointError: the format has no such dtype.
        OSError: the disk is full or the folder cannot be written to.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    # Widest elements first, so that each tensor is aligned to its elements and readers may map it.
    order = sorted(leaves, key=lambda name: (-leaves[name].dtype.itemsize, name))
    for name in order:
        leaf = leaves[name]
        if leaf.dtype not in _NAMES:
            raise CheckpointError(
                f"{name!r} is {leaf.dtype}", where=str(path), allowed=", ".join(_DTYPES), do="choose a --dtype"
            )
        end = position + leaf.num_bytes
        header[name] = {"dtype": _NAMES[leaf.dtype], "shape": list(leaf.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in order:
            file.write(_bytes(leaves[name].read()).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> tuple[dict[str, Leaf], dict[str, str]]:
    """The tensors of a file by name, and its metadata.

    Raises:
        CheckpointError: it is no such file, or damaged.
    """
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", {})
        leaves = {name: _leaf(path, 8 + length, size, entry) for name, entry in header.items()}
        ends = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if 8 + length + ends != size:
            raise ValueError(f"{size} bytes, {8 + length + ends} are described")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"it is no whole safetensors file ({error})", where=str(path)) from error
    return leaves, metadata


def _leaf(path: Path, start: int, size: int, entry: Mapping[str, Any]) -> Leaf:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"dtype {entry['dtype']} is not known here")
    dtype, shape = _DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
    first, end = entry["data_offsets"]
    if end - first != torch.Size(shape).numel() * dtype.itemsize or not 0 <= first <= end <= size - start:
        raise ValueError(f"bytes {first} to {end} cannot be {shape} of {dtype}")

    def fetch() -> Tensor:
        found = torch.empty(shape, dtype=dtype)
        with open(path, "rb") as file:
            file.seek(start + first)
            if found.numel() and file.readinto(_bytes(found).numpy().data) != end - first:
                raise CheckpointError("it ends too early", where=str(path))
        return found

    return Leaf(shape, dtype, fetch)


def _bytes(tensor: Tensor) -> Tensor:
    """The elements of a contiguous tensor as bytes, the same memory."""
    return tensor.reshape(-1).view(torch.uint8)
