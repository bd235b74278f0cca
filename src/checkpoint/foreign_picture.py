# SPDX-License-Identifier: Apache-2.0
"""The middle of every conversion: Lightning's checkpoint with leaves where the tensors are, each read when asked for.

    ours, .ckpt, safetensors, DeepSpeed   --read-->   Picture   --write-->   ours, .ckpt, safetensors

A tied tensor is one leaf under several names. Optimizer states stand under positions, as Lightning has them.

Note [mapped, and let go]: files are mapped, so nothing is read before a leaf is. But pages of a mapped file count as
this process's memory until it is unmapped; so after so many bytes the file is closed and opened again, which parses its
table of contents anew and nothing else. What a conversion holds is then one tensor and a bounded window.

Note [a loader's knot]: `torch.load` leaves functions behind that know each other and the mapping, so the mapping lasts
until the garbage collector comes by, which may be several windows later. What was made since loading began is the
collector's youngest generation as long as it does not run; so it is held off, and that generation is looked through.
"""

from __future__ import annotations

import gc
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from stratagem.checkpoint import tree
from stratagem.checkpoint.tree import Path as TreePath
from stratagem.errors import CheckpointError

WINDOW_BYTES = 2**25
EXTRA = "stratagem"
"""The key of what this package adds to a checkpoint; it travels in single files too, where Lightning ignores it."""

TRAINING = ("optimizer_states", "lr_schedulers", "callbacks", "MixedPrecision", "native_amp_scaling_state")
"""What a checkpoint has for training alone, as Lightning's `save_weights_only` leaves it out."""


@final
@dataclass(frozen=True, eq=False)
class Leaf:
    """One tensor of the source.

    Args:
        shape: of it.
        dtype: of its elements.
        read: gives it, contiguous, in memory of its own.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def numel(self) -> int:
        """Elements."""
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.dtype.itemsize

    @classmethod
    def of(cls, value: Any) -> Leaf | None:
        """A leaf, or a small tensor that stayed in the tree as one; None for anything else."""
        if isinstance(value, Tensor):
            return cls(tuple(value.shape), value.dtype, lambda: value.detach().clone().contiguous())
        return value if isinstance(value, cls) else None

    def cast(self, dtype: torch.dtype) -> Leaf:
        """The same in another dtype; what is no floating-point number stays as it is."""
        if not self.dtype.is_floating_point or dtype == self.dtype:
            return self
        return Leaf(self.shape, dtype, lambda: self.read().to(dtype))


@final
@dataclass(frozen=True)
class Picture:
    """A checkpoint of whatever kind.

    Args:
        tree: Lightning's, with `Leaf`s.
        kind: of the source, for people.
        notes: what the source had that is not in the tree.
        config: a Hugging Face model's config, where the source has one.
    """

    tree: dict[str, Any]
    kind: str
    notes: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> Mapping[str, Any]:
        """The module's.

        Raises:
            CheckpointError: there is none.
        """
        found = self.tree.get(tree.STATE)
        if not isinstance(found, Mapping) or not found:
            raise CheckpointError("there are no weights in it", allowed=f"a checkpoint with a {tree.STATE!r}")
        return found

    def aliases(self) -> dict[str, str]:
        """Further names of tied tensors, and the first name of each."""
        first: dict[int, str] = {}
        found = {}
        for name, value in self.state.items():
            known = first.setdefault(id(value), name)
            if known != name:
                found[name] = known
        return found

    def leaves(self) -> dict[TreePath, Leaf]:
        """Every leaf by its way through the tree; a tied one once."""
        found: dict[int, tuple[TreePath, Leaf]] = {}
        for path, value in walk(self.tree):
            if isinstance(value, Leaf):
                found.setdefault(id(value), (path, value))
        return dict(found.values())


def walk(node: Any, at: tree.Path = ()) -> Iterator[tuple[tree.Path, Any]]:
    """Everything in a tree that is no branch, with its way there.

    >>> list(walk({"a": [1, {"b": 2}]}))
    [(('a', 0), 1), (('a', 1, 'b'), 2)]
    """
    if isinstance(node, Mapping):
        for key, item in node.items():
            yield from walk(item, (*at, key))
    elif type(node) in (list, tuple):
        for index, item in enumerate(node):
            yield from walk(item, (*at, index))
    else:
        yield at, node


def replaced(node: Any, change: Callable[[tree.Path, Any], Any], at: tree.Path = ()) -> Any:
    """A copy of a tree with something else at its ends.

    >>> replaced({"a": [1, {"b": 2}]}, lambda path, value: value + len(path))
    {'a': [3, {'b': 5}]}
    """
    if isinstance(node, dict):
        found = {key: replaced(item, change, (*at, key)) for key, item in node.items()}
        if type(node) is dict:
            return found
        copy = node.copy()
        copy.clear()
        copy.update(found)
        return copy
    if type(node) in (list, tuple):
        return type(node)(replaced(item, change, (*at, index)) for index, item in enumerate(node))
    return change(at, node)


def is_leaf(value: Any) -> bool:
    """Whether a tensor is converted as a leaf: dense numbers, and more than one; others stay in the tree."""
    return isinstance(value, Tensor) and value.numel() > tree.INLINE_NUMEL and tree._is_plain(value)


@final
class Window:
    """A file that is opened when it is read, and again after so many bytes: see Note [mapped, and let go].

    Args:
        open: opens it.
        num_bytes: how much is read before it is opened again.
    """

    def __init__(self, open: Callable[[], Any], num_bytes: int = WINDOW_BYTES) -> None:
        self._open, self._num_bytes = open, num_bytes
        self._opened: Any = None
        self._left = 0

    def get(self) -> Any:
        """What opening it gives; must not be kept."""
        if self._opened is None:
            self._opened, self._left = self._open(), self._num_bytes
        return self._opened

    def took(self, num_bytes: int) -> None:
        """Says how much of it was read."""
        self._left -= num_bytes
        if self._left <= 0:
            self._opened = None


def load_file(path: Path, *, trust: bool, stand_ins: Mapping[str, type] | None = None) -> Any:
    """What `torch.save` wrote, mapped, without running anything that the file says.

    Args:
        path: the file.
        trust: let the file's pickles run, whatever they do.
        stand_ins: by full name, what to build instead of objects of these classes.

    Raises:
        CheckpointError: it is damaged or nothing of `torch.save`'s, or needs `trust`.
    """
    allowed: list[Any] = [(kind, name) for name, kind in (stand_ins or {}).items()]
    try:
        with torch.serialization.safe_globals(allowed):
            return loaded(path, weights_only=not trust, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        if not zipfile.is_zipfile(path):
            raise CheckpointError(f"it is no checkpoint ({_first_line(error)})", where=str(path)) from error
        raise CheckpointError(
            f"it holds objects that only code can build: {', '.join(classes_in(path)) or _first_line(error)}",
            where=str(path),
            do="--trust, if you know who wrote it: loading such a file can run anything",
        ) from error
    except OSError as error:
        raise CheckpointError(f"it cannot be read: {error.strerror or error}", where=str(path)) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(f"it is damaged, or no checkpoint ({_first_line(error)})", where=str(path)) from error
    except (ImportError, AttributeError) as error:
        raise CheckpointError(f"code that it asks for is not here ({error})", where=str(path)) from error


def loaded(path: Path, **settings: Any) -> Any:
    """`torch.load` to the CPU, of which nothing but the result is left: see Note [a loader's knot]."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return torch.load(path, map_location="cpu", **settings)
    finally:
        gc.collect(0)
        if was_on:
            gc.enable()


def classes_in(path: Path) -> list[str]:
    """The classes that a file of `torch.save`'s asks for beyond those of plain data; runs nothing."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # a damaged file; whoever reads it says so
        return []


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".")
