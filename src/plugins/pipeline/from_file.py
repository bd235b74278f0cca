# SPDX-License-Identifier: Apache-2.0
"""A user's own schedule, from a file.

The form is that of torch.distributed.pipelining: a line per rank, actions in order, separated by commas.

    0F0,0F1,,0B0,0B1          stage, kind, micro-batch; an empty place is idle time and means nothing
    1F0,1B0,1F1,1B1
    (0F3;3B1)OVERLAP_F_B      a pair

Files that torch wrote with communication in them (`SEND_F`, `RECV_B`, `UNSHARD`, `REDUCE_GRAD`, ...) can be read too.
Such entries are passed over: what is sent follows from the order of the work (`messages`), and when to synchronise is
the engine's to know.
"""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path

from stratagem.errors import ConfigError
from stratagem.plugins.pipeline.actions import Action, Schedule
from stratagem.plugins.pipeline.validate import validate

_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B", re.ASCII)
_ENGINE = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*", re.ASCII)
_SHOWN = 8
_MAX_COUNT = 100_000
"""Stages and micro-batches of a file: more is a slip of the pen, and would be counted for minutes first."""


def read_schedule(path: str | PathLike[str], *, max_in_flight: float | None = None) -> Schedule:
    """Read and validate a schedule.

    Args:
        path: of the file, UTF-8.
        max_in_flight: bound on the micro-batches that a rank may hold; see `validate`.

    Raises:
        ConfigError: the file cannot be read, or holds no valid schedule; names every line that is wrong.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"it cannot be read: {error}", where=str(path), allowed="a text file") from error
    return parse_schedule(text, name=path.stem, where=str(path), max_in_flight=max_in_flight)


def parse_schedule(
    text: str, *, name: str = "own", where: str = "schedule", max_in_flight: float | None = None
) -> Schedule:
    """The schedule that `text` holds, validated. Pure; arguments as of `read_schedule`.

    How many micro-batches there are, and which stage lies on which rank, follows from the actions.

    Raises:
        ConfigError: names every line that is wrong, or all that is wrong with the order.

    Example:
        >>> parse_schedule("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1").owners
        (0, 1)
        >>> parse_schedule("0F0,0B0\\n1F0,1X0", where="own.csv")
        Traceback (most recent call last):
        ...
        stratagem.errors.ConfigError: own.csv: line 2, entry 2: '1X0' is no action. Allowed: ... To mend it: ...
    """
    rows, pairs, errors = _rows(text)
    if not any(rows):
        errors = errors or ["there is no action in it"]
    owners: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            first = owners.setdefault(action.stage, rank)
            if first != rank and not errors:
                errors.append(f"line {rank + 1}: {action}, but stage {action.stage} is on line {first + 1} already")
    num_stages = max(owners, default=-1) + 1
    if max(num_stages, *(a.micro_batch for row in rows for a in row), 0) > _MAX_COUNT:
        errors.append(f"it has a stage or micro-batch above {_MAX_COUNT}")
    elif lost := [stage for stage in range(num_stages) if stage not in owners]:
        errors.append(f"stage {lost[0]} is on no line, but stage {num_stages - 1} is")
    if errors:
        more = f"; and {len(errors) - _SHOWN} more" if len(errors) > _SHOWN else ""
        raise ConfigError(
            "; ".join(errors[:_SHOWN]) + more,
            where=where,
            allowed="a line per rank of stage, then F, B, I or W, then micro-batch, with commas between, and pairs",
            do="write 1F3 for the forward of micro-batch 3 at stage 1",
        )
    schedule = Schedule(
        name=name,
        num_micro_batches=1 + max(action.micro_batch for row in rows for action in row),
        owners=tuple(owners[stage] for stage in range(num_stages)),
        ranks=tuple(map(tuple, rows)),
        pairs=frozenset(pairs),
    )
    return validate(schedule, max_in_flight=max_in_flight, where=where)


def _rows(text: str) -> tuple[list[list[Action]], set[Action], list[str]]:
    rows: list[list[Action]] = []
    pairs: set[Action] = set()
    errors: list[str] = []
    for number, line in enumerate(text.rstrip().splitlines(), start=1):
        rows.append([])
        if not line.strip():
            errors.append(f"line {number}: it is empty, and would be a rank without work")
        for entry, word in enumerate(map(str.strip, line.split(",")), start=1):
            joined = _PAIR.fullmatch(word)
            if not word or _ENGINE.fullmatch(word):
                continue
            try:
                actions = [Action.parse(part) for part in (joined.groups() if joined else [word])]
            except ConfigError as error:
                errors.append(f"line {number}, entry {entry}: {error.what}")
                continue
            rows[-1] += actions
            if joined:
                pairs.add(actions[0])
    return rows, pairs, errors
