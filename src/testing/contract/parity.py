# SPDX-License-Identifier: Apache-2.0
"""Items 1 and 2 of the contract: many ranks train what one process trains, and end as bit-equal replicas.

Same module, seed and global batch, float64 and SGD with momentum and weight decay. Compared are the norm of every
gradient before clipping, the samples and the loss of every batch, the rates, and parameters and buffers at the end. The
norm is compared by itself since clipping to a norm would hide a gradient that is N times too long.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from stratagem.testing.contract.base import ContractBase, on_ranks, unless_refused
from stratagem.testing.contract.cases import CASES, Case
from stratagem.testing.contract.runs import STEPS, Gangs, Record, Run, reference, train
from stratagem.testing.contract.subject import Subject

DDP = Subject(strategy="ddp_find_unused_parameters_true", replicated=())
"""Lightning's own strategy, the measure where one process cannot be it."""

_AS_FAR_AS_DDP = 8.0
"""Where a module computes in float32 inside, a strategy may be this many times as far from one process as `ddp` is."""


class ParityContract(ContractBase):
    """Same losses, norms, rates, parameters and buffers as one process; replicas bit-equal."""

    @on_ranks(1, 2, 3, 4)
    def test_parity(self, subject: Subject, gangs: Gangs, case: Case, num_ranks: int) -> None:
        """Plain, accumulated, clipped, and with an uneven last batch: all as in one process."""
        if not case.is_available:
            pytest.skip(f"{case.requires_package} is not installed")
        runs = runs_of(case, subject)
        with unless_refused(subject, *case.needs):
            trained, alone = train(gangs, subject, case, runs, num_ranks), reference(gangs, case, runs)
            allowed = self._allowed(gangs, subject, case, runs, trained, alone)
            for run, one, many in zip(runs, alone, trained, strict=True):
                assert_clips(one, run, case)
                assert_same_training(one, many, tolerance=allowed, what=f"{case.name} ({run.label})")
                assert_replicas(many, subject.replicated, what=f"{case.name} ({run.label})")

    def _allowed(
        self,
        gangs: Gangs,
        subject: Subject,
        case: Case,
        runs: Sequence[Run],
        trained: Sequence[Sequence[Record]],
        alone: Sequence[Record],
    ) -> float:
        """The tolerance; where a module rounds to float32 inside, as wide as Lightning's ddp needs, no wider."""
        pairs = list(zip(alone, trained, strict=True))
        if not case.float32_inside or all(max(deviations(*pair).values()) <= subject.tolerance for pair in pairs):
            return subject.tolerance
        even = tuple(dataclasses.replace(run, tail=0) for run in runs)
        ddp = zip(alone, ddp_records(gangs, case, even, len(trained[0])), strict=True)
        return max(subject.tolerance, _AS_FAR_AS_DDP * max(max(deviations(*pair).values()) for pair in ddp))

    @on_ranks(1, 2, 3, 4)
    def test_batchnorm_without_sync_is_that_of_ddp(self, subject: Subject, gangs: Gangs, num_ranks: int) -> None:
        """Each rank normalises by its own samples; running statistics are those of rank 0, on every rank."""
        case = next(case for case in CASES if case.name == "averaged_sync_batchnorm")
        runs = (Run(order="slices"), Run(order="slices", batches=6, accumulate=3))
        here = train(gangs, subject, case, runs, num_ranks)
        for run, mine, theirs in zip(runs, here, ddp_records(gangs, case, runs, num_ranks), strict=True):
            for rank in range(num_ranks):
                what = f"ddp ({run.label}), rank {rank}"
                close(mine[rank].losses, theirs[rank].losses, 1e-12, f"losses of {what}")
                close(mine[rank].norms, theirs[rank].norms, 1e-12, f"norms of {what}")
            close_states(mine[0].state, theirs[0].state, 1e-12, f"ddp ({run.label})")
            assert_replicas(mine, subject.replicated, what=run.label)

    @on_ranks(1, 2, 3, 4)
    def test_ranks_start_from_the_weights_of_rank_0(self, subject: Subject, gangs: Gangs, num_ranks: int) -> None:
        """Ranks that were seeded each in its own way train rank 0's model all the same, buffers included."""
        case = next(case for case in CASES if case.name == "rows_sync_batchnorm")
        with unless_refused(subject, "own_seeds"):
            (many,) = train(gangs, subject, case, [Run(order="slices", own_seeds=True)], num_ranks)
            (same,) = train(gangs, subject, case, [Run(order="slices")], num_ranks)
            for rank in range(num_ranks):
                close(many[rank].losses, same[rank].losses, subject.tolerance, f"losses of rank {rank}")
            close_states(many[0].state, same[0].state, subject.tolerance, "the state of rank 0")
            assert_replicas(many, subject.replicated, what="ranks with seeds of their own")

    @on_ranks(1, 2, 3, 4)
    def test_fewer_samples_than_ranks_in_the_last_batch(self, subject: Subject, gangs: Gangs, num_ranks: int) -> None:
        """A rank that has nothing in the last batch neither waits for ever nor changes the mean."""
        case = next(case for case in CASES if case.name == "groups_and_schedule")
        runs = [Run(batches=2, tail=max(num_ranks - 1, 1))]
        with unless_refused(subject, "uneven_batches"):
            (many,) = train(gangs, subject, case, runs, num_ranks)
            (one,) = reference(gangs, case, runs)
            close(many[0].norms, one.norms, subject.tolerance, "norms")
            close_states(many[0].state, one.state, subject.tolerance, "state")
            assert_replicas(many, subject.replicated, what="after the last batch")


def ddp_records(gangs: Gangs, case: Case, runs: tuple[Run, ...], num_ranks: int) -> list[list[Record]]:
    """What Lightning's own ddp makes of these runs, `[run][rank]`; kept for the session."""
    return _ddp_records(gangs.modules, case, runs, num_ranks)


@cache
def _ddp_records(modules: tuple[str, ...], case: Case, runs: tuple[Run, ...], num_ranks: int) -> list[list[Record]]:
    return train(Gangs(modules), DDP, case, runs, num_ranks)


def runs_of(case: Case, subject: Subject) -> list[Run]:
    """The runs of a case that the subject does not rule out.

    Two, to save time: always clipped with an uneven last batch, and accumulated with clipping so seldom that a wrong
    scale of the gradient shows in the weights too (not never: an unstable run would magnify its rounding).
    """
    synced = "sync_batchnorm" in case.needs
    uneven = subject.uneven_batches is True and not case.float32_inside
    first = Run(batches=2, tail=5, sync_batchnorm=synced) if uneven else Run(sync_batchnorm=synced)
    if case.is_manual:
        return [first]
    accumulate = 3 if subject.accumulation is True else 1
    second = Run(batches=2 * accumulate, accumulate=accumulate, sync_batchnorm=synced)
    if subject.clipping_by_norm is not True:
        return [first, second]
    return [dataclasses.replace(first, clip=case.clip), dataclasses.replace(second, clip=10 * case.clip)]


def assert_clips(one: Record, run: Run, case: Case) -> None:
    """Clipping that never happens checks nothing."""
    if run.clip == case.clip:
        assert min(one.norms) > 1.05 * run.clip, f"{case.name}: norms {one.norms} are not clipped by {run.clip}"


def assert_same_training(one: Record, many: Sequence[Record], *, tolerance: float, what: str) -> None:
    """Asserts that `many` ranks trained what one process trained."""
    for rank, record in enumerate(many):  # first: the gradient is where most faults begin
        close(record.norms, one.norms, tolerance, f"gradient norms of {what}, rank {rank}")
    readers = [record for record in many if record.model_part == many[0].model_part]
    seen = [sum(parts) for parts in zip(*(record.samples for record in readers), strict=True)]
    assert seen == one.samples, f"samples of {what}: the ranks read {seen} per batch, one process {one.samples}"
    close(mean_losses(many), one.losses, tolerance, f"losses of {what}")
    for rank, record in enumerate(many):
        assert record.rates == one.rates, f"learning rates of {what}, rank {rank}: {record.rates}, not {one.rates}"
    close_states(many[0].state, one.state, tolerance, what)


def mean_losses(many: Sequence[Record]) -> list[float | None]:
    """The mean over samples of each batch: the ranks' mean losses weighed by their samples."""
    found: list[float | None] = []
    for batch in range(len(many[0].losses)):
        parts = [(record.losses[batch], record.samples[batch]) for record in many]
        weighed = [(loss, samples) for loss, samples in parts if loss is not None]
        total = sum(samples for _, samples in weighed)
        found.append(sum(loss * samples for loss, samples in weighed) / total if total else None)
    return found


def deviations(one: Record, many: Sequence[Record]) -> dict[str, float]:
    """By quantity, how far many ranks are from one process, relatively."""
    found = {
        "losses": _distance(mean_losses(many), one.losses),
        "norms": max(_distance(record.norms, one.norms) for record in many),
    }
    for name, value in one.state.items():
        found[name] = _tensor_distance(many[0].state[name], value)
    return found


def close(found: Sequence[float | None], expected: Sequence[float | None], tolerance: float, what: str) -> None:
    """Asserts that two series are equal, relatively to `expected`, number by number."""
    assert len(found) == len(expected), f"{what}: {len(found)} of them, not {len(expected)}"
    for place, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        distance = _distance([mine], [theirs])
        assert distance <= tolerance, (
            f"{what}: number {place} is {mine}, not {theirs} (off by {distance:.1e} relatively)"
        )


def close_states(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float, what: str) -> None:
    """Asserts that two states have the same names, and values equal relatively to each tensor's largest element."""
    assert list(found) == list(expected), f"{what}: the state has {sorted(found)}, not {sorted(expected)}"
    for name, value in expected.items():
        distance = _tensor_distance(found[name], value)
        assert distance <= tolerance, f"{what}: {name} is off by {distance:.1e} relatively, allowed are {tolerance:.1e}"


def assert_replicas(many: Sequence[Record], kinds: Iterable[str], *, what: str) -> None:
    """Asserts that ranks which hold the same part of the model hold the same bits."""
    prefixes = tuple(kind.removesuffix("s") + " " for kind in kinds)
    for rank, record in enumerate(many):
        first = next(n for n, other in enumerate(many) if other.model_part == record.model_part)
        keys = dict.fromkeys([*many[first].digests, *record.digests])
        if not (STEPS in many[first].digests and STEPS in record.digests):
            keys.pop(STEPS, None)  # a rank that owns nothing of what is divided has stepped nothing
        other = [k for k in keys if k.startswith(prefixes) and many[first].digests.get(k) != record.digests.get(k)]
        assert not other, (
            f"{what}: rank {rank} is no replica of rank {first}: {', '.join(other[:5])} ({len(other)} in all)"
        )


def _distance(found: Sequence[float | None], expected: Sequence[float | None]) -> float:
    worst = 0.0
    for mine, theirs in zip(found, expected, strict=True):
        if mine is None or theirs is None:
            worst = max(worst, 0.0 if mine is theirs else math.inf)
        elif not (math.isfinite(mine) and math.isfinite(theirs)):
            worst = math.inf
        else:
            worst = max(worst, abs(mine - theirs) / max(abs(theirs), 1e-300)) if mine != theirs else worst
    return worst


def _tensor_distance(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return math.inf
    if torch.equal(found, expected):
        return 0.0
    wide = expected.double()
    off = float((found.double() - wide).abs().max() / wide.abs().max().clamp(min=1e-300))
    return off if math.isfinite(off) else math.inf
