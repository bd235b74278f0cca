# SPDX-License-Identifier: Apache-2.0
"""The engine under everything a training loop may do, and the known wrong implementations, planted and seen."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stratagem.collectives import Op, Wire
from stratagem.errors import ConfigError
from stratagem.placement import Placement, global_norm
from stratagem.plugins.zero import Zero1, Zero2, Zero3, ZeroSettings
from stratagem.plugins.zero.bucket import OwnedParameter
from stratagem.plugins.zero.technique import Zero
from tests.plugins import zero_cases as cases

STAGES = {"zero_1": Zero1, "zero_2": Zero2, "zero_3": Zero3}
TINY = ZeroSettings(bucket_mib=4e-4, first_bucket_mib=1e-4, persistence_threshold=0)
on_all_stages = pytest.mark.parametrize("stage", STAGES)


def rows(step: int, rank: int | None = None, *, width: int = 5, number: int = 3) -> Tensor:
    """Samples of one rank, or of all."""
    everything = torch.randn(
        number * dist.get_world_size(), width, dtype=torch.float64, generator=torch.Generator().manual_seed(step)
    )
    return everything if rank is None else everything[rank * number : (rank + 1) * number]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False), nn.Tanh(), nn.Linear(3, 1)).double()


def start(stage: str, module: nn.Module, settings: ZeroSettings = TINY, **options: object) -> tuple[Zero, object]:
    zero, here = STAGES[stage](settings), cases.context(**options)
    zero.apply(module, here)
    return zero, here


# -- planted faults ------------------------------------------------------------------------------------------------


def _sum_for_mean(zero: Zero) -> None:
    original = zero._lane.shard.reduce_scatter
    zero._lane.shard.reduce_scatter = lambda *a, op, **k: original(*a, op=Op.SUM, **k)


def _missing_bucket(zero: Zero) -> None:
    original = zero._gradients._reduce
    victim = next(b for b in zero._gradients.buckets if any(p.shape == (37, 7) for p in b.parameters))

    def reduce(bucket: object, flat: Tensor, owned: Tensor, kept: Tensor | None, adds: bool) -> None:
        if bucket is victim:
            owned.copy_(flat[slice(*victim.span)])
        else:
            original(bucket, flat, owned, kept, adds)

    zero._gradients._reduce = reduce


def _local_norm(zero: Zero) -> None:
    zero.norm_parts = lambda tensors: [(Placement("", tuple(p.shape)), p.grad) for p in tensors if p.grad is not None]


def _norm_of_replicas(zero: Zero) -> None:
    """Counts zeros that stand for nothing as often as there are ranks: a padding that is not neutral."""
    original = zero.norm_parts
    zero.norm_parts = lambda tensors: [(place, g + 0.01 if place.name == "" else g) for place, g in original(tensors)]


def _one_rank_skips(zero: Zero) -> None:
    optimizer = zero._optimizers[0].optimizer
    original, calls = optimizer.step, [0]

    def step(*args: object, **kwargs: object) -> object:
        calls[0] += 1
        if calls[0] == 2 and dist.get_rank() == 1:
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                p.grad = None
        return original(*args, **kwargs)

    optimizer.step = step


def _forgets_to_gather(zero: Zero) -> None:
    zero._lane.shard.all_gather = lambda *_, **__: None


FAULTS = [_sum_for_mean, _missing_bucket, _local_norm, _norm_of_replicas, _one_rank_skips]


@pytest.mark.ranks(2)
@on_all_stages
@pytest.mark.parametrize("fault", [None, *FAULTS])
@pytest.mark.parametrize("make", ["sgd", "adamw"])
def test_planted_faults_are_seen_by_the_parity_check(
    stage: str, fault: Callable[[Zero], None] | None, make: str
) -> None:
    """What every parity test here asserts holds without a fault and fails with each; under AdamW only where it can."""
    module, reference = cases.awkward(), cases.awkward()
    zero, here = start(stage, module)
    optimizer = getattr(cases, make)(module)
    zero.attach([optimizer])
    if fault is not None:
        fault(zero)
    try:
        _, norms, _ = cases.train(module, lambda m: optimizer, zero, here, optimizer=optimizer)
        _, expected, _ = cases.train(reference, getattr(cases, make))
        zero.close()
        cases.assert_same_parameters(module, reference)
        torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected), rtol=1e-9, atol=0)
        seen = False
    except AssertionError:
        seen = True
    assert seen == (fault is not None)
    zero.abort()
    here.abort()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", ["zero_1", "zero_2"])
def test_parameters_that_are_not_gathered_are_seen(stage: str) -> None:
    module, reference = cases.awkward(), cases.awkward()
    zero, here = start(stage, module)
    optimizer = cases.sgd(module)
    zero.attach([optimizer])
    _forgets_to_gather(zero)
    cases.train(module, cases.sgd, zero, here, optimizer=optimizer)
    cases.train(reference, cases.sgd)
    with pytest.raises(AssertionError):
        cases.assert_same_parameters(module, reference)
    zero.abort()
    here.abort()


# -- loops ---------------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Each call uses some branches; the last is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(5, 1) for _ in range(4)).double()

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        return torch.stack([self.branches[i](x).square().mean() for i in order]).sum()


@pytest.mark.ranks(2, 3)
@on_all_stages
@pytest.mark.parametrize("partition", ["flat", "parameter"])
def test_ranks_may_take_different_branches_in_different_order(stage: str, partition: str) -> None:
    """A branch that a rank left out counts as zero there; what nobody used is neither stepped nor decayed. Stage 3
    keeps these whole, since what it fetches it fetches on all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module, reference = Branches(), Branches()
    settings = ZeroSettings(bucket_mib=1e-4, first_bucket_mib=1e-5, partition=partition)
    zero, here = start(stage, module, settings)

    def make(m: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    mine, plain = make(module), make(reference)
    zero.attach([mine])
    for step in range(4):
        orders = [[step % 2, 1], [2, 1], [1, step % 2]][:size]
        module(rows(step, rank), orders[rank]).backward()
        sum(reference(rows(step, r), orders[r]) / size for r in range(size)).backward()
        for optimizer in (mine, plain):
            optimizer.step()
            optimizer.zero_grad()
    zero.close()
    cases.assert_same_parameters(module, reference)
    here.close()


@pytest.mark.ranks(2)
@on_all_stages
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("accumulation", ["partition", "whole"])
def test_backward_passes_add_up_until_gradients_are_cleared(stage: str, set_to_none: bool, accumulation: str) -> None:
    """Two reduced passes and an unreduced one per step, then a pass that is thrown away."""
    rank = dist.get_rank()
    module, reference = mlp(), mlp()
    settings = ZeroSettings(bucket_mib=4e-4, persistence_threshold=0, accumulation=accumulation)
    zero, here = start(stage, module, settings)

    def make(m: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    mine, plain = make(module), make(reference)
    zero.attach([mine])
    for step in range(3):
        module(rows(step, rank)).mean().backward()
        with zero.no_sync():
            module(rows(step + 10, rank)).square().mean().backward()
        out = module(rows(step + 20, rank))
        out.mean().backward(retain_graph=True)
        out.square().mean().backward()
        for seed, square in ((step, 0), (step + 10, 1), (step + 20, 0), (step + 20, 1)):
            out = reference(rows(seed))
            (out.square() if square else out).mean().backward()
        for optimizer in (mine, plain):
            optimizer.step()
            optimizer.zero_grad(set_to_none)
        module(rows(step + 30, rank)).mean().backward()
        mine.zero_grad(set_to_none)
    zero.close()
    cases.assert_same_parameters(module, reference)
    here.close()


@pytest.mark.ranks(2, 3)
@on_all_stages
@pytest.mark.parametrize("reduced", [True, False])
def test_what_one_optimizer_cleared_is_not_added_to_what_another_gathers(stage: str, reduced: bool) -> None:
    """One steps and clears after every pass, one after every second; in stage 3 their small modules share memory."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module, reference = Branches(), Branches()
    zero, here = start(stage, module, ZeroSettings(bucket_mib=1.0))
    often, seldom = (
        [
            torch.optim.SGD(m.branches[k].parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
            for m in (module, reference)
        ]
        for k in (0, 1)
    )
    zero.attach([often[0], seldom[0]])
    for step in range(6):
        with nullcontext() if reduced or step % 2 else zero.no_sync():
            module(rows(step, rank), [0, 1]).backward()
        sum(reference(rows(step, r), [0, 1]) / size for r in range(size)).backward()
        if reduced or step % 2:
            for optimizer in often:
                optimizer.step()
                optimizer.zero_grad()
        if step % 2:
            for optimizer in seldom:
                optimizer.step()
                optimizer.zero_grad()
    zero.close()
    cases.assert_same_parameters(module, reference)
    here.close()


@pytest.mark.ranks(2)
@on_all_stages
def test_two_optimizers_take_turns(stage: str) -> None:
    """As in a GAN: the other player's parameters are switched off through its optimizer's groups, and not sent."""
    rank = dist.get_rank()
    players = [nn.ModuleList([mlp(), nn.Linear(1, 5).double()]) for _ in range(2)]
    zero, here = start(stage, players[0])
    optimizers = [
        [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1) for part in module]
        for module in players
    ]
    zero.attach(optimizers[0])
    for step in range(4):
        turn = step % 2
        for module, (first, second), data in zip(players, optimizers, (rows(step, rank), rows(step)), strict=True):
            acting, waiting = (first, second) if turn else (second, first)
            for optimizer, on in ((acting, True), (waiting, False)):
                for p in (p for group in optimizer.param_groups for p in group["params"]):
                    p.requires_grad = on
            assert [p.requires_grad for p in module.parameters()].count(True) == sum(
                len(group["params"]) for group in acting.param_groups
            )
            acting.zero_grad()
            zero.begin()
            before = here.traffic.total(op="reduce_scatter")
            module[1](module[0](data)).square().mean().backward()
            zero.finish()
            if module is players[0]:
                trained = sum(p.numel() for p in module.parameters() if p.requires_grad) * 8
                sent = here.traffic.total(op="reduce_scatter") - before
                assert abs(sent.num_bytes - trained / 2) <= 8 * len(list(module.parameters()))
            acting.step()
    zero.close()
    cases.assert_same_parameters(players[0], players[1])
    here.close()


@pytest.mark.ranks(2)
@on_all_stages
def test_parameters_may_be_unfrozen_and_join_an_optimizer_later(stage: str) -> None:
    rank, modules = dist.get_rank(), [mlp(), mlp()]
    zero, here = start(stage, modules[0])
    optimizers = []
    for module in modules:
        module[0].requires_grad_(False)
        module[2].requires_grad_(False)
        trained = [*module[0].parameters(), *module[4].parameters()]
        optimizers.append(torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.1))
    zero.attach(optimizers[:1])
    for step in range(4):
        for module, optimizer, data in zip(modules, optimizers, (rows(step, rank), rows(step)), strict=True):
            module[0].requires_grad_(step > 0)
            if step == 2:
                module[2].requires_grad_(True)
                optimizer.add_param_group({"params": list(module[2].parameters()), "lr": 0.2})
            zero.begin()
            module(data).square().mean().backward()
            zero.finish()
            optimizer.step()
            optimizer.zero_grad()
    zero.close()
    cases.assert_same_parameters(*modules)
    here.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", ["zero_1", "zero_2"])
def test_buffers_follow_rank_zero(stage: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    module.register_buffer("table", torch.randn(100_000))
    zero, here = start(stage, module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    zero.attach([optimizer])
    before = here.traffic.total()
    module(rows(0, dist.get_rank())).sum().backward()
    assert (here.traffic.total() - before).num_bytes < 10_000  # the table stays at home
    cases.assert_ranks_agree(list(module.buffers()))
    expected = nn.BatchNorm1d(4).double()
    expected(nn.functional.linear(rows(0, 0), module[0].weight, module[0].bias))
    torch.testing.assert_close(module[1].running_mean, expected.running_mean)
    zero.close()
    here.close()


@pytest.mark.ranks(2)
def test_stage_1_sends_once_however_much_is_accumulated_and_stage_2_as_it_says() -> None:
    sent = {}
    for stage, accumulation in (("zero_1", "partition"), ("zero_2", "whole"), ("zero_2", "partition")):
        module = mlp()
        zero, here = start(stage, module, ZeroSettings(accumulation=accumulation, unused_parameters="none"))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        zero.attach([optimizer])
        for micro_batches in (1, 3):
            before = here.traffic.total(op="reduce_scatter")
            for k in range(micro_batches):
                if k < micro_batches - 1:
                    with zero.no_sync():
                        module(rows(k, dist.get_rank())).mean().backward()
                else:
                    module(rows(k, dist.get_rank())).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            sent[stage, accumulation, micro_batches] = (here.traffic.total(op="reduce_scatter") - before).num_bytes
        zero.close()
        here.close()
    for stage, accumulation, factor in (("zero_1", "partition", 1), ("zero_2", "whole", 1), ("zero_2", "partition", 3)):
        assert sent[stage, accumulation, 3] == factor * sent[stage, accumulation, 1] > 0


@pytest.mark.ranks(2)
@on_all_stages
def test_a_scaler_skips_on_all_ranks_when_one_owns_an_overflow(stage: str) -> None:
    """The infinity lies in one element, so one rank owns it; steps, scales and step counts stay equal nevertheless."""
    module = mlp().float()
    zero, here = start(stage, module)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    zero.attach([optimizer])
    zero.agree_on_overflow = True
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    scales = []
    for step in range(5):
        loss = module(rows(step, dist.get_rank()).float()).mean()
        if step == 2:
            loss = loss + dict(module.named_parameters())["4.weight"][0, 1] * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales == [4.0, 8.0, 4.0, 4.0, 8.0]
    everyone: list[object] = [None, None]
    steps = {float(entries["step"]) for entries in optimizer.state.values()}
    dist.all_gather_object(everyone, (scales, steps))
    assert everyone[0] == everyone[1] == (scales, {4.0})
    zero.close()
    cases.assert_ranks_agree(list(module.parameters()))
    assert all(p.isfinite().all() for p in module.parameters())
    here.close()


@pytest.mark.ranks(3)
@on_all_stages
def test_a_rank_that_owns_nothing_scales_as_the_others_do(stage: str) -> None:
    """One matrix that is not cut: two of the three ranks have nothing for their scalers to look at."""
    module = nn.Linear(5, 3, bias=False)
    zero, here = start(stage, module, ZeroSettings(partition="parameter", persistence_threshold=0))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    zero.attach([optimizer])
    zero.agree_on_overflow = True
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    scales = []
    for step in range(4):
        loss = module(rows(step, dist.get_rank()).float()).mean() * (float("inf") if step == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales == [4.0, 8.0, 4.0, 4.0]
    state = zero.optimizer_state(optimizer)
    if dist.get_rank() == 0:
        assert state["state"][0]["exp_avg"].shape == (3, 5)
        assert float(state["state"][0]["step"]) == 3.0
    zero.close()
    cases.assert_ranks_agree(list(module.parameters()))
    here.close()


@pytest.mark.ranks(2)
def test_an_overflow_is_told_whatever_the_layout_of_a_gradient() -> None:
    """Each rank owns one of two channels-last weights; an infinity in one of them is seen by both."""
    module = nn.Sequential(nn.Conv2d(4, 4, 3, bias=False), nn.Conv2d(4, 4, 3, bias=False))
    zero, here = start("zero_2", module.to(memory_format=torch.channels_last), ZeroSettings(partition="parameter"))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    zero.attach([optimizer])
    zero.agree_on_overflow = True
    weights = list(module.parameters())
    (weights[0].sum() * float("inf") + weights[1].sum()).backward()
    found = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    assert [gradient.is_contiguous() for gradient in found] == [False]
    assert not found[0].isfinite().all()
    zero.close()
    here.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "by_strategy"), [("zero_1", False), ("zero_2", True), ("zero_3", False)])
def test_a_backward_that_fails_leaves_nothing_behind(stage: str, by_strategy: bool) -> None:
    """It fails when the first gradients are on their way. The caller goes on with the next batch, or is told to clear
    where a part of it was added to what he had."""
    modules = [mlp(), mlp()]
    zero, here = start(stage, modules[0])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in modules]
    zero.attach(optimizers[:1])

    def backward(step: int, *, fails: bool = False) -> None:
        hidden = modules[0][:4](rows(step, dist.get_rank()))
        if fails:
            modules[0][2].weight.register_hook(fail)
        loss = modules[0][4](hidden).square().mean()
        if by_strategy:
            zero.begin()
        loss.backward()
        if by_strategy:
            zero.finish()

    def fail(gradient: Tensor) -> Tensor:
        if failing:
            raise MemoryError("out of memory")
        return gradient

    for step in range(4):
        failing = step in (1, 2)
        if step == 1:
            with pytest.raises(MemoryError):
                backward(step, fails=True)
            continue  # not even cleared
        if step == 2:
            failing = False
            backward(step)
            failing = True
            with pytest.raises(MemoryError):
                backward(step)
            failing = False
            with pytest.raises(RuntimeError, match="zero_grad"):
                backward(step)
            optimizers[0].zero_grad()
        backward(step)
        modules[1](rows(step)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    zero.close()
    cases.assert_same_parameters(*modules)
    here.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", ["zero_1", "zero_2"])
@pytest.mark.parametrize("look", ["forward", "name", "list", "state_dict"])
def test_late_parameters_are_there_when_anybody_looks(stage: str, look: str) -> None:
    """The step returns while a slowed-down gather is still on its way; whoever looks gets the new values."""
    module, reference = mlp(), mlp()
    zero, here = start(stage, module, ZeroSettings(gather="forward"))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, reference)]
    zero.attach(optimizers[:1])
    gather = zero._lane.shard.all_gather

    def slow_gather(*args: object, **kwargs: object) -> None:
        time.sleep(0.2)
        gather(*args, **kwargs)

    zero._lane.shard.all_gather = slow_gather
    module(rows(0, dist.get_rank())).mean().backward()
    reference(rows(0)).mean().backward()
    begin = time.monotonic()
    for optimizer in optimizers:
        optimizer.step()
    assert time.monotonic() - begin < 0.15
    expected = reference(rows(1))
    if look == "forward":
        torch.testing.assert_close(module(rows(1)), expected, rtol=1e-12, atol=0)
    elif look == "name":
        torch.testing.assert_close(module[2].weight, reference[2].weight, rtol=1e-12, atol=1e-15)
    elif look == "list":
        for p, q in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-15)
    else:
        for name, value in module.state_dict().items():
            torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-12, atol=1e-15)
    assert time.monotonic() - begin >= 0.2
    zero.close()
    assert all(type(m._parameters) is dict and not m._forward_pre_hooks for m in module.modules())
    here.close()


@pytest.mark.ranks(2)
@on_all_stages
def test_offloading_on_the_cpu_changes_nothing_and_says_so(stage: str) -> None:
    module, zero, here = mlp(), STAGES[stage](ZeroSettings(offload="cpu")), cases.context()
    with pytest.warns(UserWarning, match="offload: cpu changes nothing"):
        zero.apply(module, here)
    zero.attach([torch.optim.SGD(module.parameters(), lr=0.1)])
    assert all(bucket.master is None for bucket in zero._buckets)
    zero.close()
    here.close()


@pytest.mark.ranks(2)
@on_all_stages
def test_the_reduced_gradient_can_be_had_whole(stage: str) -> None:
    module, reference = mlp(), mlp()
    zero, here = start(stage, module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    zero.attach([optimizer])
    module(rows(0, dist.get_rank())).square().mean().backward()
    reference(rows(0)).square().mean().backward()
    assert all(p.grad is None for p in module.parameters())  # nobody takes a part for the whole
    for p, q in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(zero.full_gradient(p), q.grad, rtol=1e-12, atol=1e-14)
    optimizer.zero_grad()
    assert all(zero.full_gradient(p) is None for p in module.parameters())
    zero.close()
    here.close()


@pytest.mark.ranks(2, 4)
@on_all_stages
@pytest.mark.parametrize(
    ("wire", "narrow", "bound"),
    [(Wire.BF16, Wire.BF16, 2**-8), (Wire.INT8, Wire.INT8, 1 / 127), (Wire.INT4, Wire.INT8, 1 / 7)],
)
def test_narrow_wires_err_within_bounds(stage: str, wire: Wire, narrow: Wire, bound: float) -> None:
    """Each hop rounds a partial mean of gradients; all compute with the same rounded values, owners step exact ones."""
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    module = nn.Linear(64, 33)
    exact = {name: p.detach().clone() for name, p in module.named_parameters()}
    settings = ZeroSettings(gradient_wire=wire, parameter_wire=narrow, persistence_threshold=0)
    zero, here = start(stage, module, settings)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    zero.attach([optimizer])
    parts = [torch.randn(8, 64, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    module(parts[rank]).sum().backward()
    means = {"weight": torch.stack([x.sum(0).expand(33, 64) for x in parts]), "bias": torch.full((size, 33), 8.0)}
    for name, p in module.named_parameters():
        found = zero.full_gradient(p)
        error = float((found - means[name].mean(0)).abs().max())
        assert error <= size * bound * float(means[name].abs().sum(0).max()) / size
        exact[name] -= 0.5 * found
    optimizer.step()
    optimizer.zero_grad()
    x = torch.eye(64)
    for name, p in module.named_parameters():
        owned = next(q for group in optimizer.param_groups for q in group["params"] if q.whole is p)
        piece = zero.placement_of(owned).flat
        mine = exact[name].flatten()[slice(*piece)]
        torch.testing.assert_close(owned.detach().flatten(), mine, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        out = module(x)
    cases.assert_ranks_agree([out])
    expected = nn.functional.linear(x, exact["weight"], exact["bias"])
    largest = float(exact["weight"].abs().max() + exact["bias"].abs().max())
    error = float((out - expected).abs().max())
    assert 0 < error <= 2 * bound * max(largest, 1.0)
    zero.close()
    here.close()


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@on_all_stages
def test_a_module_that_changes_under_the_run_is_refused(stage: str) -> None:
    module, here = mlp(), cases.context()
    zero = STAGES[stage](ZeroSettings())  # small modules: whole in stage 3, too
    zero.apply(module, here)
    zero.attach([torch.optim.SGD(module.parameters(), lr=0.1)])
    kept = module[0].weight.data
    module[0].weight.data = kept.clone()
    with pytest.raises(ConfigError, match=r"the memory of one of .*0\.weight.* was exchanged"):
        zero.begin()
    module[0].weight.data = kept
    module.extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(ConfigError, match=r"parameter 'extra' was added or replaced"):
        zero.begin()
    del module.extra
    zero.begin()
    zero.abort()
    here.abort()


@pytest.mark.ranks(2)
@on_all_stages
def test_optimizers_that_do_not_fit_the_module_are_refused(stage: str) -> None:
    module = mlp()
    zero, here = start(stage, module)
    stranger = nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(ConfigError, match=r"optimizer 0 holds a parameter of shape \(2, 3\)"):
        zero.attach([torch.optim.SGD([stranger], lr=0.1)])
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(ConfigError, match="in two optimizers or groups"):
        zero.attach(optimizers)
    zero.abort()
    here.abort()


@pytest.mark.ranks(2)
@on_all_stages
def test_sparse_gradients_and_broken_promises_are_refused(stage: str) -> None:
    module = nn.ModuleList([nn.Embedding(4, 3, sparse=True), nn.Linear(3, 3)])
    settings = ZeroSettings(unused_parameters="none", persistence_threshold=0)
    zero, here = start(stage, module, settings)
    zero.attach([torch.optim.SGD(module.parameters(), lr=0.1)])
    with pytest.raises(ConfigError, match=r"received no gradient.*detect"):
        module[1](torch.ones(1, 3)).sum().backward()
    with pytest.raises(ConfigError, match="sparse=False"):
        module[0](torch.tensor([1])).sum().backward()
    zero.abort()
    here.abort()


class Shared(nn.Module):
    """One layer used twice, each time in a reentrant checkpoint: its gradient arrives in two nested backward passes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.last = nn.Linear(5, 5).double(), nn.Linear(5, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return self.last(x).square().mean()


@pytest.mark.ranks(2)
@on_all_stages
@pytest.mark.parametrize("overlap", [True, False])
def test_a_gradient_that_grows_after_it_left_is_never_wrong(stage: str, overlap: bool) -> None:
    module, reference = Shared(), Shared()
    settings = ZeroSettings(bucket_mib=4e-4, first_bucket_mib=1e-5, overlap=overlap, persistence_threshold=0)
    zero, here = start(stage, module, settings)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    zero.attach([optimizer])
    zero.begin()
    if overlap:
        with pytest.raises(RuntimeError, match="overlap: false"):
            module(rows(0, dist.get_rank())).backward()
        zero.abort()
        here.abort()
        return
    module(rows(0, dist.get_rank())).backward()
    zero.finish()
    reference(rows(0)).backward()
    for p, q in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(zero.full_gradient(p), q.grad, rtol=1e-10, atol=1e-14)
    zero.close()
    here.close()


# -- overlap -------------------------------------------------------------------------------------------------------


class Sleepy(torch.autograd.Function):
    """Backward takes its time, and writes down when it ended."""

    @staticmethod
    def forward(ctx, x: Tensor, ends: list[float]) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.ends = ends
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        time.sleep(0.05)
        ctx.ends.append(time.monotonic())
        return grad, None


@pytest.mark.ranks(2)
@on_all_stages
def test_buckets_leave_while_backward_still_runs(stage: str) -> None:
    """Four layers, each with 50 ms of backward and, on a slowed-down ring, 40 ms of sending: in a row 360 ms."""
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
    layer_mib = 65 * 64 * 4 / 2**20
    cap = 1.01 * layer_mib * (1 if stage == "zero_1" else 2)
    settings = ZeroSettings(bucket_mib=cap, first_bucket_mib=cap)
    zero, here = start(stage, layers, settings)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    zero.attach([optimizer])
    starts: list[float] = []
    send = zero._lane.shard.reduce_scatter

    def slow_send(*args: object, **kwargs: object) -> object:
        starts.append(time.monotonic())
        time.sleep(0.04)
        return send(*args, **kwargs)

    zero._lane.shard.reduce_scatter = slow_send
    ends: list[float] = []
    x = torch.randn(8, 64, requires_grad=True)
    for layer in layers:
        x = layer(Sleepy.apply(x, ends))
    begin = time.monotonic()
    x.sum().backward()
    total = time.monotonic() - begin
    assert len(starts) == 4
    assert starts[0] < ends[0] < starts[-1]
    assert total < 4 * 0.05 + 4 * 0.04
    zero.close()
    here.close()


def test_pieces_speak_for_their_parameters() -> None:
    whole = nn.Parameter(torch.zeros(4))
    piece = OwnedParameter.of(torch.zeros(0), whole)
    piece.requires_grad = False
    assert not whole.requires_grad
    piece.requires_grad_(True)
    assert whole.requires_grad
    assert piece.requires_grad
    norm = global_norm([(Placement("w", (4,)), torch.ones(4))], reduce=lambda *_: None)
    assert float(norm) == 2.0
