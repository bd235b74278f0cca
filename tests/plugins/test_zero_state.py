# SPDX-License-Identifier: Apache-2.0
"""State is that of one process, whichever stage and partition wrote it; half precision keeps its masters."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stratagem.errors import CheckpointError
from stratagem.plugins.zero import Zero1, Zero2, Zero3, ZeroSettings
from stratagem.plugins.zero.state import MASTER
from tests.plugins import zero_cases as cases

STAGES = {"zero_1": Zero1, "zero_2": Zero2, "zero_3": Zero3}
SETTINGS = {
    "flat": ZeroSettings(bucket_mib=1e-3, persistence_threshold=0),
    "parameter": ZeroSettings(bucket_mib=1e-3, persistence_threshold=0, partition="parameter"),
}


def _from_rank_0(value: object) -> object:
    """What rank 0 has, as a checkpoint file would hand it to everyone."""
    box = [value]
    if dist.get_rank() == 0:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        box = [torch.load(buffer, weights_only=True)]
    dist.broadcast_object_list(box)
    return box[0]


def _assert_states_equal(found: dict, expected: dict, tolerance: float) -> None:
    assert [g["params"] for g in found["param_groups"]] == [g["params"] for g in expected["param_groups"]]
    assert found["state"].keys() == expected["state"].keys()
    for number, entries in expected["state"].items():
        assert found["state"][number].keys() == entries.keys()
        for key, value in entries.items():
            mine = found["state"][number][key]
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(mine, value, rtol=tolerance, atol=1e-12)
            else:
                assert mine == value


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("partition", SETTINGS)
@pytest.mark.parametrize("make", ["sgd", "adamw"])
def test_a_run_goes_on_from_its_state_bit_by_bit_and_from_that_of_one_process(
    stage: str, partition: str, make: str
) -> None:
    build, size = getattr(cases, make), dist.get_world_size()
    settings, here = SETTINGS[partition], cases.context()
    module, reference = cases.awkward(), cases.awkward()
    zero = STAGES[stage](settings)
    zero.apply(module, here)
    _, _, optimizer = cases.train(module, build, zero, here, steps=range(2))
    _, _, plain = cases.train(reference, build, steps=range(2))
    written = _from_rank_0((zero.module_state(module), zero.optimizer_state(optimizer)))
    if dist.get_rank() == 0:
        _assert_states_equal(written[1], plain.state_dict(), 1e-9)
    cases.train(module, build, zero, here, steps=range(2, 4), optimizer=optimizer)
    zero.close()
    cases.train(reference, build, steps=range(2, 4), optimizer=plain)

    for state, exact in ((written, True), ((None, None), False)):
        resumed, again = cases.awkward(), STAGES[stage](settings)
        with torch.no_grad():
            for p in resumed.parameters():
                p.fill_(0.5)
        again.apply(resumed, here)
        fresh = build(resumed)
        again.attach([fresh])
        if not exact:  # a checkpoint that one process wrote
            single = cases.awkward()
            _, _, its = cases.train(single, build, steps=range(2))
            state = (single.state_dict(), its.state_dict())
        again.load_module_state(resumed, state[0])
        again.load_optimizer_state(fresh, state[1])
        cases.train(resumed, build, again, here, steps=range(2, 4), optimizer=fresh)
        again.close()
        cases.assert_same_parameters(resumed, reference)
        if exact:
            for p, q in zip(resumed.parameters(), module.parameters(), strict=True):
                assert torch.equal(p, q)
    assert size == here.shape.dp_shard
    here.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_half_precision_steps_exact_masters_and_resumes_exactly(stage: str) -> None:
    """300 steps of 1e-3 from 1.0: in bfloat16 alone each would round back to 1.0."""
    settings, here = ZeroSettings(persistence_threshold=0), cases.context()

    def start() -> tuple[nn.Module, object, torch.optim.Optimizer]:
        module = nn.Linear(5, 7).to(torch.bfloat16)
        with torch.no_grad():
            for p in module.parameters():
                p.fill_(1.0)
        zero = STAGES[stage](settings)
        zero.apply(module, here)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        zero.attach([optimizer])
        return module, zero, optimizer

    def steps(module: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        for _ in range(number):
            module(torch.ones(1, 5, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    module, zero, optimizer = start()
    steps(module, optimizer, 150)
    states = _from_rank_0((zero.module_state(module), zero.optimizer_state(optimizer)))
    steps(module, optimizer, 150)
    zero.close()
    for p in module.parameters():
        torch.testing.assert_close(p.float(), torch.full_like(p, 0.7, dtype=torch.float32), rtol=4e-3, atol=0)
    # SGD without momentum has no state of its own, so there is nothing to hang masters on unless they are stated
    # anyway.
    assert set(states[1]["state"][0]) == {MASTER}
    assert states[1]["state"][0][MASTER].dtype is torch.float32
    again, zero, optimizer = start()
    zero.load_module_state(again, states[0])
    zero.load_optimizer_state(optimizer, states[1])
    steps(again, optimizer, 150)
    zero.close()
    for p, q in zip(again.parameters(), module.parameters(), strict=True):
        assert torch.equal(p, q)
    here.close()


@pytest.mark.ranks(2)
def test_another_grouping_is_refused() -> None:
    module, zero, here = cases.awkward(), Zero1(), cases.context()
    zero.apply(module, here)
    optimizer = cases.sgd(module)
    zero.attach([optimizer])
    with pytest.raises(CheckpointError, match="groups of"):
        zero.load_optimizer_state(optimizer, cases.adamw(cases.awkward()).state_dict())
    zero.close()
    here.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_the_user_gets_plain_objects_back(stage: str) -> None:
    module, zero, here = cases.awkward(), STAGES[stage](ZeroSettings(persistence_threshold=0)), cases.context()
    zero.apply(module, here)
    _, _, optimizer = cases.train(module, cases.adamw, zero, here)
    zero.close()
    mine = {id(p) for p in module.parameters()}
    assert all(id(p) in mine for group in optimizer.param_groups for p in group["params"])
    assert "zero_grad" not in vars(optimizer)
    for part in module.modules():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
        assert type(part._parameters) is dict
    for parameter in module.parameters():
        assert not parameter._post_accumulate_grad_hooks
        assert parameter.untyped_storage().nbytes() == parameter.numel() * 8  # no view of something larger
    copy.deepcopy(module)
    module(cases.batch(0, 2, 0), 0).sum().backward()
    here.close()
