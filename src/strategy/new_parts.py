# SPDX-License-Identifier: Apache-2.0
"""Parts of a module that came into being in a forked rank: built by `configure_model` or `setup`, registered by a hook.

Weights alone would find no place in the caller's module, and a `test` after `fit` would run on a fresh model. So the
parts themselves come home, each as a pickle of its own; those that do not pickle are named.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import final

import torch
from torch import Tensor, nn


@final
class NewParts:
    """Remembers what a module has, then tells what it has besides.

    Args:
        module: as the caller knows it; in the rank, before the work.

    Example:
        >>> module = nn.Sequential(nn.Linear(1, 1))
        >>> parts = NewParts(module)
        >>> module[0] = nn.Linear(1, 2)
        >>> module.register_buffer("late", torch.zeros(2))
        >>> sorted(parts.pickled())
        ['0', 'late']
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known = {name: id(thing) for name, thing in _parts(module)}

    def pickled(self) -> dict[str, bytes | None]:
        """The topmost new modules, parameters and buffers by name, None where one does not pickle. Local."""
        found: dict[str, bytes | None] = {}
        for name, thing in _parts(self._module):
            above = name.rpartition(".")[0]
            within = any(name.startswith(f"{other}.") for other in found)
            if name and not within and self._known.get(name) != id(thing) and (not above or above in self._known):
                if isinstance(thing, Tensor) and name in self._known:
                    continue  # another tensor in a known place: its values come with the weights
                found[name] = _pickle(thing)
        return found


def place(module: nn.Module, parts: Mapping[str, bytes | None]) -> list[str]:
    """Puts parts where they belong, in the caller; returns the names of those that could not come. Local."""
    lost = []
    for name, data in parts.items():
        above, _, leaf = name.rpartition(".")
        if data is None:
            lost.append(name)
            continue
        thing = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)  # written by our own child
        owner = module.get_submodule(above)
        if isinstance(thing, Tensor) and not isinstance(thing, nn.Parameter):
            owner.register_buffer(leaf, thing)
        else:
            setattr(owner, leaf, thing)
    return lost


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module | Tensor]]:
    yield from module.named_modules()
    yield from module.named_parameters()
    yield from module.named_buffers()


def _pickle(thing: nn.Module | Tensor) -> bytes | None:
    buffer = io.BytesIO()
    try:
        torch.save(thing, buffer)
    except Exception:  # hooks, locks, handles: anything may hang on a module
        return None
    return buffer.getvalue()
