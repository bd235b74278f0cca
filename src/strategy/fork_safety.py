# SPDX-License-Identifier: Apache-2.0
"""When may a process that has imported everything be forked, and with how many threads may the children compute?

Note [OpenMP and fork]: the first parallel region of a thread makes OpenMP keep a pool of helper threads for it. `fork`
copies the memory that says "I have helpers" but none of the helpers, so the child waits in its first parallel region
for ever. The pool belongs to the thread that forks, and OpenMP 5 can be told to give it up (`omp_pause_resource_all`);
both parent and child then make a fresh one when they need it. A runtime without that call is harmless too as long as
the children compute with one thread, since a region of one thread needs no helper.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import sys

import torch

_OPENMP = re.compile(r"\s(/\S*/lib(?:gomp|omp|iomp5)(?:-\w+)?\.so[.\d]*)$", re.MULTILINE)
_PAUSE_HARD = 2  # omp_pause_hard: give the threads up


def threads_per_rank(num_ranks: int) -> int:
    """How many threads each of `num_ranks` ranks of this machine computes with.

    What the user chose by `OMP_NUM_THREADS` stays; else the cores of this process are divided, at least 1 each.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, num_cores // num_ranks)


def fork_obstacle(num_threads: int) -> str | None:
    """Why this process must not be forked into ranks of `num_threads` threads each, or None if it may be.

    Gives up the calling thread's pool of OpenMP helpers: call it right before the fork, from the thread that forks.
    """
    if sys.platform != "linux":
        return f"ranks are forked on Linux only, and this is {sys.platform}"
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return "this process has used CUDA, which does not survive a fork"
    if multiprocessing.current_process().daemon:
        return "this process is a daemon of multiprocessing, which may start no processes"
    runtimes = pause_openmp()
    if num_threads > 1 and not all(runtimes.values()):
        stubborn = ", ".join(os.path.basename(path) for path, paused in runtimes.items() if not paused)
        return f"the threads of {stubborn} cannot be given up; with OMP_NUM_THREADS=1 this would not matter"
    return None


def pause_openmp() -> dict[str, bool]:
    """Makes every OpenMP runtime of this process give up the calling thread's helpers: see Note [OpenMP and fork].

    Returns:
        The path of each runtime, and whether it did.
    """
    with open("/proc/self/maps") as file:
        paths = sorted(set(_OPENMP.findall(file.read())))
    return {path: _pause(path) for path in paths}


def _pause(path: str) -> bool:
    try:
        pause = ctypes.CDLL(path).omp_pause_resource_all
    except (OSError, AttributeError):
        return False
    return int(pause(_PAUSE_HARD)) == 0
