# SPDX-License-Identifier: Apache-2.0
"""State of a model that is cut into boxes: what ranks state as parts is each element of the whole once, and back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from stratagem.boxes import Boxed
from stratagem.checkpoint.parts import Part, whole_box, within
from stratagem.mesh import MeshShape
from stratagem.plugins.ring_ddp import RingDDP
from stratagem.plugins.tensor import TensorParallel
from stratagem.plugins.zero import Zero1, Zero3, ZeroSettings
from stratagem.technique import Context, DataTechnique


class Fused(nn.Module):
    """A fused layer, an embedding tied to the head, and a norm that is whole everywhere."""

    _tp_plan: ClassVar[dict[str, str]] = {
        "embed": "embedding_rowwise",
        "gate_up": "packed_colwise",
        "down": "rowwise",
        "head": "colwise_rep",
    }

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(7, 6), nn.LayerNorm(6), nn.Linear(6, 7, bias=False)
        self.gate_up, self.down = nn.Linear(6, 16), nn.Linear(8, 6)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        gate, up = self.gate_up(x).chunk(2, -1)
        logits: Tensor = self.head(x + self.down(F.silu(gate) * up))
        return logits


def _fused() -> nn.Module:
    torch.manual_seed(0)
    return Fused().double()


def _step(module: nn.Module, optimizer: torch.optim.Optimizer, data: DataTechnique | None) -> None:
    tokens = torch.arange(7).view(1, 7)
    for _ in range(2):
        F.cross_entropy(module(tokens)[0], tokens[0].flip(0)).backward()
        if data is not None:
            data.finish()
        optimizer.step()
        optimizer.zero_grad()


def _assembled(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every rank's parts put together; what is no part is equal on all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(state))
    found = {}
    for name, mine in state.items():
        parts = [theirs[name] for theirs in everyone]
        if not isinstance(mine, Part):
            found[name] = mine
            continue
        whole, times = torch.zeros(mine.shape, dtype=mine.dtype), torch.zeros(mine.shape)
        for part in parts:
            for box, tensor in zip(part.boxes, part.tensors, strict=True):
                within(whole, whole_box(mine.shape), box).copy_(tensor)
                within(times, whole_box(mine.shape), box).add_(1.0 / part.num_copies)
        assert torch.allclose(times, torch.ones(())), f"{name} is stated {times} times"
        found[name] = whole
    return found


ENGINES: dict[str, Any] = {
    "ring_ddp": RingDDP,
    "zero_1": lambda: Zero1(ZeroSettings(bucket_mib=1e-3, first_bucket_mib=1e-3)),
    "zero_3": lambda: Zero3(ZeroSettings(persistence_threshold=0)),
}


def _check(name: str, tp: int) -> None:
    inner: DataTechnique = ENGINES[name]()
    shape = MeshShape.fit(dist.get_world_size(), fill=inner.axis, tp=tp)
    here = Context(shape, dist.get_rank(), torch.device("cpu"))
    module, plain = _fused(), _fused()
    technique, data = TensorParallel(), Boxed(inner, "tp")
    technique.apply(module, here)
    data.apply(module, here)
    optimizer, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (module, plain))
    data.attach([optimizer])
    _step(module, optimizer, data)
    _step(plain, theirs, None)
    expected, expected_state = plain.state_dict(), theirs.state_dict()["state"]

    parts = data.module_parts(module)
    assert parts["head.weight"] is parts["embed.weight"]
    for key, value in _assembled(parts).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-10, atol=1e-12, msg=key)
    state = data.optimizer_parts(optimizer)
    for number, entries in state["state"].items():
        for key, value in _assembled(entries).items():
            torch.testing.assert_close(
                value, expected_state[number][key], rtol=1e-10, atol=1e-14, msg=f"{number} {key}"
            )

    wholes, of_optimizer = data.module_state(module), data.optimizer_state(optimizer)
    if here.rank == 0:
        assert list(wholes) == list(expected)
        for key, value in wholes.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-10, atol=1e-12, msg=key)
        for number, entries in of_optimizer["state"].items():
            for key, value in entries.items():
                torch.testing.assert_close(value, expected_state[number][key], rtol=1e-10, atol=1e-14)

    data.load_module_state(module, copy.deepcopy(expected))
    data.load_optimizer_state(optimizer, copy.deepcopy(theirs.state_dict()))
    _step(module, optimizer, data)
    _step(plain, theirs, None)
    data.close()
    technique.close()
    for key, value in module.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[key], rtol=1e-10, atol=1e-12, msg=key)
    here.close()


@pytest.mark.ranks(2)
def test_parts_and_wholes_of_a_row() -> None:
    _check("ring_ddp", 2)


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ENGINES)
def test_parts_and_wholes_of_two_rows(name: str) -> None:
    _check(name, 2)
