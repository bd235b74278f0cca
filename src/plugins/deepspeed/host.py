# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed keeps per process: its import, its idea of the hardware, its process groups, the environment it reads.

    load(kind)     import it for this kind of device, quietly; safe before a fork: it starts no thread
    Host.open      a process group of ours, DeepSpeed's world on it, with the run's timeout
    Host.close     all of that forgotten, so that a second run in the same process starts afresh

Note [an operator that is never built]: when DeepSpeed opens its world on CPUs it compiles a C++ operator, once per
rank, for an all-reduce that only its tensor-parallel inference calls. Training never does. It is marked as not
compatible before the world is opened: no compiler is needed, and no two ranks build the same thing at once.

Note [kernels that are not compiled]: whatever the optimizer, DeepSpeed imports its own Muon, and with it torch's
compiler, which takes each rank several seconds. The module is imported here with its kernels left as plain functions.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment

from stratagem.errors import ConfigError
from stratagem.strategy.rendezvous import Rendezvous

_SHARED_MEMORY_OP = "deepspeed_shm_comm"


def missing() -> str:
    """Why DeepSpeed cannot be had, or the empty string; imports nothing."""
    return "" if importlib.util.find_spec("deepspeed") else "it needs the module deepspeed, which is not installed"


def load(kind: str) -> Any:
    """Import DeepSpeed for devices of this kind. Local.

    Args:
        kind: `cpu` or `cuda`.

    Raises:
        ConfigError: this process has imported DeepSpeed for other devices before.
    """
    kept = os.environ.get("DS_ACCELERATOR")
    if kind == "cpu":
        os.environ["DS_ACCELERATOR"] = kind  # read once, when the first import looks for hardware
    try:
        import deepspeed
        from deepspeed.accelerator import get_accelerator
    finally:
        if kept is None:
            os.environ.pop("DS_ACCELERATOR", None)
        else:
            os.environ["DS_ACCELERATOR"] = kept
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    logger.addFilter(_is_news)
    with _uncompiled():
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    for stage in ("stage_1_and_2", "stage3"):
        importlib.import_module(f"deepspeed.runtime.zero.{stage}")
    found = get_accelerator().device_name()
    if found != kind:
        raise ConfigError(
            f"DeepSpeed was imported for {found} devices in this process, and this run is on {kind}",
            where="trainer.accelerator",
            do="start this run in a process of its own, without DS_ACCELERATOR in its environment",
        )
    deepspeed.ops.__compatible_ops__[_SHARED_MEMORY_OP] = False  # see Note [an operator that is never built]
    return deepspeed


def _is_news(record: logging.LogRecord) -> bool:
    """That an optimizer is not one of DeepSpeed's own is what the user asked for."""
    return "untested optimizer" not in record.getMessage()


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Within it `torch.compile` leaves functions as they are: see Note [kernels that are not compiled]."""

    def as_it_is(function: Any = None, **_: Any) -> Any:
        return function if function is not None else lambda decorated: decorated

    compiled = torch.compile
    torch.compile = as_it_is  # type: ignore[assignment]  # overloaded
    try:
        yield
    finally:
        torch.compile = compiled


@final
class Host:
    """DeepSpeed's world for one run."""

    def __init__(self) -> None:
        self._owns_group = False
        self._kept: dict[str, str | None] = {}
        self._quiet: warnings.catch_warnings[None] | None = None

    def open(
        self,
        environment: ClusterEnvironment,
        backend: str,
        *,
        timeout: timedelta,
        device: torch.device,
    ) -> None:
        """Opens the default process group, unless there is one, and DeepSpeed's groups on it.

        Collective: every rank of the world calls it.

        Args:
            environment: knows address, port, rank and world size.
            backend: of torch.distributed.
            timeout: of every collective of the run.
            device: the rank's.
        """
        load(device.type)
        self._quiet = warnings.catch_warnings()
        self._quiet.__enter__()
        warnings.filterwarnings(
            "ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning
        )  # DeepSpeed's calls
        self._own_environment(environment)
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            place = None if device.type == "cpu" else device
            Rendezvous.open(environment, backend, timeout=timeout, device=place)
        from deepspeed import comm
        from deepspeed.utils import groups

        self._forget()
        comm.init_distributed(backend, dist_init_required=False if comm.is_initialized() else None, verbose=False)
        groups._WORLD_GROUP = dist.new_group(timeout=timeout)  # its own would wait for half an hour

    def close(self, *, failed: bool) -> None:
        """Forgets the groups and the environment, and closes what `open` opened. Local.

        Args:
            failed: peers may be gone: nothing waits for them.
        """
        try:
            self._forget()
            if self._owns_group and dist.is_initialized():
                if failed and dist.get_backend() == "nccl":  # destroying would wait for collectives that never end
                    dist.distributed_c10d._abort_process_group()
                else:
                    dist.destroy_process_group()
        finally:
            self._owns_group = False
            for name, value in self._kept.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            self._kept = {}
            if self._quiet is not None:
                self._quiet.__exit__(None, None, None)
                self._quiet = None

    def _own_environment(self, environment: ClusterEnvironment) -> None:
        told = {
            "RANK": environment.global_rank(),
            "WORLD_SIZE": environment.world_size(),
            "LOCAL_RANK": environment.local_rank(),
        }
        self._kept = {name: os.environ.get(name) for name in told}
        os.environ.update({name: str(value) for name, value in told.items()})

    def _forget(self) -> None:
        """DeepSpeed keeps its world in globals of its modules, and takes a stale one for a live one."""
        from deepspeed.comm import comm
        from deepspeed.utils import groups

        comm.cdb = None
        groups._WORLD_GROUP = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = groups.mesh_device = None
        groups._ALL_TO_ALL_GROUP.clear()
