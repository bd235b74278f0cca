# SPDX-License-Identifier: Apache-2.0
"""Item 3 of the contract: a technique is what it sends and what it holds.

Sent bytes are the kernel's count of what left this rank's sockets; held bytes are unique storages. Both are compared
with the formula of the technique and, where the contract's user knows better, with a formula of the user's own. So a
name that is an alias of another technique fails, whatever it says about itself.

    step 0          sockets open, buckets are laid out: not counted
    step 1, 2       counted, from the start of a batch to the end of its optimizer step
    before step 2   gradients are complete: what is held is counted

Each kind of held bytes must be that of the formula. Beyond it, nothing may grow with the model: the bytes of all live
tensors, in a small model and in a large one, differ by no more than the formula does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from stratagem.measure.memory import held_bytes, live_tensor_bytes
from stratagem.measure.wire import WireBytes
from stratagem.models.causal_lm import CausalLM
from stratagem.models.gpt import GPT, GPTConfig
from stratagem.models.optim import OptimizerSettings
from stratagem.strategy.base import MeshStrategy
from stratagem.technique import DataTechnique
from stratagem.testing.contract.base import ContractBase, on_ranks
from stratagem.testing.contract.cases import tokens
from stratagem.testing.contract.runs import Gangs, Run, make_loader, make_trainer
from stratagem.testing.contract.subject import Build, Subject

_EXACT = 0.005
"""Framing, the agreement on unused parameters and the like may add this much to the formula."""

_GLOBAL_BATCH, _FIRST, _LAST = 12, 1, 2


@final
@dataclass(frozen=True)
class ModelFacts:
    """The unparallelised model, as the contract counts it before the strategy has touched it.

    Attributes:
        parameters: bytes of all parameters, tied ones once.
        trained: bytes of those that require a gradient; so many a whole gradient has, and so many SGD's momentum.
        buffers: bytes of all buffers.
    """

    parameters: int
    trained: int
    buffers: int


@final
@dataclass
class Fingerprint:
    """What one rank sent and held.

    Attributes:
        sent: bytes per optimizer step, by the rank that they went to, as the kernel counts.
        booked: the same in all, as the strategy's own books have it; None where it keeps none.
        held: bytes by kind: `parameters`, `gradients`, `optimizer`.
        live: bytes of all tensors that came to life with the run.
        stated_sent: what the technique says that it sends.
        stated_held: what the technique says that it holds, by kind.
        facts: the model before.
    """

    sent: list[float] = field(default_factory=list)
    booked: float | None = None
    held: dict[str, int] = field(default_factory=dict)
    live: int = 0
    stated_sent: float | None = None
    stated_held: dict[str, int] | None = None
    facts: ModelFacts = ModelFacts(0, 0, 0)


class FingerprintContract(ContractBase):
    """Bytes on the wire and bytes held are those of the formula."""

    sends_to_right_neighbour_only: ClassVar[bool] = True
    """Whether the technique is a ring; otherwise only the sum over peers is compared."""

    hidden_memory: ClassVar[float] = 0.05
    """What a rank may hold beyond the formula as the model grows, as a share of it; constant staging is not counted."""

    def expected_wire_bytes(self, subject: Subject, facts: ModelFacts, num_ranks: int, accumulate: int) -> float | None:
        """Bytes that a rank sends for gradients and parameters per optimizer step, from first principles.

        None where only the technique's own statement (`DataTechnique.wire_bytes_per_step`) is to be held against it; a
        strategy without such a statement must override this.
        """
        return None

    def expected_held_bytes(self, subject: Subject, facts: ModelFacts, num_ranks: int) -> Mapping[str, float] | None:
        """Bytes that a rank holds: `parameters`, `gradients`, `optimizer` (SGD's momentum); or None, as above."""
        return None

    @on_ranks(1, 2, 3, 4)
    def test_bytes_are_those_of_the_formula(self, subject: Subject, gangs: Gangs, num_ranks: int) -> None:
        """Sent: by the kernel's count, to the right neighbour, whatever the accumulation. Held: by unique storages."""
        accumulations = (1, 4) if subject.accumulation is True else (1,)
        kwargs = {"subject": subject, "accumulations": accumulations}
        per_rank: list[list[Fingerprint]] = gangs.run(num_ranks, measure_all, kwargs, deadline=timedelta(seconds=90))
        for rank, prints in enumerate(per_rank):
            *wires, small, large = prints
            for accumulate, found in zip(accumulations, wires, strict=True):
                where = f"{subject.name} on {num_ranks} ranks, accumulating {accumulate}, rank {rank}"
                expected = self.expected_wire_bytes(subject, found.facts, num_ranks, accumulate)
                self._check_wire(where, expected, found, rank)
            self._check_memory(f"{subject.name} on {num_ranks} ranks, rank {rank}", subject, small, large, num_ranks)

    def _check_wire(self, where: str, expected: float | None, found: Fingerprint, rank: int) -> None:
        assert expected is not None or found.stated_sent is not None, (
            f"{where} states no bytes. Give the contract an `expected_wire_bytes`, or the strategy a DataTechnique."
        )
        num_ranks = len(found.sent)
        slack = _EXACT * found.facts.trained  # of the gradient, so that 0 can be expected
        total = sum(found.sent)
        for source, formula in (("the formula", expected), ("its own statement", found.stated_sent)):
            if formula is not None:
                off = f"{where} sent {total:.0f} bytes per step; {source} says {formula:.0f}"
                assert abs(total - formula) <= max(_EXACT * formula, slack if formula == 0 else 0), off
        if found.booked is not None:
            off = f"{where} sent {total:.0f} bytes per step; its own books say {found.booked:.0f}"
            assert abs(total - found.booked) <= max(_EXACT * total, slack if num_ranks == 1 else 0), off
        if self.sends_to_right_neighbour_only and num_ranks > 1:
            right = found.sent[(rank + 1) % num_ranks]
            assert total - right <= _EXACT * total, f"{where} sent {found.sent} bytes to ranks 0, 1, ...: not a ring"

    def _check_memory(
        self, where: str, subject: Subject, small: Fingerprint, large: Fingerprint, num_ranks: int
    ) -> None:
        for found in (small, large):
            formulas = self._held_formulas(subject, found, num_ranks)
            assert formulas, (
                f"{where} states no held bytes. Give the contract an `expected_held_bytes`, "
                "or the strategy a DataTechnique."
            )
            for source, formula in formulas.items():
                for kind, num_bytes in formula.items():
                    off = f"{where} holds {found.held[kind]} bytes of {kind}; {source} says {num_bytes:.0f}"
                    assert abs(found.held[kind] - num_bytes) <= _EXACT * max(num_bytes, found.facts.trained / 100), off
        for source, formula in self._held_formulas(subject, large, num_ranks).items():
            grows = sum(formula.values()) - sum(self._held_formulas(subject, small, num_ranks)[source].values())
            found_grows = large.live - small.live
            off = f"with the model all live tensors of {where} grow by {found_grows} bytes; by {source} by {grows:.0f}"
            assert found_grows <= grows * (1 + self.hidden_memory), off

    def _held_formulas(self, subject: Subject, found: Fingerprint, num_ranks: int) -> dict[str, dict[str, float]]:
        given = self.expected_held_bytes(subject, found.facts, num_ranks)
        sources = {"the formula": given, "its own statement": found.stated_held}
        momentum = {"optimizer": float((given or {}).get("optimizer", found.facts.trained))}  # no technique states it
        return {name: {**momentum, **formula} for name, formula in sources.items() if formula is not None}


def measure_all(subject: Subject, accumulations: Sequence[int]) -> list[Fingerprint]:
    """The body of every rank: on sockets with each accumulation, then as usual with a small and a large model.

    Collective.
    """
    on_sockets, as_usual = Build(transport="p2p"), Build()
    wires = [measure(subject, accumulate, on_sockets) for accumulate in accumulations]
    return [*wires, measure(subject, 1, as_usual, num_layers=2), measure(subject, 1, as_usual, num_layers=6)]


def measure(subject: Subject, accumulate: int, build: Build, *, num_layers: int = 4) -> Fingerprint:
    """Trains a GPT, of about a million parameters if left so, and counts. Collective."""
    seed_everything(1, verbose=False)
    data = tokens(_GLOBAL_BATCH * accumulate * (_LAST + 1))
    before = live_tensor_bytes()
    config = GPTConfig(vocab_size=256, num_layers=num_layers, hidden_size=128, num_heads=4, max_seq_len=16)
    module = CausalLM(GPT(config), OptimizerSettings(name="sgd", lr=0.1, weight_decay=0.1, momentum=0.9))
    meter = _Meter(_facts(module), before, accumulate)
    run = Run(precision="32-true", accumulate=accumulate)
    trainer = make_trainer(subject, run, meter, build=build, max_epochs=1)
    trainer.fit(module, make_loader(subject, data, _GLOBAL_BATCH))
    return meter.found


class _Meter(Callback):
    """Counts between the first batch of one optimizer step and the last of a later one."""

    def __init__(self, facts: ModelFacts, live_before: int, accumulate: int) -> None:
        self.found = Fingerprint(facts=facts)
        self._live_before, self._accumulate = live_before, accumulate
        self._wire = WireBytes()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == _FIRST * self._accumulate:
            trainer.strategy.barrier()  # what the step before still sends would count
            self._booked = _booked(trainer)
            self._wire.__enter__()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if trainer.global_step == _LAST:
            stepped = [p for group in optimizer.param_groups for p in group["params"]]  # perhaps pieces of parameters
            tensors = [*pl_module.parameters(), *stepped]
            self.found.held = {
                "parameters": held_bytes([p.detach() for p in tensors]),
                "gradients": held_bytes([p.grad.detach() for p in tensors if p.grad is not None]),
                "optimizer": held_bytes([_tensors(state) for state in optimizer.state.values()]),
            }
            self.found.live = live_tensor_bytes() - self._live_before

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == (_LAST + 1) * self._accumulate - 1:
            self._wire.__exit__(None, None, None)
            steps, booked = _LAST + 1 - _FIRST, _booked(trainer)
            self.found.sent = [num_bytes / steps for num_bytes in self._wire.by_rank()]
            if booked is not None and self._booked is not None:
                self.found.booked = (booked - self._booked) / steps
            technique = data_technique(trainer)
            if technique is not None:
                self.found.stated_sent = sum(technique.wire_bytes_per_step().values())
                self.found.stated_held = dict(technique.held_bytes())


def data_technique(trainer: Trainer) -> DataTechnique | None:
    """The technique that owns the gradients, if the strategy is a mesh of techniques."""
    return trainer.strategy._data if isinstance(trainer.strategy, MeshStrategy) else None


def _booked(trainer: Trainer) -> int | None:
    context = getattr(trainer.strategy, "context", None)
    return context.traffic.total().num_bytes if context is not None else None


def _facts(module: torch.nn.Module) -> ModelFacts:
    def size(tensors: Sequence[Tensor]) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    parameters = list(module.parameters())
    return ModelFacts(size(parameters), size([p for p in parameters if p.requires_grad]), size(list(module.buffers())))


def _tensors(state: Mapping[str, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]
