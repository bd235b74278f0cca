# SPDX-License-Identifier: Apache-2.0
"""What became of a run's time: one small file per attempt, and a table over all attempts at the end.

    runs/.../guard/attempts/0001.json      written every few steps, so that a killed attempt has told nearly all
    runs/.../guard/summary.json            over all attempts, as it stands at the end of the last one

Note [effective]: effective training time is the time spent in steps that count, over the time since the first attempt
began. Not effective are saves, validation, starts and ends, the time between attempts, and the steps that were lost:
skipped, rolled back, or made again by a later attempt since no checkpoint had them. Waiting for other ranks is told
beside it and is part of a step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from rich.console import Console
from rich.table import Table


@final
@dataclass
class Attempt:
    """One attempt of a run, as rank 0 saw it; times are seconds, `began` and `told` of `time.time`.

    Attributes:
        began: when it was set up.
        told: when this was last written.
        first: optimizer steps that were made before it.
        last: optimizer steps that were made when it ended.
        skipped: steps that were not made.
        rolled_back: steps that were made and taken back.
        training: time in steps, with loading and waiting.
        saving: time in which the run stood for a save.
        validating: time in validation.
        waiting: of `training`; None where it was not measured.
        outcome: `finished`, the name of the error, or `interrupted` as long as nothing else is known.
        notes: what happened, in words.
    """

    began: float
    told: float
    first: int = 0
    last: int = 0
    skipped: int = 0
    rolled_back: int = 0
    training: float = 0.0
    saving: float = 0.0
    validating: float = 0.0
    waiting: float | None = None
    outcome: str = "interrupted"
    notes: list[str] = field(default_factory=list)


@final
@dataclass(frozen=True)
class Summary:
    """Over all attempts; see Note [effective].

    Attributes:
        attempts: how many.
        interruptions: attempts that did not finish.
        steps: optimizer steps that the run has in the end.
        lost: steps made by one attempt and made again by the next.
        skipped: steps not made.
        rolled_back: steps made and taken back.
        seconds: from the begin of the first attempt to the end of the last.
        training: seconds in steps, of all attempts.
        saving: seconds of all attempts.
        validating: seconds of all attempts.
        waiting: seconds, of those attempts that measured it.
        effective: share of `seconds` spent in steps that count.
    """

    attempts: int
    interruptions: int
    steps: int
    lost: int
    skipped: int
    rolled_back: int
    seconds: float
    training: float
    saving: float
    validating: float
    waiting: float
    effective: float


def summarise(attempts: Sequence[Attempt]) -> Summary:
    """The sum over attempts, in their order.

    Example:
        >>> killed = Attempt(0.0, 12.0, first=0, last=10, training=10.0)
        >>> resumed = Attempt(20.0, 40.0, first=8, last=24, training=16.0, saving=2.0, outcome="finished")
        >>> found = summarise([killed, resumed])
        >>> found.lost, found.interruptions, found.effective  # 24 seconds of steps that count, of 40
        (2, 1, 0.6)
    """
    lost = effective = 0.0
    for attempt, following in zip(attempts, [*attempts[1:], None], strict=True):
        made = max(attempt.last - attempt.first, 0)
        again = max(attempt.last - following.first, 0) if following is not None else 0
        vain = min(again + attempt.skipped + attempt.rolled_back, made)
        lost += again
        effective += attempt.training * (made - vain) / made if made else 0.0
    seconds = attempts[-1].told - attempts[0].began
    return Summary(
        attempts=len(attempts),
        interruptions=sum(attempt.outcome != "finished" for attempt in attempts),
        steps=attempts[-1].last,
        lost=int(lost),
        skipped=sum(attempt.skipped for attempt in attempts),
        rolled_back=sum(attempt.rolled_back for attempt in attempts),
        seconds=seconds,
        training=sum(attempt.training for attempt in attempts),
        saving=sum(attempt.saving for attempt in attempts),
        validating=sum(attempt.validating for attempt in attempts),
        waiting=sum(attempt.waiting or 0.0 for attempt in attempts),
        effective=min(effective / seconds, 1.0) if seconds > 0 else 0.0,
    )


@final
class Logbook:
    """The files of a run's attempts; rank 0's.

    Args:
        folder: the guard's; every attempt of a run has the same.
        resumes: the run goes on from a checkpoint. If it does not, and the last attempt in the folder has finished,
            this is another run and those attempts are removed; else it is a new attempt from the start.
    """

    def __init__(self, folder: Path, *, resumes: bool) -> None:
        self._folder = folder / "attempts"
        self._folder.mkdir(parents=True, exist_ok=True)
        known = self.attempts()
        if not resumes and known and known[-1].outcome == "finished":
            for path in self._folder.glob("*.json"):
                path.unlink()
        number = max((int(path.stem) for path in self._folder.glob("*.json") if path.stem.isdigit()), default=0) + 1
        self._path = self._folder / f"{number:04}.json"

    def write(self, attempt: Attempt) -> None:
        """As it stands; a reader sees the old or the new text, never half of one."""
        attempt.told = time.time()
        _replace(self._path, asdict(attempt))

    def attempts(self) -> list[Attempt]:
        """All that are known, in order; a file that cannot be read is left out."""
        found = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                found.append(Attempt(**json.loads(path.read_text())))
            except (OSError, ValueError, TypeError):
                continue
        return found

    def close(self, attempt: Attempt) -> Summary:
        """Writes the attempt for the last time, and the summary."""
        self.write(attempt)
        found = summarise(self.attempts() or [attempt])
        _replace(self._folder.parent / "summary.json", asdict(found))
        return found


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(content, indent=1))
    draft.replace(path)


def show(summary: Summary, console: Console | None = None) -> None:
    """The table, on standard output or the console given."""
    table = Table(title="What became of the time", show_header=False)
    rows = {
        "attempts": f"{summary.attempts}, of which {summary.interruptions} interrupted",
        "steps": f"{summary.steps}",
        "steps made again": f"{summary.lost}",
        "skipped, rolled back": f"{summary.skipped}, {summary.rolled_back}",
        "time": f"{summary.seconds:.1f} s",
        "in steps": f"{summary.training:.1f} s, of which {summary.waiting:.1f} s waiting for other ranks",
        "in saves": f"{summary.saving:.1f} s",
        "in validation": f"{summary.validating:.1f} s",
        "effective training time": f"{summary.effective:.1%}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    (console or Console()).print(table)
