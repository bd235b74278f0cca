# SPDX-License-Identifier: Apache-2.0
"""What the stages can do beyond their defaults keeps the contract too: cuts between parameters, optimizers, precisions.

The registered names themselves, with `partition: flat`, are in `test_contract.py`. Here every class is the whole
contract of one variant, on 2, 3 and 4 ranks, and slow; of each a little runs by default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.optim import AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from stratagem.models.causal_lm import CausalLM
from stratagem.models.gpt import GPT, GPTConfig
from stratagem.models.optim import OptimizerSettings
from stratagem.plugins.zero import Zero1Strategy, Zero2Strategy, Zero3Strategy, ZeroSettings
from stratagem.testing.contract import CASES, Case, StrategyContract, Subject
from stratagem.testing.contract.base import on_ranks
from stratagem.testing.contract.cases import rows_of_8, tokens, untied_gpt
from stratagem.testing.contract.parity import assert_replicas, close, close_states, mean_losses
from stratagem.testing.contract.runs import Gangs, Run, reference, train

BETWEEN_PARAMETERS = ZeroSettings(partition="parameter", persistence_threshold=0)


def zero_1_parameter() -> Strategy:
    """Stage 1, cut between parameters."""
    return Zero1Strategy(BETWEEN_PARAMETERS)


def zero_2_parameter() -> Strategy:
    """Stage 2, cut between parameters."""
    return Zero2Strategy(BETWEEN_PARAMETERS)


def zero_3_parameter() -> Strategy:
    """Stage 3, cut between parameters; nothing stays whole."""
    return Zero3Strategy(BETWEEN_PARAMETERS)


VARIANTS: tuple[Callable[[], Strategy], ...] = (zero_1_parameter, zero_2_parameter, zero_3_parameter)
FLAT = ("zero_1", "zero_2", "zero_3")

# -- optimizers ----------------------------------------------------------------------------------------------------


class TwoOptimizers(LightningModule):
    """A GPT whose feed-forward matrices Muon steps, and AdamW all else: enough that each of 4 ranks owns some."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        config = GPTConfig(
            vocab_size=32, num_layers=2, hidden_size=16, num_heads=4, max_seq_len=16, tie_embeddings=False
        )
        self.model = GPT(config)

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """One loss, one backward, two steps; Muon's gradients are clipped, AdamW's left alone."""
        optimizers, schedules = self.optimizers(), self.lr_schedulers()
        assert isinstance(optimizers, list)
        assert isinstance(schedules, list)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = F.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        self.manual_backward(loss)
        self.clip_gradients(optimizers[0], gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        return loss.detach()

    @override
    def configure_optimizers(self) -> Any:
        inner = [p for name, p in self.named_parameters() if p.ndim == 2 and ".ffn." in name]
        chosen = {id(p) for p in inner}
        outer = [p for p in self.parameters() if id(p) not in chosen]
        assert inner
        optimizers = [Muon(inner, lr=0.02, weight_decay=0.1), AdamW(outer, lr=3e-3, weight_decay=0.1)]
        return optimizers, [LambdaLR(optimizer, lambda step: 0.5 ** (step // 2)) for optimizer in optimizers]


class MatricesOnly(LightningModule):
    """Nothing but matrices, under Muon alone, so that Lightning clips and accumulates."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 12, bias=False),
            nn.Tanh(),
            nn.Linear(12, 20, bias=False),
            nn.Tanh(),
            nn.Linear(20, 3, bias=False),
        )

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """A mean over samples."""
        return (self.layers(batch) - 1.0).square().mean()

    @override
    def configure_optimizers(self) -> Any:
        return Muon(self.parameters(), lr=0.02, weight_decay=0.1)


def adamw_gpt() -> LightningModule:
    """A GPT under AdamW, with a group that decays and one that does not."""
    config = GPTConfig(vocab_size=32, num_layers=2, hidden_size=16, num_heads=4, max_seq_len=16)
    return CausalLM(GPT(config), OptimizerSettings(lr=3e-3, warmup_steps=1, schedule="cosine"))


SGD_CASE = Case("sgd", untied_gpt, tokens, clip=0.3)
ADAMW_CASE = Case("adamw", adamw_gpt, tokens, clip=0.3)
MUON_CASE = Case("muon_and_adamw", TwoOptimizers, tokens, clip=0.3, needs=("manual_optimization",))
MATRICES_CASE = Case("muon", MatricesOnly, rows_of_8, clip=0.2)
ELEMENTWISE = (SGD_CASE, ADAMW_CASE)
EVERY_OPTIMIZER = (*ELEMENTWISE, MUON_CASE, MATRICES_CASE)

LOSSES = {"32-true": 1e-5, "bf16-mixed": 2e-2, "bf16-true": 5e-2}
"""How far losses may be, relatively, from one process in the same precision, which rounds in another order."""


def check_precisions(subject: Subject, gangs: Gangs, case: Case, num_ranks: int) -> None:
    """Trains a case in every precision: near one process, finite, in the right dtype, replicas bit-equal."""
    clip = None if case.is_manual else case.clip
    runs = [Run(precision=precision, clip=clip) for precision in ("32-true", "bf16-mixed", "bf16-true")]
    trained = train(gangs, subject, case, runs, num_ranks)
    for run, many, one in zip(runs, trained, reference(gangs, case, runs), strict=True):
        what = f"{case.name} in {run.precision}"
        close(mean_losses(many), one.losses, LOSSES[run.precision], f"losses of {what}")
        assert one.losses[-1] != one.losses[0], f"{what} changes nothing"
        for name, value in one.state.items():
            assert many[0].state[name].dtype == value.dtype, f"{what}: {name}"
            assert bool(torch.isfinite(many[0].state[name]).all()), f"{what}: {name}"
        if (
            run.precision == "32-true" and "muon" not in case.name
        ):  # Muon iterates in bfloat16, where a last bit decides
            close_states(many[0].state, one.state, 1e-4, what)
        assert_replicas(many, subject.replicated, what=what)


# -- the whole contract --------------------------------------------------------------------------------------------


@pytest.mark.slow
class TestBetweenParameters(StrategyContract):
    """`partition: parameter`: slices of a bucket are as even as its parameters allow, so each rank states its own."""

    cases: Sequence[Case] = (*CASES, ADAMW_CASE, MUON_CASE, MATRICES_CASE)
    world_sizes = (2, 3, 4)

    @pytest.fixture(params=VARIANTS, ids=lambda variant: variant.__name__)
    def described(self, request: pytest.FixtureRequest) -> Subject:
        """One subject per stage."""
        return Subject(strategy=request.param, world_sizes=self.world_sizes)

    @on_ranks(2, 3, 4)
    @pytest.mark.parametrize("optimized", EVERY_OPTIMIZER, ids=lambda case: case.name)
    def test_optimizers_in_every_precision(
        self, subject: Subject, gangs: Gangs, optimized: Case, num_ranks: int
    ) -> None:
        """SGD, AdamW and Muon."""
        check_precisions(subject, gangs, optimized, num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("case", ELEMENTWISE, ids=lambda case: case.name)
@pytest.mark.parametrize("name", FLAT)
def test_flat_with_optimizers_in_every_precision(name: str, case: Case, num_ranks: int) -> None:
    """What `partition: flat` may hold: SGD with momentum and AdamW."""
    check_precisions(Subject(strategy=name), Gangs(), case, num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", FLAT)
def test_flat_with_adamw_is_one_process(name: str, num_ranks: int) -> None:
    StrategyContract().test_parity(Subject(strategy=name), Gangs(), ADAMW_CASE, num_ranks)


# -- by default ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.__name__)
def test_muon_under_the_parameter_partition(variant: Callable[[], Strategy]) -> None:
    """In float64 as one process, with and without an optimizer of another kind beside it; and in every precision."""
    contract, subject, gangs = StrategyContract(), Subject(strategy=variant), Gangs()
    contract.test_parity(subject, gangs, MATRICES_CASE, 2)
    contract.test_parity(subject, gangs, MUON_CASE, 2)
    check_precisions(subject, gangs, MUON_CASE, 2)
