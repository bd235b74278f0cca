# SPDX-License-Identifier: Apache-2.0
"""Item 6 of the contract: one rank's end is every rank's end, soon and with the cause named.

    raise    its own error on the rank that raises; on the others, within `_SOON`, one that names a peer and the axis
    kill     the same on the others, as when the kernel ends a process for want of memory
    hang     the others give up when the run's timeout is over, not before and not much later

The gangs open no process group, so that the one that has to end is the strategy's own, under its own timeout.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest

from stratagem.errors import CommunicationError
from stratagem.mesh import AXES
from stratagem.testing.contract.base import ContractBase, on_ranks, skip_if_lacking
from stratagem.testing.contract.cases import CASES
from stratagem.testing.contract.runs import Gangs, Run, make_loader, make_trainer
from stratagem.testing.contract.subject import Build, Subject
from stratagem.testing.faults import Fault, Faults, InjectedFault
from stratagem.testing.ranks import RankFailure, RanksFailed

_SOON = timedelta(seconds=15)
"""Bound on what must be immediate; generous, since machines are shared, and still far from `_PATIENT`."""

_PATIENT = timedelta(minutes=10)
"""Timeout of runs that must not need it."""

_SHORT = timedelta(seconds=3)
"""Timeout of runs that must need it."""

_CULPRIT, _STEP = 1, 1


class FailureContract(ContractBase):
    """A rank that raises, dies or hangs ends the run on every rank in bounded time, with the cause named."""

    @on_ranks(2, 3)
    @pytest.mark.parametrize("moment", ["before_forward", "before_backward", "after_backward"])
    def test_a_rank_that_raises(self, subject: Subject, gangs: Gangs, num_ranks: int, moment: Any) -> None:
        """Keeps its own error; nobody waits for it."""
        fault = Fault("raise", _CULPRIT, _STEP, moment)
        failures = _fail(gangs, subject, num_ranks, (fault,), _PATIENT, grace=_SOON)
        assert isinstance(failures[_CULPRIT].exception, InjectedFault), failures[_CULPRIT].summary
        _assert_others_say_why(subject, failures, num_ranks)

    @on_ranks(2, 3)
    def test_a_rank_that_is_killed(self, subject: Subject, gangs: Gangs, num_ranks: int) -> None:
        """The others are told by the closed connection, not by a timeout."""
        fault = Fault("kill", _CULPRIT, _STEP, "before_backward")
        failures = _fail(
            gangs, subject, num_ranks, (fault,), _PATIENT, grace=_SOON, dies={_CULPRIT: -9}, deadline=2 * _SOON
        )
        assert _CULPRIT not in failures, failures[_CULPRIT].summary
        _assert_others_say_why(subject, failures, num_ranks)

    @on_ranks(2, 3)
    def test_a_rank_that_hangs(self, subject: Subject, gangs: Gangs, num_ranks: int) -> None:
        """The others wait for the run's timeout, and no longer."""
        skip_if_lacking(subject, "bounded_hang")
        fault = Fault("hang", _CULPRIT, _STEP, "before_backward")
        grace = timedelta(seconds=1 if num_ranks == 2 else 3)  # of three ranks, one may be told by another that gave up
        failures = _fail(gangs, subject, num_ranks, (fault,), _SHORT, grace=grace, deadline=_SHORT + 2 * _SOON)
        assert failures[_CULPRIT].exitcode is None, f"the hanging rank ended by itself: {failures[_CULPRIT].summary}"
        _assert_others_say_why(subject, failures, num_ranks)

    @on_ranks(2, 3)
    def test_every_rank_raises(self, subject: Subject, gangs: Gangs, num_ranks: int) -> None:
        """Each keeps its own error: nobody waits in the teardown for the others, and no error hides another."""
        faults = tuple(Fault("raise", rank, _STEP, "before_forward") for rank in range(num_ranks))
        failures = _fail(gangs, subject, num_ranks, faults, _PATIENT, grace=_SOON)
        for rank in range(num_ranks):
            assert isinstance(failures[rank].exception, InjectedFault), f"rank {rank}: {failures[rank].summary}"


def _fail(
    gangs: Gangs, subject: Subject, num_ranks: int, faults: tuple[Fault, ...], timeout: timedelta, **options: Any
) -> dict[int, RankFailure]:
    options = {"deadline": timedelta(seconds=60), "group": False, **options}
    try:
        gangs.attempt(num_ranks, train_with, {"subject": subject, "faults": faults, "timeout": timeout}, **options)
    except RanksFailed as error:
        print(error)
        return error.failures
    pytest.fail("no rank failed: the run went on over a fault, or never reached it", pytrace=False)


def train_with(subject: Subject, faults: tuple[Fault, ...], timeout: timedelta) -> None:
    """The body of every rank: a run with faults in it. Collective."""
    case = next(case for case in CASES if case.name == "groups_and_schedule")
    trainer = make_trainer(subject, Run(), Faults(faults), build=Build(timeout=timeout))
    trainer.fit(case.module(), make_loader(subject, case.data(5 * case.global_batch), case.global_batch))


def _assert_others_say_why(subject: Subject, failures: dict[int, RankFailure], num_ranks: int) -> None:
    others = [rank for rank in range(num_ranks) if rank != _CULPRIT]
    for rank in others:
        assert rank in failures, f"rank {rank} ended as if nothing had happened"
        assert failures[rank].exitcode is not None, f"rank {rank} did not end: {failures[rank].summary}"
    if subject.naming_the_peer is not True:
        return
    named: set[int] = set()
    for rank in others:
        error = failures[rank].exception
        assert isinstance(error, CommunicationError), f"rank {rank}: {failures[rank].details}"
        text = str(error)
        assert any(axis in text for axis in AXES), f"rank {rank} names no axis: {text}"
        peers = {int(number) for number in re.findall(r"rank (\d+)", text)} - {rank}
        assert peers, f"rank {rank} names no peer: {text}"
        named |= peers
    assert _CULPRIT in named, f"nobody names rank {_CULPRIT}: {[str(failures[rank].exception) for rank in others]}"
