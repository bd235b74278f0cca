# SPDX-License-Identifier: Apache-2.0
"""Where ranks meet: one store per process for as long as it lives, and a fresh name in it for every run.

`env://` makes a new store each time a process group is opened. A second run in the same process would bind the first
one's port again, or, where torchrun hosts the store, find its keys. So the store is kept, and each opening
has a prefix of its own; ranks count openings alike, since they run the same script.
"""

from __future__ import annotations

import os
from datetime import timedelta
from itertools import count
from typing import ClassVar, final

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous


@final
class Rendezvous:
    """Opens the default process group, any number of times in one process."""

    _stores: ClassVar[dict[tuple[str, int], Store]] = {}
    _openings: ClassVar[count[int]] = count()

    @classmethod
    def open(
        cls, environment: ClusterEnvironment, backend: str, *, timeout: timedelta, device: torch.device | None
    ) -> None:
        """Opens the default group at the address that the cluster environment names.

        Collective: every rank of the world calls it.

        Args:
            environment: knows address, port, rank and world size.
            backend: of torch.distributed.
            timeout: for the rendezvous and for every later collective.
            device: the rank's device, where it is not the CPU.
        """
        address, port = environment.main_address, environment.main_port
        rank, world_size = environment.global_rank(), environment.world_size()
        if (address, port) not in cls._stores:
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)  # read by env://
            meeting = rendezvous("env://", rank, world_size, timeout=timeout)
            cls._stores[address, port] = next(iter(meeting))[0]
        store = PrefixStore(f"stratagem/{next(cls._openings)}", cls._stores[address, port])
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device
        )
