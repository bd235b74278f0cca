# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's checkpoints of ZeRO, stages 1 to 3, read without DeepSpeed.

    latest                                     the name of the folder below
    checkpoint/mp_rank_00_model_states.pt      what Lightning saves, names, shapes; stages 1 and 2: the weights
    checkpoint/zero_pp_rank_1_..._model_states.pt   the same per rank (stage 3): its pieces of frozen parameters
    checkpoint/zero_pp_rank_1_..._optim_states.pt      per rank: its pieces of exact weights and moments

Exact weights and moments are vectors; `param_shapes` says which parameters lie in each, in which order.

    stages 1, 2    the ranks' pieces, one after the other, are one vector per group: parameters follow each other in it
                   rank 0 [ a a a b ]  rank 1 [ b b c . ]
    stage 3        each parameter is cut among the ranks, so each rank's vectors hold its piece of every parameter
                   rank 0 [ a a b b c ]  rank 1 [ a . b . c ]      (a: 3 elements, and one of padding)

Note [nothing of DeepSpeed's runs]: its files hold objects of its classes beside the tensors (a loss scaler, an enum).
Objects that do nothing are built in their place, so the files load with `weights_only`, and DeepSpeed is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from stratagem.checkpoint import tree
from stratagem.checkpoint.foreign_picture import EXTRA, WINDOW_BYTES, Leaf, Picture, Window, classes_in, load_file
from stratagem.errors import CheckpointError

MASTER = "stratagem_master"
"""The key of a parameter's exact value in the optimizer's state, as our ZeRO has it."""

_THEIRS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
    *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version"),
    "checkpoint_parallel_dimensions",
}
"""Keys of a file of model states that are DeepSpeed's; the others are what Lightning saved."""


@final
class StandIn:
    """Built in the place of an object of DeepSpeed's: see Note [nothing of DeepSpeed's runs]."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        """Ignores what the object held."""


@final
@dataclass(frozen=True)
class _Piece:
    """Elements `[start, stop)` of one vector of one rank."""

    rank: int
    vector: int
    start: int
    stop: int


def find(source: Path) -> Path | None:
    """The folder with DeepSpeed's files: this one, or the one that `latest` names; None if there is neither."""
    if any(source.glob("*_model_states.pt")):
        return source
    try:
        tag = (source / "latest").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    folder = source / tag
    return folder if tag and any(folder.glob("*_model_states.pt")) else None


def read(source: Path, *, trust: bool = False) -> Picture:
    """A checkpoint of DeepSpeed's: weights under all their names, moments and exact weights per parameter.

    Weights have the type that they were trained in. Where that is not the exact weights' own, those stand in the
    optimizer's state as our ZeRO has them.

    Args:
        source: the folder that was saved, or the one below it.
        trust: let pickles run; needed where Lightning saved objects of the user's classes.

    Raises:
        CheckpointError: files are missing or damaged, do not fit each other, or need what is not supported.
    """
    folder = find(source)
    if folder is None:
        raise CheckpointError("there are no files of model states", where=str(source))
    _refuse_other_parallelism(folder)
    models = _files(folder, "model_states")
    windows = _windows(models, trust)
    head = windows[0].get()
    optims = _windows(_files(folder, "optim_states"), trust)
    notes = ["DeepSpeed's loss scaler"] if optims else ["the optimizer's state: there are no files of it"]
    stage = _stage(optims[0].get()) if optims else 0
    _check_count(folder, stage, optims, windows)
    state: dict[str, Any] = {}
    found_tree: dict[str, Any] = {key: value for key, value in head.items() if key not in _THEIRS}
    found_tree[tree.STATE] = state
    reads = _Optimizers(optims, stage, head["param_shapes"]) if optims else None
    frozen = head.get("frozen_param_shapes") or {}
    for name, value in head["module"].items():
        if reads is not None and stage == 3 and name in reads.shapes:
            state[name] = reads.master(name).cast(value.dtype)
        elif stage == 3 and name in frozen:
            state[name] = _frozen(windows, name, tuple(frozen[name]), value.dtype)
        elif isinstance(value, Tensor):
            state[name] = Leaf(tuple(value.shape), value.dtype, _module_reader(windows[0], name))
    for one, other in (head.get("shared_params") or {}).items():  # pairs, of which either may be the one stored
        stored = one if reads is not None and one in reads.shapes else other
        state[one] = state[other] = state[stored]
    if reads is not None:
        states, names = reads.state(state)
        found_tree[tree.OPTIMIZERS] = [states]
        found_tree[EXTRA] = {"optimizer_names": [names], "strategy": f"DeepSpeed ZeRO {stage}"}
    kind = f"DeepSpeed, ZeRO stage {stage} on {len(optims)} ranks" if optims else "DeepSpeed without ZeRO"
    return Picture(found_tree, kind, tuple(notes))


@final
class _Optimizers:
    """The ranks' vectors, as tensors of parameters."""

    def __init__(self, files: Sequence[Window], stage: int, param_shapes: Sequence[Mapping[str, Any]]) -> None:
        self._files, self._stage = files, stage
        own = files[0].get()["optimizer_state_dict"]
        self._masters = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        self._base = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
        base = own.get(self._base)
        if not isinstance(base, Mapping) or "state" not in base:
            raise CheckpointError(
                "the optimizer's state is of DeepSpeed's elastic kind",
                do="save with elastic_checkpoint off",
            )
        self.param_groups: Sequence[Mapping[str, Any]] = base["param_groups"]
        self.vectors = [dict(shapes) for shapes in param_shapes]
        self.shapes = {name: tuple(shape) for shapes in self.vectors for name, shape in shapes.items()}
        self._sizes = [[v.numel() for v in file.get()["optimizer_state_dict"][self._masters]] for file in files]
        self._pieces = dict(self._in_rows() if stage == 3 else self._in_line(own.get("param_alignment_paddings")))

    def _in_line(self, paddings: Any) -> Iterator[tuple[str, list[_Piece]]]:
        for vector, shapes in enumerate(self.vectors):
            offset = 0
            for number, (name, shape) in enumerate(shapes.items()):
                end = offset + torch.Size(shape).numel()
                pieces, first = [], 0
                for rank, sizes in enumerate(self._sizes):
                    last = first + sizes[vector]
                    if first < end and offset < last:
                        pieces.append(_Piece(rank, vector, max(offset - first, 0), min(end, last) - first))
                    first = last
                if end > first:
                    raise CheckpointError(f"the vectors of the ranks end before {name!r} does")
                yield name, pieces
                offset = end + (paddings[vector][number] if paddings else 0)

    def _in_rows(self) -> Iterator[tuple[str, list[_Piece]]]:
        ranks = len(self._files)
        for vector, shapes in enumerate(self.vectors):
            offset = 0
            for name, shape in shapes.items():
                numel = torch.Size(shape).numel()
                size = -(-numel // ranks)
                pieces = []
                for rank in range(ranks):
                    mine = min(size, max(numel - rank * size, 0))
                    pieces.append(_Piece(rank, vector, offset, offset + mine))
                yield name, pieces
                offset += size
            if any(len(sizes) != len(self.vectors) or sizes[vector] != offset for sizes in self._sizes):
                raise CheckpointError(f"vector {vector} of a rank has not the {offset} elements of its parameters")

    def master(self, name: str) -> Leaf:
        """A parameter's exact value."""
        dtype = self._files[0].get()["optimizer_state_dict"][self._masters][self._pieces[name][0].vector].dtype
        return Leaf(self.shapes[name], dtype, lambda: self._put_together(name, None))

    def state(self, weights: Mapping[str, Leaf]) -> tuple[dict[str, Any], list[str]]:
        """The optimizer's state under positions, and the name that each position has."""
        names: list[str] = []
        groups = []
        for group in self.param_groups:
            own = [name for vector in group["params"] for name in self.vectors[vector]]
            groups.append({**group, "params": list(range(len(names), len(names) + len(own)))})
            names += own
        state: dict[int, dict[str, Any]] = {}
        for number, name in enumerate(names):
            vector = self._pieces[name][0].vector
            size = self._sizes[0][vector]
            entries: dict[str, Any] = {}
            for key, value in self._vectors(0).get(vector, {}).items():
                if isinstance(value, Tensor) and value.dim() and value.numel() == size:
                    entries[key] = Leaf(self.shapes[name], value.dtype, self._reader(name, key))
                else:
                    entries[key] = value.clone() if isinstance(value, Tensor) else value
            master = self.master(name)
            if name in weights and weights[name].dtype != master.dtype:
                entries[MASTER] = master
            if entries:
                state[number] = entries
        return {"state": state, "param_groups": groups}, names

    def _reader(self, name: str, key: str) -> Any:
        return lambda: self._put_together(name, key)

    def _put_together(self, name: str, key: str | None) -> Tensor:
        found = []
        for piece in self._pieces[name]:
            file = self._files[piece.rank]
            if key is None:
                vector = file.get()["optimizer_state_dict"][self._masters][piece.vector]
            else:
                vector = self._vectors(piece.rank)[piece.vector][key]
            found.append(vector.view(-1)[piece.start : piece.stop].clone())
            file.took(found[-1].numel() * found[-1].element_size())
        return torch.cat(found).view(self.shapes[name])

    def _vectors(self, rank: int) -> Mapping[int, Mapping[str, Any]]:
        found: Mapping[int, Mapping[str, Any]] = self._files[rank].get()["optimizer_state_dict"][self._base]["state"]
        return found


def _module_reader(window: Window, name: str) -> Any:
    def fetch() -> Tensor:
        found: Tensor = window.get()["module"][name].clone(memory_format=torch.contiguous_format)
        window.took(found.numel() * found.element_size())
        return found

    return fetch


def _frozen(windows: Sequence[Window], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Leaf:
    def fetch() -> Tensor:
        pieces = []
        for window in windows:
            pieces.append(window.get()["frozen_param_fragments"][name].clone())
            window.took(pieces[-1].numel() * pieces[-1].element_size())
        return torch.cat(pieces)[: torch.Size(shape).numel()].view(shape)

    return Leaf(shape, dtype, fetch)


def _windows(paths: Sequence[Path], trust: bool) -> list[Window]:
    """Of the ranks' files; all of them together hold what one would, since tensors are put together out of all."""
    return [_window(path, trust, WINDOW_BYTES // len(paths)) for path in paths]


def _window(path: Path, trust: bool, num_bytes: int) -> Window:
    stand_ins: Mapping[str, type] = {
        name: StandIn for name in classes_in(path) if name.partition(".")[0] == "deepspeed"
    }
    return Window(lambda: load_file(path, trust=trust, stand_ins=stand_ins), num_bytes)


def _stage(file: Mapping[str, Any]) -> int:
    """The stage; an enum of DeepSpeed's, or what stands in for it."""
    found = file.get("optimizer_state_dict", {}).get("zero_stage")
    number = found.values[0] if isinstance(found, StandIn) else found
    if number not in (1, 2, 3):
        raise CheckpointError(f"its ZeRO stage is {number}", allowed="1, 2, 3")
    return int(number)


def _check_count(folder: Path, stage: int, optims: Sequence[Window], models: Sequence[Window]) -> None:
    if not optims:
        return
    told = optims[0].get()["optimizer_state_dict"]["partition_count"]
    ranks = max(told) if isinstance(told, list) else told
    if len(optims) != ranks or (stage == 3 and len(models) != ranks):
        raise CheckpointError(
            f"{ranks} ranks wrote it; there are {len(optims)} files of optimizer states and {len(models)} of models",
            where=str(folder),
            do="bring the files of all nodes together in one folder",
        )


def _refuse_other_parallelism(folder: Path) -> None:
    others = [path.name for path in folder.iterdir() if re.match(r"layer_|expp_rank_|.*mp_rank_(?!00)\d", path.name)]
    if others:
        raise CheckpointError(
            f"{others[0]} is of a model that was divided by tensors, layers or experts too",
            where=str(folder),
            allowed="ZeRO stages 1 to 3 alone",
        )


def _files(folder: Path, kind: str) -> list[Path]:
    """Of all ranks, in their order."""

    def rank(path: Path) -> int:
        found = re.search(r"pp_rank_(\d+)", path.name)
        return int(found[1]) if found else 0

    return sorted(folder.glob(f"*_{kind}.pt"), key=rank)
