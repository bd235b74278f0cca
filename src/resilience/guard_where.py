# SPDX-License-Identifier: Apache-2.0
"""Where a rank stands: the line of its main thread, and the collective in which it waits, read from the stack.

All collectives of ours pass through one door, the `Communicator`, and torch's through one module. Whoever is in one has
a frame of it on the stack, with the axis in it. So nothing has to be noted when a collective is entered, a run that
does not hang pays nothing, and any thread of a rank can tell, though its main thread does not answer.

A main thread that waits for a future of the background thread waits in what that thread is in.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import final

from stratagem.collectives import Communicator

_DOOR, _TORCH = "stratagem.collectives.communicator", "torch.distributed"
_DDP = "torch.nn.parallel.distributed"
_MACHINERY = ("threading", "concurrent.futures", "contextlib", "queue", "stratagem.collectives", _TORCH, _DDP)
_FUTURES = "concurrent.futures"
_DEPTH = 12


@final
@dataclass(frozen=True)
class Standing:
    """Where a rank stands.

    Attributes:
        line: `file:line in function`, the innermost outside of the machinery of waiting.
        collective: what it waits in, e.g. `all_reduce over dp_replicate`; empty if in none.
        stack: the innermost frames, the innermost last.
    """

    line: str
    collective: str
    stack: list[str]


def standing(thread: int | None = None) -> Standing:
    """Of a thread of this process, the main one by default. Local; may be called from any thread.

    Example:
        >>> standing(threading.get_ident()).collective
        ''
    """
    frames = sys._current_frames()
    frame = frames.get(thread or threading.main_thread().ident or 0)
    if frame is None:
        return Standing("nowhere: the thread has ended", "", [])
    site = next((each for each in _outward(frame) if not _module(each).startswith(_MACHINERY)), frame)
    summary = traceback.StackSummary.extract(
        ((each, each.f_lineno) for each in list(_outward(frame))[:_DEPTH][::-1]), lookup_lines=False
    )
    stack = [f"{entry.filename}:{entry.lineno} in {entry.name}" for entry in summary]
    where = f"{site.f_code.co_filename}:{site.f_lineno} in {site.f_code.co_name}"
    return Standing(where, collective_of(frame, frames), stack)


def collective_of(frame: FrameType, frames: dict[int, FrameType]) -> str:
    """In which collective the thread at `frame` waits, itself or for a thread among `frames`; empty if in none."""
    found = _collective(frame)
    if found or not any(_module(each).startswith(_FUTURES) for each in _outward(frame, 4)):
        return found
    others = (_collective(other) for other in frames.values() if other is not frame)
    return next((each for each in others if each), "")


def _collective(frame: FrameType) -> str:
    """Of the frames that belong to the door, the outermost is the call that was made."""
    name = ""
    if _module(frame) == _DDP and frame.f_code.co_name.startswith("_distributed_"):  # buffers, before a forward
        return f"{frame.f_code.co_name.removeprefix('_distributed_')} over the process group"
    for each in _outward(frame, 24):
        module = _module(each)
        if module == _DOOR:
            owner = each.f_locals.get("self")
            if isinstance(owner, Communicator):
                name = f"{each.f_code.co_name} over {owner.axis}"
        elif module == f"{_TORCH}.distributed_c10d":
            name = name or f"{each.f_code.co_name} over the process group"
    return name


def _outward(frame: FrameType | None, most: int = 1000) -> Iterator[FrameType]:
    while frame is not None and most > 0:
        yield frame
        frame, most = frame.f_back, most - 1


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
