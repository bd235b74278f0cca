# SPDX-License-Identifier: Apache-2.0
"""What the stages send and hold: by the kernel's count of bytes, and by unique storages."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stratagem.plugins.zero import Zero1, Zero2, Zero3, ZeroSettings
from stratagem.plugins.zero.bucket import OwnedParameter
from stratagem.testing import WireBytes, held_bytes, live_tensor_bytes, process_memory
from tests.plugins import zero_cases as cases

STAGES = {"zero_1": Zero1, "zero_2": Zero2, "zero_3": Zero3}
WIDTH, DEPTH = 96, 8
WIDE = 256


class Stack(nn.Module):
    """Blocks of one size. The input requires a gradient, as that of an embedding does: every block needs its weight."""

    def __init__(self, depth: int = DEPTH, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    width = next(module.parameters()).shape[1]
    module(torch.randn(4, width, requires_grad=True)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("stage", "rounds"), [("zero_1", 2), ("zero_2", 2), ("zero_3", 3)])
def test_bytes_on_the_wire_are_those_of_the_formula(stage: str, rounds: int) -> None:
    size = dist.get_world_size()
    torch.manual_seed(0)
    module = Stack(12, WIDE)
    settings = ZeroSettings(bucket_mib=1.0)
    zero, here = STAGES[stage](settings), cases.context(transport="p2p")
    zero.apply(module, here)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    zero.attach([optimizer])
    _step(module, optimizer)  # sockets open
    dist.barrier()
    with WireBytes() as wire:
        _step(module, optimizer)
        dist.barrier()
    sent = wire.by_rank()
    parameters = sum(p.numel() for p in module.parameters()) * 4
    expected = rounds * (size - 1) / size * parameters
    assert abs(sum(sent) - expected) <= 0.01 * expected, (sum(sent) / parameters, expected / parameters)
    assert abs(sum(zero.wire_bytes_per_step().values()) - expected) <= 0.001 * expected
    assert sum(sent) - sent[(dist.get_rank() + 1) % size] <= 0.005 * expected  # a ring, but for barriers
    zero.close()
    here.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("wire", "ratio"), [("bf16", 0.5), ("int8", 0.254), ("int4", 0.129)])
def test_narrow_gradients_are_as_much_smaller_as_stated(wire: str, ratio: float) -> None:
    """By the kernel's count, and by the strategy's own formula; parameters travel in full beside them."""
    torch.manual_seed(0)
    module = Stack(6, WIDE)
    zero, here = Zero2(ZeroSettings(gradient_wire=wire)), cases.context(transport="p2p")
    zero.apply(module, here)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    zero.attach([optimizer])
    _step(module, optimizer)
    dist.barrier()
    with WireBytes() as measured:
        _step(module, optimizer)
        dist.barrier()
    expected = (1 + ratio) / 2 * sum(p.numel() for p in module.parameters()) * 4
    assert sum(measured.by_rank()) == pytest.approx(expected, rel=0.01)
    assert sum(zero.wire_bytes_per_step().values()) == pytest.approx(expected, rel=0.005)
    zero.close()
    here.close()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("stage", "whole", "divided"), [("zero_1", 8, 8), ("zero_2", 4, 12), ("zero_3", 0, 16)])
def test_held_bytes_are_those_of_the_formula(stage: str, whole: int, divided: int) -> None:
    """fp32 Adam, per parameter: parameters and gradients 4 each, the state 8; taken before the step."""
    size = dist.get_world_size()
    here, live, formula = cases.context(), [], []
    for depth in (DEPTH, 4 * DEPTH):
        before = live_tensor_bytes()
        module = Stack(depth)
        zero = STAGES[stage](ZeroSettings(bucket_mib=0.2))
        zero.apply(module, here)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        zero.attach([optimizer])
        _step(module, optimizer)
        module(torch.randn(4, WIDTH, requires_grad=True)).backward()
        groups = [p for group in optimizer.param_groups for p in group["params"]]
        held = held_bytes(list(module.parameters()), groups, [p.grad for p in groups if p.grad is not None], optimizer)
        numel = sum(p.numel() for p in module.parameters())
        expected = numel * (whole + divided / size)
        assert abs(held - expected) <= 0.02 * expected, (held / numel, whole + divided / size)
        stated = zero.held_bytes()
        assert abs(stated["parameters"] + stated["gradients"] + 2 * stated["optimizer"] - expected) <= 0.01 * expected
        live.append(live_tensor_bytes() - before)
        formula.append(expected)
        zero.close()
        del module, optimizer, zero, groups
    assert live[1] - live[0] <= 1.02 * (formula[1] - formula[0])  # nothing that grows with the model hides elsewhere
    here.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", ["zero_2", "zero_3"])
def test_gradients_in_backward_never_exceed_the_share_and_a_bucket(stage: str) -> None:
    """Counted at every arrival: what gradients hold anywhere, autograd's own about to be taken over included."""
    size = dist.get_world_size()
    torch.manual_seed(0)
    module = Stack(24)
    bucket = 6 * (WIDTH * WIDTH + WIDTH) * 4
    zero, here = STAGES[stage](ZeroSettings(bucket_mib=bucket / 2**20, first_bucket_mib=1)), cases.context()
    zero.apply(module, here)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    zero.attach([optimizer])
    _step(module, optimizer)
    largest = 0

    def watch(_: Tensor) -> None:
        nonlocal largest
        engine = zero._gradients
        alive = [p.grad for p in module.parameters() if p.grad is not None]
        alive += [b.gradient for b in engine.buckets if b.gradient is not None]
        alive += [b.owned for b in engine.buckets if b.owned is not None]
        alive += [flat for free in engine._pool._free.values() for flat in free]
        alive += [flat for row in engine._pool._travelling.values() for _, flat in row]
        alive += list(engine._pool._lent.values())
        largest = max(largest, held_bytes(alive))

    handles = [p.register_post_accumulate_grad_hook(watch) for p in module.parameters()]
    module(torch.randn(4, WIDTH, requires_grad=True)).backward()
    gradients = sum(p.numel() for p in module.parameters()) * 4
    assert gradients / size < largest <= gradients / size * 1.001 + bucket
    assert largest < 0.8 * gradients
    for handle in handles:
        handle.remove()
    zero.close()
    here.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", ["zero_2", "zero_3"])
def test_gradients_that_travel_alone_wait_for_a_slow_wire(stage: str) -> None:
    """A gradient larger than a bucket travels from where autograd put it, and nothing held backward back: behind a
    slow wire they piled up to the whole model's. Now one travels at a time."""
    module = Stack(8)
    zero, here = STAGES[stage](ZeroSettings(bucket_mib=1e-3, first_bucket_mib=1e-3)), cases.context()
    zero.apply(module, here)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    zero.attach([optimizer])
    _step(module, optimizer)
    send, waiting = zero._lane.shard.reduce_scatter, []

    def slow_send(*args: object, **kwargs: object) -> object:
        time.sleep(0.02)
        return send(*args, **kwargs)

    zero._lane.shard.reduce_scatter = slow_send
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: waiting.append(sum(not future.done() for future in zero._gradients._futures))
        )
    module(torch.randn(4, WIDTH, requires_grad=True)).backward()
    assert max(waiting) <= 3, waiting  # a weight, and biases, which have buffers of their own
    assert len(zero._gradients.buckets) > 8
    zero.close()
    here.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("limit", ["one_ahead", "none_ahead", "no_room"])
def test_stage_3_has_few_blocks_at_a_time(limit: str) -> None:
    """In forward and in backward: the block in use, and the one ahead if asked for and if there is room."""
    torch.manual_seed(0)
    module = Stack(12)
    block = (WIDTH * WIDTH + WIDTH) * 4
    settings = {
        "one_ahead": ZeroSettings(prefetch=1),
        "none_ahead": ZeroSettings(prefetch=0),
        "no_room": ZeroSettings(prefetch=4, max_live_mib=1.5 * block / 2**20),
    }[limit]
    zero, here = Zero3(settings), cases.context()
    zero.apply(module, here)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    zero.attach([optimizer])
    for _ in range(2):
        _step(module, optimizer)
    in_forward: list[int] = []
    in_backward: list[int] = []

    def count(into: list[int]) -> None:
        memory = [p.detach() for p in module.parameters()] + [f for unit in zero._fetcher.units for f in unit.memory]
        into.append(held_bytes(memory) // block)

    linears = [each for each in module.modules() if isinstance(each, nn.Linear)]
    handles = [each.register_forward_pre_hook(lambda *_: count(in_forward)) for each in linears]
    handles += [p.register_post_accumulate_grad_hook(lambda _: count(in_backward)) for p in module.parameters()]
    _step(module, optimizer)
    most = 2 if limit == "one_ahead" else 1
    assert max(in_forward) == most  # it does fetch ahead where it may, and never more
    assert min(in_forward) >= 1
    assert max(in_backward) <= most + 1  # the one whose last gradient is on its way
    for handle in handles:
        handle.remove()
    assert held_bytes([p.detach() for p in module.parameters()]) <= 4 * 2 * 12  # a NaN each: nothing stays behind
    zero.close()
    here.close()


@pytest.mark.ranks(2)
def test_stage_3_leaves_no_weights_with_autograd() -> None:
    """No Python object shows what a graph holds, so the kernel is asked: ten blocks of 4 MiB, at the last forward."""
    torch.manual_seed(0)
    width, depth = 1024, 10
    module = Stack(depth, width)
    zero, here = Zero3(), cases.context(transport="p2p")
    zero.apply(module, here)
    zero.attach([torch.optim.SGD(module.parameters(), lr=1e-3)])
    x = torch.randn(1, width, requires_grad=True)
    module(x).backward()
    found: list[int] = []
    last = [each for each in module.modules() if isinstance(each, nn.Linear)][-1]
    handle = last.register_forward_pre_hook(lambda *_: found.append(process_memory().private))
    before = process_memory().private
    loss = module(x)
    block = (width * width + width) * 4
    assert found[0] - before < 3.5 * block  # this one, the one ahead, and crumbs
    handle.remove()
    loss.backward()
    zero.close()
    here.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_have_neither_gradient_memory_nor_state(stage: str) -> None:
    module = Stack()
    module.requires_grad_(False)
    module.blocks[0].requires_grad_(True)
    zero, here = STAGES[stage](), cases.context()
    zero.apply(module, here)
    optimizer = torch.optim.AdamW(module.parameters())
    zero.attach([optimizer])
    _step(module, optimizer)
    mine = [p for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]
    assert {id(p.whole) for p in mine} <= {id(p) for p in module.blocks[0].parameters()}
    trained = sum(p.numel() for p in module.blocks[0].parameters())
    held = [b.gradient for b in zero._buckets] + [b.owned for b in zero._buckets]
    assert held_bytes([t for t in held if t is not None]) <= trained * 4
    assert all(isinstance(p, OwnedParameter) for group in optimizer.param_groups for p in group["params"])
    zero.close()
    here.close()
