# SPDX-License-Identifier: Apache-2.0
"""Ranks are started, watched and ended as promised. The runs are in `scenarios.py`; here is what must come of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stratagem.errors import CommunicationError, ConfigError, RankError
from stratagem.strategy.fork_safety import pause_openmp, threads_per_rank
from stratagem.strategy.rank_process import describe, is_consequence, readable

ROOT = Path(__file__).parents[2]
COMMON = {"LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"}  # what would make a fresh process believe it is a rank


def run(*command: str, timeout: float = 300.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh Python process in the root of the project, with one thread and no trace of pytest's own environment."""
    kept = {
        name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
    }
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**kept, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every scenario by name; all in one process, so that each also shows that the one before has left it well."""
    folder = tmp_path_factory.mktemp("temporary")
    done = run("-m", "tests.launch.scenarios", TMPDIR=str(folder))
    assert done.returncode == 0, done.stderr[-5000:]
    results: dict[str, Any] = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))
    results["left in the temporary folder"] = sorted(path.name for path in folder.iterdir())
    results["stderr"] = done.stderr
    return results


# -- one rank fails, and with it the run -----------------------------------------------------------------------------

FAILURES = {
    "raises": "ZeroDivisionError: boom",
    "is_killed": "it was killed by SIGKILL (out of memory?)",
    "crashes": "it was killed by SIGSEGV",
    "exits": "it exited with code 7 before its work was done",
    "leaves": "it left by sys.exit(0) before its work was done",
    "is_killed_with_workers": "it was killed by SIGKILL (out of memory?)",
    "raises_on_the_way_out": "ZeroDivisionError: boom",
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_names_the_rank_and_the_cause(outcomes: dict[str, Any], name: str) -> None:
    outcome = outcomes[name]
    assert (outcome["error"], outcome["rank"], outcome["summary"]) == ("RankError", 1, FAILURES[name])


@pytest.mark.parametrize(
    "name", [*FAILURES, "raises_user_error", "hangs", "saves_on_exception", "writes_a_lot_and_raises"]
)
def test_a_failure_ends_all_in_time_and_leaves_nothing(outcomes: dict[str, Any], name: str) -> None:
    outcome = outcomes[name]
    assert outcome["processes"] == []
    assert outcome["descriptors"] == 0
    assert outcome["seconds"] < 20  # against a timeout of 60 s, and a hang without end


def test_a_failure_shows_the_traceback_of_the_rank(outcomes: dict[str, Any]) -> None:
    text = outcomes["raises"]["text"]
    assert "in _boom" in text
    assert outcomes["raises"]["cause"] == "ZeroDivisionError"
    assert "CommunicationError" not in text  # what the other rank made of it
    assert "launcher.py" not in text


def test_an_error_of_the_user_arrives_as_itself(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["raises_user_error"]
    assert (outcome["error"], outcome["text"]) == ("ConfigError", "model.width: it is 0. Allowed: 1 or more.")


def test_a_crash_shows_where(outcomes: dict[str, Any]) -> None:
    assert "string_at" in outcomes["crashes"]["text"]
    assert "multiprocessing" not in outcomes["crashes"]["text"]


def test_a_hang_outside_of_collectives_ends_by_the_timeout_and_shows_where(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["hangs"]
    assert (outcome["error"], outcome["rank"]) == ("RankError", 1)
    assert "_sleep_for_ever" in outcome["text"]
    assert "rank 0 had given up waiting" in outcome["summary"]


def test_a_message_larger_than_a_pipe_arrives(outcomes: dict[str, Any]) -> None:
    assert outcomes["writes_a_lot_and_raises"]["cause"] == "ValueError"
    assert outcomes["writes_a_lot_and_raises"]["length"] > 1_000_000


def test_hooks_of_an_exception_run_in_the_ranks_alone(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["saves_on_exception"]
    assert (outcome["error"], outcome["rank"], outcome["saved"]) == ("RankError", 0, 2)
    assert "hook-False-0" in outcome["hooks"]
    assert not any(hook.startswith("hook-True") for hook in outcome["hooks"])


# -- all is well -----------------------------------------------------------------------------------------------------


def test_what_a_run_changes_comes_home(outcomes: dict[str, Any]) -> None:
    home = outcomes["comes_home"]
    assert home["moved"]
    assert home["as_saved"]
    assert (home["global_step"], home["epoch"], home["status"]) == (4, 1, "TrainerStatus.FINISHED")
    assert (home["metric"], home["score"]) == (3.0, 3.0)
    assert home["trainer"], "a callback's reference to the trainer must stay the caller's trainer"
    assert home["log"] == ["checkpoints", "metrics.csv"]
    assert home["logs"] == ["version_0"]
    assert (home["processes"], home["environment"]) == ([], [])


def test_no_metrics_are_lost_whatever_runs_follow_each_other(outcomes: dict[str, Any]) -> None:
    """Each run of a trainer appends to one file, exactly as runs in one process do."""
    forked, alone = outcomes["metrics"]["forked"], outcomes["metrics"]["alone"]
    assert list(forked) == ["lightning_logs/version_0/metrics.csv"]
    assert forked == alone
    filled = [tuple(row) for row in forked["lightning_logs/version_0/metrics.csv"][:-1]]
    numbers = {name: sum(name in row for row in filled) for name in ("trained", "validated", "tested", "from outside")}
    # Three fits of four steps and one validation each, two validations more, a test, two rows from outside.
    assert numbers == {"trained": 12, "validated": 5, "tested": 1, "from outside": 2}


def test_event_files_of_tensorboard_are_not_written_over(outcomes: dict[str, Any]) -> None:
    """Though two runs may begin in the same second, which is all that tensorboardX names a file by."""
    if outcomes["tensorboard"] is None:
        pytest.skip("neither tensorboard nor tensorboardX is installed")
    fitted, validated = outcomes["tensorboard"]
    assert len(fitted) == 1
    assert len(validated) == 2
    assert fitted.items() <= validated.items()


def test_the_training_loss_that_is_logged_does_not_depend_on_the_number_of_ranks(outcomes: dict[str, Any]) -> None:
    alone, forked = outcomes["losses"]
    assert forked == pytest.approx(alone, rel=1e-5)


def test_what_the_run_has_built_comes_home_or_is_named(outcomes: dict[str, Any]) -> None:
    """A module of `configure_model` stayed in the ranks, and a test after `fit` ran on a fresh one."""
    built = outcomes["built_in_the_run"]
    assert built["home"]
    assert built["stubborn"]
    assert any("layer" in line and "cannot be brought back" in line for line in built["logged"])


def test_unseeded_ranks_draw_their_own_random_numbers(outcomes: dict[str, Any]) -> None:
    noise = outcomes["built_in_the_run"]["noise"]
    assert len(set(noise)) == 2


def test_a_list_that_a_callback_fills_is_filled_in_place(outcomes: dict[str, Any]) -> None:
    assert outcomes["comes_home"]["steps"] == list(range(1, 9))  # over both fits


def test_a_second_fit_goes_on_as_it_does_in_one_process(outcomes: dict[str, Any]) -> None:
    assert outcomes["comes_home"]["second_fit"] == outcomes["here"]


def test_predict_returns_the_share_of_rank_0(outcomes: dict[str, Any]) -> None:
    assert outcomes["comes_home"]["predicted"] == [[1, 1]] * 32  # half of BoringModel's 64


def test_nothing_stays_in_the_temporary_folder(outcomes: dict[str, Any]) -> None:
    left = outcomes["left in the temporary folder"]
    # A loader's worker that is killed with its rank cannot remove the folder multiprocessing made for its sockets.
    assert [name for name in left if not name.startswith("pymp-")] == []
    assert len(left) <= 1


# -- threads ---------------------------------------------------------------------------------------------------------


def test_ranks_compute_with_many_threads_after_the_parent_did(outcomes: dict[str, Any]) -> None:
    """A forked child of a process that has run a parallel region hangs in its own first one. Giving the pool up before
    the fork cures it."""
    assert outcomes["threads"] == [None] * 5


def test_ranks_share_the_cores(outcomes: dict[str, Any]) -> None:
    threads = outcomes["threads_are_divided"]
    assert threads["seen"] == [max(1, threads["cores"] // 2)]


def test_the_users_choice_of_threads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_per_rank(2) == torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads_per_rank(10**6) == 1


def test_the_openmp_of_torch_is_found_and_gives_up_its_threads() -> None:
    runtimes = pause_openmp()
    assert runtimes
    assert all(runtimes.values()), runtimes


# -- the parent is told to stop --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "code"), [("interrupted", 130), ("terminated", 143), ("parent_killed", -9)])
def test_a_signal_to_the_parent_ends_all(outcomes: dict[str, Any], name: str, code: int) -> None:
    outcome = outcomes[name]
    assert outcome["exit"] == code
    assert outcome["processes"] == []
    assert outcome["gone"] < 5


def test_ranks_end_gracefully_when_told_to(outcomes: dict[str, Any]) -> None:
    for rank in (0, 1):
        assert f"on_exception {rank} KeyboardInterrupt" in outcomes["stderr"]
        assert f"on_exception {rank} SIGTERMException" in outcomes["stderr"]
    assert "Traceback" not in outcomes["stderr"]


# -- which launcher --------------------------------------------------------------------------------------------------


def test_the_launcher_fits_the_place(outcomes: dict[str, Any]) -> None:
    choices = outcomes["choices"]
    assert choices["auto"] == choices["warm"] == "WarmLauncher"
    assert choices["one"] == "NoneType"
    assert choices["cold"] == choices["external"] == choices["several_hosts"] == "_SubprocessScriptLauncher"
    assert choices["warm_on_several_hosts"].startswith(
        "run.launcher: ranks cannot be forked here: the ranks are on several"
    )


def test_an_unsafe_fork_is_refused_or_avoided(outcomes: dict[str, Any]) -> None:
    assert outcomes["choices"]["unsafe_warm"].startswith("run.launcher: ranks cannot be forked here: a reason")
    assert outcomes["choices"]["unsafe_auto"] == ["cold start", "_SubprocessScriptLauncher"]


# -- the words of a failure ------------------------------------------------------------------------------------------


def _raised(first: BaseException, then: BaseException, *, explicit: bool) -> BaseException:
    try:
        try:
            raise first
        except BaseException as error:
            if explicit:
                raise then from error
            raise then  # noqa: B904
    except BaseException as error:
        return error


def test_the_first_error_of_a_chain_decides_who_is_to_blame() -> None:
    gone, bug = CommunicationError("rank 1 is gone"), ValueError("a bug")
    assert is_consequence(gone)
    assert is_consequence(ConnectionResetError())
    assert is_consequence(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"))
    assert not is_consequence(bug)
    assert not is_consequence(RuntimeError("shapes differ"))
    assert not is_consequence(_raised(ValueError("a bug"), CommunicationError("in the clean-up"), explicit=False))
    assert is_consequence(_raised(OSError("recv"), CommunicationError("rank 1 is gone"), explicit=True))
    assert is_consequence(_raised(CommunicationError("rank 1 is gone"), ValueError("no result"), explicit=False))


def test_an_error_that_does_not_pickle_is_described_nevertheless() -> None:
    class Local(Exception):
        pass

    report = describe(Local("told"))
    assert report.exception == b""
    assert report.summary.endswith("Local: told")


def test_a_rank_error_says_who_and_what() -> None:
    error = RankError(3, 8, "it hung and was killed", "File x, line 1\n")
    assert str(error) == "rank 3 of 8: it hung and was killed\n\nFile x, line 1"
    assert not isinstance(error, ConfigError)


def test_stacks_are_shown_without_what_led_to_the_work() -> None:
    launcher = ROOT / "src" / "strategy" / "launcher.py"
    frames = ['"model.py", line 3 in step', f'"{launcher}", line 9 in _told', '"x.py", line 1 in y']
    text = "\n  File ".join(["Thread 0x1:", *frames]) + "\n\n"
    assert readable(text + 'Thread 0x2:\n  File "z.py", line 1 in z\nExtension modules: a, b') == (
        'Thread 0x1:\n  File "model.py", line 3 in step\n\nThread 0x2:\n  File "z.py", line 1 in z'
    )


# -- slow: cold starts -----------------------------------------------------------------------------------------------

_SCRIPT = """
import sys
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from stratagem.plugins.ring_ddp import RingDDPStrategy
from stratagem.strategy import RunSettings

if __name__ == "__main__":
    strategy = RingDDPStrategy(run=RunSettings(launcher=sys.argv[1]))
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=2, limit_val_batches=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    model = BoringModel()
    trainer.fit(model)
    sys.stdout.write(f"done {trainer.global_rank} {trainer.global_step} {trainer.world_size}\\n")  # in one piece
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(_SCRIPT)
    return str(path)


@pytest.mark.slow
def test_subprocess_starts_the_script_once_per_rank(script: str) -> None:
    done = run(script, "subprocess")
    assert sorted(line for line in done.stdout.splitlines() if "done" in line) == ["done 0 2 2", "done 1 2 2"], (
        done.stderr
    )


@pytest.mark.slow
def test_ranks_of_torchrun_are_taken_as_they_are(script: str) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run(*command, script, "auto")
    assert sorted(line for line in done.stdout.splitlines() if "done" in line) == ["done 0 2 2", "done 1 2 2"], (
        done.stderr
    )


@pytest.mark.slow
def test_torchrun_with_another_number_of_ranks_is_refused(script: str) -> None:
    done = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", script, "auto")
    assert done.returncode != 0
    assert "does not match the world size" in done.stderr
    assert "done" not in done.stdout
