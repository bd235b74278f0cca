# SPDX-License-Identifier: Apache-2.0
"""Stage 3 under modules that do not keep to the simple path: what they use is there, however they use it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stratagem.errors import CommunicationError
from stratagem.models import GPT, GPTConfig
from stratagem.plugins.zero import Zero3, ZeroSettings
from stratagem.plugins.zero.initial import ShardedInit
from stratagem.testing import held_bytes, live_tensor_bytes
from tests.plugins import zero_cases as cases

ALL = ZeroSettings(persistence_threshold=0, bucket_mib=1e-3)


class Body(nn.Module):
    """What the cases below share: blocks, and tokens that become rows `[B, 6]`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(6))


class Twice(Body):
    """Every block is called twice, the last time in another order."""

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        x = self.embed(tokens)
        for block in [*self.blocks, *reversed(self.blocks)]:
            x = block(x) * self.scale
        return x.square().sum(-1)


class Elsewhere(Body):
    """Weights are read outside their module's forward, and one block is not called as a whole."""

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        x = self.embed(tokens)
        x = torch.tanh(self.blocks[0][0](x)) @ self.blocks[0][2].weight.T
        x = self.blocks[1](x)
        return F.linear(x, self.embed.weight).logsumexp(-1) + self.blocks[2](x).square().sum(-1)


class Hidden(Body):
    """Part of the loss is left in an attribute, another part comes out of a nest that no hook would search."""

    class Nest:
        def __init__(self, x: Tensor) -> None:
            self.inner = {"x": [x]}

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Hidden.Nest:
            self.extra = self.second(x).square().sum(-1)
            return Hidden.Nest(torch.tanh(self.first(x)))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Hidden.Block() for _ in range(3))

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        x, extra = self.embed(tokens), torch.zeros(())
        for block in self.blocks:
            x = block(x).inner["x"][0]
            extra = extra + block.extra
        return x.sum(-1) * self.scale.sum() + extra


class Recomputed(Body):
    """Blocks and parts of blocks are computed again in backward."""

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        x = self.embed(tokens)
        x = checkpoint(self.blocks[0], x, use_reentrant=False)
        x = checkpoint(self.blocks[1][0], x, use_reentrant=False)
        x = self.blocks[1][2](x)
        return checkpoint(self.blocks[2], x, use_reentrant=True).square().sum(-1) * self.scale.sum()


class Saved(Body):
    """The user has hooks on saved tensors, too: around the blocks, and within one."""

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy().copy(), torch.from_numpy):
            x = self.blocks[1](self.blocks[0](self.embed(tokens)))
        return self.blocks[2](x).square().sum(-1) * self.scale.sum()


class LowRank(Body):
    """Adapters beside frozen blocks: gradients flow through weights that get none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)
        self.embed.requires_grad_(False)
        self.adapters = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        x = self.embed(tokens)
        for block, adapter in zip(self.blocks, self.adapters, strict=True):
            x = block(x) + adapter(x)
        return x.square().sum(-1) * self.scale.sum()


class Attention(Body):
    """Torch's own transformer layer and LSTM, which reach into their parts and hold lists of their weights."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lstm = nn.LSTM(6, 5, batch_first=True)

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        x = self.encoder(self.embed((tokens[:, None] + torch.arange(4)) % 13))
        return self.lstm(x)[0].square().sum((1, 2)) * self.scale.sum()


BODIES = [Twice, Elsewhere, Hidden, Recomputed, Saved, LowRank, Attention]


def _build(body: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return body().double()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_a_module_uses_is_there(body: Callable[[], nn.Module], prefetch: int) -> None:
    module, reference = _build(body), _build(body)
    settings = ZeroSettings(persistence_threshold=0, bucket_mib=1e-3, prefetch=prefetch, overlap=body is not Recomputed)
    zero, here = Zero3(settings), cases.context()
    zero.apply(module, here)

    def make(m: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)

    cases.train(module, make, zero, here)
    cases.train(reference, make)
    memory = [p.detach() for p in module.parameters()]
    assert held_bytes(memory) <= 8 * len(memory)  # nothing is left lying about
    zero.close()
    cases.assert_same_parameters(module, reference)
    here.close()


class Gated(nn.Module):
    """Blocks that run on every rank, each with a part that only some calls use."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.extra = nn.Linear(6, 9), nn.Linear(9, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, uses: bool) -> Tensor:
            y = self.b(torch.tanh(self.a(x)))
            return y + self.extra(x) if uses else y

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 6), nn.Linear(6, 1)
        self.blocks = nn.ModuleList(Gated.Block() for _ in range(3))

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = torch.tanh(block(x, uses))
        return self.head(x).mean()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("accumulation", "bucket_mib", "micro_batches"),
    [("partition", 1e-3, 1), ("partition", 1e-4, 1), ("whole", 25.0, 3)],
)
def test_ranks_may_leave_out_parts_of_blocks(accumulation: str, bucket_mib: float, micro_batches: int) -> None:
    """One rank reduces what another enters after its backward only, which fetches from the first: with buckets for a
    block, and with gradients that travel alone. With micro-batches that are not reduced, blocks are freed alike."""
    rank, size, modules = dist.get_rank(), dist.get_world_size(), [_build(Gated), _build(Gated)]
    settings = ZeroSettings(persistence_threshold=0, bucket_mib=bucket_mib, accumulation=accumulation)
    zero, here = Zero3(settings), cases.context()
    zero.apply(modules[0], here)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in modules]
    zero.attach(optimizers[:1])
    for step in range(2):
        for micro in range(micro_batches):
            generator = torch.Generator().manual_seed(10 * step + micro)
            data = torch.randn(size, 4, 6, dtype=torch.float64, generator=generator)
            uses = [(r + micro) % 2 == 0 for r in range(size)]
            with nullcontext() if micro == micro_batches - 1 else zero.no_sync():
                modules[0](data[rank], uses[rank]).backward()
            sum(modules[1](data[r], uses[r]) / size for r in range(size)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    zero.close()
    cases.assert_same_parameters(*modules)
    here.close()


@pytest.mark.ranks(2)
def test_evaluation_needs_no_gradients_and_no_optimizer() -> None:
    module, reference, zero, here = _build(Twice), _build(Twice), Zero3(ALL), cases.context()
    zero.apply(module, here)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            for step in range(2):
                tokens = cases.batch(dist.get_rank(), 2, step)
                torch.testing.assert_close(module(tokens, step), reference(tokens, step), rtol=1e-12, atol=0)
    zero.close()
    here.close()


@pytest.mark.ranks(2)
def test_backward_does_not_fetch_what_it_does_not_read() -> None:
    """An embedding needs the tokens only, a first layer whose input gets no gradient needs the input only."""
    module, zero, here = _build(LowRank), Zero3(ALL), cases.context()
    zero.apply(module, here)
    cases.train(module, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), zero, here, steps=range(2))
    fetches = {unit.block.name: sum(unit.fetches_per_step) for unit in zero._fetcher.units}
    assert fetches["embed"] == 1
    assert fetches["blocks.2.0"] == fetches["blocks.2.2"] == 2
    assert fetches["adapters.0"] == 1
    zero.close()
    here.close()


@pytest.mark.ranks(2)
def test_what_is_read_before_a_step_is_read_anew_after_it() -> None:
    module, reference, zero, here = _build(LowRank), _build(LowRank), Zero3(ALL), cases.context()
    zero.apply(module, here)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, reference)]
    zero.attach(optimizers[:1])
    module(cases.batch(dist.get_rank(), 2, 0), 0).mean().backward()
    reference(cases.batch(None, 2, 0), 0).mean().backward()
    torch.testing.assert_close(module.adapters[1].weight, reference.adapters[1].weight, rtol=1e-12, atol=0)
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(module.adapters[1].weight, reference.adapters[1].weight, rtol=1e-10, atol=1e-14)
    zero.close()
    here.close()


@pytest.mark.ranks(2)
def test_reading_what_is_elsewhere_is_loud() -> None:
    module, zero, here = _build(Twice), Zero3(ALL), cases.context()
    zero.apply(module, here)
    for parameter in module.parameters():
        assert parameter.isnan().all()
        assert parameter.shape == dict(_build(Twice).named_parameters())[zero.names[id(parameter)]].shape
    with pytest.raises(RuntimeError, match="written-to"), torch.no_grad():
        nn.init.normal_(next(module.parameters()))
    zero.close()
    here.close()


@pytest.mark.ranks(2)
def test_ranks_that_run_other_blocks_are_told() -> None:
    module, zero, here = _build(Twice), Zero3(ALL), cases.context()
    zero.apply(module, here)
    x = torch.ones(2, 6, dtype=torch.float64)
    with pytest.raises(CommunicationError, match=r"out of turn.*fetches block .*persistence_threshold|gave up"):
        module.blocks[dist.get_rank()][0](x) if dist.get_rank() else module.blocks[0][2](torch.ones(2, 9).double())
    zero.abort()
    here.abort()


class Fresh(nn.Module):
    """Overrides what its parts drew for themselves, as many models do, and ties its head."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 48, padding_idx=0)
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(depth))
        self.norm = nn.BatchNorm1d(48)
        self.head = nn.Linear(48, 64, bias=False)
        self.head.weight = self.embed.weight
        self.apply(self._init)
        for block in self.blocks:
            with torch.no_grad():
                block.weight.mul_(0.5)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
            if module.bias is not None:
                nn.init.normal_(module.bias, 0.0, 0.1)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("what", ["fresh", "gpt"])
def test_a_module_that_is_built_divided_has_the_values_of_one_process(what: str) -> None:
    def build() -> nn.Module:
        torch.manual_seed(3)
        if what == "fresh":
            return Fresh(6)
        return GPT(GPTConfig(vocab_size=64, num_layers=3, hidden_size=32, num_heads=4, num_kv_heads=2, max_seq_len=16))

    reference, here = build(), cases.context()
    random_after = torch.get_rng_state()
    with ShardedInit(here.communicator("dp_shard", lane="parameters"), whole_mib=0.02, min_numel=64) as initial:
        module = build()
    assert torch.equal(torch.get_rng_state(), random_after)
    numel = sum(p.numel() for p in module.parameters())
    assert held_bytes([p.detach() for p in module.parameters()]) < 0.2 * 4 * numel
    zero = Zero3(ZeroSettings(persistence_threshold=0), initial=initial)
    zero.apply(module, here)
    zero.close()
    for (name, p), q in zip(module.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q), name
    for p, q in zip(module.buffers(), reference.buffers(), strict=True):
        assert torch.equal(p, q)
    here.close()


@pytest.mark.ranks(4)
def test_a_large_module_is_never_whole_on_a_rank() -> None:
    """Counted at every registration while it is built, then at every block of two steps."""
    here, largest = cases.context(transport="p2p"), 0
    before = live_tensor_bytes()

    def watch(*_: object) -> None:
        nonlocal largest
        largest = max(largest, live_tensor_bytes() - before)

    class Watched(nn.Linear):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            watch()

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Watched(128, 128) for _ in range(24))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x.sum()

    with ShardedInit(here.communicator("dp_shard", lane="parameters"), whole_mib=0.1) as initial:
        module = Large()
    zero = Zero3(ZeroSettings(bucket_mib=0.2, restore_parameters=False), initial=initial)
    zero.apply(module, here)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    zero.attach([optimizer])
    for block in module.blocks:
        block.register_forward_pre_hook(watch)
    for parameter in module.parameters():  # `block.weight` would be use, and bring it here
        parameter.register_post_accumulate_grad_hook(watch)
    for _ in range(2):
        module(torch.randn(2, 128)).backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = sum(p.numel() for p in module.parameters()) * 4
    assert whole / 4 < largest < 0.85 * whole  # quarters of parameters and gradients, a few blocks, two buckets
    zero.close()
    assert all(p.isnan().all() for p in module.parameters())
    here.close()
