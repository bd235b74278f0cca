# SPDX-License-Identifier: Apache-2.0
"""Where data loaders stand: in a place where only who knows it looks, and back where Lightning looks.

Under our strategies every training loader has a state, and Lightning keeps the states in its loop. A plain loader has
none, and Lightning refuses a checkpoint with more states than loaders that take one. So a single file, which any
Trainer may be given, has ours set aside; a folder has them in their place. How many batches of the epoch are done
stands in the loop's own progress, which stays as it is. States of a user's own loaders stay too: those loaders take
them on one device as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stratagem.checkpoint.foreign_picture import EXTRA

LOADERS = "loaders"
"""The key beneath `EXTRA`: of each state its place in Lightning's list, and the state."""

_WAY = ("loops", "fit_loop", "state_dict")
_THEIRS = "combined_loader"
_OURS = {"epoch", "samples", "batches"}


def states(tree: Mapping[str, Any]) -> list[tuple[int, Any]]:
    """States of our loaders in a checkpoint, wherever they are, each with its place among all loaders' states."""
    aside = [(place, state) for place, state in tree.get(EXTRA, {}).get(LOADERS, ())]
    return aside + [(place, state) for place, state in enumerate(_listed(tree)) if _is_ours(state)]


def set_aside(tree: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint without states of our loaders where Lightning looks.

    >>> position = {"epoch": 0, "samples": 8, "batches": 2}
    >>> saved = {"loops": {"fit_loop": {"state_dict": {"combined_loader": [position]}}}}
    >>> set_aside(saved)["loops"], set_aside(saved)["stratagem"] == {"loaders": [[0, position]]}
    ({'fit_loop': {'state_dict': {}}}, True)
    >>> put_back(set_aside(saved)) == saved
    True
    """
    listed = _listed(tree)
    ours = [[place, state] for place, state in enumerate(listed) if _is_ours(state)]
    if not ours:
        return tree
    rest = [state for state in listed if not _is_ours(state)]
    return {**_relisted(tree, rest), EXTRA: {**tree.get(EXTRA, {}), LOADERS: ours}}


def put_back(tree: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint with every state where Lightning looks."""
    extra = dict(tree.get(EXTRA, {}))
    aside = extra.pop(LOADERS, None)
    if not aside:
        return tree
    listed = list(_listed(tree))
    for place, state in sorted(aside, key=lambda item: item[0]):
        listed.insert(place, state)
    back = _relisted(tree, listed)
    return {**back, EXTRA: extra} if extra else {key: value for key, value in back.items() if key != EXTRA}


def _listed(tree: Mapping[str, Any]) -> list[Any]:
    node: Any = tree
    for step in _WAY:
        node = node.get(step) if isinstance(node, Mapping) else None
    found = node.get(_THEIRS) if isinstance(node, Mapping) else None
    return found if isinstance(found, list) else []


def _relisted(tree: dict[str, Any], listed: list[Any], way: tuple[str, ...] = _WAY) -> dict[str, Any]:
    if way:
        return {**tree, way[0]: _relisted(tree.get(way[0], {}), listed, way[1:])}
    rest = {key: value for key, value in tree.items() if key != _THEIRS}
    return {**rest, _THEIRS: listed} if listed else rest


def _is_ours(state: Any) -> bool:
    return isinstance(state, Mapping) and state.keys() == _OURS
