# SPDX-License-Identifier: Apache-2.0
"""The inside of one rank: what happens in a process of a gang before, around and after the body.

`run_ranks` (in `ranks.py`) is the outside. The two speak over one pipe: the rank sends one `Report`, and if its body
returned it waits for one message before it closes the process group. It comes when no rank is in its body any more: a
rank that left earlier would break the connections of those that are still busy.
"""

from __future__ import annotations

import contextlib
import copyreg
import faulthandler
import fcntl
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from typing import Any, Literal

from stratagem.testing import preload

RANK_FILE = __file__
"""Frames of this file, and those that called it, are the harness; what they called is the body."""


@dataclass(frozen=True)
class Job:
    """What all ranks of a gang are told. Everything in it pickles."""

    num_ranks: int
    body: bytes  # (function, keyword arguments), pickled; unpickled where a failure can be reported
    folder: str
    port: int
    group: bool
    timeout: timedelta
    environment: Mapping[str, str]
    modules: Sequence[str]
    rewritten: Sequence[str]


@dataclass(frozen=True)
class Report:
    """What a rank says at its end.

    Attributes:
        kind: how it ended; `harness` means that the gang itself is broken, not the body.
        at: when, on the clock that all processes of the host share.
        value: pickled: the body's result, or the exception that it raised; empty if that does not pickle.
        text: the traceback, or the explanation.
    """

    kind: Literal["returned", "raised", "harness"]
    at: float
    value: bytes = b""
    text: str = ""


def stack_file(folder: str, rank: int) -> str:
    """Where a rank writes the stacks of its threads when it is asked to by SIGUSR1, or crashes."""
    return os.path.join(folder, f"rank{rank}.stack")


def log_file(folder: str, rank: int) -> str:
    """Where a rank's standard output and error go."""
    return os.path.join(folder, f"rank{rank}.log")


def main(rank: int, job: Job, pipe: connection.Connection) -> None:
    """Be rank `rank` of the gang: run the body, report, and leave nothing behind."""
    with open(stack_file(job.folder, rank), "wb", buffering=0) as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        faulthandler.enable(file=stacks)
        _leave_the_terminal()
        with open(log_file(job.folder, rank), "wb", buffering=0) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        absent = preload.missing(job.modules)
        if absent:
            text = "\n".join(f"{name} was not inherited: {reason}" for name, reason in absent.items())
            report = Report("harness", time.monotonic(), text=text)
        else:
            report = _run(rank, job)
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.send_bytes(pickle.dumps(report))
        if report.kind != "returned":
            os._exit(1)  # its peers must notice at once; threads and half-open groups could keep it
        with contextlib.suppress(EOFError):
            pipe.recv_bytes()
        pipe.close()
        _close_the_group(job)
        faulthandler.disable()


def _leave_the_terminal() -> None:
    """Be a process group of its own: Ctrl-C reaches the parent alone, and what a rank starts ends with it.

    If the parent is killed, the kernel ends this group: a pipe whose other end only the parent has may send a signal
    when it closes. (The parent of this process is the fork server, which lives as long as any rank does.)
    """
    os.setpgid(0, 0)
    parent = multiprocessing.parent_process()
    if sys.platform == "linux" and parent is not None:
        pipe = parent.sentinel
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpid())  # negative: the whole group
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
        if connection.wait([pipe], timeout=0):  # it closed before that
            os._exit(1)


def _run(rank: int, job: Job) -> Report:
    try:
        _prepare(rank, job)
        _let_outcomes_pickle()
        _rewrite_asserts(job.rewritten)
        function, kwargs = pickle.loads(job.body)
        _open_the_group(rank, job)
        result = function(**kwargs)
    except SystemExit:
        raise  # the rank's own way to die: its exit code is the report
    except BaseException as error:
        return _raised(error)
    stray = [thread.name for thread in threading.enumerate() if _is_stray(thread)]
    if stray:
        return Report("raised", time.monotonic(), text=f"the body returned but left threads running: {stray}\n")
    try:
        return Report("returned", time.monotonic(), value=pickle.dumps(result))
    except Exception as error:
        text = f"the body returned something that cannot be pickled: {type(result).__name__}: {error}\n"
        return Report("raised", time.monotonic(), text=text)


def _is_stray(thread: threading.Thread) -> bool:
    """A thread that is no daemon would keep the process from ending; it gets a moment to end by itself."""
    if thread is threading.current_thread() or thread.daemon:
        return False
    thread.join(timeout=1.0)
    return thread.is_alive()


def _prepare(rank: int, job: Job) -> None:
    """Set the environment as torchrun would, one thread, seed 0."""
    os.environ.clear()
    os.environ.update(job.environment)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.num_ranks),
        LOCAL_WORLD_SIZE=str(job.num_ranks),
        GROUP_RANK="0",
        GROUP_WORLD_SIZE="1",
        ROLE_RANK=str(rank),
        ROLE_WORLD_SIZE=str(job.num_ranks),
        ROLE_NAME="default",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
        TORCHELASTIC_RUN_ID="gang",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
        TORCHELASTIC_USE_AGENT_STORE="True",
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo" if sys.platform == "linux" else "lo0",
    )
    import numpy
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    # Lightning reads the rank once, when it is imported, which was in the server.
    rank_zero = sys.modules.get("lightning_utilities.core.rank_zero")
    if rank_zero is not None:
        rank_zero.rank_zero_only.rank = rank


def _open_the_group(rank: int, job: Job) -> None:
    import torch.distributed as dist

    if job.group:
        path = os.path.join(job.folder, "store")
        store = dist.FileStore(path, job.num_ranks)  # type: ignore[attr-defined]  # torch's export is implicit
        dist.init_process_group("gloo", store=store, rank=rank, world_size=job.num_ranks, timeout=job.timeout)


def _close_the_group(job: Job) -> None:
    import torch.distributed as dist

    if job.group and dist.is_initialized():
        dist.destroy_process_group()


def _raised(error: BaseException) -> Report:
    at = time.monotonic()
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == RANK_FILE and trace.tb_next is not None:
        trace = trace.tb_next  # the reader wants the body's frames, not ours
    text = "".join(traceback.format_exception(type(error), error, trace))
    try:
        value = pickle.dumps(error)
        pickle.loads(value)  # some exceptions pickle but cannot be built again
    except Exception:
        value = b""
    return Report("raised", at, value=value, text=text)


def _outcome(name: str, message: str) -> BaseException:
    import pytest

    made: BaseException = getattr(pytest, name).Exception(message)
    return made


def _let_outcomes_pickle() -> None:
    """pytest's own exceptions (skip, fail, xfail) claim to live in `builtins`, where pickle does not find them."""
    pytest = sys.modules.get("pytest")
    if pytest is None:
        return
    for name in ("skip", "fail", "xfail"):
        made = getattr(pytest, name).Exception
        copyreg.pickle(made, lambda error, name=name: (_outcome, (name, str(error.msg))))  # type: ignore[misc]


def _rewrite_asserts(modules: Sequence[str]) -> None:
    """Let failing asserts of the test modules explain themselves here as they do in pytest's own process.

    `modules` are those that pytest rewrote in the parent; its compiled files are found in the cache and reused.
    """
    if not modules:
        return
    from types import SimpleNamespace

    from _pytest.assertion import rewrite

    state = SimpleNamespace(trace=lambda message: None)
    config: Any = SimpleNamespace(stash={rewrite.assertstate_key: state}, getini=lambda name: [])
    hook = rewrite.AssertionRewritingHook(config)
    hook.mark_rewrite(*(name for name in modules if name not in sys.modules))
    sys.meta_path.insert(0, hook)
