# SPDX-License-Identifier: Apache-2.0
"""The inside of a forked rank: what it does before and after its work, and how it tells what became of it.

A rank lives in a process group of its own, so that Ctrl-C in a terminal reaches the parent alone and whatever the rank
itself starts (loader workers) can be ended with it. It dies with its parent, even if that is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import IO, Any, Literal, final

import torch.distributed as dist

from stratagem.errors import CommunicationError

_ABOVE_THE_WORK = True  # frames of this file are left out of a rank's traceback
_LAUNCHER = os.path.join(os.path.dirname(__file__), "launcher.py")
_PEER_WORDS = ("connection closed by peer", "connection reset by peer", "broken pipe", "gloo", "socket", "nccl")


@final
@dataclass(frozen=True)
class Report:
    """What a rank says about itself, once.

    Attributes:
        kind: it returned, raised, or left by `SystemExit`.
        at: when (`time.monotonic`, which all processes of a machine share).
        summary: one line.
        details: its traceback.
        exception: what it raised, pickled; empty if it does not pickle.
        exitcode: the code of its `SystemExit`.
        consequence: whether it only says that another rank is gone.
    """

    kind: Literal["returned", "raised", "exited"]
    at: float
    summary: str = ""
    details: str = ""
    exception: bytes = b""
    exitcode: int | None = None
    consequence: bool = False


@final
class Rank:
    """This process, as a rank.

    Args:
        number: which rank.
        pipe: to the parent: it sends one message before the work begins, and gets one `Report`.
        stacks: a file that takes the stacks of this process when it crashes or is asked by SIGUSR1.
    """

    def __init__(self, number: int, pipe: Connection, stacks: IO[Any]) -> None:
        self.number, self._pipe, self._stacks = number, pipe, stacks
        self._reported = False

    def main(self, body: Callable[[Rank, Any], None], parent: int) -> None:
        """Prepare, wait for the parent's message, call `body(self, message)`, report."""
        self._settle(parent)
        code = 1
        try:
            body(self, self._pipe.recv())
            self.report(Report("returned", time.monotonic()))
            code = 0
        except BaseException as error:
            self.report(describe(error))
            if isinstance(error, SystemExit) and isinstance(error.code, int):
                code = error.code
        if code:  # nothing that is left here is worth waiting for: threads, workers, peers
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def report(self, report: Report) -> None:
        """Tell the parent; only the first report counts."""
        if not self._reported:
            self._reported = True
            with contextlib.suppress(OSError):  # the parent is gone, and so will this process be
                self._pipe.send_bytes(pickle.dumps(report))

    def _settle(self, parent: int) -> None:
        os.setpgid(0, 0)
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call above
            os._exit(1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a background group may still write to the terminal
        faulthandler.enable(self._stacks, all_threads=True)
        if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
            faulthandler.register(signal.SIGUSR1, self._stacks, all_threads=True)


def describe(error: BaseException) -> Report:
    """What to report about an exception that ended the work."""
    at = time.monotonic()
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        text = f"it left by sys.exit({error.code!r}) before its work was done"
        return Report("exited", at, summary=text, details=_trace(error), exitcode=code)
    summary = "".join(traceback.format_exception_only(error)).strip()
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # some exceptions pickle but cannot be built again
    except Exception:
        pickled = b""
    return Report("raised", at, summary, _trace(error), pickled, consequence=is_consequence(error))


def is_consequence(error: BaseException) -> bool:
    """Whether an exception says no more than that a peer is gone or silent.

    Example:
        >>> is_consequence(CommunicationError("rank 1 closed the connection")), is_consequence(ValueError("a bug"))
        (True, False)
    """
    root = error
    while not (_is_about_peers(root) and root.__cause__):  # a fault of communication explains itself by its cause
        deeper = root.__cause__ or (None if root.__suppress_context__ else root.__context__)
        if deeper is None:
            break
        root = deeper  # what was raised first; the rest came while it was handled
    return _is_about_peers(root)


def _is_about_peers(error: BaseException) -> bool:
    if isinstance(error, CommunicationError | ConnectionError | dist.DistError):
        return True
    text = str(error).lower()
    return type(error) is RuntimeError and any(word in text for word in _PEER_WORDS)


def readable(stacks: str) -> str:
    """What faulthandler wrote, without the frames that led to the work: they are the same in every rank."""
    kept, dropping = [], False
    for line in stacks.splitlines():
        if line.startswith("Extension modules:"):
            break
        if not line.startswith("  File"):
            dropping = False
        elif f'"{_LAUNCHER}"' in line:
            dropping = True
        if not dropping:
            kept.append(line)
    return "\n".join(kept).strip()


def _trace(error: BaseException) -> str:
    """The traceback without the frames of this file and of what stands above the work."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_globals.get("_ABOVE_THE_WORK", False):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))
