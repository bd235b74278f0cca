# SPDX-License-Identifier: Apache-2.0
"""Which optimizers may be divided, and how: found by trying them, so one that nobody has heard of is judged too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Muon, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR

from stratagem.errors import ConfigError
from stratagem.plugins.zero import Zero1, Zero2, Zero3, ZeroSettings
from stratagem.plugins.zero.separable import separable
from tests.plugins import zero_cases as cases


class RowNormalised(Optimizer):
    """Steps along rows of length 1: right on whole matrices only, and on no list of names."""

    def __init__(self, params: object, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm(dim=-1, keepdim=True).clamp_min(1e-12), alpha=group["lr"])


class GlobalSign(Optimizer):
    """Scales every step by the sum of all parameters: cannot be divided at all."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        everything = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = sum(p.sum() for p in everything)
        for p in everything:
            p.sub_(p.grad * scale.tanh())


class Peculiar(Optimizer):
    """An elementwise optimizer whose constructor takes something else than its settings."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True), "elements"),
        (lambda m: SGD(m.parameters(), lr=0.0, momentum=0.9), "elements"),
        (lambda m: Adam(m.parameters(), lr=torch.tensor(0.1), amsgrad=True), "elements"),
        (lambda m: AdamW(m.parameters()), "elements"),
        (lambda m: Adagrad(m.parameters()), "elements"),
        (lambda m: RMSprop(m.parameters(), centered=True), "elements"),
        (Peculiar, "elements"),
        (lambda m: Muon([m.weight]), "parameters"),
        (lambda m: Muon([m.weight], lr=0.0), "parameters"),
        (lambda m: Adafactor(m.parameters()), "parameters"),
        (lambda m: RowNormalised(m.parameters()), "parameters"),
        (lambda m: torch.optim.LBFGS(m.parameters()), "no"),
        (lambda m: GlobalSign(m.parameters()), "no"),
    ],
)
def test_an_optimizer_is_judged_by_what_it_does(make: Callable[[nn.Module], Optimizer], expected: str) -> None:
    module = nn.Linear(3, 2)
    optimizer = make(module)
    before = [p.detach().clone() for p in module.parameters()]
    state = torch.get_rng_state()
    assert separable(optimizer) == expected
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, was) for p, was in zip(module.parameters(), before, strict=True))
    assert not any(len(entries) for entries in optimizer.state.values()) or isinstance(optimizer, Adagrad)


def test_a_warm_up_that_begins_at_nothing_hides_nothing() -> None:
    optimizer = RowNormalised([nn.Parameter(torch.ones(3, 2))], lr=0.1)
    LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert separable(optimizer) == "parameters"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [Zero1, Zero2, Zero3])
def test_the_flat_partition_refuses_with_advice(stage: type[Zero1]) -> None:
    module, zero, here = nn.Linear(4, 4), stage(), cases.context()
    zero.apply(module, here)
    with pytest.raises(ConfigError, match=r"Muon needs whole parameters.*set zero.partition: parameter"):
        zero.attach([Muon([module.weight])])
    with pytest.raises(ConfigError, match=r"LBFGS lets parameters influence each other.*ring_ddp"):
        zero.attach([torch.optim.LBFGS([module.weight])])
    zero.close()
    here.close()


class Matrices(nn.Module):
    """Matrices of unlike shapes, for optimizers that need them whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in ((13, 7), (7, 31), (31, 5), (5, 9)))

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        hidden = nn.functional.one_hot(tokens, 13).to(self.layers[3].weight.dtype)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden.square().sum(-1)


def _muon(module: nn.Module) -> Optimizer:
    return Muon(module.parameters(), lr=0.05, weight_decay=0.1)


def _adafactor(module: nn.Module) -> Optimizer:
    return Adafactor(module.parameters(), lr=0.05)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", [Zero1, Zero2, Zero3])
@pytest.mark.parametrize("make", [_muon, _adafactor])
def test_optimizers_of_whole_matrices_train_as_in_one_process(
    stage: type[Zero1], make: Callable[[nn.Module], Optimizer]
) -> None:
    torch.manual_seed(0)
    module = Matrices().double()
    torch.manual_seed(0)
    reference = Matrices().double()
    settings = ZeroSettings(partition="parameter", bucket_mib=1e-3, persistence_threshold=0)
    zero, here = stage(settings), cases.context()
    zero.apply(module, here)
    _, _, optimizer = cases.train(module, make, zero, here)
    _, _, plain = cases.train(reference, make)
    state = zero.optimizer_state(optimizer)
    zero.close()
    # Muon iterates in bfloat16, where the last bit of a mean decides.
    cases.assert_same_parameters(module, reference, tolerance=2e-2 if make is _muon else 1e-9)
    if dist.get_rank() == 0:  # state of any shape is put together too
        shapes = {k: {n: getattr(v, "shape", None) for n, v in e.items()} for k, e in state["state"].items()}
        theirs = plain.state_dict()["state"]
        assert shapes == {k: {n: getattr(v, "shape", None) for n, v in e.items()} for k, e in theirs.items()}
    here.close()
