# SPDX-License-Identifier: Apache-2.0
"""What the fork server imports once, so that no rank has to.

A fresh Python that imports torch and Lightning needs seconds; a fork of a process that has them needs milliseconds. The
standard library's fork server is such a process: it imports what it is told, runs nothing else and therefore stays at
one thread, which is what makes its forks safe. It has one fault: an import that fails there fails without a word, and
every rank then pays for the import again. So the server imports only this module, which imports all others, keeps
what went wrong, and lets every rank ask.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import traceback
from collections.abc import Iterable

VARIABLE = "STRATAGEM_TEST_PRELOAD"
"""The environment variable by which the parent tells the server its list, as JSON."""

MODULES = (
    "pytest",
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",  # the first DistributedDataParallel object imports it, some 800 modules
    "torch.distributed.device_mesh",
    "lightning.pytorch",
    "lightning.pytorch.demos.boring_classes",
)
"""What every gang expects to inherit."""

_PID = os.getpid()
_LOADED: set[str] = set()
_FAILED: dict[str, str] = {}


def missing(modules: Iterable[str]) -> dict[str, str]:
    """Return each of `modules` that this process did not inherit, with the reason.

    Asked by a rank. Empty means that all is well.
    """
    if os.getpid() == _PID:
        reason = "the fork server imported nothing: it was started by other code, or could not import stratagem"
        return dict.fromkeys(modules, reason)
    late = _FAILED.get("threads", "the fork server was already running when this module was asked for")
    return {name: _FAILED.get(name, late) for name in modules if name not in _LOADED}


def _own_modules() -> list[str]:
    """Every module of this package; one that cannot be imported is left for the test that uses it to report."""
    import stratagem

    found = pkgutil.walk_packages(stratagem.__path__, "stratagem.", onerror=lambda name: None)
    return [module.name for module in found if not module.name.endswith("__main__")]


def _load(modules: Iterable[str], failed: dict[str, str]) -> None:
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception:  # any failure is reported, none may end the server
            failed[name] = traceback.format_exc()
        else:
            _LOADED.add(name)


def _warm_up(modules: Iterable[str]) -> None:
    _load(modules, _FAILED)
    _load(_own_modules(), {})
    if os.path.isdir("/proc/self/task") and len(os.listdir("/proc/self/task")) > 1:
        _FAILED["threads"] = "an import started a thread, so that forks of the server could hang"
        _LOADED.clear()
    gc.collect()
    gc.freeze()  # the ranks' garbage collector then leaves the inherited pages shared


if VARIABLE in os.environ:
    _warm_up(json.loads(os.environ.pop(VARIABLE)))
