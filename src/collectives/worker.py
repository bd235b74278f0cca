# SPDX-License-Identifier: Apache-2.0
"""One background thread that runs collectives in the order in which they were submitted.

The ranks of an axis must call its collectives in one order. One thread with one queue gives exactly that, and
communication runs while the submitting thread computes.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar, final

import torch

P = ParamSpec("P")
R = TypeVar("R")
_Task = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@final
class Worker:
    """Runs `submit`ted calls one after another in one thread of its own.

    After one call failed, all later ones fail at once with the same exception: the ranks would no longer be in step.
    The thread ends with `close`, or when the worker is forgotten; it never keeps the process alive.

    Args:
        name: of the thread, for debuggers.

    Example:
        >>> worker = Worker("demo")
        >>> worker.submit(max, 2, 3).result()
        3
        >>> worker.close()
    """

    def __init__(self, name: str = "stratagem-collectives") -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._closed = False
        self._last: Future[Any] | None = None
        ready = threading.Event()
        self._thread = threading.Thread(target=_serve, args=(self._tasks, ready), name=name, daemon=True)
        self._thread.start()
        # A ring adds small pieces between waits: waking a pool of threads for each would cost more than it brings.
        # torch keeps the number per thread, but the number for threads to come is one for all, so restore that here.
        num_threads = torch.get_num_threads()
        ready.wait()
        torch.set_num_threads(num_threads)
        self._finalizer = weakref.finalize(self, self._tasks.put, None)

    def submit(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run `fn(*args, **kwargs)` after everything submitted before it; the future gives its result or exception.

        Raises:
            RuntimeError: the worker is closed.
        """
        if self._closed:
            raise RuntimeError("this worker is closed")
        future: Future[R] = Future()
        self._last = future
        self._tasks.put((future, fn, args, kwargs))
        return future

    def drain(self) -> None:
        """Wait until everything submitted so far has run; raise what failed, if anything did."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Run what is still queued, then end the thread. Failures stay in their futures. May be called twice.

        A thread that is blocked in a collective ends only when that does: `Communicator.abort` sees to it.
        """
        self._closed = True
        self._finalizer()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _serve(tasks: queue.SimpleQueue[_Task | None], ready: threading.Event) -> None:
    """The thread. Knows the queue only, so that it does not keep the worker alive."""
    torch.get_num_threads()  # the first look in a thread sets its number to the common one: before, not after, ours
    torch.set_num_threads(1)
    ready.set()
    failure: BaseException | None = None
    while (task := tasks.get()) is not None:
        future, fn, args, kwargs = task
        if not future.set_running_or_notify_cancel():
            continue
        if failure is not None:
            future.set_exception(failure)
            continue
        try:
            result = fn(*args, **kwargs)
        except BaseException as error:
            failure = error
            future.set_exception(error)
        else:
            future.set_result(result)
        del task, future, fn, args, kwargs  # an idle worker holds no tensors
