# SPDX-License-Identifier: Apache-2.0
"""Whether ranks that should hold the same hold the same, bit by bit.

Replicas that drift apart by one bit are the earliest sign of a missed or doubled reduction; a loss curve shows it much
later or never. So the comparison is bitwise: parameters, buffers, and the optimizer's state with its step counts and
its learning rates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def fingerprint(module: nn.Module, optimizers: Optimizer | Iterable[Optimizer] = ()) -> str:
    """Return a hash over names, shapes, dtypes and bits of what `module` and `optimizers` hold on this process.

    Example:
        >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> fingerprint(one) == fingerprint(other)
        False
        >>> _ = other.load_state_dict(one.state_dict())
        >>> fingerprint(one) == fingerprint(other)
        True
    """
    digest = hashlib.sha256()
    for name, part in _digests(module, optimizers):
        digest.update(f"{name}={part};".encode())
    return digest.hexdigest()


def assert_replicas_equal(
    module: nn.Module, optimizers: Optimizer | Iterable[Optimizer] = (), *, group: Any = None
) -> None:
    """Assert that every rank of `group` holds, bit by bit, what its rank 0 holds.

    Every rank of the group must call it. Costs one `all_gather_object` of some 80 bytes per tensor.

    Args:
        module: its parameters and buffers are compared.
        optimizers: one or several; their state, step counts and settings are compared.
        group: the ranks that should be replicas of each other; the default group if None.

    Raises:
        AssertionError: on every rank of the group; names the first thing that differs and the ranks that differ.
    """
    import torch.distributed as dist

    mine = list(_digests(module, optimizers))
    everyone: list[list[tuple[str, str]]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, mine, group=group)
    message = _difference([dict(each) for each in everyone])
    if message:
        raise AssertionError(message)


def _difference(replicas: list[dict[str, str]]) -> str:
    """What differs first from replica 0, in words; empty if nothing does."""
    names = list(dict.fromkeys(name for replica in replicas for name in replica))
    different = [name for name in names if len({replica.get(name) for replica in replicas}) > 1]
    if not different:
        return ""
    first = different[0]
    absent = [rank for rank, replica in enumerate(replicas) if first not in replica]
    if absent:
        return f"{first} is missing on ranks {absent} ({len(different)} of {len(names)} entries differ)"
    ranks = [rank for rank, replica in enumerate(replicas) if replica[first] != replicas[0][first]]
    return f"{first} differs between rank 0 and ranks {ranks} ({len(different)} of {len(names)} entries differ)"


def _digests(module: nn.Module, optimizers: Optimizer | Iterable[Optimizer]) -> Iterator[tuple[str, str]]:
    """The name and the hash of everything that is compared."""
    for name, parameter in module.named_parameters():
        yield f"parameter {name}", _digest(parameter)
    for name, buffer in module.named_buffers():
        yield f"buffer {name}", _digest(buffer)
    names = {parameter: name for name, parameter in module.named_parameters()}
    for number, optimizer in enumerate([optimizers] if isinstance(optimizers, Optimizer) else optimizers):
        for index, group in enumerate(optimizer.param_groups):
            place = f"optimizer {number} group {index}"
            for key in sorted(set(group) - {"params"}):
                yield f"{place} {key}", _digest(group[key])
            for position, parameter in enumerate(group["params"]):
                owner = names.get(parameter, f"parameter {position}")
                for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                    yield f"{place} {owner} {key}", _digest(value)


def _digest(value: Any) -> str:
    """A hash of a tensor's bits, or of a setting's text."""
    if not isinstance(value, Tensor):
        if isinstance(value, Mapping):
            value = {key: _digest(each) for key, each in sorted(value.items())}
        elif isinstance(value, (list, tuple)):
            value = [_digest(each) for each in value]
        return hashlib.sha256(repr(value).encode()).hexdigest()[:32]
    local = value.detach()
    if hasattr(local, "to_local"):  # a DTensor: what this rank holds of it
        local = local.to_local()
    flat = local.cpu().contiguous().reshape(-1)
    digest = hashlib.sha256(f"{tuple(value.shape)} {tuple(local.shape)} {value.dtype}".encode())
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]
