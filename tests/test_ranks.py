# SPDX-License-Identifier: Apache-2.0
"""The gang, and what it says when something goes wrong."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stratagem.errors import ConfigError
from stratagem.testing import preload
from stratagem.testing.ranks import SCALE_VARIABLE, HarnessError, RanksFailed, run_ranks

_SHORT = timedelta(seconds=0.5)


def _rank() -> int:
    return int(os.environ["RANK"])


# --- what a body finds


@pytest.mark.ranks(1, 2, 4)
def test_every_rank_ends_with_the_sum(num_ranks: int) -> None:
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor)
    assert tensor.item() == num_ranks * (num_ranks - 1) / 2


class TestMethods:
    @pytest.mark.ranks(2)
    def test_a_method_is_a_body_too(self, tmp_path: Path) -> None:
        (tmp_path / f"{dist.get_rank()}").touch()
        dist.barrier()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.ranks(2)
def test_a_rank_has_one_thread_seed_zero_and_the_variables_of_torchrun() -> None:
    assert torch.get_num_threads() == 1
    assert torch.initial_seed() == 0
    assert dist.get_backend() == "gloo"
    expected = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    assert {name: os.environ[name] for name in expected} == expected
    assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(dist.get_rank())
    assert dist.is_torchelastic_launched()
    assert threading.active_count() == 1


def _seen(name: str) -> tuple[str | None, str]:
    return os.environ.get(name), os.getcwd()


def test_environment_and_folder_of_the_caller_reach_the_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_ranks(1, _seen, {"name": "COLOUR"}, group=False)  # the server has started without the variable
    monkeypatch.setenv("COLOUR", "red")
    monkeypatch.chdir(tmp_path)
    assert run_ranks(2, _seen, {"name": "COLOUR"}, group=False) == [("red", str(tmp_path))] * 2


def _double(value: torch.Tensor) -> torch.Tensor:
    return 2 * value + dist.get_rank()


def test_arguments_and_results_travel_as_values() -> None:
    results = run_ranks(2, _double, {"value": torch.arange(3)})
    assert [each.tolist() for each in results] == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.ranks(2, group=False)
def test_without_a_group_env_init_works_as_under_torchrun() -> None:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == 2
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_a_body_may_close_the_group_and_open_another() -> None:
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == 2


def _fit(folder: Path) -> tuple[int, str, list[float]]:
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringModel

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    model = BoringModel()
    trainer.fit(model)
    launcher = type(trainer.strategy.launcher).__name__
    return trainer.global_rank, launcher, model.layer.weight.flatten().tolist()


def test_a_trainer_uses_the_gang_as_it_is(tmp_path: Path) -> None:
    (first, first_launcher, weights), (second, second_launcher, others) = run_ranks(2, _fit, {"folder": tmp_path})
    assert (first, second) == (0, 1)
    assert first_launcher == second_launcher
    assert weights == others
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["epoch=0-step=2.ckpt"]


# --- what is said when a rank fails


def _raise_on_rank_1() -> None:
    if _rank() == 1:
        raise ConfigError("it is broken", where="here")
    dist.recv(torch.ones(1), src=1)


def test_the_rank_that_raises_is_named_with_its_traceback_and_the_others_with_theirs() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, _raise_on_rank_1)
    message, failures = str(caught.value), caught.value.failures
    assert message.startswith("2 of 2 ranks failed; rank 1 first: ConfigError: here: it is broken.\n")
    assert 'raise ConfigError("it is broken", where="here")' in message
    assert "dist.recv(torch.ones(1), src=1)" in failures[0].details
    assert "rank.py" not in message  # frames of the harness explain nothing
    assert isinstance(failures[1].exception, ConfigError)
    assert caught.value.__cause__ is failures[1].exception


def _exit(how: str) -> None:
    dist.barrier()
    if _rank() == 0:
        return
    print("last words", file=sys.stderr, flush=True)
    if how == "exit":
        os._exit(7)
    if how == "sys.exit":
        sys.exit(7)
    if how == "exit 0":
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSEGV)


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("exit", 7, "exited with code 7 before its body returned"),
        ("sys.exit", 7, "exited with code 7 before its body returned"),
        ("exit 0", 0, "exited with code 0 before its body returned"),
        ("kill", -9, "killed by SIGKILL before its body returned"),
        ("crash", -11, "killed by SIGSEGV before its body returned"),
    ],
)
def test_a_rank_that_dies_is_named_with_its_code_and_its_last_words(how: str, code: int, said: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, _exit, {"how": how})
    failure = caught.value.failures[1]
    assert (failure.summary, failure.exitcode, failure.exception) == (said, code, None)
    assert "  | last words" in failure.details
    assert ("in _exit" in failure.details) == (how == "crash")
    assert "--- rank 0: returned after" in str(caught.value)


def _hang_in_recv() -> None:
    if _rank() == 0:
        dist.recv(torch.ones(1), src=1)  # the blocking line
    dist.barrier(group=None) if _rank() == 2 else time.sleep(3600)


def test_ranks_that_hang_are_ended_at_the_deadline_and_say_where() -> None:
    line = _hang_in_recv.__code__.co_firstlineno + 2
    started = time.monotonic()
    with pytest.raises(RanksFailed, match=r"3 of 3 ranks failed; rank \d first: still running after") as caught:
        run_ranks(3, _hang_in_recv, deadline=timedelta(seconds=2))
    assert time.monotonic() - started < 10
    details = [caught.value.failures[rank].details for rank in range(3)]
    assert f'test_ranks.py", line {line} in _hang_in_recv' in details[0]
    assert "in recv" in details[0]
    assert f'test_ranks.py", line {line + 1} in _hang_in_recv' in details[1]
    assert "in barrier" in details[2]
    assert "rank.py" not in "".join(details)


def _hang_after_a_failure() -> None:
    if _rank() == 1:
        raise ValueError("the cause")
    time.sleep(3600)


def test_the_first_failure_leaves_the_others_the_grace_period_only() -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 1 first: ValueError: the cause") as caught:
        run_ranks(2, _hang_after_a_failure, deadline=timedelta(seconds=50), grace=timedelta(seconds=1))
    assert 1 <= time.monotonic() - started < 10
    assert "in _hang_after_a_failure" in caught.value.failures[0].details


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_rank_that_does_not_answer_is_ended_all_the_same() -> None:
    with pytest.raises(RanksFailed, match="did not answer SIGUSR1"):
        run_ranks(1, _stop, deadline=_SHORT)


def _returns_the_unpicklable() -> Any:
    return lambda: None


class _Stubborn(Exception):
    """An exception that pickles but cannot be built again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def _raises_the_unpicklable() -> None:
    raise _Stubborn(1, 2)


def _leaves_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(3600,), name="Wanderer").start()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (_returns_the_unpicklable, "the body returned something that cannot be pickled: function"),
        (_raises_the_unpicklable, "_Stubborn: 1 and 2"),
        (_leaves_a_thread, "left threads running: \\['Wanderer'\\]"),
    ],
)
def test_what_a_rank_cannot_hand_over_is_explained(body: Callable[[], Any], said: str) -> None:
    with pytest.raises(RanksFailed, match=said):
        run_ranks(1, body, deadline=timedelta(seconds=20))


def test_what_cannot_travel_to_the_ranks_is_an_error_at_once() -> None:
    with pytest.raises(ValueError, match="must be a function of a module"):
        run_ranks(1, lambda: None)
    with pytest.raises(ValueError, match="argument 'name' \\(lock\\) does not pickle"):
        run_ranks(1, _seen, {"name": threading.Lock()})
    with pytest.raises(ValueError, match=r"num_ranks is 0\. Allowed: 1 or more"):
        run_ranks(0, _rank)


# --- ranks that must die


def test_a_death_that_is_expected_is_no_failure() -> None:
    assert run_ranks(2, _exit, {"how": "kill"}, dies={1: -9}) == [None, None]
    assert run_ranks(3, _dies_alone, dies={1: 7}) == ["told", None, "told"]


def _dies_alone() -> str:
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(7)
    with pytest.raises(RuntimeError, match=r"[Cc]onnection"):
        dist.recv(torch.ones(1), src=1)
    return "told"


def test_another_death_than_the_expected_one_is_a_failure() -> None:
    with pytest.raises(RanksFailed, match=r"exited with code 7 before .*, but must die otherwise: killed by SIGKILL"):
        run_ranks(2, _exit, {"how": "exit"}, dies={1: -9})
    with pytest.raises(RanksFailed, match="rank 0 first: lived, but must die: killed by SIGKILL"):
        run_ranks(2, _exit, {"how": "kill"}, dies={0: -9, 1: -9})


# --- what is left behind: nothing


def _state() -> dict[str, Any]:
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "children": len(multiprocessing.active_children()),
        "folders": sorted(Path(tempfile.gettempdir()).glob("stratagem-gang-*")),
    }


def test_fifty_gangs_in_a_row_leave_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_ranks(2, _rank)
    before = _state()
    for _ in range(50):
        assert run_ranks(2, _rank) == [0, 1]
    assert _state() == before


@pytest.mark.ranks(2)
def test_nobody_leaves_before_all_have_returned(tmp_path: Path) -> None:
    """Rank 1 returned at once and closed its connections while rank 0 was still making its own."""
    path = tmp_path / "pid"
    if dist.get_rank() == 1:
        path.write_text(str(os.getpid()))
        return
    assert _wait_until(path.exists)
    time.sleep(0.3)
    assert _alive(int(path.read_text()))


@pytest.mark.parametrize("body", [_hang_after_a_failure, _raise_on_rank_1, _stop, _leaves_a_thread])
def test_a_gang_that_fails_leaves_nothing(
    body: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_ranks(2, _rank)
    before = _state()
    with pytest.raises(RanksFailed):
        run_ranks(2, body, deadline=_SHORT, grace=_SHORT)
    assert _state() == before


def _start_a_child(path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    (path / f"{_rank()}").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(3600)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _started(path: Path) -> list[int]:
    return [int(pid) for file in path.iterdir() for pid in file.read_text().split()]


def _wait_until(condition: Callable[[], bool], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_an_interrupt_ends_the_ranks_and_what_they_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The user presses Ctrl-C while ranks run that have children of their own."""
    (elsewhere := tmp_path / "gangs").mkdir()  # other tests start gangs at the same time
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    (pids := tmp_path / "pids").mkdir()
    run_ranks(1, _rank)
    before = _state()
    interrupt = threading.Thread(
        target=lambda: _wait_until(lambda: len(_started(pids)) == 4) and os.kill(os.getpid(), signal.SIGINT)
    )
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        run_ranks(2, _start_a_child, {"path": pids})
    interrupt.join()
    assert _wait_until(lambda: not any(_alive(pid) for pid in _started(pids)))
    assert _state() == before


_PARENT = """
import sys
from pathlib import Path
from stratagem.testing.ranks import run_ranks
from tests.test_ranks import _start_a_child
if __name__ == "__main__":
    run_ranks(1, _start_a_child, {"path": Path(sys.argv[1])})
"""


@pytest.mark.slow
def test_ranks_and_what_they_started_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, str(tmp_path)])
    try:
        assert _wait_until(lambda: len(_started(tmp_path)) == 2, 120)
        parent.kill()
        assert _wait_until(lambda: not any(_alive(pid) for pid in _started(tmp_path)))
    finally:
        parent.kill()
        parent.wait()


# --- the harness itself


def test_a_module_that_was_not_inherited_is_a_failure_of_the_harness() -> None:
    run_ranks(1, _rank, group=False)
    with pytest.raises(HarnessError, match="mailbox was not inherited: the fork server was already running"):
        run_ranks(1, _rank, group=False, modules=["mailbox"])


def test_a_preload_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload, "_PID", -1)  # as if this process were a fork of the one that loaded it
    monkeypatch.setattr(preload, "_LOADED", set())
    monkeypatch.setattr(preload, "_FAILED", {})
    preload._load(["json", "no_such_module"], preload._FAILED)
    missing = preload.missing(["json", "no_such_module"])
    assert list(missing) == ["no_such_module"]
    assert "No module named 'no_such_module'" in missing["no_such_module"]


_EARLY = """
import operator
from multiprocessing import forkserver
from stratagem.testing.ranks import HarnessError, run_ranks
if __name__ == "__main__":
    forkserver.ensure_running()
    try:
        run_ranks(1, operator.add)
    except HarnessError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_server_that_other_code_has_started_is_a_failure_of_the_harness() -> None:
    command = [sys.executable, "-c", _EARLY]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "torch was not inherited: the fork server imported nothing: it was started by other code" in result.stdout


def test_slow_machines_scale_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SCALE_VARIABLE, "1e-9")
    with pytest.raises(RanksFailed, match="still running"):
        run_ranks(1, _rank)


def _speak() -> None:
    print(f"I am {_rank()}")
    os.system("echo from below")


def test_output_of_the_ranks_is_shown_behind_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, _speak)
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(
        f"[rank {rank}] {text}" for rank in (0, 1) for text in (f"I am {rank}", "from below")
    )
