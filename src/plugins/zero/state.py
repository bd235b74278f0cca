# SPDX-License-Identifier: Apache-2.0
"""An optimizer's state as one process has it, put together from pieces and taken apart again.

So that a run under any strategy, on any number of ranks, can go on from the checkpoint of any other, state is always
written whole, under the plain optimizer's indices. One tensor is put together at a time, and only rank 0 keeps it.

Where the optimizer works on masters (half precision parameters), their exact values are stated as `MASTER` beside the
optimizer's own entries; a plain optimizer carries that entry along and ignores it. A parameter that was never stepped
has no entry at all, since optimizers take its absence for "not yet begun".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stratagem.collectives import Communicator
from stratagem.errors import CheckpointError
from stratagem.plugins.zero.bucket import Bucket, OwnedParameter
from stratagem.plugins.zero.optimizer import OwnedOptimizer, part_of_state

MASTER = "stratagem_master"
"""The key of a parameter's exact value."""

Entry = tuple[str, Any]
"""How a rank describes an entry: ("part", dtype) for a tensor cut like the parameter, ("whole", value) for the rest."""


@torch.no_grad()
def gather_state(owned_optimizer: OwnedOptimizer, comm: Communicator) -> dict[str, Any]:
    """The optimizer's state, whole, under the plain indices; its `state` is empty on ranks other than 0 of the axis.

    Every rank of the axis over which parameters are divided calls it. It sends every byte of the state once around the
    ring, one tensor at a time, and one small message of descriptions.
    """
    groups = owned_optimizer.optimizer.state_dict()["param_groups"]
    state = compose_state(owned_optimizer, comm, partial(_gather_part, comm))
    return {"state": state if comm.rank == 0 else {}, "param_groups": groups}


def compose_state(
    owned_optimizer: OwnedOptimizer,
    comm: Communicator,
    value_of: Callable[[Bucket, int, Tensor | None, torch.dtype], Any],
) -> dict[int, dict[str, Any]]:
    """The optimizer's `state` under the plain indices, on every rank, with a value of one's own for each cut tensor.

    Every rank of the axis calls it; it sends one small message of descriptions, besides what `value_of` sends.

    Args:
        owned_optimizer: whose.
        comm: over the axis along which parameters are divided.
        value_of: what stands for a tensor that is cut like its parameter: given the parameter's bucket and index, my
            piece of the tensor (None where I have none) and its dtype. Called on every rank, for the same tensors in
            the same order.
    """
    optimizer = owned_optimizer.optimizer
    everyone: list[dict[int, dict[str, Entry]]] = comm.gather_objects(_describe_entries(owned_optimizer))
    state: dict[int, dict[str, Any]] = {}
    for number, owned, bucket, index in owned_optimizer.owned():
        descriptions = [theirs.get(number, {}) for theirs in everyone]
        for key in dict.fromkeys(key for entries in descriptions for key in entries):
            kind, detail = next(entries[key] for entries in descriptions if key in entries)
            local = owned if key == MASTER else optimizer.state.get(owned, {}).get(key)
            value = value_of(bucket, index, local, detail) if kind == "part" else detail
            state.setdefault(number, {})[key] = value
    known = {number for number, *_ in owned_optimizer.owned()}
    strangers = optimizer.state_dict()["state"]
    return state | {number: entry for number, entry in strangers.items() if number not in known}


def _describe_entries(owned_optimizer: OwnedOptimizer) -> dict[int, dict[str, Entry]]:
    """What this rank has of each parameter's state, by the plain index: see `Entry`. Local."""
    found: dict[int, dict[str, Entry]] = {}
    for number, owned, bucket, index in owned_optimizer.owned():
        entries = {
            key: _describe(value, owned) for key, value in owned_optimizer.optimizer.state.get(owned, {}).items()
        }
        if bucket.has_master and (entries or bucket.has_moved(index)):
            entries[MASTER] = ("part", bucket.state_dtype)
        found[number] = entries
    return found


def _describe(value: Any, owned: OwnedParameter) -> Entry:
    if isinstance(value, Tensor) and value.dim() and value.shape == owned.shape:
        return "part", value.dtype
    return "whole", value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _gather_part(
    comm: Communicator, bucket: Bucket, index: int, local: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """One tensor of the parameter's shape on rank 0 of the axis; None elsewhere."""
    whole = gather_parameter(bucket, index, comm, local=local, dtype=dtype)
    return whole.to(bucket.cut.layout.device) if comm.rank == 0 else None


@torch.no_grad()
def gather_parameter(
    bucket: Bucket, index: int, comm: Communicator, *, local: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Puts one tensor of a parameter's shape together from the ranks' pieces, on every rank of the axis.

    Every rank of the axis calls it. It sends the tensor once around the ring.

    Args:
        bucket: where the parameter lies.
        index: which of the bucket's parameters it is.
        comm: over the axis.
        local: my piece, in any shape; None where it is empty.
        dtype: of the tensor.
    """
    piece = bucket.pieces[index]
    spans = bucket.cut.spans(piece.slot)
    flat = torch.empty(spans[-1][1], dtype=dtype, device=comm.device)
    if local is not None and piece.numel:
        mine = flat[piece.start : piece.stop]
        if piece.is_whole:
            replace(piece.slot, offset=0).view(flat).copy_(local)
        else:
            mine.copy_(local.reshape(-1))
    comm.all_gather(flat, bounds=spans)
    return replace(piece.slot, offset=0).view(flat)


@torch.no_grad()
def gather_gradient(bucket: Bucket, index: int, comm: Communicator) -> Tensor | None:
    """A parameter's reduced gradient, whole, on every rank of the axis; None where no rank has one.

    Every rank of the axis calls it. It sends the gradient once around the ring, and one number.
    """
    owned = bucket.owned_parameters[index]
    gradient = owned.grad if owned is not None else None
    has = torch.tensor([int(gradient is not None)], device=comm.device)
    comm.reduce_small(has, "max")
    if not int(has):
        return None
    return gather_parameter(bucket, index, comm, local=gradient, dtype=bucket.state_dtype)


@torch.no_grad()
def load_state(owned_optimizer: OwnedOptimizer, state: Mapping[str, Any]) -> None:
    """The inverse of `gather_state`; every rank holds the whole state. Local.

    Raises:
        CheckpointError: the groups have other sizes than the optimizer's.
    """
    optimizer = owned_optimizer.optimizer
    theirs = [len(group["params"]) for group in state["param_groups"]]
    ours = [len(group["params"]) for group in optimizer.param_groups]
    if theirs != ours:
        raise CheckpointError(
            f"the checkpoint's optimizer has groups of {theirs} parameters, this one of {ours}",
            where="the optimizer's state",
            do="resume with the module and the configure_optimizers that wrote the checkpoint",
        )
    numbers = [number for group in state["param_groups"] for number in group["params"]]  # as the writer counted
    parts: dict[int, Any] = {}
    for number, owned, bucket, index in owned_optimizer.owned():
        entries = dict(state["state"].get(numbers[number], {}))
        master = entries.pop(MASTER, None)
        if bucket.has_master and bucket.pieces[index].numel:
            bucket.refresh_piece(index)
            if master is not None:
                owned.copy_(part_of_state({MASTER: master}, bucket, index)[MASTER].view_as(owned))
        if entries and bucket.pieces[index].numel:
            parts[number] = part_of_state(entries, bucket, index)
    groups = [
        {**saved, "params": group["params"]}
        for saved, group in zip(state["param_groups"], optimizer.state_dict()["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({"state": parts, "param_groups": groups})
