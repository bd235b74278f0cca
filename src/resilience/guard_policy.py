# SPDX-License-Identifier: Apache-2.0
"""Which steps are bad: not finite, or far above what was usual. Pure arithmetic on numbers that all ranks share.

What is judged is the largest loss of any rank, the mean over its micro-batches, and the largest norm of the gradient:
one maximum of two numbers over all ranks, right before the optimizer's step. So one rank's NaN is everybody's, and all
ranks keep the same history and come to the same verdict.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any, final

from stratagem.resilience.guard_settings import BadSteps


@final
class Judge:
    """Remembers what good steps looked like.

    Args:
        settings: see `BadSteps`.

    Attributes:
        in_a_row: bad steps since the last good one.

    Example:
        >>> judge = Judge(BadSteps(spike_factor=3.0, warmup=2))
        >>> [judge.verdict(loss, 1.0) for loss in (2.0, 2.2, 9.0, float("inf"), 1.9)]
        ['', '', 'the loss is 9, 4.29 times the median of the last 2 steps', 'the loss is not finite', '']
    """

    def __init__(self, settings: BadSteps) -> None:
        self._settings = settings
        self._losses: deque[float] = deque(maxlen=settings.window)
        self._norms: deque[float] = deque(maxlen=settings.window)
        self.in_a_row = 0

    def verdict(self, loss: float, norm: float) -> str:
        """Why a step is bad; empty for a good one, which is remembered."""
        settings = self._settings
        reason = self._look("loss", loss, self._losses, settings.spike_factor)
        if not reason and settings.gradient:
            reason = self._look("norm of the gradient", norm, self._norms, settings.gradient_factor)
        if reason:
            self.in_a_row += 1
        else:
            self.in_a_row = 0
            self._losses.append(loss)
            self._norms.append(norm)
        return reason

    def _look(self, what: str, value: float, history: deque[float], factor: float | None) -> str:
        if not math.isfinite(value):
            return f"the {what} is not finite"
        if factor is None or len(history) < self._settings.warmup:
            return ""
        median = statistics.median(history)
        if median <= 0 or value <= factor * median:  # of a loss that may be negative no multiple means anything
            return ""
        return f"the {what} is {value:.6g}, {value / median:.3g} times the median of the last {len(history)} steps"

    def state_dict(self) -> dict[str, Any]:
        """The history, equal on all ranks."""
        return {"losses": list(self._losses), "norms": list(self._norms), "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; what was seen before (in an earlier fit) is forgotten."""
        self._losses.clear()
        self._norms.clear()
        self._losses.extend(state["losses"])
        self._norms.extend(state["norms"])
        self.in_a_row = state["in_a_row"]
