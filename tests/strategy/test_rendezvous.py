# SPDX-License-Identifier: Apache-2.0
"""Ranks of one attempt meet in a store in which dead ranks have left their words."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from stratagem.strategy.rendezvous import among_the_living

PATIENCE = timedelta(seconds=20)


def meet(port: int, late: tuple[float, ...]) -> list[str]:
    """One attempt of as many ranks as there are delays; what each finds where rank 0 wrote."""

    def come(rank: int) -> str:
        time.sleep(late[rank])
        client = TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
        store = among_the_living(client, rank, len(late), PATIENCE)
        mine = f"{port} {late}"
        if rank == 0:
            assert not store.check(["address"])
            store.set("address", mine)
        return store.get("address").decode()

    with ThreadPoolExecutor(len(late)) as pool:
        return list(pool.map(come, range(len(late))))


def test_an_attempt_reads_nothing_of_those_that_are_dead() -> None:
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    for late in ((0.0, 0.0, 0.0), (0.0, 0.1, 0.05), (0.1, 0.0, 0.0), (0.0, 0.1), (0.1, 0.0, 0.1), (0.0,)):
        assert meet(host.port, late) == [f"{host.port} {late}"] * len(late)


def test_who_waits_for_a_rank_that_never_comes_says_so() -> None:
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    assert meet(host.port, (0.0, 0.0))
    for rank in (0, 1):  # the words of the other are there, and nobody answers
        client = TCPStore("127.0.0.1", host.port, is_master=False, timeout=PATIENCE)
        with pytest.raises(dist.DistStoreError, match="not all ranks of this attempt came"):
            among_the_living(client, rank, 2, timedelta(seconds=0.2))
