# SPDX-License-Identifier: Apache-2.0
"""Whether an attempt that failed is followed by another one, when, and on how many devices. Pure.

newest checkpoint    3     3     6     6     6
failure              A     B     A     A         progress sets the count back; A twice at one place is a loop
without progress     1     2     1     2
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

LONGEST_WAIT = 30.0
"""Seconds before an attempt, at most."""


@final
@dataclass(frozen=True)
class Failure:
    """How one attempt failed.

    Args:
        cause: in one line, without the rank.
        reached: optimizer steps made.
        newest: steps in the newest checkpoint afterwards; -1 if there is none.
        died: ranks whose process is gone: killed, crashed or left.
    """

    cause: str
    reached: int
    newest: int
    died: int = 0

    def is_like(self, other: Failure) -> bool:
        """Whether it is the same failure at the same step; addresses in its words do not count."""
        mine, theirs = (re.sub(r"0x[0-9a-fA-F]+", "0x", each.cause) for each in (self, other))
        return (mine, self.reached) == (theirs, other.reached)


@final
@dataclass(frozen=True)
class Verdict:
    """What comes next: another attempt after `wait` seconds, or the end for a reason."""

    go_on: bool
    wait: float = 0.0
    reason: Literal["", "loop", "exhausted"] = ""


def judge(failures: Sequence[Failure], began_from: int, max_restarts: int) -> Verdict:
    """After the last of these failures.

    Args:
        failures: of all attempts so far, in order; at least one.
        began_from: steps in the checkpoint from which the first attempt went on; -1 if it began anew.
        max_restarts: how many restarts there may be without a newer checkpoint in between.

    Example:
        >>> first, same = Failure("boom", 4, 3), Failure("boom", 4, 3)
        >>> judge([first], -1, 3)
        Verdict(go_on=True, wait=0.5, reason='')
        >>> judge([first, same], -1, 3)
        Verdict(go_on=False, wait=0.0, reason='loop')
        >>> judge([first, Failure("bang", 5, 3)], -1, 1).reason
        'exhausted'
    """
    before = [began_from, *(failure.newest for failure in failures)]
    fruitless = 1
    while fruitless < len(failures) and before[-fruitless] <= before[-fruitless - 1]:
        fruitless += 1
    if fruitless > 1 and failures[-1].is_like(failures[-2]):
        return Verdict(False, reason="loop")
    if fruitless > max_restarts:
        return Verdict(False, reason="exhausted")
    return Verdict(True, min(LONGEST_WAIT, 0.5 * 2.0 ** (fruitless - 1)))


def fewer(devices: int, died: int, fitting: Sequence[int]) -> int:
    """How many devices the next attempt takes.

    Args:
        devices: of the attempt that failed.
        died: its ranks whose process is gone.
        fitting: the numbers that keep the global batch, none of them below what the user allows.

    Example:
        >>> fewer(4, 1, [2, 3, 4]), fewer(4, 1, [2, 4]), fewer(4, 0, [2, 3]), fewer(2, 1, [2, 3, 4])
        (3, 2, 4, 2)
    """
    return max((number for number in fitting if number <= devices - died), default=devices) if died else devices
