# SPDX-License-Identifier: Apache-2.0
"""Conversion: what a source is, what a target is to be, and the way from one to the other.

    stratagem folder   <->  single file (Lightning's .ckpt)  <->  safetensors folder (Hugging Face)
    DeepSpeed           ->  all of these

Nothing is there under the target's name until all of it is there; it is written under another name beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, final

import torch

from stratagem.checkpoint import (
    commit,
    foreign_deepspeed,
    foreign_folder,
    foreign_hub,
    foreign_lightning,
    foreign_loaders,
    tree,
)
from stratagem.checkpoint.foreign_account import OURS_ONLY, TIED, account
from stratagem.checkpoint.foreign_picture import EXTRA, TRAINING, Leaf, Picture
from stratagem.errors import CheckpointError, ConfigError

Kind = Literal["folder", "ckpt", "safetensors"]
KINDS: tuple[Kind, ...] = ("folder", "ckpt", "safetensors")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@final
@dataclass(frozen=True)
class Settings:
    """How to convert.

    Args:
        to: what the target is to be; where it is None, the target's name says it.
        weights_only: leave out what only training needs.
        dtype: of the weights' floating-point numbers; as they are where it is None. With a wider one than the weights'
            own, the optimizer's exact values are taken where it has them.
        prefix: what the module puts before the names of a Hugging Face model.
        config_from: where to find the model's config for Hugging Face.
        shard_bytes: the most that one safetensors file holds.
        force: replace a target that is there.
        trust: let pickles of the source run.
        deep: compare the checksums of a source of ours before anything else.
        keep_loaders: in a single file, leave positions of data loaders where Lightning looks for them. Then the file
            resumes only with loaders that take one, as ours do; Lightning refuses it with plain ones.
    """

    to: Kind | None = None
    weights_only: bool = False
    dtype: torch.dtype | None = None
    prefix: str = "model."
    config_from: Path | None = None
    shard_bytes: int = 5 * 10**9
    force: bool = False
    trust: bool = False
    deep: bool = True
    keep_loaders: bool = False


@final
@dataclass(frozen=True)
class Report:
    """What was converted.

    Args:
        source: its kind.
        target: its kind.
        num_weights: tensors of the module, a tied one once.
        num_elements: theirs.
        num_states: tensors of the optimizers.
        num_bytes: of all of them.
        carried: what the target has beside its weights.
        ours_only: the part of that which stratagem's strategies read and Lightning's own do not.
        left_out: what the source had and the target has not.
    """

    source: str
    target: Kind
    num_weights: int
    num_elements: int
    num_states: int
    num_bytes: int
    carried: tuple[str, ...]
    ours_only: tuple[str, ...]
    left_out: tuple[str, ...]


def convert(source: Path, target: Path, settings: Settings = Settings()) -> Report:
    """Converts a checkpoint. Local: one process does it, and holds about one tensor at a time.

    Raises:
        CheckpointError: the source is none, is damaged, or does not fit the target.
        ConfigError: settings do not fit each other, the target is there, or a package is missing.
    """
    kind = target_kind(target, settings.to)
    _check(source, target, kind, settings)
    picture = read(source, settings)
    left_out, before = list(picture.notes), account(picture)
    if settings.weights_only or kind == "safetensors":
        picture = _weights(picture, settings.dtype, everything=kind != "safetensors")
    if kind == "folder":
        picture = replace(picture, tree=foreign_loaders.put_back(picture.tree))
    elif kind == "ckpt" and not settings.keep_loaders:
        picture = replace(picture, tree=foreign_loaders.set_aside(picture.tree))
    after = account(picture) if kind != "safetensors" else _only(account(picture), (TIED,))
    left_out += [words for key, words in before.items() if key not in after]
    with _built(target) as place:
        if kind == "folder":
            foreign_folder.write(picture, place.draft)
        elif kind == "ckpt":
            with commit.reported("written", target):
                foreign_lightning.write(picture, place.path)
        else:
            config = foreign_hub.find_config(settings.config_from, picture)
            with commit.reported("written", target):
                left_out += foreign_hub.write(
                    picture, place.path, prefix=settings.prefix, config=config, shard_bytes=settings.shard_bytes
                )
            if not config:
                left_out.append("config.json, which nothing here tells (--config-from names one)")
    return _report(picture, kind, after, left_out)


def read(source: Path, settings: Settings = Settings()) -> Picture:
    """A checkpoint of whatever kind, opened.

    Raises:
        CheckpointError: it is none, is of several kinds at once, or is damaged.
    """
    kind = source_kind(source)
    if kind == "folder":
        return foreign_folder.read(source, trust=settings.trust, deep=settings.deep)
    if kind == "ckpt":
        return foreign_lightning.read(source, trust=settings.trust)
    if kind == "safetensors":
        return foreign_hub.read(source, prefix=settings.prefix)
    return foreign_deepspeed.read(source, trust=settings.trust)


def source_kind(source: Path) -> str:
    """What lies there: a `Kind`, or "deepspeed".

    Raises:
        CheckpointError: nothing that is known here, or several things.
    """
    known = "a folder of stratagem's, a .ckpt file, a folder or file of safetensors, a folder of DeepSpeed's"
    if source.is_file():
        return "safetensors" if source.suffix == ".safetensors" else "ckpt"
    if not source.is_dir():
        raise CheckpointError("there is nothing of that name", where=str(source))
    if ".tmp-" in source.name:
        raise CheckpointError("it was never committed, so it is not complete", where=str(source), do="name another one")
    found = {
        "folder": foreign_folder.is_one(source),
        "safetensors": any(source.glob("*.safetensors")) or (source / foreign_hub.INDEX).is_file(),
        "deepspeed": foreign_deepspeed.find(source) is not None,
    }
    kinds = [kind for kind, there in found.items() if there]
    if len(kinds) > 1:
        raise CheckpointError(
            f"it holds checkpoints of several kinds: {', '.join(kinds)}",
            where=str(source),
            do="name one of them, or move it to a folder of its own",
        )
    if kinds:
        return kinds[0]
    folders = [manifest.parent for manifest in source.glob("*/manifest.json")]
    below = sorted(path.name for path in [*source.glob("*.ckpt"), *folders])
    do = f"name one of {', '.join(dict.fromkeys(below))}" if below else ""
    raise CheckpointError("it is no checkpoint", where=str(source), allowed=known, do=do)


def target_kind(target: Path, to: Kind | None) -> Kind:
    """What a target is to be.

    >>> target_kind(Path("weights.ckpt"), None), target_kind(Path("step=3.ckpt"), "folder")
    ('ckpt', 'folder')

    Raises:
        ConfigError: the name does not say it.
    """
    if to is not None and to not in KINDS:
        raise ConfigError(f"{to!r}", where="--to", allowed=", ".join(KINDS))
    if to is None and target.suffix != ".ckpt":
        raise ConfigError(
            f"the name {target.name!r} does not say what it is to be",
            where="TARGET",
            allowed="a name that ends with .ckpt, for a single file",
            do="--to folder, --to safetensors or --to ckpt",
        )
    return to or "ckpt"


def _check(source: Path, target: Path, kind: Kind, settings: Settings) -> None:
    if settings.dtype is not None and not settings.weights_only and kind != "safetensors":
        raise ConfigError("another dtype would not fit the optimizer's state", where="--dtype", do="add --weights-only")
    if target.exists() and target.resolve() == source.resolve():
        raise ConfigError("source and target are the same", where=str(target))
    if (target.exists() or target.is_symlink()) and not settings.force:
        raise ConfigError("the target is there already", where=str(target), do="choose another name, or --force")


def _weights(picture: Picture, dtype: torch.dtype | None, *, everything: bool) -> Picture:
    """Without what only training needs, and cast."""
    state = dict(picture.state)
    if dtype is not None:
        exact = _masters(picture)
        cast: dict[int, Any] = {}  # a tied leaf stays one leaf
        for name, value in state.items():
            leaf = Leaf.of(value)
            if leaf is not None and leaf.dtype.is_floating_point:
                chosen = exact.get(id(value), leaf) if dtype.itemsize > leaf.dtype.itemsize else leaf
                state[name] = cast.setdefault(id(value), chosen.cast(dtype))
    kept = {key: value for key, value in picture.tree.items() if key not in (*TRAINING, EXTRA)}
    if not everything:
        kept = {key: value for key, value in kept.items() if key == "hyper_parameters"}
    return replace(picture, tree={**kept, tree.STATE: state})


def _masters(picture: Picture) -> dict[int, Leaf]:
    """The exact values of parameters that the optimizers hold, by the leaf of the rounded ones."""
    found = {}
    names = picture.tree.get(EXTRA, {}).get("optimizer_names") or []
    for optimizer, known in zip(picture.tree.get(tree.OPTIMIZERS) or [], names, strict=False):
        for number, entries in optimizer["state"].items():
            master = entries.get(foreign_deepspeed.MASTER)
            if isinstance(master, Leaf) and known[number] in picture.state:
                found[id(picture.state[known[number]])] = master
    return found


@final
@dataclass
class _Place:
    """Where a target is built."""

    draft: commit.Draft
    path: Path


@contextlib.contextmanager
def _built(target: Path) -> Iterator[_Place]:
    """Gives a place to build in; what is there at the end gets the target's name, in one step."""
    place = _Place(draft := commit.Draft(target), draft.folder / "built")
    try:
        yield place
        if place.path.exists():
            with commit.reported("committed", target):
                commit.replace_folder(place.path, target)
    finally:
        draft.discard()  # a folder that is committed is no longer there under this name


def _only(words: Mapping[str, str], keys: Sequence[str]) -> dict[str, str]:
    return {key: word for key, word in words.items() if key in keys}


def _report(picture: Picture, kind: Kind, account: Mapping[str, str], left_out: Sequence[str]) -> Report:
    weights = {id(value): leaf for value in picture.state.values() if (leaf := Leaf.of(value)) is not None}
    states = [leaf for path, leaf in picture.leaves().items() if path[0] == tree.OPTIMIZERS]
    ours = _only(account, OURS_ONLY)
    return Report(
        picture.kind,
        kind,
        len(weights),
        num_elements=sum(leaf.numel for leaf in weights.values()),
        num_states=len(states),
        num_bytes=sum(leaf.num_bytes for leaf in [*weights.values(), *states]),
        carried=tuple(words for key, words in account.items() if key not in ours),
        ours_only=tuple(ours.values()),
        left_out=tuple(left_out),
    )
