# SPDX-License-Identifier: Apache-2.0
"""Every registered name of this package keeps the contract of a strategy."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from typing_extensions import override

from stratagem.registry import strategies
from stratagem.testing.contract import CASES, StrategyContract, Subject
from stratagem.testing.contract.fingerprint import ModelFacts
from stratagem.testing.contract.runs import Run, make_loader, make_trainer
from stratagem.testing.replicas import assert_replicas_equal

OURS = sorted(
    name
    for name, entry in strategies().items()
    if entry.distribution == "stratagem"
    and not name.startswith("deepspeed_")  # test_contract_deepspeed.py has those
    and name != "tensor_parallel"  # test_contract_tensor.py has it
)


class TestRegistered(StrategyContract):
    """A new name joins by being registered; what is peculiar to one is said here."""

    @pytest.fixture(params=OURS)
    def described(self, request: pytest.FixtureRequest) -> Subject:
        """One subject per registered name."""
        return Subject(strategy=request.param)

    @override
    def expected_wire_bytes(self, subject: Subject, facts: ModelFacts, num_ranks: int, accumulate: int) -> float | None:
        """From first principles, beside what each technique states itself: of all bytes, a rank sends these shares."""
        share = (num_ranks - 1) / num_ranks
        sent = {
            "ring_ddp": 2,  # reduce-scatter and all-gather of the gradients, once
            "zero_1": 2,  # reduce-scatter of the gradients, all-gather of the parameters
            "zero_2": accumulate + 1,  # the gradients of each micro-batch are reduced at once
            "zero_3": None,  # its all-gathers depend on which layers it keeps: it states them itself
        }
        times = sent.get(subject.name)
        return None if times is None else times * share * facts.trained

    @override
    def expected_held_bytes(self, subject: Subject, facts: ModelFacts, num_ranks: int) -> Mapping[str, float] | None:
        parameters, trained, n = facts.parameters, facts.trained, num_ranks
        held = {
            "ring_ddp": {"parameters": parameters, "gradients": trained, "optimizer": trained},
            "zero_1": {"parameters": parameters, "gradients": trained, "optimizer": trained / n},
            "zero_2": {"parameters": parameters, "gradients": trained / n, "optimizer": trained / n},
            "zero_3": {"parameters": parameters / n, "gradients": trained / n, "optimizer": trained / n},
        }
        return held.get(subject.name)


def test_something_is_registered() -> None:
    """Without a name the class above would pass by testing nothing."""
    assert "ring_ddp" in OURS


@pytest.mark.ranks(2, 3)
def test_ring_ddp_trains_without_the_backends_reductions() -> None:
    """A ring of its own: where torch's reductions raise, it still trains."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the backend's own reduction was called")

    kept = {name: getattr(dist, name) for name in ("all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter")}
    case = next(case for case in CASES if case.name == "gpt_tied")
    subject = Subject(strategy="ring_ddp")
    seed_everything(1, verbose=False)
    module = case.module()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    try:
        for name in kept:
            setattr(dist, name, refuse)
        trainer = make_trainer(subject, Run(clip=case.clip))
        trainer.fit(module, make_loader(subject, case.data(36), case.global_batch))
    finally:
        for name, original in kept.items():
            setattr(dist, name, original)
    assert not all(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))
    assert_replicas_equal(module)
