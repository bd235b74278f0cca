# SPDX-License-Identifier: Apache-2.0
"""Bytes held: the count of storages, and the kernel's books."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from stratagem.measure.memory import held_bytes, live_tensor_bytes, peak_rss, process_memory

_MIB = 2**20


def test_a_training_state_in_float32_adam_holds_sixteen_bytes_per_parameter() -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    assert held_bytes(model, optimizer) == 4 * 64 * 64
    model(torch.ones(1, 64)).sum().backward()
    assert held_bytes(model) == 8 * 64 * 64
    optimizer.step()
    num_step_bytes = 4  # Adam counts its steps in one float32 per parameter tensor
    assert held_bytes(model, optimizer) == 16 * 64 * 64 + num_step_bytes


def test_each_storage_counts_once_and_whole() -> None:
    whole = torch.zeros(1000)
    assert held_bytes(whole[:10]) == held_bytes(whole[:10], whole[20:], {"a": [whole]}) == 4000
    assert held_bytes(torch.zeros(1000, device="meta"), torch.zeros(0)) == 0


def test_containers_and_dataclasses_are_opened() -> None:
    @dataclass
    class Shard:
        piece: torch.Tensor
        name: str

    assert held_bytes({"x": [(Shard(torch.zeros(5, dtype=torch.float64), "x"),)]}) == 40


class _Views(Mapping[str, torch.Tensor]):
    """Makes its tensor anew at each access."""

    def __init__(self, base: torch.Tensor) -> None:
        self.base = base

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.base[:]

    def __iter__(self) -> Iterator[str]:
        return iter(["view"])

    def __len__(self) -> int:
        return 1


def test_a_tensor_that_is_made_in_passing_does_not_hide_the_next() -> None:
    """Objects are told apart by their id, and that of a freed one is given to the next."""
    assert held_bytes([_Views(torch.zeros(10)) for _ in range(50)]) == 50 * 40


def test_live_tensors_are_found_wherever_they_are() -> None:
    before = live_tensor_bytes()
    hidden = [object(), {"deep": torch.zeros(_MIB, dtype=torch.uint8)}]
    assert live_tensor_bytes() - before == _MIB
    hidden.clear()
    assert live_tensor_bytes() == before


@pytest.mark.ranks(1)
def test_the_kernel_sees_what_is_held_and_what_was_held() -> None:
    before = process_memory()
    assert before.private <= before.pss <= before.rss <= before.peak_rss
    held = torch.ones(64 * _MIB, dtype=torch.uint8)
    after = process_memory()
    assert after.rss - before.rss == pytest.approx(64 * _MIB, rel=0.05)
    assert after.private - before.private == pytest.approx(64 * _MIB, rel=0.05)
    del held
    with peak_rss() as peak:
        torch.ones(32 * _MIB, dtype=torch.uint8)
    assert peak.num_bytes == pytest.approx(32 * _MIB, rel=0.05)
    assert process_memory().rss - before.rss < 16 * _MIB
