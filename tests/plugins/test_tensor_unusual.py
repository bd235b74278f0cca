# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism with code that reads or writes what is cut in unusual ways: right, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratagem.errors import PlanError, PluginError
from stratagem.plan import Plan
from stratagem.plugins.tensor import TensorParallelStrategy, TensorSettings
from stratagem.plugins.tensor.cuts import plan_cuts
from stratagem.plugins.tensor.functions import own_slice, spans
from stratagem.plugins.tensor.infer import infer_plan
from stratagem.plugins.tensor.sharded import ShardedTensor
from tests.plugins import tensor_cases as cases

PAIR = Plan(tensor={"up": "colwise", "down": "rowwise"})


class Twice(nn.Module):
    """Two layers read one tensor, the first of them without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.teacher = nn.Embedding(cases.VOCAB, 8), nn.Linear(8, 8)
        self.teacher.requires_grad_(False)
        self.up, self.head = nn.Linear(8, 8), nn.Linear(8, cases.VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        with torch.no_grad():
            wanted = self.teacher(x)
        logits: Tensor = self.head(torch.tanh(self.up(x)) + wanted)
        return logits


def twice() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return Twice().double()


@pytest.mark.ranks(2)
def test_a_layer_without_gradients_shares_nothing_with_one_that_has_them() -> None:
    """Layers of one input share what they read. After one that ran under `no_grad`, the next had no gradient for it."""
    found, expected = cases.train(twice, cases.context(), TensorSettings()), cases.train(twice)
    assert cases.distance(found, expected) <= 1e-10


class Own(nn.Linear):
    """A layer that reads its weight itself."""

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Linear`."""
        return F.linear(input, self.weight, self.bias)


class Scaled(nn.Linear):
    """A layer that adds to what `nn.Linear` does."""

    def forward(self, input: Tensor) -> Tensor:
        """Twice as much."""
        return 2 * super().forward(input)


class Block(nn.Module):
    """A pair of layers of some class."""

    def __init__(self, make: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.up, self.down = make(4, 8), make(8, 4)


def _old_norm(a: int, b: int) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it is deprecated, and still in use
        return nn.utils.weight_norm(nn.Linear(a, b))


def _patched(a: int, b: int) -> nn.Module:
    layer = nn.Linear(a, b)
    layer.forward = lambda x: x  # type: ignore[method-assign]  # as wrappers do
    return layer


def test_a_layer_whose_product_is_not_ours_is_refused() -> None:
    """A weight that is computed, or read by a forward of the user's, was cut all the same: products were summed twice,
    or not at all, and nothing was said."""
    makers = {
        "computed": lambda a, b: nn.utils.parametrizations.weight_norm(nn.Linear(a, b)),
        "computed ": _old_norm,
        "forward of its own": Own,
        "forward of its own ": _patched,
    }
    for what, make in makers.items():
        with pytest.raises(PlanError, match=what.strip()):
            plan_cuts(Block(make), PAIR, 2)
    assert [cut.kind for cut in plan_cuts(Block(Scaled), PAIR, 2).layers] == ["column", "row"]
    sequence = nn.Sequential(_old_norm(4, 8), nn.ReLU(), _old_norm(8, 4), _patched(4, 4))
    assert not infer_plan(sequence, 2).tensor


class Opened(nn.Module):
    """Sequences of which the code takes parts: whole pairs of the first, less of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.halved, self.walked, self.passed = (
            nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.kept[:3](self.kept(x))
        x = x + self.halved[:-1](x).mean()
        for layer in self.walked:
            x = layer(x)
        return F.relu(x + sum(layer.weight.mean() for layer in reversed(self.passed)))


def test_a_sequence_that_is_opened_has_no_pair() -> None:
    """An inferred pair hands features from one layer to the other that are cut; code that called the first layer alone
    computed with a part of them, and nothing was said."""
    styles = dict(infer_plan(Opened(), 2).tensor)
    assert (styles["kept.0"], styles["kept.2"]) == ("colwise", "rowwise")
    assert {styles[f"{name}.{n}"] for name in ("halved", "walked", "passed") for n in (0, 2)} == {
        "colwise_gather_output"
    }


def _of_a_row(x: Tensor) -> Tensor:
    last = x[:, -1]
    last.mul_(2.0)
    x.view(15, 11)[1].fill_(0.5)
    return x.softmax(-1)


def _of_a_class(x: Tensor) -> Tensor:
    first = x[..., 0]
    first.fill_(-1.0)
    x.narrow(-1, 2, 3).mul_(3.0)
    first.add_(0.5)
    return x.flatten(0, 1).softmax(-1)


def _without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(2.0)
        x.view(15, 11)[:, 1] += 1.0
        x.detach()[0, 0] = 0.25
    return x.softmax(-1)


def _of_data(x: Tensor) -> Tensor:
    x.data[..., 3] = 0.0
    x.data.mul_(2.0)
    return x.softmax(-1)


def _by_a_mask(x: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    rows[rows > 0.5] = -1.0
    x /= 2.0
    return F.cross_entropy(rows, torch.arange(15) % 11, reduction="none") + x.reshape(15, 11).sum(-1)


@pytest.mark.ranks(3)
def test_what_is_written_through_a_view_is_written() -> None:
    """A view of cut logits, of a row or of a class, was a copy: `logits[..., 0].fill_(-inf)` changed nothing; and what
    was written without gradients lost those of the logits."""
    here = cases.context()
    comm, along = here.communicator("tp"), spans(11, 3)
    values = torch.randn(3, 5, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for operation in (_of_a_row, _of_a_class, _without_gradients, _of_data, _by_a_mask):
        whole = values.clone().requires_grad_()
        local = own_slice(values, comm, -1, along).clone().requires_grad_()
        expected, found = operation(whole * 1.0), operation(ShardedTensor.of(local * 1.0, comm, along))
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14, msg=operation.__name__)
        factors = torch.arange(expected.numel(), dtype=torch.float64).view(expected.shape)
        (expected * factors).sum().backward()
        (found * factors).sum().backward()
        assert whole.grad is not None
        assert local.grad is not None
        mine = own_slice(whole.grad, comm, -1, along)
        torch.testing.assert_close(local.grad, mine, rtol=1e-12, atol=1e-12, msg=operation.__name__)
    cut = ShardedTensor.of(own_slice(values, comm, -1, along).clone().requires_grad_(), comm, along)
    for refused in (cut.retain_grad, lambda: cut.register_hook(print), lambda: torch.softmax(cut, -1, out=cut)):
        with pytest.raises(NotImplementedError, match="of every rank"):
            refused()
    here.close()


def test_a_wrong_data_technique_is_refused_with_the_mesh() -> None:
    """Without `tp` nobody had asked for the data technique before the processes had started."""
    for tp in (-1, 2):
        with pytest.raises(PluginError, match="no technique is called 'nonsense'"):
            TensorParallelStrategy(tp=tp, data="nonsense").mesh_shape(4)  # type: ignore[arg-type]  # on purpose
