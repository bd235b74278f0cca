# SPDX-License-Identifier: Apache-2.0
"""Packing is pure: every parameter once, caps kept, launch order that can always be met."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stratagem.buckets import pack

dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
parameters = st.lists(st.tuples(st.integers(0, 40), dtypes), max_size=12).map(
    lambda rows: [nn.Parameter(torch.zeros(numel, dtype=dtype)) for numel, dtype in rows]
)


@given(parameters, st.integers(1, 200), st.integers(1, 200))
def test_every_parameter_lies_in_one_bucket_and_no_two_overlap(
    params: list[nn.Parameter], cap: int, first_cap: int
) -> None:
    buckets = pack(params, cap_bytes=cap, first_cap_bytes=first_cap)
    assert sorted(slot.index for bucket in buckets for slot in bucket.slots) == list(range(len(params)))
    for bucket in buckets:
        assert {params[slot.index].dtype for slot in bucket.slots} == {bucket.dtype}
        end = 0
        for slot in bucket.slots:
            assert slot.offset == end
            end += params[slot.index].numel()
        assert end == bucket.numel
        assert bucket.num_bytes <= cap or len(bucket.slots) == 1 or bucket.num_bytes <= first_cap


@given(parameters, st.integers(1, 200))
def test_buckets_leave_in_the_order_in_which_backward_fills_them(params: list[nn.Parameter], cap: int) -> None:
    filled_last = [min(slot.index for slot in bucket.slots) for bucket in pack(params, cap_bytes=cap)]
    assert filled_last == sorted(filled_last, reverse=True)


def test_the_first_bucket_is_small() -> None:
    params = [nn.Parameter(torch.zeros(4)) for _ in range(5)]
    sizes = [len(bucket.slots) for bucket in pack(params, cap_bytes=32, first_cap_bytes=16)]
    assert sizes == [1, 2, 2]


def test_views_keep_the_memory_format_of_their_parameter() -> None:
    weight = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    transposed = nn.Parameter(torch.zeros(3, 2).t())
    strided = nn.Parameter(torch.zeros(4, 6)[:, ::2])
    (bucket,) = pack([weight, transposed, strided], cap_bytes=10**6)
    flat = torch.arange(bucket.numel, dtype=torch.float32)
    by_index = {slot.index: slot.view(flat) for slot in bucket.slots}
    assert by_index[0].stride() == weight.stride()
    assert by_index[1].stride() == transposed.stride()
    assert by_index[2].stride() == (3, 1)  # not dense: contiguous instead
    assert sorted(torch.cat([view.reshape(-1) for view in by_index.values()]).tolist()) == flat.tolist()
