# SPDX-License-Identifier: Apache-2.0
"""Ring DDP: whole replicas, gradients averaged around a ring while backward runs.

Use it when the model, its gradients and its optimizer fit on every rank. It costs, per rank and optimizer step, `2
(N-1)/N` times the gradient bytes on the wire, to the right neighbour only, whatever the accumulation; and it holds
parameters, gradients and optimizer state whole (16 bytes per parameter with float32 Adam). It cannot make the model
smaller: that is what the ZeRO stages are for.
"""

from typing import TYPE_CHECKING, Any

from stratagem.plugins.ring_ddp.technique import RingDDP, RingDDPSettings

if TYPE_CHECKING:
    from stratagem.plugins.ring_ddp.strategy import RingDDPStrategy

__all__ = ["RingDDP", "RingDDPSettings", "RingDDPStrategy"]


def __getattr__(name: str) -> Any:
    """The strategy needs Lightning, the technique does not: it is imported when it is asked for."""
    if name == "RingDDPStrategy":
        from stratagem.plugins.ring_ddp.strategy import RingDDPStrategy

        return RingDDPStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
