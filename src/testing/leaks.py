# SPDX-License-Identifier: Apache-2.0
"""The leak police: a test that leaves something behind fails itself, not the test after it.

    @pytest.fixture(autouse=True)
    def leave_nothing_behind() -> Iterator[None]:
        with no_leaks():
            yield

Watched are threads, child processes, environment variables, signal handlers and the default process group. What is
found is also put right where that is possible, so that one culprit makes one failure.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator
from typing import Any

LIBRARY_VARIABLES = frozenset(
    {
        # Lightning: seed_everything and its workers; a strategy's launcher; deterministic mode.
        "PL_GLOBAL_SEED",
        "PL_SEED_WORKERS",
        "CUBLAS_WORKSPACE_CONFIG",
        # torch and what it stands on, when they are first imported or used.
        "CUDA_MODULE_LOADING",
        "KMP_DUPLICATE_LIB_OK",
        "KMP_INIT_AT_FORK",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        # pytest: the name of the phase.
        "PYTEST_CURRENT_TEST",
    }
)
"""Variables that the libraries themselves set in passing: put back without a word."""

_PATIENCE = 2.0  # seconds that a thread or process which is about to end gets


class Leak(AssertionError):
    """The block left something behind; the message lists it."""


@contextlib.contextmanager
def no_leaks(*, allowed_variables: Collection[str] = LIBRARY_VARIABLES) -> Iterator[None]:
    """Compare this process before and after the block; put back what changed, and raise if it should not have.

    If the block itself raises, its error stands and the leaks are only put right.

    Args:
        allowed_variables: environment variables that may change; they are put back all the same.

    Raises:
        Leak: a thread, child process, environment variable, signal handler or process group was left.

    Example:
        >>> with no_leaks():
        ...     os.environ["COLOUR"] = "red"
        Traceback (most recent call last):
        ...
        stratagem.testing.leaks.Leak: left behind: environment variable COLOUR (set)
        >>> "COLOUR" in os.environ
        False
    """
    threads, children = set(threading.enumerate()), _children()
    environment, handlers, grouped = dict(os.environ), _signal_handlers(), _has_process_group()
    try:
        yield
    except BaseException:
        _put_right(environment, handlers, grouped)
        raise
    found = [
        *_new_threads(threads),
        *_new_children(children),
        *_changed_variables(environment, allowed_variables),
        *(f"handler of {number.name}" for number, handler in _signal_handlers().items() if handler != handlers[number]),
    ]
    if _has_process_group() and not grouped:
        found.append("default process group of torch.distributed")
    _put_right(environment, handlers, grouped)
    if found:
        raise Leak(f"left behind: {'; '.join(found)}")


def _new_threads(before: set[threading.Thread]) -> list[str]:
    """Python threads; those of libraries' native code are theirs, and tqdm's monitor lives as long as the process."""
    new = [thread for thread in threading.enumerate() if thread not in before]
    new = [thread for thread in new if type(thread).__name__ != "TMonitor"]
    end = time.monotonic() + _PATIENCE
    for thread in new:
        thread.join(max(0.0, end - time.monotonic()))
    return [f"thread {thread.name}" for thread in new if thread.is_alive()]


def _new_children(before: set[int]) -> list[str]:
    end = time.monotonic() + _PATIENCE
    while True:
        new = {pid: _command(pid) for pid in _children() - before}
        # The standard library's two servants of multiprocessing live as long as the process.
        new = {pid: command for pid, command in new.items() if "multiprocessing." not in command}
        if not new or time.monotonic() > end:
            return [f"child process {pid} ({command or 'a zombie'})" for pid, command in sorted(new.items())]
        time.sleep(0.02)


def _changed_variables(before: dict[str, str], allowed: Collection[str]) -> Iterator[str]:
    for name in sorted({*before, *os.environ}):
        if name not in allowed and before.get(name) != os.environ.get(name):
            how = "set" if name not in before else "changed" if name in os.environ else "removed"
            yield f"environment variable {name} ({how})"


def _put_right(environment: dict[str, str], handlers: dict[signal.Signals, Any], grouped: bool) -> None:
    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)
    if _has_process_group() and not grouped:
        sys.modules["torch.distributed"].destroy_process_group()


def _signal_handlers() -> dict[signal.Signals, Any]:
    return {signal.Signals(number): signal.getsignal(number) for number in signal.valid_signals() if _named(number)}


def _named(number: int) -> bool:
    return number in signal.Signals._value2member_map_


def _has_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return bool(distributed is not None and distributed.is_available() and distributed.is_initialized())


def _children() -> set[int]:
    """The child processes of this one, zombies too; empty where the system is not Linux."""
    found: set[int] = set()
    with contextlib.suppress(FileNotFoundError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children") as file:
                found.update(int(pid) for pid in file.read().split())
    return found


def _command(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""
