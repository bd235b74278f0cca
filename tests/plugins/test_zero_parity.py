# SPDX-License-Identifier: Apache-2.0
"""Every stage and both partitions against one process, in float64, with clipping, weight decay and momentum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from stratagem.plugins.zero import Zero1, Zero2, Zero3, ZeroSettings
from stratagem.plugins.zero.technique import Zero
from stratagem.testing import assert_replicas_equal
from tests.plugins import zero_cases as cases

STAGES = {"zero_1": Zero1, "zero_2": Zero2, "zero_3": Zero3}
SETTINGS = {
    "flat": ZeroSettings(),
    "flat_tiny_buckets": ZeroSettings(bucket_mib=4e-4, first_bucket_mib=1e-4, persistence_threshold=0),
    "parameter": ZeroSettings(partition="parameter", bucket_mib=2e-3, persistence_threshold=60, prefetch=0),
    "no_overlap": ZeroSettings(overlap=False, bucket_mib=1e-3),
    "late": ZeroSettings(gather="forward", bucket_mib=1e-3),
}


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_run_is_that_of_one_process(stage: str, settings: str) -> None:
    for make in (cases.sgd, cases.adamw):
        _check_run(STAGES[stage](SETTINGS[settings]), make)


def _check_run(zero: Zero, make: Callable[[nn.Module], Optimizer]) -> None:
    module, reference = cases.awkward(), cases.awkward()
    if dist.get_rank():
        with torch.no_grad():
            for p in module.parameters():
                p.add_(1.0)  # rank 0's values reach everyone
    here = cases.context()
    zero.apply(module, here)
    before = cases.awkward().state_dict()
    losses, norms, _ = cases.train(module, make, zero, here)
    expected, expected_norms, _ = cases.train(reference, make)
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    torch.testing.assert_close(
        total / dist.get_world_size(), torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=0
    )
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected_norms), rtol=1e-6, atol=0)
    assert max(norms) > cases.CLIP
    state = zero.module_state(module)  # whole on rank 0 while the parameters may be elsewhere
    zero.close()  # and the module is whole again
    cases.assert_same_parameters(module, reference)
    assert_replicas_equal(module)
    if dist.get_rank() == 0:
        assert all(torch.equal(state[name], p) for name, p in module.state_dict().items())
    assert torch.equal(module.unused.weight, before["unused.weight"])  # neither decayed nor stepped
    assert torch.equal(module.frozen.weight, before["frozen.weight"])
    here.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulation", ["partition", "whole"])
@pytest.mark.parametrize("partition", ["flat", "parameter"])
def test_micro_batches_add_up(stage: str, accumulation: str, partition: str) -> None:
    module, reference = cases.awkward(), cases.awkward()
    settings = ZeroSettings(bucket_mib=1e-3, accumulation=accumulation, partition=partition, persistence_threshold=0)
    zero, here = STAGES[stage](settings), cases.context()
    zero.apply(module, here)
    cases.train(module, cases.sgd, zero, here, micro_batches=3)
    cases.train(reference, cases.sgd, micro_batches=3)
    zero.close()
    cases.assert_same_parameters(module, reference)
    here.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", STAGES)
def test_groups_of_ranks_may_each_divide_a_replica(stage: str) -> None:
    module, reference = cases.awkward(), cases.awkward()
    zero, here = STAGES[stage](ZeroSettings(bucket_mib=1e-3, persistence_threshold=0)), cases.context(replicas=2)
    zero.apply(module, here)
    cases.train(module, cases.sgd, zero, here)
    cases.train(reference, cases.sgd)
    zero.close()
    cases.assert_same_parameters(module, reference)
    assert_replicas_equal(module)
    here.close()
