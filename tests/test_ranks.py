# SPDX-License-Identifier: Apache-2.0
"""The gang, and what it says when something goes wrong."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist


@pytest.mark.ranks(1, 2, 4)
def test_every_rank_ends_with_the_sum(num_ranks: int) -> None:
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor)
    assert tensor.item() == num_ranks * (num_ranks - 1) / 2
