# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds beside its weights, in words: told of source and target, the difference is what was left out.

A single file has room for everything, but Lightning's own strategies read only their part of it; the words of
`OURS_ONLY` are of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stratagem.checkpoint import foreign_loaders, tree
from stratagem.checkpoint.foreign_deepspeed import MASTER
from stratagem.checkpoint.foreign_picture import EXTRA, Picture

TIED, MASTERS, RANDOM, GRADIENTS, LOADERS = "tied", "masters", "random", "gradients", "loaders"
OURS_ONLY = (MASTERS, RANDOM, GRADIENTS, LOADERS)

_KNOWN = {
    "loops": "the loops' progress",
    "hyper_parameters": "hyper-parameters of the module",
    "datamodule_hyper_parameters": "hyper-parameters of the data module",
    "MixedPrecision": "the loss scaler",
    "native_amp_scaling_state": "the loss scaler",
}
_SILENT = {
    *(tree.STATE, tree.OPTIMIZERS, EXTRA, "lr_schedulers", "callbacks", "epoch", "global_step"),
    *("pytorch-lightning_version", "hparams_name", "hparams_type", "datamodule_hparams_name"),
}
"""Counted below, or no state at all."""


def account(picture: Picture) -> dict[str, str]:
    """What a checkpoint holds, by a key of this module or of Lightning's."""
    found: dict[str, str] = {}
    held = picture.tree
    aliases = picture.aliases()
    if aliases:
        pairs = [f"{alias} = {name}" for alias, name in list(aliases.items())[:3]]
        found[TIED] = f"{_count(len(aliases), 'tied name')} ({', '.join(pairs)}{', ...' if len(aliases) > 3 else ''})"
    optimizers = [state for state in held.get(tree.OPTIMIZERS) or [] if state.get("state")]
    if optimizers:
        found[tree.OPTIMIZERS] = f"state of {_count(len(optimizers), 'optimizer')}"
    entries = [entry for state in optimizers for entry in state["state"].values() if isinstance(entry, Mapping)]
    masters = sum(MASTER in entry for entry in entries)
    if masters:
        found[MASTERS] = f"exact weights of {_count(masters, 'parameter')}"
    for key, word in (("lr_schedulers", "learning-rate schedule"), ("callbacks", "callback")):
        if held.get(key):
            found[key] = f"state of {_count(len(held[key]), word)}"
    found |= {key: _KNOWN.get(key, repr(key)) for key, value in held.items() if key not in _SILENT and value}
    return found | _of_ranks(held)


def _of_ranks(held: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    extra = held.get(EXTRA, {})
    ranks = [rank for rank in extra.get("ranks") or [] if isinstance(rank, Mapping)]
    if any(rank.get("random") for rank in ranks):
        found[RANDOM] = f"random states of {_count(len(ranks), 'rank')}"
    if extra.get("reduced") or any(rank.get("gradients") for rank in ranks):
        found[GRADIENTS] = "gradients of an open accumulation window"
    positions = foreign_loaders.states(held)
    if positions:
        told = ", ".join(f"epoch {state['epoch']}, sample {state['samples']}" for _, state in positions)
        found[LOADERS] = f"positions of {_count(len(positions), 'data loader')} ({told})"
    return found


def _count(number: int, word: str) -> str:
    """A number with its noun.

    >>> _count(1, "rank"), _count(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{number} {word}" + ("" if number == 1 else "s")
