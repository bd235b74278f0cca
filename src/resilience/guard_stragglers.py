# SPDX-License-Identifier: Apache-2.0
"""Stragglers: in a run that is in step the slowest rank sets the pace, and all ranks look equally slow.

    rank 0   |compute|. . . . . . . . waits|compute|. . . . . . . . waits|
    rank 1   |compute, slowly              |compute, slowly              |      same step time, other *own* time

So what is compared is a rank's own time: that of loading, forward, backward and step, without waiting for others
(`Sampler`). Once in a while each rank tells its own, one number; the score is that number over the median of all.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import final

from stratagem.resilience.guard_settings import Stragglers


def scores(own: Sequence[float]) -> list[float]:
    """Own time over the median of all; the smaller of the middle two, so that one of two ranks can stand out.

    Example:
        >>> scores([2.0, 8.0, 2.0]), scores([2.0, 6.0])
        ([1.0, 4.0, 1.0], [1.0, 3.0])
    """
    median = max(statistics.median_low(own), 1e-9)
    return [each / median for each in own]


@final
class Scores:
    """Remembers who was slow at the last exchanges.

    Args:
        settings: see `Stragglers`.

    Example:
        >>> watch = Scores(Stragglers(in_a_row=2))
        >>> watch.add([0.1, 0.4]), watch.add([0.1, 0.4]), watch.add([0.1, 0.1])
        ([], [1], [])
    """

    def __init__(self, settings: Stragglers) -> None:
        self._settings = settings
        self._slow: dict[int, int] = {}
        self.last: list[float] = []
        """The scores of the last exchange, by rank."""

    def add(self, own: Sequence[float]) -> list[int]:
        """Takes in each rank's own seconds per step; returns the ranks to be named now."""
        self.last, slack = scores(own), self._settings.slack.total_seconds()
        median = statistics.median_low(own)
        for rank, (score, seconds) in enumerate(zip(self.last, own, strict=True)):
            slow = score > self._settings.threshold and seconds - median > slack
            self._slow[rank] = self._slow.get(rank, 0) + 1 if slow else 0
        return [rank for rank, times in self._slow.items() if times >= self._settings.in_a_row]
