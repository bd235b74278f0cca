# SPDX-License-Identifier: Apache-2.0
"""Item 4 of the contract: a run that was stopped and taken up again is the run that never stopped.

    on as many ranks      bit for bit: losses, rates, weights, buffers, what the optimizer holds; with dropout, in the
                          middle of an epoch, in the middle of a window
    on any other number,  to float64 1e-10 of one process, without dropout: no two numbers of ranks draw alike
    under another name

In both the samples that are left of the epoch are read once, and those that were read are not read again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest

from stratagem.testing.contract.base import ContractBase, on_ranks, unless_refused
from stratagem.testing.contract.parity import close, close_states
from stratagem.testing.contract.resuming import MOMENTS, Leg, Moment, Trace, travel
from stratagem.testing.contract.runs import Gangs
from stratagem.testing.contract.subject import Subject


class ResumeContract(ContractBase):
    """Save, stop, resume: the same bits here, the same numbers elsewhere."""

    @on_ranks(2)
    def test_resume_is_bit_equal(self, subject: Subject, gangs: Gangs, num_ranks: int, tmp_path: Path) -> None:
        """Taken up by fresh processes; and that a checkpoint is taken changes nothing."""
        with unless_refused(subject, "resuming"):
            check_bit_equal(gangs, subject, num_ranks, tmp_path)

    @pytest.mark.slow
    @on_ranks(1, 3, 4)
    def test_resume_is_bit_equal_on_more(self, subject: Subject, gangs: Gangs, num_ranks: int, tmp_path: Path) -> None:
        """As above."""
        with unless_refused(subject, "resuming"):
            check_bit_equal(gangs, subject, num_ranks, tmp_path)

    @on_ranks(2)
    def test_resume_elsewhere(self, subject: Subject, gangs: Gangs, num_ranks: int, tmp_path: Path) -> None:
        """From these ranks to another number of them, and to one process; and from one process back to these ranks."""
        others = [size for size in subject.world_sizes if size not in (1, num_ranks)][:1] or [num_ranks]
        here, alone = str(tmp_path / "here"), str(tmp_path / "alone")
        moments: tuple[Moment, ...] = ("window", "step")
        with unless_refused(subject, "resuming"):
            go(gangs, num_ranks, [Leg(subject=subject, quiet=True, save_to=here)])
            go(gangs, 1, [Leg(subject=None, quiet=True, save_to=alone)])
            for size in others:
                resumed = go(gangs, size, [_resumed(subject, here, "window"), _resumed(subject, alone, "step")])
                for leg, moment in zip(resumed, moments, strict=True):
                    assert_goes_on(gangs, leg, moment, subject.tolerance, f"{subject.name} on {size} ranks ({moment})")
            (leg,) = go(gangs, 1, [_resumed(None, here, "step")])
            assert_goes_on(gangs, leg, "step", subject.tolerance, f"one process after {subject.name}")


def _resumed(subject: Subject | None, folder: str, moment: Moment) -> Leg:
    return Leg(subject=subject, quiet=True, resume_from=f"{folder}/{moment}")


def go(gangs: Gangs, num_ranks: int, legs: Sequence[Leg]) -> list[list[Trace]]:
    """Runs legs one after the other in one gang of fresh processes; returns `[leg][rank]`."""
    deadline = timedelta(seconds=60 + 4 * len(legs))
    per_rank = gangs.run(num_ranks, travel, {"legs": list(legs)}, group=num_ranks > 1, deadline=deadline)
    return [list(traces) for traces in zip(*per_rank, strict=True)]


def never_stopped(gangs: Gangs) -> Trace:
    """The quiet run from start to end in one process; kept for the session."""
    return _never_stopped(gangs.modules)


@cache
def _never_stopped(modules: tuple[str, ...]) -> Trace:
    return go(Gangs(modules), 1, [Leg(subject=None, quiet=True)])[0][0]


def check_bit_equal(gangs: Gangs, subject: Subject, num_ranks: int, folder: Path) -> None:
    """Saves in both ways and at every moment, takes each up again, and one of them twice."""
    now, later, again = (str(folder / name) for name in ("now", "later", "again"))
    never, *saved = go(
        gangs,
        num_ranks,
        [
            Leg(subject=subject),
            Leg(subject=subject, save_to=now),
            Leg(subject=subject, save_to=later, async_save=True),
        ],
    )
    for leg, way in zip(saved, ("a save", "a save in the background"), strict=True):
        _assert_same_bits(never, leg, f"{subject.name}: {way} changed the run")
    taken: tuple[tuple[str, Moment], ...] = (
        (now, "window"),
        (later, "window"),
        (later, "step"),
        (later, "epoch"),
        (again, "late"),  # written by the one before, which was resumed itself
    )
    legs = [
        Leg(subject=subject, resume_from=f"{path}/{moment}", save_to=again if moment == "epoch" else "")
        for path, moment in taken
    ]
    resumed = go(gangs, num_ranks, legs)
    for leg, (path, moment) in zip(resumed, taken, strict=True):
        done = set(range(MOMENTS[moment]))
        assert not done & set(leg[0].losses), f"batches {sorted(done & set(leg[0].losses))} were trained again"
        _assert_same_bits(never, leg, f"{subject.name} resumed from {Path(path).name}/{moment}")


def _assert_same_bits(never: Sequence[Trace], again: Sequence[Trace], what: str) -> None:
    for rank, (one, other) in enumerate(zip(never, again, strict=True)):
        for item in ("rows", "rates", "losses"):
            before, after = getattr(one, item), getattr(other, item)
            wrong = [number for number in after if after[number] != before[number]]
            assert not wrong, f"{what}: other {item} on rank {rank} in batches {wrong}"
        assert max(other.losses) == max(one.losses), f"{what}: rank {rank} ended after batch {max(other.losses)}"
        differing = [name for name, digest in one.digests.items() if other.digests.get(name) != digest]
        assert not differing, f"{what}: rank {rank} ended with other bits in {differing[:5]}"


def assert_goes_on(gangs: Gangs, leg: Sequence[Trace], moment: Moment, tolerance: float, what: str) -> None:
    """Asserts that a quiet leg from a checkpoint is the rest of the run that never stopped."""
    one = never_stopped(gangs)
    numbers = [number for number in one.losses if number >= MOMENTS[moment]]
    assert list(leg[0].losses) == numbers, f"{what}: batches {list(leg[0].losses)} were trained, not {numbers}"
    for number in numbers:
        read = Counter(row for trace in leg for row in trace.rows[number])
        assert sorted(read) == sorted(one.rows[number]), f"{what}: other samples in batch {number}"
        assert len(set(read.values())) == 1, f"{what}: samples were read unequally often in batch {number}"
        total = sum(len(trace.rows[number]) for trace in leg)
        loss = sum(trace.losses[number] * len(trace.rows[number]) for trace in leg) / total
        close([loss], [one.losses[number]], tolerance, f"{what}: the loss of batch {number}")
        assert leg[0].rates[number] == one.rates[number], f"{what}: other learning rates after batch {number}"
    close_states(leg[0].state, one.state, tolerance, what)
