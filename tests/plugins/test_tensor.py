# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: its collectives, its loss, its layers, its bytes, and a GPT against one process in float64."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from stratagem.models.gpt import GPT, GPTConfig
from stratagem.plugins.tensor import TensorParallel, TensorSettings
from stratagem.plugins.tensor.cross_entropy import LossSettings, vocab_cross_entropy
from stratagem.plugins.tensor.functions import (
    copy_to,
    gather_from,
    gather_sum,
    own_slice,
    reduce_from,
    scatter_sum,
    scatter_to,
    spans,
)
from stratagem.plugins.tensor.sharded import ShardedTensor
from stratagem.testing.replicas import assert_replicas_equal
from tests.plugins import tensor_cases as cases

EVEN_OR_NOT = TensorSettings(uneven=True)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- collectives ---------------------------------------------------------------------------------------------------


@pytest.mark.ranks(3)
def test_conjugate_collectives() -> None:
    """Forward and backward of each, with slices that are not even, and the bytes of their docstrings."""
    here = cases.context()
    comm, n, rank = here.communicator("tp"), dist.get_world_size(), dist.get_rank()
    along = spans(7, n)
    every = [_random(2, 7, 5, seed=r) for r in range(n)]
    total, mine = torch.stack(every).sum(0), every[rank]
    share = own_slice(every[0], comm, 1, along)
    gathered = torch.cat([own_slice(e, comm, 1, (along[r],) * n) for r, e in enumerate(every)], 1)
    summed = own_slice(total, comm, 1, along)
    # function, input, output, gradient that arrives, gradient that leaves
    table: list[tuple[Callable[[Tensor], Tensor], Tensor, Tensor, Tensor, Tensor]] = [
        (lambda x: copy_to(x, comm), mine, mine, mine, total),
        (lambda x: reduce_from(x, comm), mine, total, total, total),
        (lambda x: gather_from(x, comm, 1, along), share, every[0], total, summed),
        (lambda x: scatter_to(x, comm, 1, along), total, summed, share, every[0]),
        (lambda x: gather_sum(x, comm, 1, along), share, every[0], mine, summed),
        (lambda x: scatter_sum(x, comm, 1, along), mine, summed, share, every[0]),
    ]
    all_reduce, half = 2 * (n - 1) / n * mine.nbytes, (n - 1) / n * mine.nbytes
    for number, (function, given, out, arrives, leaves) in enumerate(table):
        x = given.clone().requires_grad_()
        before = here.traffic.total().num_bytes
        y = function(x)
        y.backward(arrives.contiguous())
        sent = here.traffic.total().num_bytes - before
        assert torch.allclose(y, out, rtol=1e-14), number
        assert x.grad is not None
        assert torch.allclose(x.grad, leaves, rtol=1e-14), number
        formula = {0: all_reduce, 1: all_reduce, 2: half, 3: half, 4: 2 * half, 5: 2 * half}[number]
        assert abs(sent - formula) <= 2 * 8 * 10 * n, (number, sent, formula)  # slices are uneven
    assert gathered.shape == every[0].shape
    here.close()


# -- the loss and the tensor that behaves like the whole ------------------------------------------------------------


@pytest.mark.ranks(3)
def test_cross_entropy_is_that_of_whole_logits() -> None:
    """Every argument of `F.cross_entropy`; three numbers per place are sent, four with smoothing, none in backward."""
    here = cases.context()
    comm, n, classes = here.communicator("tp"), dist.get_world_size(), 11
    along = spans(classes, n)
    logits, weight = _random(3, 5, classes), _random(classes, seed=1).abs()
    targets = torch.randint(0, classes, (3, 5), generator=torch.Generator().manual_seed(2))
    targets[0, 0] = 3
    each: list[dict[str, Any]] = [{"ignore_index": 3}, {"label_smoothing": 0.1}, {"weight": weight}]
    for options in (
        a | b | {"reduction": r} for a, b in itertools.product([{}, *each], each) for r in ("none", "sum", "mean")
    ):
        whole = logits.clone().requires_grad_()
        expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), **options)
        expected.sum().backward()
        local = own_slice(logits, comm, -1, along).clone().requires_grad_()
        cut = ShardedTensor.of(local, comm, along)
        before = here.traffic.total().num_bytes
        found = nn.CrossEntropyLoss(**options)(cut.flatten(0, 1), targets.flatten())
        found.sum().backward()
        sent = here.traffic.total().num_bytes - before
        assert torch.allclose(found, expected, rtol=1e-13), options
        assert whole.grad is not None
        assert local.grad is not None
        assert torch.allclose(local.grad, own_slice(whole.grad, comm, -1, along), rtol=1e-12, atol=1e-15), options
        rows = 2 + ("label_smoothing" in options)
        assert sent == 15 * 8 * (n - 1) + rows * 15 * 8 * 2 * (n - 1) // n, options
    by_dim = F.cross_entropy(ShardedTensor.of(own_slice(logits, comm, -1, along), comm, along).transpose(1, 2), targets)
    assert torch.allclose(by_dim, F.cross_entropy(logits.transpose(1, 2), targets))
    odd = torch.softmax(_random(15, classes, seed=4), -1)
    cut = ShardedTensor.of(own_slice(logits, comm, -1, along), comm, along).flatten(0, 1)
    assert torch.allclose(F.cross_entropy(cut, odd), F.cross_entropy(logits.flatten(0, 1), odd))
    with pytest.raises(IndexError, match="Target 11 is out of bounds"):
        F.cross_entropy(cut, torch.full((15,), classes))
    here.close()


class _Mine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * torch.arange(x.shape[-1], dtype=x.dtype)).sum(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.unsqueeze(-1) * torch.arange(11, dtype=gradient.dtype)


def _written(x: Tensor) -> Tensor:
    x = x * 1.0
    x[..., 0] = 0.0
    x.mul_(2.0)
    return x.softmax(-1)


KEPT: list[Callable[[Tensor], Tensor]] = [
    lambda x: x[:, -1],
    lambda x: x[..., :-1, :],
    lambda x: x[torch.tensor([[True, False, True, True, False]] * 3)],
    lambda x: x[[0, 2]],
    lambda x: x[None],
    lambda x: x.transpose(1, 2),
    lambda x: x.permute(2, 0, 1),
    lambda x: x.flatten(0, 1),
    lambda x: x.reshape(15, -1),
    lambda x: x.view(3, 5, 11)[1:].contiguous(),
    lambda x: torch.tanh(x / 30.0) * 30.0,
    lambda x: (2 * x).float().to(torch.float64),
    lambda x: x + x,
]
GATHERED: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.argmax(-1),
    lambda x: x.softmax(-1),
    lambda x: x.max(-1).values,
    lambda x: x.topk(3).values,
    lambda x: x[..., 2:4],
    lambda x: x[:, :, 3],
    lambda x: x.reshape(-1),
    lambda x: x.view(3, 5, 11, 1),
    lambda x: 1.0 - x,
    lambda x: F.log_softmax(x, -1),
    lambda x: torch.cat([x, x], -1),
    lambda x: F.linear(x, torch.ones(2, 11, dtype=x.dtype)),
    _Mine.apply,
    _written,
]


@pytest.mark.ranks(3)
def test_other_operations_on_cut_logits_are_right() -> None:
    """Values and gradients of what stays cut and of what is put together; facts, copies, pickles."""
    here = cases.context()
    comm, along = here.communicator("tp"), spans(11, 3)
    values = _random(3, 5, 11)
    for number, operation in enumerate([*KEPT, *GATHERED]):
        whole = values.clone().requires_grad_()
        local = own_slice(values, comm, -1, along).clone().requires_grad_()
        expected, found = operation(whole), operation(ShardedTensor.of(local, comm, along))
        assert isinstance(found, ShardedTensor) == (number < len(KEPT)), number
        assert found.shape == expected.shape, number
        plain = found.whole() if isinstance(found, ShardedTensor) else found
        assert torch.allclose(plain, expected, rtol=1e-14), number
        if expected.is_floating_point():
            factors = _random(*expected.shape, seed=9)
            (expected * factors).sum().backward()
            (plain * factors).sum().backward()
            assert whole.grad is not None
            assert local.grad is not None
            assert torch.allclose(local.grad, own_slice(whole.grad, comm, -1, along), rtol=1e-12, atol=1e-14), number
    cut = ShardedTensor.of(own_slice(values, comm, -1, along).clone().requires_grad_(), comm, along)
    assert (cut.shape, cut.size(-1), len(cut), cut.requires_grad) == ((3, 5, 11), 11, 3, True)
    assert torch.equal(pickle.loads(pickle.dumps(cut.detach())), values)
    assert torch.equal(copy.deepcopy(cut.detach()), values)
    assert "tensor([[[" in repr(cut)
    here.close()


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_published_vectors() -> None:
    """Megatron-LM's: logits 0 to 7 over and over, of which each of 4 ranks has 32; an all-reduce of rank numbers."""
    here = cases.context()
    comm = here.communicator("tp")
    logits = torch.arange(8.0).repeat(16, 4)
    loss = vocab_cross_entropy(
        logits, torch.arange(0, 32, 2), comm, spans(128, 4), settings=LossSettings(reduction="none")
    )
    expected = torch.tensor([10.2309, 8.2309, 6.2309, 4.2309] * 4)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-4)
    ranks = torch.full((2,), float(dist.get_rank()))
    assert reduce_from(ranks, comm).tolist() == [6.0, 6.0]
    assert spans(128, 4)[1] == (32, 64)
    here.close()


# -- a model against one process ------------------------------------------------------------------------------------

MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": cases.gpt,
    "untied": lambda: cases.gpt(tied=False),
    "one_key_head": lambda: cases.gpt(kv_heads=1),
    "dropout": lambda: cases.gpt(dropout=0.3),
    "recompute": lambda: cases.gpt(dropout=0.3, recompute=True, kv_heads=4),
}


class Dropping(nn.Module):
    """Dropout before and after a row layer, and torch's own encoder, beside a plan for the rest."""

    _tp_plan: ClassVar[dict[str, str]] = {
        "up": "colwise",
        "inner": "colwise",
        "down": "rowwise",
        "outer": "replicate",
        "embed": "embedding_colwise",
        "head": "colwise_rep",
    }

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(cases.VOCAB, 8), nn.Linear(8, cases.VOCAB)
        self.up, self.inner, self.down, self.outer = (
            nn.Linear(8, 12),
            nn.Dropout(0.4),
            nn.Linear(12, 8),
            nn.Dropout(0.2),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        logits: Tensor = self.head(x + self.outer(self.down(self.inner(F.relu_(self.up(x))))))
        return logits


class Attention(nn.Module):
    """A fused `[q; k; v]` and `[gate; up]`, heads that are not square, counts read from attributes."""

    _tp_plan: ClassVar[dict[str, str]] = {
        "qkv": "packed_colwise",
        "out": "rowwise",
        "ffn.gate_up": "packed_colwise",
        "ffn.down": "rowwise",
        "head": "colwise_rep",
    }

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.n_embd = 4, 24
        self.embed, self.head = nn.Embedding(cases.VOCAB, 8), nn.Linear(8, cases.VOCAB)
        self.qkv, self.out = nn.Linear(8, 72), nn.Linear(24, 8)
        self.ffn = nn.ModuleDict({"gate_up": nn.Linear(8, 20), "down": nn.Linear(10, 8)})

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        rows = x.shape[:2]
        q, k, v = (y.view(*rows, self.num_heads, -1).transpose(1, 2) for y in self.qkv(x).split(self.n_embd, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(*rows, self.n_embd)
        x = x + self.out(mixed)
        gate, up = self.ffn["gate_up"](x).chunk(2, -1)
        logits: Tensor = self.head(x + self.ffn["down"](torch.tanh(gate) * up))
        return logits


class Encoder(nn.Module):
    """Torch's own, which has no plan, and reads weights without calling layers when it evaluates."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(cases.VOCAB, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, cases.VOCAB))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embed(tokens)))
        return logits


def dropping() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return Dropping().double()


def attention() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return Attention().double()


def encoder() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return Encoder().double()


@pytest.mark.ranks(2)
def test_fused_layers_dropout_of_cut_features_and_modules_without_a_plan() -> None:
    for make in (attention, dropping, encoder):
        found, expected = cases.train(make, cases.context()), cases.train(make)
        assert cases.distance(found, expected) <= 1e-10, make
    here, model, plain = cases.context(), encoder().eval(), encoder().eval()
    technique = TensorParallel()
    technique.apply(model, here)
    with torch.inference_mode():
        torch.testing.assert_close(model(cases.tokens(0)[0]), plain(cases.tokens(0)[0]), rtol=1e-12, atol=1e-12)
    assert {layer.kind for layer in technique.cuts.layers} == {"column", "row", "vocab"}
    technique.close()
    here.close()


def _check(tp: int, names: tuple[str, ...]) -> None:
    for name in names:
        expected = cases.train(MODELS[name])
        for sequence in ("auto", "off"):
            settings = TensorSettings(uneven=True, sequence_parallel=sequence)
            found = cases.train(MODELS[name], cases.context(tp), settings)
            assert cases.distance(found, expected) <= 1e-10, (name, sequence)


@pytest.mark.ranks(2)
def test_a_gpt_is_that_of_one_process() -> None:
    """Losses, norms and parameters, with and without sequence parallelism; masks of dropout are the one process's."""
    _check(-1, ("tied", "recompute"))


@pytest.mark.slow
@pytest.mark.ranks(2, 3, 4)
def test_a_gpt_on_more_ranks_is_that_of_one_process() -> None:
    """On 3 ranks heads, features and tokens are uneven; on 4 a key head is needed by two."""
    _check(-1, tuple(MODELS))


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_two_rows_of_two_are_one_process() -> None:
    """Rows read different samples; norms and clipping count every element once."""
    _check(2, ("tied", "untied", "one_key_head"))


@pytest.mark.ranks(2)
def test_what_is_whole_is_equal_and_what_is_cut_is_a_slice() -> None:
    """Before training: slices of the one-process values. After steps: whole parameters bit-equal on all ranks.

    And the module is an ordinary one again after `close`.
    """
    here, model, plain = cases.context(), cases.gpt(), cases.gpt()
    technique = TensorParallel()
    technique.apply(model, here)
    wholes = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        box = here.placements[name].box if name in here.placements else None
        expected = wholes[name][tuple(slice(*span) for span in box)] if box is not None else wholes[name]
        assert torch.equal(parameter, expected), name
    divided = sum(p.numel() for name, p in plain.named_parameters() if name in here.placements)
    whole = sum(p.numel() for p in plain.parameters()) - divided
    odd = plain.config.hidden_size  # one token more on rank 0
    assert sum(p.numel() for p in model.parameters()) == divided // 2 + whole + (here.rank == 0) * odd - odd // 2
    assert isinstance(model.blocks[0].ffn.up_proj, nn.Linear)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        cases.loss_of(model, *cases.tokens(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    norms = nn.ModuleDict({name.replace(".", "_"): m for name, m in model.named_modules() if "norm" in name})
    assert len(norms) == 5
    assert_replicas_equal(norms)
    technique.close()
    assert_replicas_equal(model)
    assert type(model.blocks[0].ffn.up_proj) is nn.Linear
    assert model(cases.tokens(0)[0]).shape == (cases.GLOBAL_BATCH, cases.LENGTH, cases.VOCAB)
    here.close()


# -- bytes ----------------------------------------------------------------------------------------------------------


def _sent(num_layers: int, settings: TensorSettings | None) -> tuple[int, int]:
    """Bytes of one micro-batch, and bytes that forward keeps for backward, of a model of so many layers.

    Without settings, of one process.
    """
    torch.manual_seed(0)
    here = cases.context()
    model = GPT(GPTConfig(vocab_size=64, num_layers=num_layers, hidden_size=64, num_heads=4, ffn_size=128))
    if settings is not None:
        TensorParallel(settings).apply(model, here)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that no other one gets its address
        return tensor

    before = here.traffic.total().num_bytes
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    num_kept = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    loss.backward()
    sent = here.traffic.total().num_bytes - before
    here.close()
    return sent, num_kept


@pytest.mark.ranks(2)
def test_bytes_of_a_layer() -> None:
    """Four all-reduces of `[B, T, D]` with whole sequences; with cut ones the same, and two all-gathers in backward.

    Of the activations of a layer, a rank keeps half with cut sequences, and about two thirds with whole ones: what the
    norms read and what the column layers read is whole then.
    """
    t, activation = dist.get_world_size(), 2 * 32 * 64 * 4
    settings = {"one": None, "whole": TensorSettings(sequence_parallel="off"), "cut": TensorSettings()}
    sent, kept = {}, {}
    for name, each in settings.items():
        small, large = _sent(1, each), _sent(3, each)
        sent[name], kept[name] = (large[0] - small[0]) / 2, (large[1] - small[1]) / 2
    all_reduce = 2 * (t - 1) / t * activation
    assert sent["whole"] == pytest.approx(4 * all_reduce, rel=0.01)
    assert sent["cut"] == pytest.approx(5 * all_reduce, rel=0.01)
    assert kept["cut"] / kept["one"] == pytest.approx(0.5, abs=0.005)
    assert kept["whole"] / kept["one"] == pytest.approx(0.65, abs=0.03)
