# SPDX-License-Identifier: Apache-2.0
"""What the parts of the contract share: the subject and the gangs as fixtures, world sizes, refusals."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import pytest
from lightning.pytorch.strategies import Strategy

from stratagem.testing.contract.cases import CASES, Case
from stratagem.testing.contract.runs import Gangs
from stratagem.testing.contract.subject import (
    CAPABILITIES,
    NO_SKIPPED_STEPS,
    Capability,
    Lacks,
    Precision,
    Refuses,
    Subject,
)

_Test = TypeVar("_Test", bound=Callable[..., None])


def on_ranks(*num_ranks: int) -> Callable[[_Test], _Test]:
    """Makes one test of each of these numbers of ranks that the class claims to be made for, of one at least."""

    def mark(test: _Test) -> _Test:
        test.wanted_ranks = num_ranks  # type: ignore[attr-defined]
        return test

    return mark


class ContractBase:
    """The settings of a contract: class attributes that a subclass sets; see `Subject` for what each one means."""

    strategy: ClassVar[str | Callable[[], Strategy]]
    cases: ClassVar[Sequence[Case]] = CASES
    world_sizes: ClassVar[tuple[int, ...]] = (1, 2, 3, 4)
    precisions: ClassVar[tuple[Precision, ...]] = ("32-true", "bf16-mixed", "bf16-true", "64-true")
    replicated: ClassVar[tuple[str, ...]] = ("parameters", "buffers", "optimizer")
    supports_manual_optimization: ClassVar[Capability] = True
    supports_accumulation: ClassVar[Capability] = True
    supports_clipping_by_norm: ClassVar[Capability] = True
    supports_clipping_by_value: ClassVar[Capability] = True
    supports_unused_parameters: ClassVar[Capability] = True
    supports_sync_batchnorm: ClassVar[Capability] = True
    supports_uneven_batches: ClassVar[Capability] = True
    supports_skipped_steps: ClassVar[Capability] = NO_SKIPPED_STEPS
    supports_own_seeds: ClassVar[Capability] = True
    supports_resuming: ClassVar[Capability] = True
    supports_naming_the_peer: ClassVar[Capability] = True
    supports_bounded_hang: ClassVar[Capability] = True

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Numbers of ranks and cases, out of those that the class names."""
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases, ids=[case.name for case in self.cases])
        if "num_ranks" in metafunc.fixturenames:
            wanted: tuple[int, ...] = metafunc.function.wanted_ranks
            fitting = [size for size in wanted if size in self.world_sizes]
            sizes = fitting or [min(self.world_sizes, key=lambda size: (size == 1, size))]
            metafunc.parametrize("num_ranks", sizes, ids=[f"{size}ranks" for size in sizes])

    @pytest.fixture
    def described(self) -> Subject:
        """The subject that the class attributes describe; override it to describe one in another way."""
        strategy: Any = inspect.getattr_static(type(self), "strategy")
        claims = {name: getattr(self, f"supports_{name}") for name in CAPABILITIES}
        return Subject(
            strategy=getattr(strategy, "__func__", strategy),
            world_sizes=self.world_sizes,
            precisions=self.precisions,
            replicated=self.replicated,
            **claims,
        )

    @pytest.fixture
    def subject(self, described: Subject, request: pytest.FixtureRequest) -> Subject:
        """The subject, if it claims this test's number of ranks."""
        callspec = getattr(request.node, "callspec", None)
        num_ranks = callspec.params.get("num_ranks") if callspec is not None else None
        if num_ranks is not None and num_ranks not in described.world_sizes:
            pytest.skip(f"{described.name} is not made for {num_ranks} ranks")
        return described

    @pytest.fixture
    def gangs(self, pytestconfig: pytest.Config) -> Gangs:
        """Runs bodies on ranks."""
        return Gangs(pytestconfig.getini("ranks_preload"))


def skip_if_lacking(subject: Subject, *needs: str) -> None:
    """Skips the test, with the reason, if the subject lacks one of these capabilities."""
    for name in needs:
        claim = getattr(subject, name)
        if isinstance(claim, Lacks):
            pytest.skip(f"{subject.name} lacks {name}: {claim.why}")


@contextmanager
def unless_refused(subject: Subject, *needs: str) -> Iterator[None]:
    """Runs the block, which needs these capabilities: skipped where one is lacking, and must be refused where one is.

    Args:
        subject: the strategy under test.
        needs: names of its capabilities.
    """
    skip_if_lacking(subject, *needs)
    refused = [name for name in needs if isinstance(getattr(subject, name), Refuses)]
    if not refused:
        yield
        return
    try:
        yield
    except pytest.fail.Exception as failure:
        _assert_clear(subject, refused, str(failure))
    else:
        pytest.fail(f"{subject.name} should refuse {', '.join(refused)}, and did not", pytrace=False)


def _assert_clear(subject: Subject, refused: list[str], report: str) -> None:
    """A refusal is an error on every rank, of a kind that is meant for users, with a message."""
    summaries = re.findall(r"^--- rank (\d+)[^:]*: (.*)$", report, flags=re.MULTILINE)
    kind = re.compile(r"\w*(Error|Exception): \S")
    unclear = [rank for rank, summary in summaries if not kind.match(summary)]
    assert summaries, report
    assert not unclear, f"{subject.name} refuses {refused} but ranks {unclear} do not say so:\n{report}"
