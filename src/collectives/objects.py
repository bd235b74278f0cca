# SPDX-License-Identifier: Apache-2.0
"""Python objects over an axis: pickled to bytes, which travel as tensors through the same door as everything else."""

from __future__ import annotations

import pickle
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from stratagem.collectives.communicator import Communicator


def gather(communicator: Communicator, obj: Any) -> list[Any]:
    """The objects of all ranks, in the order of the axis. Collective: sends the sizes, then the other ranks' bytes."""
    if communicator.size == 1:
        return [obj]
    payload = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    sizes = torch.zeros(communicator.size, dtype=torch.int64, device=communicator.device)
    sizes[communicator.rank] = payload.numel()
    communicator.all_gather(sizes)
    bounds = tuple(pairwise(accumulate(sizes.tolist(), initial=0)))
    everybody = torch.empty(bounds[-1][1], dtype=torch.uint8, device=communicator.device)
    everybody[slice(*bounds[communicator.rank])] = payload.to(communicator.device)
    communicator.all_gather(everybody, bounds=bounds)
    data = everybody.cpu().numpy().tobytes()
    return [pickle.loads(data[lo:hi]) for lo, hi in bounds]


def broadcast(communicator: Communicator, obj: Any, src: int) -> Any:
    """The object of the rank at index `src`. Collective: sends its size, then its bytes, along the chain of ranks."""
    if communicator.size == 1:
        return obj
    data = bytearray(pickle.dumps(obj)) if communicator.rank == src else bytearray()
    size = torch.tensor([len(data)], dtype=torch.int64, device=communicator.device)
    communicator.broadcast(size, src)
    payload = torch.empty(int(size), dtype=torch.uint8, device=communicator.device)
    if communicator.rank == src:
        payload.copy_(torch.frombuffer(data, dtype=torch.uint8))
    communicator.broadcast(payload, src)
    return obj if communicator.rank == src else pickle.loads(payload.cpu().numpy().tobytes())
