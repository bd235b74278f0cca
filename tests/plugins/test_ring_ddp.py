# SPDX-License-Identifier: Apache-2.0
"""Ring DDP's engine in plain torch: the known wrong implementations of gradient averaging, one test each."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stratagem.collectives import Wire
from stratagem.errors import ConfigError
from stratagem.mesh import MeshShape
from stratagem.plugins.ring_ddp import RingDDP, RingDDPSettings
from stratagem.technique import Context

TINY = RingDDPSettings(bucket_mib=1e-4, first_bucket_mib=1e-5)
"""About a hundred bytes: nearly every parameter has a bucket of its own."""


def context(**options: object) -> Context:
    size = dist.get_world_size()
    return Context(MeshShape.fit(size), dist.get_rank(), torch.device("cpu"), timeout=timedelta(seconds=20), **options)


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False), nn.Tanh(), nn.Linear(3, 1)).double()


def rows(n: int, *, rank: int | None = None) -> Tensor:
    """`n` samples per rank; those of one rank, or of all ranks."""
    everything = torch.randn(n * dist.get_world_size(), 5, dtype=torch.float64, generator=torch.manual_seed(7))
    return everything if rank is None else everything[rank * n : (rank + 1) * n]


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for mine, reference in zip(found, expected, strict=True):
        assert (mine is None) == (reference is None)
        if mine is not None:
            torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-14)


def assert_replicas_agree(tensors: list[Tensor | None]) -> None:
    everyone: list[list[Tensor | None]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, tensors)
    for other in everyone:
        for mine, theirs in zip(everyone[0], other, strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("transport", ["shared_memory", "p2p"])
@pytest.mark.parametrize(
    "settings", [TINY, RingDDPSettings(), RingDDPSettings(unused_parameters="none", overlap=False)]
)
def test_gradients_are_those_of_one_process(transport: str, settings: RingDDPSettings) -> None:
    rank = dist.get_rank()
    module, reference = mlp(seed=rank), mlp(seed=0)
    ring, here = RingDDP(settings), context(transport=transport)
    ring.apply(module, here)  # rank 0's weights reach everyone
    for _ in range(3):
        for model, data in ((module, rows(4, rank=rank)), (reference, rows(4))):
            model.zero_grad()
            model(data).square().mean().backward()
        assert_same(gradients(module), gradients(reference))
        assert_replicas_agree(gradients(module))
        for model in (module, reference):
            torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1).step()
    ring.close()
    here.close()


@pytest.mark.ranks(3)
def test_the_backend_never_reduces_gradients() -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the backend's own collective was called")

    module, ring, here = mlp(), RingDDP(TINY), context(transport="p2p")
    ring.apply(module, here)
    names = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_gather", "all_gather_into_tensor")
    kept = {name: getattr(dist, name) for name in names}
    try:
        for name in names:
            setattr(dist, name, refuse)
        module(rows(2, rank=dist.get_rank())).sum().backward()
    finally:
        for name, original in kept.items():
            setattr(dist, name, original)
    ring.close()
    here.close()


@pytest.mark.ranks(2, 3)
def test_accumulated_gradients_are_averaged_once_and_sent_once() -> None:
    rank = dist.get_rank()
    module, reference = mlp(), mlp()
    ring, here = RingDDP(TINY), context()
    ring.apply(module, here)
    sent = []
    for micro_batches in (1, 3):
        before = here.traffic.total().num_bytes
        module.zero_grad()
        reference.zero_grad()
        for k in range(micro_batches):
            data = rows(2 * (k + 1), rank=rank)
            if k < micro_batches - 1:
                with ring.no_sync():
                    module(data).square().mean().backward()
            else:
                module(data).square().mean().backward()
            reference(rows(2 * (k + 1))).square().mean().backward()
        assert_same(gradients(module), gradients(reference))
        sent.append(here.traffic.total().num_bytes - before)
    assert sent[0] == sent[1] > 0
    ring.close()
    here.close()


class Branches(nn.Module):
    """Each call uses one branch; `never` is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(5, 1) for _ in range(4)).double()
        self.never = nn.Linear(5, 1).double()

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        return torch.stack([self.branches[i](x).square().mean() for i in order]).sum()


@pytest.mark.ranks(2, 3)
def test_ranks_may_take_different_branches_in_different_order() -> None:
    """Rank 0 goes 0, 1; rank 1 goes 2, 1; the average counts a branch that a rank left out as zero; what nobody used
    keeps no gradient, so that weight decay leaves it alone. In the next step other branches are used."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module, reference, ring, here = Branches(), Branches(), RingDDP(TINY), context()
    ring.apply(module, here)
    for step in range(4):
        orders = [[step % 2, 1], [2, 1], [1, step % 2]][:size]
        module.zero_grad()
        reference.zero_grad()
        module(rows(2, rank=rank), orders[rank]).backward()
        sum(reference(rows(2, rank=r), orders[r]) / size for r in range(size)).backward()
        assert_same(gradients(module), gradients(reference))
        assert module.never.weight.grad is None
        assert module.branches[3].weight.grad is None
        assert_replicas_agree(gradients(module))
    ring.close()
    here.close()


@pytest.mark.ranks(2)
def test_a_promise_that_all_are_used_is_checked() -> None:
    module, ring, here = Branches(), RingDDP(RingDDPSettings(unused_parameters="none")), context()
    ring.apply(module, here)
    with pytest.raises(ConfigError, match=r"received no gradient.*detect"):
        module(rows(2, rank=dist.get_rank()), [0]).backward()
    ring.abort()
    here.abort()


@pytest.mark.ranks(2)
def test_a_branch_used_only_in_an_earlier_micro_batch_still_counts() -> None:
    rank = dist.get_rank()
    module, reference, ring, here = Branches(), Branches(), RingDDP(TINY), context()
    ring.apply(module, here)
    with ring.no_sync():
        module(rows(2, rank=rank), [0]).backward()
    module(rows(2, rank=rank), [1]).backward()
    for r in range(2):
        (reference(rows(2, rank=r), [0, 1]) / 2).backward()
    assert_same(gradients(module), gradients(reference))
    ring.close()
    here.close()


@pytest.mark.ranks(2)
def test_frozen_parameters_join_when_they_are_unfrozen() -> None:
    rank = dist.get_rank()
    module, reference, ring, here = mlp(), mlp(), RingDDP(TINY), context()
    for model in (module, reference):
        model[0].requires_grad_(False)
    ring.apply(module, here)
    for frozen in (True, False, True):
        for model, data in ((module, rows(2, rank=rank)), (reference, rows(2))):
            model[0].requires_grad_(not frozen)
            model.zero_grad()
            if model is module:
                ring.begin()
            model(data).square().mean().backward()
        ring.finish()
        assert_same(gradients(module), gradients(reference))
    ring.close()
    here.close()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens)).logsumexp(-1).mean()


@pytest.mark.ranks(2)
def test_a_tied_parameter_has_one_placement_and_one_gradient() -> None:
    rank = dist.get_rank()
    module, reference, ring, here = Tied(), Tied(), RingDDP(), context()
    ring.apply(module, here)
    tokens = torch.arange(8).reshape(2, 4)
    module(tokens[rank]).backward()
    (sum(reference(tokens[r]) for r in range(2)) / 2).backward()
    assert_same(gradients(module), gradients(reference))
    assert [(p.name, p.aliases) for p in here.placements.values()] == [("embed.weight", ("head.weight",))]
    ring.close()
    here.close()


@pytest.mark.ranks(2)
def test_dtypes_and_memory_formats_may_mix() -> None:
    torch.manual_seed(0)
    module = nn.ParameterDict(
        {
            "wide": nn.Parameter(torch.randn(4, 4, dtype=torch.float64)),
            "short": nn.Parameter(torch.randn(3, dtype=torch.bfloat16)),
            "image": nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)),
            "scalar": nn.Parameter(torch.tensor(2.0)),
            "empty": nn.Parameter(torch.zeros(0)),
            "complex": nn.Parameter(torch.randn(3, dtype=torch.complex64)),
        }
    )
    ring, here = RingDDP(TINY), context()
    ring.apply(module, here)
    factor = dist.get_rank() + 1
    sum((p.abs() ** 2).sum().double() for p in module.values()).mul(factor).backward()
    for parameter in module.values():
        torch.testing.assert_close(parameter.grad, 1.5 * 2 * parameter.detach())
        assert parameter.grad.stride() == parameter.stride()
    ring.close()
    here.close()


@pytest.mark.ranks(2)
def test_gradients_are_views_of_the_buckets() -> None:
    """So that there is one copy of them; also after `zero_grad(set_to_none=False)` and under accumulation."""
    module, ring, here = mlp(), RingDDP(), context()
    ring.apply(module, here)
    data = rows(2, rank=dist.get_rank())
    module(data).sum().backward()
    before = [p.grad.data_ptr() for p in module.parameters()]
    assert len({p.grad.untyped_storage().data_ptr() for p in module.parameters()}) == len(ring._buckets)
    module.zero_grad(set_to_none=False)
    module(data).sum().backward()
    module.zero_grad()
    with ring.no_sync():
        module(data).sum().backward()
    module(data).sum().backward()
    assert [p.grad.data_ptr() for p in module.parameters()] == before
    ring.close()
    here.close()


@pytest.mark.ranks(2, 3)
def test_buffers_follow_rank_zero_and_constant_ones_are_not_sent() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    module.register_buffer("table", torch.randn(100_000))
    ring, here = RingDDP(), context()
    ring.apply(module, here)
    reference = nn.BatchNorm1d(4).double()
    before = here.traffic.total().num_bytes
    module(rows(4, rank=dist.get_rank())).sum().backward()
    assert here.traffic.total().num_bytes - before < 10_000
    reference(module[0](rows(4, rank=0)))
    torch.testing.assert_close(module[1].running_mean, reference.running_mean)
    assert_replicas_agree([b.clone() for b in module.buffers()])
    module.table.add_(dist.get_rank())  # a change is noticed, wherever it happens
    module(rows(4, rank=dist.get_rank())).sum().backward()
    assert_replicas_agree([b.clone() for b in module.buffers()])
    ring.close()
    here.close()


@pytest.mark.ranks(2)
def test_several_backward_passes_before_a_step_add_up() -> None:
    rank = dist.get_rank()
    module, reference, ring, here = mlp(), mlp(), RingDDP(TINY), context()
    ring.apply(module, here)
    for model, data in ((module, rows(2, rank=rank)), (reference, rows(2))):
        out = model(data)
        out.square().mean().backward(retain_graph=True)
        out.mean().backward()
    assert_same(gradients(module), gradients(reference))
    ring.close()
    here.close()


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
@pytest.mark.parametrize("overlap", [True, False])
def test_a_gradient_that_grows_after_it_left_is_never_wrong(overlap: bool) -> None:
    rank = dist.get_rank()
    settings = RingDDPSettings(bucket_mib=1e-4, first_bucket_mib=1e-5, overlap=overlap)
    module, reference, ring, here = Shared(), Shared(), RingDDP(settings), context()
    ring.apply(module, here)
    ring.begin()
    reference(rows(2)).backward()
    if overlap:
        with pytest.raises(RuntimeError, match="overlap: false"):
            module(rows(2, rank=rank)).backward()
        ring.abort()
        here.abort()
        return
    module(rows(2, rank=rank)).backward()
    ring.finish()
    assert_same(gradients(module), gradients(reference))
    ring.close()
    here.close()


@pytest.mark.ranks(2)
def test_sparse_gradients_are_refused() -> None:
    module, ring, here = nn.Embedding(4, 3, sparse=True), RingDDP(), context()
    ring.apply(module, here)
    with pytest.raises(ConfigError, match="sparse=False"):
        module(torch.tensor([1])).sum().backward()
    ring.abort()
    here.abort()


@pytest.mark.ranks(2)
def test_ranks_that_built_different_modules_are_told_which() -> None:
    module = nn.Linear(3 + dist.get_rank(), 2)
    here = context()
    with pytest.raises(ConfigError, match=r"'weight \(2, 3\).*'weight \(2, 4\).*on rank 1"):
        RingDDP().apply(module, here)
    here.close()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("wire", "bound"), [(Wire.BF16, 2**-8), (Wire.INT8, 1 / 127)])
def test_narrow_wires_err_within_bounds_and_keep_replicas_equal(wire: Wire, bound: float) -> None:
    n = dist.get_world_size()
    module = nn.ParameterList([nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(333))])
    ring, here = RingDDP(RingDDPSettings(wire=wire)), context()
    ring.apply(module, here)
    everyone = [torch.stack([torch.randn(p.shape, generator=torch.manual_seed(r)) for r in range(n)]) for p in module]
    sum((p * parts[dist.get_rank()]).sum() for p, parts in zip(module, everyone, strict=True)).backward()
    for p, parts in zip(module, everyone, strict=True):
        # each of the N hops rounds a partial mean no larger than the sum of the parts
        assert float((p.grad - parts.mean(0)).abs().max()) <= n * bound * float(parts.abs().sum(0).max()) / n
    assert_replicas_agree(gradients(module))
    ring.close()
    here.close()


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
def test_buckets_leave_while_backward_still_runs() -> None:
    """Four layers, each with 50 ms of backward and, by a slowed-down ring, 40 ms of sending: in a row 360 ms."""
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
    ring, here = RingDDP(RingDDPSettings(bucket_mib=0.016, first_bucket_mib=0.016)), context()
    ring.apply(layers, here)
    starts: list[float] = []
    send = ring._comm.all_reduce

    def slow_send(*args: object, **kwargs: object) -> None:
        starts.append(time.monotonic())
        time.sleep(0.04)
        send(*args, **kwargs)  # type: ignore[arg-type]

    ring._comm.all_reduce = slow_send  # type: ignore[method-assign]
    ends: list[float] = []
    x = torch.randn(8, 64, requires_grad=True)
    for layer in layers:
        x = layer(Sleepy.apply(x, ends))
    begin = time.monotonic()
    x.sum().backward()
    total = time.monotonic() - begin
    assert len(ring._buckets) == 4
    assert starts[0] < ends[0] < starts[-1]
    assert total < 4 * 0.05 + 4 * 0.04
    ring.close()
    here.close()
    assert not any(p._post_accumulate_grad_hooks for p in layers.parameters())
