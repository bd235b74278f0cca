# SPDX-License-Identifier: Apache-2.0
"""Bitwise comparison of replicas: it must see one bit, anywhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from stratagem.testing.replicas import assert_replicas_equal, fingerprint


def _trained() -> tuple[nn.Module, AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(torch.bfloat16)
    optimizer = AdamW(model.parameters())
    model(torch.randn(5, 3, dtype=torch.bfloat16)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def _parameter(model: nn.Module, optimizer: AdamW) -> None:
    with torch.no_grad():
        weight = model.get_parameter("0.weight")
        weight.view(torch.int16)[1, 2] ^= 1


def _buffer(model: nn.Module, optimizer: AdamW) -> None:
    model.get_buffer("1.running_mean").view(torch.int16)[0] ^= 1


def _moment(model: nn.Module, optimizer: AdamW) -> None:
    optimizer.state[model.get_parameter("0.bias")]["exp_avg"].view(torch.int16)[3] ^= 1


def _step(model: nn.Module, optimizer: AdamW) -> None:
    optimizer.state[model.get_parameter("0.bias")]["step"] += 1


def _learning_rate(model: nn.Module, optimizer: AdamW) -> None:
    optimizer.param_groups[0]["lr"] *= 1 + 1e-15


_CHANGES = [
    (_parameter, "parameter 0.weight"),
    (_buffer, "buffer 1.running_mean"),
    (_moment, "optimizer 0 group 0 0.bias exp_avg"),
    (_step, "optimizer 0 group 0 0.bias step"),
    (_learning_rate, "optimizer 0 group 0 lr"),
]


def test_the_fingerprint_is_a_function_of_the_state_alone() -> None:
    assert fingerprint(*_trained()) == fingerprint(*_trained())


@pytest.mark.parametrize(("change", "where"), _CHANGES)
def test_the_fingerprint_sees_one_bit(change: Callable[[nn.Module, AdamW], None], where: str) -> None:
    model, optimizer = _trained()
    before = fingerprint(model, optimizer)
    change(model, optimizer)
    assert fingerprint(model, optimizer) != before


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("change", "where"), _CHANGES)
def test_the_rank_and_the_tensor_that_differ_are_named_on_every_rank(
    change: Callable[[nn.Module, AdamW], None], where: str
) -> None:
    model, optimizer = _trained()
    assert_replicas_equal(model, optimizer)
    if dist.get_rank() == 2:
        change(model, optimizer)
    with pytest.raises(AssertionError, match=rf"{where} differs between rank 0 and ranks \[2\] \(1 of "):
        assert_replicas_equal(model, [optimizer])


@pytest.mark.ranks(2)
def test_a_state_that_only_one_rank_has_is_named() -> None:
    model, optimizer = _trained()
    if dist.get_rank() == 1:
        optimizer.state.clear()
    with pytest.raises(AssertionError, match=r"exp_avg is missing on ranks \[1\]"):
        assert_replicas_equal(model, optimizer)


@pytest.mark.ranks(4)
def test_only_the_ranks_of_the_group_are_compared() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, rank // 2)
    nn.init.zeros_(model.bias)
    assert_replicas_equal(model, group=groups[rank // 2])
    with pytest.raises(AssertionError, match=r"parameter weight differs between rank 0 and ranks \[2, 3\]"):
        assert_replicas_equal(model)
