# SPDX-License-Identifier: Apache-2.0
"""An optimizer's and a module's state as the parts that each rank holds, for checkpoints that no rank ever has whole.

Nothing but descriptions is sent. What `state` does by gathering, the checkpoint's files do here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stratagem.checkpoint.parts import Part, whole_box
from stratagem.collectives import Communicator
from stratagem.plugins.zero.bucket import Bucket
from stratagem.plugins.zero.optimizer import OwnedOptimizer
from stratagem.plugins.zero.state import compose_state


def part_of_piece(bucket: Bucket, index: int, local: Tensor | None, dtype: torch.dtype, replicas: Communicator) -> Part:
    """One tensor that is cut like a parameter, as the part of it that this rank holds. Local.

    Args:
        bucket: where the parameter lies.
        index: which of the bucket's parameters it is.
        local: my piece, of the parameter's shape where it is all of it; None where it is empty.
        dtype: of the tensor.
        replicas: the ranks that hold the same piece.
    """
    piece = bucket.pieces[index]
    copy, num_copies = replicas.rank, replicas.size
    if local is None or not piece.numel:
        return Part(tuple(piece.slot.size), dtype, (), (), copy, num_copies)
    if piece.is_whole:
        shape = tuple(piece.slot.size)
        return Part(shape, local.dtype, (whole_box(shape),), (local.detach().view(shape),), copy, num_copies)
    return Part.span(
        local,
        piece.slot.size,
        piece.start,
        piece.stop,
        stride=piece.slot.stride,
        copy=copy,
        num_copies=num_copies,
    )


@torch.no_grad()
def optimizer_parts(owned_optimizer: OwnedOptimizer, shard: Communicator, replicas: Communicator) -> dict[str, Any]:
    """The optimizer's state under the plain indices, with a `Part` for each tensor that is cut like its parameter.

    Every rank of the axis over which parameters are divided calls it; it sends one small message of descriptions.
    """

    def value_of(bucket: Bucket, index: int, local: Tensor | None, dtype: torch.dtype) -> Part:
        return part_of_piece(bucket, index, local, dtype, replicas)

    groups = owned_optimizer.optimizer.state_dict()["param_groups"]
    return {"state": compose_state(owned_optimizer, shard, value_of), "param_groups": groups}
