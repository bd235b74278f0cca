# SPDX-License-Identifier: Apache-2.0
"""The wire formats, without a process: what a message stands for, and how far it may be off."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stratagem.collectives.wire import BLOCK, Op, Wire, WireFormat, wire_format

HALF_STEPS = {Wire.INT8: 254, Wire.INT4: 14}
"""Half a step of a block's scale, as a part of its largest magnitude."""

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def chain(contributions: list[Tensor], fmt: WireFormat) -> tuple[Tensor, Tensor]:
    """What reduce-scatter followed by all-gather makes of one piece: at its owner, and at somebody else."""
    tensors = [each.clone() for each in contributions]
    numel = tensors[0].numel()

    def message() -> Tensor:
        return torch.empty(fmt.message_numel(numel), dtype=fmt.dtype)

    got = message()
    fmt.contribute(tensors[0], got)
    for mine in tensors[1:-1]:
        out = message()
        fmt.add_to_message(got, mine, out)
        got = out
    owner, other = tensors[-1], tensors[0]
    fmt.add_to_mine(got, owner)
    out = message()
    fmt.publish(owner, out)
    fmt.keep(out, other)
    return owner, other


def random_tensors(n: int, numel: int, dtype: torch.dtype, *, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype) for _ in range(n)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("wire", list(Wire))
@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize("n", [2, 3, 5])
def test_owner_and_receiver_hold_the_same_bits(n: int, op: Op, wire: Wire, dtype: torch.dtype) -> None:
    owner, other = chain(random_tensors(n, 1000, dtype), wire_format(dtype, op=op, wire=wire, n=n))
    assert torch.equal(owner, other)


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize("wire", HALF_STEPS)
@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(2, 8),
    numel=st.integers(1, 3 * BLOCK),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 2**16),
)
def test_blocks_are_within_the_stated_bound(op: Op, wire: Wire, n: int, numel: int, exponent: int, seed: int) -> None:
    contributions = [each * 10.0**exponent for each in random_tensors(n, numel, torch.float32, seed=seed)]
    owner, _ = chain(contributions, wire_format(torch.float32, op=op, wire=wire, n=n))
    share = 1 / n if op is Op.MEAN else 1
    exact = torch.stack(contributions).double().sum(0) * share
    for block in torch.arange(numel).split(BLOCK):
        bound = n / HALF_STEPS[wire] * sum(float(each[block].abs().max()) for each in contributions) * share
        assert float((owner[block].double() - exact[block]).abs().max()) <= bound * (1 + 1e-5)


@pytest.mark.parametrize("wire", HALF_STEPS)
def test_blocks_round_once_by_at_most_and_up_to_half_a_step(wire: Wire) -> None:
    (values,) = random_tensors(1, 8 * BLOCK, torch.float32)
    kept = values.clone()
    fmt = wire_format(torch.float32, op=None, wire=wire, n=2)
    fmt.publish(kept, torch.empty(fmt.message_numel(values.numel()), dtype=fmt.dtype))
    for before, after in zip(values.split(BLOCK), kept.split(BLOCK), strict=True):
        half_step = float(before.abs().max()) / HALF_STEPS[wire]
        assert 0.9 * half_step < float((after - before).abs().max()) < half_step * (1 + 1e-5)


@pytest.mark.parametrize(
    ("wire", "errors"), [(Wire.INT8, (0.005, 0.009, 0.013, 0.019)), (Wire.INT4, (0.09, 0.16, 0.24, 0.35))]
)
def test_the_error_is_that_of_the_table(wire: Wire, errors: tuple[float, ...]) -> None:
    """As `Wire` states it, and without a bias that would add up over steps."""
    for n, stated in zip((2, 4, 8, 16), errors, strict=True):
        contributions = random_tensors(n, 64 * BLOCK, torch.float32)
        exact = torch.stack(contributions).double().mean(0)
        fmt = wire_format(torch.float32, op=Op.MEAN, wire=wire, n=n)
        got = torch.empty(fmt.message_numel(len(exact)), dtype=fmt.dtype)
        fmt.contribute(contributions[0], got)
        for mine in contributions[1:-1]:
            out = torch.empty_like(got)
            fmt.add_to_message(got, mine, out)
            got = out
        fmt.add_to_mine(got, contributions[-1])
        error = contributions[-1].double() - exact
        assert float(error.norm() / exact.norm()) == pytest.approx(stated, rel=0.1)
        assert abs(float(error.mean())) < 0.01 * float(exact.std())


@pytest.mark.parametrize("wire", HALF_STEPS)
def test_blocks_use_a_scale_of_its_own_per_block(wire: Wire) -> None:
    small, large = torch.full((BLOCK,), 1e-6), torch.full((BLOCK,), 1e6)
    owner, _ = chain([torch.cat([small, large])] * 2, wire_format(torch.float32, op=Op.SUM, wire=wire, n=2))
    torch.testing.assert_close(owner, 2 * torch.cat([small, large]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("wire", HALF_STEPS)
def test_blocks_keep_zeros_and_do_not_hide_what_is_not_finite(wire: Wire) -> None:
    contribution = torch.zeros(3 * BLOCK)
    contribution[BLOCK] = torch.inf
    contribution[2 * BLOCK] = torch.nan
    owner, _ = chain([contribution] * 2, wire_format(torch.float32, op=Op.SUM, wire=wire, n=2))
    assert torch.equal(owner[:BLOCK], torch.zeros(BLOCK))
    assert owner[BLOCK:].isnan().all()


def test_messages_have_the_stated_size() -> None:
    sizes = {wire: wire_format(torch.float32, op=None, wire=wire, n=2).num_bytes(1000) for wire in Wire}
    assert sizes == {Wire.FULL: 4000, Wire.BF16: 2000, Wire.INT8: 1000 + 4 * 4, Wire.INT4: 500 + 4 * 4}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("wire", list(Wire))
@given(max_bytes=st.integers(1000, 5000))
def test_the_largest_piece_fits(wire: Wire, dtype: torch.dtype, max_bytes: int) -> None:
    fmt = wire_format(dtype, op=None, wire=wire, n=2)
    assert 0 < fmt.num_bytes(fmt.piece_numel(max_bytes)) <= max_bytes


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_summed_in_float32_and_rounded_once_per_hop(dtype: torch.dtype, n: int) -> None:
    contributions = random_tensors(n, 4096, dtype)
    expected = (contributions[0].float() * (1 / n)).to(dtype)
    for each in contributions[1:]:
        expected = torch.add(expected.float(), each.float(), alpha=1 / n).to(dtype)
    owner, _ = chain(contributions, wire_format(dtype, op=Op.MEAN, wire=Wire.FULL, n=n))
    torch.testing.assert_close(owner, expected, rtol=0, atol=0)


def test_bf16_wire_sums_in_float32_at_every_hop() -> None:
    contributions = random_tensors(4, 4096, torch.float32)
    expected = contributions[0].bfloat16()
    for each in contributions[1:-1]:
        expected = (expected.float() + each).bfloat16()
    last = expected.float() + contributions[-1]
    owner, _ = chain(contributions, wire_format(torch.float32, op=Op.SUM, wire=Wire.BF16, n=4))
    assert torch.equal(owner, last.bfloat16().float())


def test_averaging_large_float16_does_not_overflow() -> None:
    """Four ranks hold 4e4, and float16 ends at 65504: a sum before the division would be infinite."""
    contributions = [torch.full((100,), 4e4, dtype=torch.float16)] * 4
    owner, _ = chain(contributions, wire_format(torch.float16, op=Op.MEAN, wire=Wire.FULL, n=4))
    assert torch.equal(owner, contributions[0])


@pytest.mark.parametrize(
    ("dtype", "op", "wire", "message"),
    [
        (torch.int64, Op.MEAN, Wire.FULL, "mean of torch.int64"),
        (torch.bool, Op.SUM, Wire.FULL, "torch.bool cannot be summed"),
        (torch.float8_e4m3fn, Op.SUM, Wire.FULL, "cannot be summed"),
        (torch.int32, Op.SUM, Wire.BF16, "carries only float16"),
        (torch.complex64, None, Wire.INT8, "carries only float16"),
    ],
)
def test_what_cannot_be_right_is_refused(dtype: torch.dtype, op: Op | None, wire: Wire, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wire_format(dtype, op=op, wire=wire, n=2)
