# SPDX-License-Identifier: Apache-2.0
"""Where ranks meet: one store per process for as long as it lives, and a fresh name in it for every run.

`env://` makes a new store each time a process group is opened. A second run in the same process would bind the first
one's port again, or, where torchrun hosts the store, find its keys. So the store is kept, and each opening
has a prefix of its own; ranks count openings alike, since they run the same script.

Note [torchrun's store outlives an attempt]: torchrun's agent hosts one store for all its attempts, and in it are the
addresses at which ranks of an earlier attempt listened. The number of an attempt would not tell them apart: each host's
agent counts only the failures of its own ranks, so TORCHELASTIC_RESTART_COUNT differs between hosts, and stays as it is
when a host joins. So ranks of one attempt find each other by words that nobody dead can have known:

    rank r    here/r   = a random word               (over that of a dead rank r)
    rank 0    answer/r = that word, a new name       (again whenever the word changes)
    rank r    hears its own word: the name is of a living rank 0; heard/NAME += 1
    rank 0    heard/NAME is everybody
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta
from itertools import count
from typing import ClassVar, final

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

_PAUSE = 0.01  # seconds between two looks into the store


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

        Raises:
            RuntimeError: not all ranks came in time (torch's DistStoreError, or its DistNetworkError).
        """
        address, port = environment.main_address, environment.main_port
        rank, world_size = environment.global_rank(), environment.world_size()
        if (address, port) not in cls._stores:
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)  # read by env://
            meeting = rendezvous("env://", rank, world_size, timeout=timeout)
            store = next(iter(meeting))[0]
            if isinstance(environment, TorchElasticEnvironment):
                store = among_the_living(store, rank, world_size, timeout)
            cls._stores[address, port] = store
        store = PrefixStore(f"stratagem/{next(cls._openings)}", cls._stores[address, port])
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device
        )


def among_the_living(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """A part of the store that only the ranks of this attempt know: see Note [torchrun's store outlives an attempt].

    Collective, once per process and store.

    Args:
        store: which ranks that are dead may have used too.
        rank: of this process, in this attempt.
        world_size: of this attempt; an earlier one may have had another.
        timeout: for all to come.

    Raises:
        DistStoreError: not all ranks came in time.
    """
    word, until = secrets.token_hex(8), time.monotonic() + timeout.total_seconds()
    if rank:
        store.set(f"stratagem/here/{rank}", word)
        mine, answer = f"stratagem/answer/{rank}", ["", ""]
        while answer[0] != word:
            _look_again(until)
            store.wait([mine], timeout)
            answer = store.get(mine).decode().split()
        store.add(f"stratagem/heard/{answer[1]}", 1)
        return PrefixStore(f"stratagem/attempt/{answer[1]}", store)
    others, answered = range(1, world_size), [b""] * (world_size - 1)
    if others:
        store.wait([f"stratagem/here/{other}" for other in others], timeout)
    while store.add(f"stratagem/heard/{word}", 0) < len(others):
        _look_again(until)
        for index, said in enumerate(store.multi_get([f"stratagem/here/{other}" for other in others])):
            if said != answered[index]:
                store.set(f"stratagem/answer/{index + 1}", f"{said.decode()} {word}")
                answered[index] = said
    return PrefixStore(f"stratagem/attempt/{word}", store)


def _look_again(until: float) -> None:
    if time.monotonic() >= until:
        raise dist.DistStoreError("not all ranks of this attempt came to the rendezvous in time")
    time.sleep(_PAUSE)
