# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin: a test marked `ranks(n)` is the body of n ranks.

    @pytest.mark.ranks(4)
    def test_sum(tmp_path): ...                                  # one gang of 4

    @pytest.mark.ranks(2, 3, 4, deadline=timedelta(seconds=20))
    def test_ring(num_ranks, dtype): ...                         # three tests: [2ranks-...], [3ranks-...], [4ranks-...]

    @pytest.mark.ranks(2, dies={1: -9})
    def test_survivor_is_told(): ...                             # rank 1 must be killed, rank 0 must return

The values of fixtures and parameters travel to the ranks, so they must pickle; fixtures themselves live in pytest's
process (a `monkeypatch` would patch the wrong one: it does not pickle). A test that every rank skips is skipped.
Options of the marker are those of `run_ranks`: `deadline`, `grace`, `dies`, `group`.
"""

from __future__ import annotations

# Here, not when the first gang starts: pytester forgets what an inner run imported, and a second copy of this module
# would start a second server.
import multiprocessing.forkserver  # noqa: F401
from typing import Any

import pytest

_OPTIONS = ("deadline", "grace", "dies", "group")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting `ranks_preload`: modules that the ranks should inherit rather than import."""
    parser.addini("ranks_preload", "modules that every rank of a gang inherits, one per line", type="linelist")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, for `--strict-markers`."""
    config.addinivalue_line(
        "markers",
        "ranks(*num_ranks, deadline=60 s, grace=2 s, dies={}, group=True): run the test's body on that many processes "
        "at once, with torch.distributed up; several numbers make several tests.",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test of each number of ranks, if the marker names several."""
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is not None and len(marker.args) > 1:
        if "num_ranks" not in metafunc.fixturenames:
            metafunc.fixturenames.append("num_ranks")
        metafunc.parametrize("num_ranks", marker.args, ids=[f"{number}ranks" for number in marker.args])


@pytest.fixture
def num_ranks(request: pytest.FixtureRequest) -> int:
    """How many ranks the test that is marked `ranks(n)` runs on."""
    marker = request.node.get_closest_marker("ranks")
    if marker is None:
        raise pytest.UsageError("the fixture `num_ranks` belongs to tests that are marked `ranks(n)`")
    return int(marker.args[0])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a marked test in a gang, and every other test as ever."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    numbers, options = _checked(marker)
    number: Any = pyfuncitem.callspec.params["num_ranks"] if len(numbers) > 1 else numbers[0]
    argnames = pyfuncitem._fixtureinfo.argnames
    kwargs = {name: pyfuncitem.funcargs[name] for name in argnames}

    from stratagem.testing.ranks import RanksFailed, run_ranks

    failed: RanksFailed | None = None
    try:
        run_ranks(number, pyfuncitem.obj, kwargs, modules=pyfuncitem.config.getini("ranks_preload"), **options)
    except RanksFailed as error:
        failed = error
    if failed is not None:  # outside of the handler, or pytest would show the report twice
        outcome = _common_outcome(failed, number)
        if outcome is not None:
            raise outcome
        pytest.fail(str(failed), pytrace=False)
    return True


def _checked(marker: pytest.Mark) -> tuple[tuple[int, ...], dict[str, Any]]:
    if not marker.args or not all(type(number) is int and number > 0 for number in marker.args):
        raise pytest.UsageError(f"ranks{marker.args}: give the number of ranks, e.g. @pytest.mark.ranks(2)")
    unknown = sorted(set(marker.kwargs) - set(_OPTIONS))
    if unknown:
        raise pytest.UsageError(f"ranks(...): unknown option {unknown[0]!r}. Allowed: {', '.join(_OPTIONS)}")
    return marker.args, dict(marker.kwargs)


def _common_outcome(failed: Any, number: int) -> BaseException | None:
    """The skip or xfail that every rank raised, if every rank did."""
    raised = [failure.exception for failure in failed.failures.values()]
    if len(raised) == number and all(
        isinstance(each, (pytest.skip.Exception, pytest.xfail.Exception)) for each in raised
    ):
        raised[0]._use_item_location = True  # else pytest names its own line
        return raised[0]
    return None
