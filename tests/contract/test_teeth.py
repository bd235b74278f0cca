# SPDX-License-Identifier: Apache-2.0
"""The contract bites: each wrong implementation below is plausible, trains without complaint, and must be caught.

Each is ring DDP with one fault. Ring DDP without a fault passes the very same calls, in `test_contract.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer.trainer import Trainer
from torch import Tensor, nn
from typing_extensions import override

from stratagem.collectives import Op, Wire
from stratagem.errors import ConfigError
from stratagem.mesh import MeshShape
from stratagem.plugins.ring_ddp import RingDDP, RingDDPSettings
from stratagem.strategy.base import MeshStrategy
from stratagem.technique import Context, DataTechnique, Technique
from stratagem.testing.contract import CASES, Lacks, Refuses, StrategyContract, Subject, failure
from stratagem.testing.contract.fingerprint import ModelFacts
from stratagem.testing.contract.runs import Gangs

CASE = {case.name: case for case in CASES}


class Ring(MeshStrategy):
    """Ring DDP, open to be spoilt."""

    settings = RingDDPSettings()

    @override
    def mesh_shape(self, world_size: int) -> MeshShape:
        return MeshShape.fit(world_size)

    @override
    def make_techniques(self) -> list[Technique]:
        return [RingDDP(self.settings)]

    @override
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        technique = self._data
        assert isinstance(technique, RingDDP | Lying)
        if technique._syncing:
            self.spoil()
        return loss

    def spoil(self) -> None:
        """Runs after every backward whose gradients were reduced."""

    @property
    def trained(self) -> list[nn.Parameter]:
        """What has a gradient."""
        assert self.model is not None
        return [parameter for parameter in self.model.parameters() if parameter.grad is not None]


class Lying(DataTechnique):
    """Does what ring DDP does, and says what it likes."""

    axis = "dp_replicate"

    def __init__(self, settings: RingDDPSettings) -> None:
        self.ring = RingDDP(settings)

    @property
    def _syncing(self) -> bool:
        return self.ring._syncing

    @override
    def apply(self, module: nn.Module, context: Context) -> None:
        self.context = context
        self.ring.apply(module, context)
        self.names = self.ring.names
        self.bytes = sum(p.numel() * p.element_size() for p in module.parameters())
        self.size = context.shape.size

    @override
    def begin(self) -> None:
        self.ring.begin()

    @override
    def finish(self) -> None:
        self.ring.finish()

    @override
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self.ring.no_sync():
            yield

    @override
    def wire_bytes_per_step(self) -> Mapping[str, float]:
        return {"dp_replicate": 2 * (self.size - 1) / self.size * self.bytes}

    @override
    def held_bytes(self) -> Mapping[str, int]:
        return self.ring.held_bytes()

    @override
    def close(self) -> None:
        self.ring.close()


class SumInsteadOfMean(Ring):
    @override
    def spoil(self) -> None:
        for parameter in self.trained:
            assert parameter.grad is not None
            parameter.grad.mul_(self.world_size)


class AverageOverTwo(Ring):
    """Divides by the ranks of half a machine, whatever the group."""

    @override
    def spoil(self) -> None:
        for parameter in self.trained:
            assert parameter.grad is not None
            parameter.grad.mul_(self.world_size / 2)


class OneParameterForgotten(Ring):
    @override
    def make_techniques(self) -> list[Technique]:
        assert self.model is not None
        self.forgotten = list(self.model.parameters())[-1]
        self.forgotten.register_post_accumulate_grad_hook(self._remember)  # before the ring hears of it
        return super().make_techniques()

    def _remember(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.local = parameter.grad.clone()

    @override
    def spoil(self) -> None:
        assert self.forgotten.grad is not None
        self.forgotten.grad.copy_(self.local)


class SyncOfEveryMicroBatch(Ring):
    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        yield


class ReducedTwice(Ring):
    @override
    def spoil(self) -> None:
        assert self.context is not None
        for parameter in self.trained:
            assert parameter.grad is not None
            self.context.communicator("dp_replicate").all_reduce(parameter.grad, op=Op.MEAN)


class StaleGradients(Ring):
    """Parameters without gradient keep the one of an earlier step."""

    @override
    def spoil(self) -> None:
        assert self.model is not None
        kept = self.__dict__.setdefault("kept", {})
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None:
                parameter.grad = kept.get(name)
            else:
                kept[name] = parameter.grad.clone()


class BuffersDrift(Ring):
    settings = RingDDPSettings(broadcast_buffers=False)


class NormOfItsOwnPart(Ring):
    """Clips by the norm of a share of the gradients, as if each rank had to count only those."""

    @override
    def _install_clipping(self) -> None:
        def clip(optimizer: torch.optim.Optimizer, clip_val: float) -> None:
            held = [p for p in self.precision_plugin.main_params(optimizer) if p.grad is not None]
            norm = torch.nn.utils.get_total_norm([p.grad for p in held[:: self.world_size] if p.grad is not None])
            torch.nn.utils.clip_grads_with_norm_(held, clip_val, norm)

        self.precision_plugin.clip_grad_by_norm = clip  # type: ignore[method-assign]


class SameDataEverywhere(Ring):
    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}


class SameShareEverywhere(Ring):
    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": 0}


class UnevenBatchUnweighted(Ring):
    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self._loaders is not None:
            self._loaders.weight = lambda: 1.0  # type: ignore[method-assign]


class NarrowWire(Ring):
    """Half the bits on the wire, and not a word about it."""

    settings = RingDDPSettings(wire=Wire.BF16)

    @override
    def make_techniques(self) -> list[Technique]:
        return [Lying(self.settings)]


class HiddenCopy(Ring):
    """Keeps a second copy of the gradients."""

    @override
    def spoil(self) -> None:
        self.copies = [p.grad.clone() for p in self.trained if p.grad is not None]


class NoBroadcastAtStart(Ring):
    @override
    def make_techniques(self) -> list[Technique]:
        assert self.model is not None
        built = [parameter.detach().clone() for parameter in self.model.parameters()]
        technique = super().make_techniques()[0]
        apply = technique.apply

        def apply_and_undo(module: nn.Module, context: Context) -> None:
            apply(module, context)
            for parameter, mine in zip(module.parameters(), built, strict=True):
                parameter.data.copy_(mine)

        technique.apply = apply_and_undo  # type: ignore[method-assign]
        return [technique]


class NotDistributed(Ring):
    """Lightning then ignores `sync_dist` without a word."""

    @property
    @override
    def is_distributed(self) -> bool:
        return False


class LocalVotes(Ring):
    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision


class WaitsInTeardown(Ring):
    """A rank that raises waits for the others before it ends, and they wait for it."""

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self.context is not None and self.global_rank == 1:
            self.context.communicator("dp_replicate").barrier()
        super().on_exception(exception)


class RefusesManualOptimization(Ring):
    """How a technique that owns the step should speak."""

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            raise ConfigError(
                "manual optimization, and the step is mine", where="model", allowed="automatic optimization"
            )
        super().setup(trainer)


def ddp_by_another_name() -> Strategy:
    """What it says on the label is another technique."""
    return DDPStrategy()


Call = Callable[[StrategyContract, Subject, Gangs], None]


def parity(case: str, num_ranks: int = 2) -> Call:
    """The parity test of one case."""
    return lambda contract, subject, gangs: contract.test_parity(subject, gangs, CASE[case], num_ranks)


def bytes_of(num_ranks: int = 2) -> Call:
    """The fingerprint."""
    return lambda contract, subject, gangs: contract.test_bytes_are_those_of_the_formula(subject, gangs, num_ranks)


def named(test: str, num_ranks: int = 2) -> Call:
    """Any other test."""
    return lambda contract, subject, gangs: getattr(contract, f"test_{test}")(subject, gangs, num_ranks)


TEETH: list[tuple[type[Ring], Call, str]] = [
    (SumInsteadOfMean, parity("gpt_tied"), "gradient norms"),
    (SumInsteadOfMean, named("hooks_see_averaged_gradients"), "gradient norms"),
    (AverageOverTwo, parity("groups_and_schedule", 3), "gradient norms"),
    (OneParameterForgotten, parity("groups_and_schedule"), "gradient norms"),
    (SyncOfEveryMicroBatch, bytes_of(), "accumulating 4.* sent"),
    (ReducedTwice, bytes_of(), "accumulating 1.* sent"),
    (StaleGradients, parity("router"), "gradient norms"),
    (BuffersDrift, named("batchnorm_without_sync_is_that_of_ddp"), "buffer"),
    (NormOfItsOwnPart, parity("groups_and_schedule"), "gradient norms.*number 1 "),
    (SameDataEverywhere, parity("boring"), "samples of"),
    (SameShareEverywhere, parity("boring"), "gradient norms"),
    (SameShareEverywhere, named("stages_logs_and_metrics"), "number|lost or doubled|each rank's own"),
    (SameDataEverywhere, named("stages_logs_and_metrics"), "number|lost or doubled|each rank's own"),
    (UnevenBatchUnweighted, parity("boring"), "uneven"),
    (UnevenBatchUnweighted, named("fewer_samples_than_ranks_in_the_last_batch", 3), "norms"),
    (NarrowWire, parity("boring"), "is off|norms|losses"),
    (NarrowWire, bytes_of(), "sent"),
    (HiddenCopy, bytes_of(), "live tensors"),
    (NoBroadcastAtStart, named("ranks_start_from_the_weights_of_rank_0"), "losses of rank|no replica"),
    (NotDistributed, named("stages_logs_and_metrics"), "rank"),
    (LocalVotes, named("early_stopping"), "still running|lost rank"),
]


@pytest.fixture
def gangs() -> Gangs:
    return Gangs(patience=timedelta(seconds=15))


@pytest.mark.parametrize(
    ("wrong", "call", "says"), TEETH, ids=[f"{wrong.__name__}-{number}" for number, (wrong, *_) in enumerate(TEETH)]
)
def test_a_wrong_implementation_is_caught(wrong: type[Ring], call: Call, says: str, gangs: Gangs) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception), match=says):
        call(StrategyContract(), Subject(strategy=wrong), gangs)


@pytest.mark.parametrize("case", ["groups_and_schedule", "boring"])
def test_what_only_bytes_show_passes_parity(case: str, gangs: Gangs) -> None:
    """Why parity is not enough: these two waste the wire and compute the right numbers."""
    for wasteful in (SyncOfEveryMicroBatch, ReducedTwice):
        parity(case)(StrategyContract(), Subject(strategy=wasteful), gangs)


class ZeroLabels(StrategyContract):
    """The formulas of a sharded optimizer: half the bytes for gradients, and for the optimizer's state a share."""

    @override
    def expected_wire_bytes(self, subject: Subject, facts: ModelFacts, num_ranks: int, accumulate: int) -> float | None:
        return 2 * (num_ranks - 1) / num_ranks * facts.trained

    @override
    def expected_held_bytes(self, subject: Subject, facts: ModelFacts, num_ranks: int) -> Mapping[str, float] | None:
        share = facts.trained / num_ranks
        return {"parameters": facts.parameters, "gradients": facts.trained, "optimizer": share}


@pytest.mark.parametrize("alias", [ddp_by_another_name, Ring])
def test_an_alias_is_caught_by_what_it_holds(alias: Callable[[], Strategy], gangs: Gangs) -> None:
    """ZeRO stage 1 sends what DDP sends, so that only memory tells them apart."""
    subject = Subject(strategy=alias, uneven_batches=Lacks("of no interest here"))
    with pytest.raises(AssertionError, match="bytes of optimizer"):
        bytes_of()(ZeroLabels(), subject, gangs)


def test_a_strategy_that_states_nothing_is_caught(gangs: Gangs) -> None:
    with pytest.raises(AssertionError, match="states no bytes"):
        bytes_of()(StrategyContract(), Subject(strategy=ddp_by_another_name), gangs)


def test_a_rank_that_waits_for_its_peers_when_it_fails_is_caught(gangs: Gangs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "_SOON", timedelta(seconds=2))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        StrategyContract().test_a_rank_that_raises(Subject(strategy=WaitsInTeardown), gangs, 2, "before_backward")


def test_a_refusal_is_demanded(gangs: Gangs) -> None:
    """Who claims to refuse, refuses; who does passes."""
    refused = Refuses("the step is its own")
    call = parity("manual_boring")
    call(StrategyContract(), Subject(strategy=RefusesManualOptimization, manual_optimization=refused), gangs)
    with pytest.raises(pytest.fail.Exception, match="should refuse manual_optimization"):
        call(StrategyContract(), Subject(strategy=Ring, manual_optimization=refused), gangs)


def test_a_capability_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="says nothing"):
        Subject(strategy="ddp", manual_optimization=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reason"):
        Lacks(" ")
