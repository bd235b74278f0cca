# SPDX-License-Identifier: Apache-2.0
"""ZeRO's stage 1: every rank steps its share of the parameters."""

from __future__ import annotations

from typing import ClassVar, final

from stratagem.plugins.zero.technique import Zero


@final
class Zero1(Zero):
    """Stage 1: the optimizer's state is divided.

    Bytes per parameter with float32 Adam `8 + 8/N`. Per rank and optimizer step it sends `2 (N-1)/N` times the
    parameter bytes, whatever the accumulation. Source: ZeRO (arXiv 1910.02054), with the reduce-scatter of its later
    revision.
    """

    stage: ClassVar[int] = 1
