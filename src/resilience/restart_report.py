# SPDX-License-Identifier: Apache-2.0
"""What restarts have cost: one line at the end of the run, and `restarts.json` beside the reports of the `Guard`.

checkpoint 3        died at 5             first batch again, from 3
----|---------------------|--------------------|------
    <-- redone: 2 steps -->
    <---------- seconds lost ------------------>
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final


@final
@dataclass
class Record:
    """One attempt.

    Attributes:
        attempt: its number, from 0.
        devices: how many it used.
        resumed: the checkpoint, empty if it began anew; `step` is how many optimizer steps are in it, 0 then.
        step: see above.
        reached: the optimizer steps made when it ended.
        cause: of its failure, with the rank; empty if it did not fail.
        seconds: from its start to its end.
        redone: optimizer steps that the next attempt makes again.
        lost: seconds from the checkpoint that the next attempt takes, or the start, to that attempt's first batch.
    """

    attempt: int
    devices: int
    resumed: str
    step: int
    reached: int
    cause: str
    seconds: float
    redone: int = 0
    lost: float = 0.0


def line(records: Sequence[Record]) -> str:
    """The summary of a run that had restarts.

    Example:
        >>> print(line([Record(0, 4, "", 0, 5, "rank 1 of 4: boom", 9.0, 2, 3.5), Record(1, 3, "x", 3, 9, "", 8.0)]))
        2 attempts on 4, 3 devices; 2 steps redone, 3.5 s lost; causes: rank 1 of 4: boom (at step 5)
    """
    causes = "; ".join(f"{record.cause} (at step {record.reached})" for record in records if record.cause)
    devices = ", ".join(str(record.devices) for record in records)
    redone, lost = sum(record.redone for record in records), sum(record.lost for record in records)
    return f"{len(records)} attempts on {devices} devices; {redone} steps redone, {lost:.1f} s lost; causes: {causes}"


def write(folder: Path, records: Sequence[Record]) -> Path:
    """Writes all attempts and their sums; a reader sees the file before or after, never a half of it."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "restarts": len(records) - 1,
        "redone_steps": sum(record.redone for record in records),
        "lost_seconds": sum(record.lost for record in records),
        "attempts": [asdict(record) for record in records],
    }
    draft = folder / f".restarts.{os.getpid()}"
    draft.write_text(json.dumps(content, indent=1), encoding="utf-8")
    os.replace(draft, folder / "restarts.json")
    return folder / "restarts.json"
