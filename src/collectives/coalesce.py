# SPDX-License-Identifier: Apache-2.0
"""Many small tensors as few flat messages: one per dtype, cut at a bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

_MAX_BYTES = 32 << 20


def coalesced(tensors: Sequence[Tensor], *, max_bytes: int = _MAX_BYTES) -> Iterator[tuple[Tensor, Callable[[], None]]]:
    """Yield `(flat, scatter)` per message: a contiguous tensor to work on, and what copies it back to the tensors.

    Tensors are grouped by dtype and device in the order of their first appearance. A group is cut before a tensor
    that would make it exceed `max_bytes`; one larger tensor is a group of its own, and, where it is contiguous, is
    yielded itself instead of a copy. So at most `max_bytes` (or one such strided tensor) is allocated at a time.

    Example:
        >>> a, b = torch.ones(2), torch.zeros(1)
        >>> for flat, scatter in coalesced([a, b]):
        ...     flat += 1
        ...     scatter()
        >>> a, b
        (tensor([2., 2.]), tensor([1.]))
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for members in kinds.values():
        group: list[Tensor] = []
        num_bytes = 0
        for tensor in members:
            if group and num_bytes + tensor.nbytes > max_bytes:
                yield _message(group)
                group, num_bytes = [], 0
            group.append(tensor)
            num_bytes += tensor.nbytes
        yield _message(group)


def _message(group: list[Tensor]) -> tuple[Tensor, Callable[[], None]]:
    if len(group) == 1 and group[0].is_contiguous():
        return group[0].view(-1), lambda: None
    flat = torch.cat([tensor.reshape(-1) for tensor in group])

    def scatter() -> None:
        for tensor, values in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(values.view(tensor.shape))

    return flat, scatter
