# SPDX-License-Identifier: Apache-2.0
"""The marker `ranks`, as a third party meets it: in a project of its own, with strict markers."""

from __future__ import annotations

import pytest

# Hypothesis would be imported anew by every inner run, which takes seconds.
_STRICT = "-p no:cacheprovider -p no:hypothesispytest --strict-markers"


def _run(pytester: pytest.Pytester, source: str) -> pytest.RunResult:
    """Run a file in this process: the fork server is warm. Rank processes import it by name, so its name is its own."""
    pytester.makepyfile(**{f"test_{pytester.path.name}": "import pytest\nimport torch.distributed as dist\n" + source})
    return pytester.runpytest_inprocess(*_STRICT.split(), "-v", "-rs")


def test_the_body_runs_once_per_rank_and_several_numbers_make_several_tests(pytester: pytest.Pytester) -> None:
    result = _run(
        pytester,
        """
        @pytest.mark.ranks(2, 3)
        @pytest.mark.parametrize("factor", [1, 2])
        def test_size(num_ranks, factor, tmp_path):
            (tmp_path / str(dist.get_rank() * factor)).touch()
            dist.barrier()
            assert dist.get_world_size() == num_ranks == len(list(tmp_path.iterdir()))

        @pytest.mark.ranks(2)
        def test_single(num_ranks):
            assert dist.get_world_size() == num_ranks == 2

        @pytest.mark.ranks(1, 2)
        def test_without_asking():
            assert dist.get_world_size() in (1, 2)

        def test_ordinary():
            assert not dist.is_initialized()
        """.replace("\n        ", "\n"),
    )
    result.assert_outcomes(passed=8)
    result.stdout.fnmatch_lines_random(["*::test_size?2ranks-1?*", "*::test_size?3ranks-2?*", "*::test_single *"])


def test_a_failing_assert_explains_itself_and_names_its_rank(pytester: pytest.Pytester) -> None:
    result = _run(
        pytester,
        """
        @pytest.mark.ranks(2)
        def test_fails():
            numbers = [1, dist.get_rank()]
            assert sum(numbers) == 1
        """.replace("\n        ", "\n"),
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "1 of 2 ranks failed; rank 1 first: AssertionError: assert 2 == 1",
            "--- rank 0: returned after *",
            "--- rank 1, after *: AssertionError: assert 2 == 1",
            "*assert sum(numbers) == 1*",
            "*where 2 = sum([[]1, 1[]])*",
        ]
    )
    assert "pyfuncitem" not in result.stdout.str()  # no frame of the plugin


def test_options_of_the_marker_reach_the_gang(pytester: pytest.Pytester) -> None:
    result = _run(
        pytester,
        """
        import os, signal, time
        from datetime import timedelta

        @pytest.mark.ranks(2, dies={1: -9})
        def test_dies():
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        @pytest.mark.ranks(1, group=False)
        def test_no_group():
            assert not dist.is_initialized()

        @pytest.mark.ranks(1, deadline=timedelta(seconds=1.5))
        def test_hangs():
            time.sleep(3600)
        """.replace("\n        ", "\n"),
    )
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["1 of 1 ranks failed; rank 0 first: still running after *", "*in test_hangs*"])


def test_a_skip_on_every_rank_is_a_skip_and_on_one_rank_a_failure(pytester: pytest.Pytester) -> None:
    result = _run(
        pytester,
        """
        @pytest.mark.ranks(2)
        def test_all():
            pytest.skip("none of us can")

        @pytest.mark.ranks(2)
        def test_one():
            if dist.get_rank() == 0:
                pytest.skip("only I cannot")

        @pytest.mark.ranks(2)
        def test_expected():
            pytest.xfail("known")
        """.replace("\n        ", "\n"),
    )
    result.assert_outcomes(skipped=1, failed=1, xfailed=1)
    result.stdout.fnmatch_lines(["SKIPPED *test_*.py*: none of us can"])


@pytest.mark.parametrize(
    ("marker", "said"),
    [
        ("ranks", "ranks(): give the number of ranks*"),
        ("ranks(0)", "ranks(0,): give the number of ranks*"),
        ("ranks('two')", "ranks('two',): give the number of ranks*"),
        ("ranks(2, dead=1)", "ranks(...): unknown option 'dead'. Allowed: deadline, grace, dies, group"),
    ],
)
def test_a_wrong_marker_is_a_clear_error(pytester: pytest.Pytester, marker: str, said: str) -> None:
    result = _run(pytester, f"@pytest.mark.{marker}\ndef test_it():\n    pass\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*{said}"])


def test_a_fixture_that_does_not_pickle_is_named(pytester: pytest.Pytester) -> None:
    result = _run(
        pytester,
        """
        @pytest.fixture
        def handle():
            with open(__file__) as file:
                yield file

        @pytest.mark.ranks(1)
        def test_it(handle):
            pass
        """.replace("\n        ", "\n"),
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*argument 'handle' (TextIOWrapper) does not pickle*"])


def test_the_marker_is_documented(pytester: pytest.Pytester) -> None:
    pytester.runpytest_inprocess("--markers").stdout.fnmatch_lines(["@pytest.mark.ranks(*num_ranks, deadline=60 s*"])
