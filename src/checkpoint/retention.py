# SPDX-License-Identifier: Apache-2.0
"""Retention: which checkpoints of a folder may go, now that a newer one has been committed.

    keep_last=2, keep_every=100    and checkpoints at every 30 steps, the last one committed at 300

    120         210   240     270 300
    first       first         the last two          30, 60, 90 (before the first 100), 150, 180 and 240 may go
    past 100    past 200

The answer follows from what is on disk alone, so a run that died between a commit and a removal owes nothing: the next
commit in the folder makes up for it. What a run has left behind it by going back (a step later than the one that was
committed) is not counted and not touched, nor is what states no step, nor what a link in the folder points to.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stratagem.checkpoint.commit import ages
from stratagem.errors import ConfigError


@dataclass(frozen=True)
class Retention:
    """What is kept in a folder.

    Args:
        keep_last: checkpoints of so many steps, the newest ones; everything if left out.
        keep_every: and for good, the first checkpoint at or past every multiple of so many steps.

    Raises:
        ConfigError: a number below 1, or `keep_every` where nothing is removed.
    """

    keep_last: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("keep_last", self.keep_last), ("keep_every", self.keep_every)):
            if value is not None and value < 1:
                raise ConfigError(f"{value}", where=name, allowed="1 or more", do="leave it out to keep everything")
        if self.keep_every is not None and self.keep_last is None:
            raise ConfigError(
                "nothing is removed without keep_last", where="keep_every", do="set keep_last, or leave it out"
            )

    def kept(self, steps: set[int]) -> set[int]:
        """Which of the steps stay.

        >>> sorted(Retention(2, 100).kept(set(range(30, 301, 30))))
        [120, 210, 270, 300]
        """
        if self.keep_last is None:
            return steps
        found = set(sorted(steps)[-self.keep_last :])
        if self.keep_every is not None:
            first: dict[int, int] = {}
            for step in sorted(steps):
                first.setdefault(step // self.keep_every, step)
            found |= {step for multiple, step in first.items() if multiple}
        return found

    def superfluous(self, committed: Path, step: int) -> list[Path]:
        """The checkpoints beside one that has just been committed that may go, oldest first.

        Args:
            committed: that checkpoint, which stays.
            step: its own.
        """
        if self.keep_last is None:
            return []
        folder = committed.parent
        known = {path: age[0] for path, age in ages(folder).items() if age is not None and 0 <= age[0] <= step}
        kept = self.kept({*known.values(), step})
        held = {committed, *(folder / path.readlink() for path in folder.iterdir() if path.is_symlink())}
        going = [path for path, its in known.items() if its not in kept and path not in held]
        return sorted(going, key=known.__getitem__)
