# SPDX-License-Identifier: Apache-2.0
"""Bytes held by a process, counted in two ways that do not trust each other.

1. **Unique storages**: the memory behind tensors, each storage counted once, in full. A "shard" that is a view of the
   whole counts as the whole; a tied weight counts once. `held_bytes(model, optimizer)` counts what these objects reach,
   `live_tensor_bytes()` what any tensor object of the process reaches.
2. **The kernel's books**: resident memory of the process. It has a constant of its own, so compare differences, never
   absolute values; in a process that was forked, `private` says what it has that its siblings do not share.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


def held_bytes(*roots: Any) -> int:
    """Return the bytes of the unique storages that `roots` reach.

    Args:
        roots: tensors, modules (parameters, buffers and gradients), optimizers (state, and the parameters of their
            groups with their gradients), and mappings, sequences, sets and dataclasses of such.

    Example:
        >>> layer = torch.nn.Linear(10, 4, bias=False)
        >>> held_bytes(layer), held_bytes(layer, layer.weight[0])
        (160, 160)
        >>> held_bytes([torch.zeros(10)[:2]])  # a view holds its whole storage
        40
    """
    return _unique_bytes(_tensors(roots, {}))


def live_tensor_bytes() -> int:
    """Return the bytes of the unique storages of all tensors that Python objects of this process refer to.

    Gradients are included. Not included is what only autograd's graph holds (activations saved for backward), so call
    it between steps.
    """
    gc.collect()
    found = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    return _unique_bytes(_tensors(found, {}))


@dataclass(frozen=True)
class ProcessMemory:
    """What the kernel says about this process, in bytes.

    Attributes:
        rss: resident pages, shared ones in full.
        pss: resident pages, each shared one divided by the number of processes that share it.
        private: resident pages that no other process has.
        peak_rss: the highest `rss` since the start or the last `peak_rss()`.
    """

    rss: int
    pss: int
    private: int
    peak_rss: int


def process_memory() -> ProcessMemory:
    """Return the memory of this process, after freed memory was given back to the system.

    Raises:
        RuntimeError: not on Linux.
    """
    _trim()
    rollup = _kibibytes("/proc/self/smaps_rollup")
    private = rollup["Private_Clean"] + rollup["Private_Dirty"] + rollup.get("Private_Hugetlb", 0)
    return ProcessMemory(rollup["Rss"], rollup["Pss"], private, _kibibytes("/proc/self/status")["VmHWM"])


@dataclass
class Peak:
    """What `peak_rss` measured.

    Attributes:
        before: resident bytes when the block began.
        num_bytes: how far the resident bytes rose above that, at their highest, set when the block ends.
    """

    before: int
    num_bytes: int = field(default=0)


@contextlib.contextmanager
def peak_rss() -> Iterator[Peak]:
    """Measure how much resident memory the block needs at its highest, also what it frees again.

    The kernel's mark is reset, so blocks cannot be nested.

    Raises:
        RuntimeError: not on Linux, or the mark cannot be reset here (some containers forbid it).
    """
    _trim()
    if sys.platform != "linux":
        raise RuntimeError("resident memory is read from procfs, which is Linux's")
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError as error:
        raise RuntimeError(f"the peak of resident memory cannot be reset here: {error}") from error
    peak = Peak(_kibibytes("/proc/self/status")["VmRSS"])
    yield peak
    peak.num_bytes = _kibibytes("/proc/self/status")["VmHWM"] - peak.before


def _tensors(objects: Iterable[Any], seen: dict[int, Any]) -> Iterator[Tensor]:
    """Every tensor that is reached, wrapped ones (DTensor and other subclasses) as what they wrap."""
    for each in objects:
        if id(each) in seen:
            continue
        seen[id(each)] = each  # kept alive, or another object could get its id
        if isinstance(each, Tensor):
            if hasattr(each, "__tensor_flatten__"):
                names, _ = each.__tensor_flatten__()
                yield from _tensors([getattr(each, name) for name in names], seen)
            else:
                yield each
            if each.is_leaf and each.grad is not None:
                yield from _tensors([each.grad], seen)
        elif isinstance(each, torch.nn.Module):
            yield from _tensors([*each.parameters(), *each.buffers()], seen)
        elif isinstance(each, torch.optim.Optimizer):
            yield from _tensors([each.state, each.param_groups], seen)
        elif isinstance(each, Mapping):
            yield from _tensors([*each.keys(), *each.values()], seen)
        elif isinstance(each, (list, tuple, set, frozenset)):
            yield from _tensors(each, seen)
        elif is_dataclass(each) and not isinstance(each, type):
            yield from _tensors([getattr(each, item.name) for item in fields(each)], seen)


def _unique_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {}
    for tensor in tensors:
        if tensor.device.type != "meta" and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                storages[(storage.device, storage.data_ptr())] = storage.nbytes()
    return sum(storages.values())


def _trim() -> None:
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # a C library without it keeps what it freed
            ctypes.CDLL(None).malloc_trim(0)


def _kibibytes(path: str) -> dict[str, int]:
    if sys.platform != "linux":
        raise RuntimeError("resident memory is read from procfs, which is Linux's")
    with open(path) as file:
        rows = [line.split() for line in file]
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}
