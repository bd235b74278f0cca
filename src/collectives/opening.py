# SPDX-License-Identifier: Apache-2.0
"""Opens the rows of an axis: their process groups, and for each row the fastest link that all its ranks can use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, final

import torch
import torch.distributed as dist

from stratagem.collectives.native import NativeCollectives
from stratagem.collectives.p2p import P2PLink
from stratagem.collectives.rendezvous import connect
from stratagem.collectives.transport import Link
from stratagem.errors import CommunicationError

Transport = Literal["auto", "p2p", "shared_memory", "native"]


@final
@dataclass(frozen=True)
class Row:
    """One row of an axis as this rank sees it. `group` and `link` are None for a row of one rank."""

    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup | None = None
    link: Link | NativeCollectives | None = None
    transport: str = "none"


def open_row(
    axis: str, rows: Sequence[Sequence[int]], *, device: torch.device, transport: Transport, timeout: timedelta
) -> Row:
    """Open all rows of an axis and return the one of this rank. Every rank of the world calls it, in the same order.

    Arguments and errors are those of `Communicator.create`. Moves a few hundred bytes per rank.
    """
    me, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    _check(axis, rows, world, timeout)
    on_cpu = device.type == "cpu"
    resolved = ("shared_memory" if on_cpu else "native") if transport == "auto" else transport
    if resolved == "shared_memory" and not on_cpu:
        raise ValueError(f"axis {axis!r}: shared_memory carries CPU tensors only, not {device}: use 'auto'")
    mine: dist.ProcessGroup | None = None
    for row in rows:
        if len(row) > 1:  # every rank takes part in the making of every group
            backend = None if resolved == "native" and not on_cpu else "gloo"
            group = dist.new_group(list(row), timeout=timeout, backend=backend)
            mine = group if me in row else mine
    ranks = next((tuple(row) for row in rows if me in row), (me,))
    index = ranks.index(me)
    if mine is None:
        return Row(ranks, index)
    if resolved == "native":
        return Row(ranks, index, mine, NativeCollectives(mine, index), "native")
    if resolved == "shared_memory":
        found = connect(mine, ranks, index, timeout=timeout)
        if isinstance(found, Link):
            return Row(ranks, index, mine, found, "shared_memory")
        if transport != "auto":
            raise CommunicationError(f"axis {axis!r}: no shared memory: {found}")
    return Row(ranks, index, mine, P2PLink(mine, ranks, index), "p2p")


def _check(axis: str, rows: Sequence[Sequence[int]], world: int, timeout: timedelta) -> None:
    named = [rank for row in rows for rank in row]
    if len(set(named)) != len(named):
        raise ValueError(f"axis {axis!r}: a rank stands in two places of {rows}")
    if any(not 0 <= rank < world for rank in named):
        raise ValueError(f"axis {axis!r}: {rows} names a rank outside the world of {world}; is the group open?")
    if timeout <= timedelta(0):
        raise ValueError(f"axis {axis!r}: the timeout is {timeout}, and must be more than 0")
