# SPDX-License-Identifier: Apache-2.0
"""A gang: one function run on N fresh processes at once, with torch.distributed up, in a fraction of a second.

    parent                          fork server (one, imports torch and Lightning once, one thread)
      |  start                         |
      |------------------------------->|--fork--> rank 0 --.
      |------------------------------->|--fork--> rank 1 --|  Gloo over loopback, found by a file
      |<== one pipe per rank: result, or exception =======-'
      |
      |  first failure: the others get `grace`, then SIGUSR1 (they write where they wait), then SIGKILL

Whatever happens, the parent is left with no process, no thread, no open file and no folder, and with one report that
has a block per rank: its traceback, or its exit code or signal, or the stack in which it hangs.

`ranks.py` is the door, `gang.py` watches the processes, `rank.py` is the inside of one, `preload.py` what it inherits.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any

from stratagem.testing import preload
from stratagem.testing.gang import Gang, HarnessError, RankFailure, RanksFailed
from stratagem.testing.rank import Job

__all__ = ["HarnessError", "RankFailure", "RanksFailed", "run_ranks"]

SCALE_VARIABLE = "STRATAGEM_TEST_DEADLINE_SCALE"
"""Environment variable: a factor on every deadline and grace, for slow machines."""


def run_ranks(
    num_ranks: int,
    body: Callable[..., Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    deadline: timedelta = timedelta(seconds=60),
    grace: timedelta = timedelta(seconds=2),
    dies: Mapping[int, int] | None = None,
    group: bool = True,
    modules: Sequence[str] = (),
) -> list[Any]:
    """Call `body(**kwargs)` on every rank of a fresh gang of processes and return the results in the order of ranks.

    In the body `torch.distributed` is initialised (Gloo, loopback, CPU), torch uses one thread, all seeds are 0, and
    the environment is what torchrun would set, so that a Lightning `Trainer(accelerator="cpu", devices=num_ranks)`
    starts no launcher and uses the group that is open. What the ranks write is collected and printed here afterwards.

    Args:
        num_ranks: how many processes, 1 or more.
        body: a function that its module knows by name; results and exceptions must pickle.
        kwargs: its arguments, the same on every rank; they must pickle.
        deadline: when ranks that still run count as hanging.
        grace: how long the others may go on after the first failure.
        dies: the ranks that must die, each with its exit code or minus its signal: `{1: -9}`. Their result is None.
        group: whether the process group is opened. Without it `init_process_group()` works as under torchrun: the
            parent hosts the store that the environment names, so that no port is ever guessed.
        modules: what the ranks must inherit beside `preload.MODULES`; heeded by the first gang of a process.

    Raises:
        RanksFailed: a rank raised, died, hung, or lived where `dies` says otherwise.
        HarnessError: the gang could not be set up.
        ValueError: no number of ranks, or something that does not pickle.

    Example:
        >>> import torch.distributed as dist
        >>> run_ranks(2, dist.get_rank)
        [0, 1]
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}. Allowed: 1 or more.")
    __tracebackhide__ = True  # pytest shows the caller, not this file
    scale = float(os.environ.get(SCALE_VARIABLE, "1"))
    work = _pickled(body, dict(kwargs or {}))
    with tempfile.TemporaryDirectory(prefix="stratagem-gang-") as folder, _rendezvous() as port:
        job = Job(
            num_ranks=num_ranks,
            body=work,
            folder=folder,
            port=port,
            group=group,
            timeout=2 * scale * deadline,  # the harness finds a hang first, and shows the stack
            environment=dict(os.environ),
            modules=(*preload.MODULES, *modules),
            rewritten=_rewritten_modules(),
        )
        gang = Gang(job, _context(job.modules), dict(dies or {}))
        with contextlib.closing(gang):
            gang.run(deadline * scale, grace * scale)
        gang.print_output()
        return gang.results()


def _pickled(body: Callable[..., Any], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((body, kwargs))
    except Exception as error:
        for name, value in kwargs.items():
            try:
                pickle.dumps(value)
            except Exception:
                what = f"argument {name!r} ({type(value).__name__}) does not pickle"
                break
        else:
            what = f"body {getattr(body, '__qualname__', body)!r} does not pickle; it must be a function of a module"
        raise ValueError(f"{what}, so it cannot travel to the ranks: {error}") from error


def _rewritten_modules() -> list[str]:
    """The modules whose asserts pytest rewrote in this process."""
    if "_pytest.assertion.rewrite" not in sys.modules:
        return []
    from _pytest.assertion.rewrite import AssertionRewritingHook

    modules = list(sys.modules.items())
    return [name for name, module in modules if isinstance(getattr(module, "__loader__", None), AssertionRewritingHook)]


@contextlib.contextmanager
def _rendezvous() -> Iterator[int]:
    """Host the store that `env://` names in the ranks, as torchrun's agent does, and yield its port.

    The kernel picks the port as the store binds it, so nobody can take it in between.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's export is implicit

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        yield store.port
    finally:
        del store


def _context(modules: Sequence[str]) -> ForkServerContext:
    """Return the context whose server is running and has imported `modules`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload.__name__])
    path = os.pathsep.join(entry for entry in sys.path if entry)  # the server of Python 3.11 is not told by itself
    started = {preload.VARIABLE: json.dumps(list(modules)), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in started}
    os.environ.update(started)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context
