# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as Lightning knows it, a tree of dicts and lists, taken apart into tensors and all the rest.

    {"state_dict": {"w": tensor}, "optimizer_states": [{"state": {0: {"exp_avg": part, "step": 3}}}], "epoch": 1}
       tensors   w, optimizer_states/0/state/0/exp_avg
       the rest  the same tree with a leaf that names the tensor where it was

A tensor of `state_dict` keeps the name it has in the plain module; any other is named by its way through the tree.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, final

import torch
from torch import Tensor
from typing_extensions import override

from stratagem.checkpoint.parts import Box, Part
from stratagem.checkpoint.reading import Reader

LEAF = "stratagem.tensor"
"""The key of a leaf: a dict with nothing in it but the tensor's name, so that it loads with `weights_only`."""

STATE, OPTIMIZERS = "state_dict", "optimizer_states"
INLINE_NUMEL = 1
"""Tensors of so many elements (step counters) stay in the tree."""

Path = tuple[Any, ...]


def take_apart(
    tree: Any, to_part: Callable[[Path, Tensor], Part | None], path: Path = ()
) -> tuple[Any, dict[str, Part]]:
    """Splits a tree into the rest and the parts by name.

    Args:
        tree: dicts, lists and tuples, with tensors and `Part`s in them.
        to_part: what this rank writes of a tensor; None if another rank writes it.
        path: where the tree is, if it is a branch.
    """
    parts: dict[str, Part] = {}
    named = Names(tree if isinstance(tree, Mapping) and not path else {})

    def walk(node: Any, at: Path) -> Any:
        if isinstance(node, Part) or (isinstance(node, Tensor) and node.numel() > INLINE_NUMEL and _is_plain(node)):
            part, name = node if isinstance(node, Part) else to_part(at, node), named(at)
            if part is not None:
                parts[name] = part
            return {LEAF: name}
        if isinstance(node, Tensor):
            return node.detach().cpu().clone()
        if type(node) in (list, tuple):
            return type(node)(walk(item, (*at, index)) for index, item in enumerate(node))
        if isinstance(node, dict):
            found = {key: walk(item, (*at, key)) for key, item in node.items()}
            return found if type(node) is dict else like(node, found)
        return node

    return walk(tree, path), parts


def put_together(tree: Any, resolve: Callable[[str], Any]) -> Any:
    """The inverse: `resolve` gives what stands for a name."""
    if isinstance(tree, dict):
        if tree.keys() == {LEAF}:
            return resolve(tree[LEAF])
        found = {key: put_together(item, resolve) for key, item in tree.items()}
        return found if type(tree) is dict else like(tree, found)
    if type(tree) in (list, tuple):
        return type(tree)(put_together(item, resolve) for item in tree)
    return tree


def tied(state: Mapping[str, Any]) -> dict[str, str]:
    """Names of a `state_dict` that share one tensor with an earlier name, which is the value.

    >>> weight = torch.zeros(2, 2)
    >>> tied({"embedding": weight, "bias": torch.zeros(2), "head": weight.detach()})
    {'head': 'embedding'}
    """
    first: dict[Any, str] = {}
    found = {}
    for name, value in state.items():
        if isinstance(value, Part):
            key: Any = id(value)
        elif isinstance(value, Tensor) and value.numel() > INLINE_NUMEL and _is_plain(value):
            key = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype, value.device)
        else:
            continue
        if key in first:
            found[name] = first[key]
        else:
            first[key] = name
    return found


def renamed_state(states: Any, names: Any, *, to_names: bool) -> Any:
    """Optimizer states under the names of parameters instead of positions, or back; as they are where none are known.

    >>> state = {"state": {0: "m"}, "param_groups": []}
    >>> named = renamed_state([state], [["weight"]], to_names=True)
    >>> named[0]["state"], renamed_state(named, [["weight"]], to_names=False)[0] == state
    ({'weight': 'm'}, True)
    """
    if not names or states is None:
        return states
    found = []
    for state, known in zip(states, names, strict=True):
        keys = dict(enumerate(known)) if to_names else {name: number for number, name in enumerate(known)}
        found.append({**state, "state": {keys[key]: entry for key, entry in state["state"].items()}})
    return found


@final
class Names:
    """Gives every tensor of a tree a name of its own: two ways may read alike where a step has a slash in it.

    Args:
        tree: whose `state_dict` keeps its names, whatever else is called so.

    >>> names = Names({"state_dict": {"ema/w": 1}, "ema": {"w": 2}})
    >>> names(("ema", "w")), names(("state_dict", "ema/w"))
    ("ema/w'", 'ema/w')
    """

    def __init__(self, tree: Mapping[str, Any]) -> None:
        state = tree.get(STATE)
        self._used = set(map(str, state)) if isinstance(state, Mapping) else set()

    def __call__(self, path: Path) -> str:
        """The name of what is at the end of a way; to be asked once for each."""
        name = name_of(path)
        if len(path) == 2 and path[0] == STATE:
            return name
        while name in self._used:
            name += "'"
        self._used.add(name)
        return name


def name_of(path: Path) -> str:
    """The name under which a tensor is stored.

    >>> name_of(("state_dict", "model.weight")), name_of(("optimizer_states", 0, "state", 3, "exp_avg"))
    ('model.weight', 'optimizer_states/0/state/3/exp_avg')
    """
    if len(path) == 2 and path[0] == STATE:
        return str(path[1])
    return "/".join(str(step) for step in path)


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is a dense tensor of numbers; others (sparse, quantised, subclasses) stay in the tree."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and not tensor.is_quantized


def like(mapping: Any, found: dict[Any, Any]) -> Any:
    """A mapping of the same kind (an `OrderedDict`, a `defaultdict` with its default) with these values."""
    another = mapping.copy()
    another.clear()
    another.update(found)
    return another


@final
class Stored:
    """A tensor of a checkpoint that is read when it is asked for, whole or in part. Local.

    Args:
        reader: of the checkpoint.
        name: of the tensor.
    """

    def __init__(self, reader: Reader, name: str) -> None:
        entry = reader.entry(name)
        self._reader, self.name = reader, name
        self.shape, self.dtype = torch.Size(entry.shape), entry.dtype

    def dim(self) -> int:
        """As a tensor's."""
        return len(self.shape)

    def numel(self) -> int:
        """As a tensor's."""
        return self.shape.numel()

    def whole(self) -> Tensor:
        """All of it, on the CPU."""
        return self._reader.whole(self.name)

    def box(self, box: Box) -> Tensor:
        """One box of it, on the CPU."""
        return self._reader.box(self.name, box)

    def span(self, start: int, stop: int, stride: tuple[int, ...] | None = None) -> Tensor:
        """The elements `[start, stop)` of its memory, in which the whole lies densely by `stride`: `[stop - start]`."""
        found = torch.empty(stop - start, dtype=self.dtype)
        self._reader.read_into(self.name, Part.span(found, self.shape, start, stop, stride=stride))
        return found


def whole(tree: Any) -> Any:
    """A tree with tensors where it has `Stored`s; a `StoredState` becomes a dict, other mappings stay of their kind.

    >>> from collections import defaultdict
    >>> whole(defaultdict(list, a=[1]))["b"]
    []
    """
    if isinstance(tree, Stored):
        return tree.whole()
    if isinstance(tree, dict) and type(tree) is not dict:
        return like(tree, {key: whole(item) for key, item in tree.items()})
    if isinstance(tree, Mapping):
        return {key: whole(item) for key, item in tree.items()}
    return type(tree)(whole(item) for item in tree) if type(tree) in (list, tuple) else tree


@final
class StoredState(MutableMapping[str, Any]):
    """A `state_dict` whose tensors are read when they are asked for; what is assigned to it stays as it is."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def raw(self, name: str) -> Any:
        """What stands under a name: a `Stored` where nobody has put something else."""
        return self._values[name]

    @override
    def __getitem__(self, name: str) -> Any:
        return whole(self._values[name])  # a module's extra state is a tree of its own

    @override
    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = value

    @override
    def __delitem__(self, name: str) -> None:
        del self._values[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    @override
    def __len__(self) -> int:
        return len(self._values)

    def copy(self) -> StoredState:
        """Another one with the same values."""
        return StoredState(self._values)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        """A dict with tensors of its own."""
        return {name: copy.deepcopy(value, memo) for name, value in self.items()}
