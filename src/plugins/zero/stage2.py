# SPDX-License-Identifier: Apache-2.0
"""ZeRO's stage 2: gradients of others' shares are gone as soon as they are reduced."""

from __future__ import annotations

from typing import ClassVar, final

from stratagem.plugins.zero.technique import Zero


@final
class Zero2(Zero):
    """Stage 2: gradients and the optimizer's state are divided.

    Bytes per parameter with float32 Adam `4 + 12/N`. Per rank and optimizer step it sends `2 (N-1)/N` times the
    parameter bytes; with `accumulation: partition` and A micro-batches `(A+1) (N-1)/N`. While backward runs, gradients
    take no more than this rank's share plus `bucket_mib` (plus what autograd itself is about to hand over; a gradient
    larger than half of `bucket_mib` counts twice instead). Source: arXiv 1910.02054.
    """

    stage: ClassVar[int] = 2
