# SPDX-License-Identifier: Apache-2.0
"""When a run is tried again and when it is not, what it goes on from, and what it says of itself."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO

from stratagem.cli import main
from stratagem.errors import CheckpointError, ConfigError, DriftError, RankError
from stratagem.resilience import restart, restart_policy
from stratagem.resilience import restart_report as report
from stratagem.resilience import restart_search as search
from stratagem.resilience.restart import Restarts, Resume
from stratagem.resilience.restart_attempt import Attempt, Begun, Slots, fitting_devices
from stratagem.resilience.restart_policy import LONGEST_WAIT, Failure, judge
from stratagem.resilience.restart_words import OPTIONS, refuse_where_others_restart, take
from stratagem.strategy.checkpoint_io import FaultTolerantCheckpointIO
from stratagem.strategy.rank_process import Rank
from stratagem.strategy.supervisor import supervised


def save(path: Path, step: int, model: BoringModel | None = None) -> None:
    """A checkpoint as a run leaves it."""
    state = (model or BoringModel()).state_dict()
    checkpoint = {"state_dict": state, "optimizer_states": [], "global_step": step, "epoch": 0}
    FaultTolerantCheckpointIO().save_checkpoint(checkpoint, path)


def a_trainer(folder: Path, *callbacks: Any, **options: Any) -> Trainer:
    defaults = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": bool(callbacks)}
    return Trainer(**{**defaults, "default_root_dir": folder, "callbacks": list(callbacks), **options})


# -- whether --------------------------------------------------------------------------------------------------------


def test_progress_sets_the_count_back_and_a_loop_ends_it() -> None:
    newest = [3, 3, 6, 6, 6, 6]
    failures = [Failure(f"cause {number}", number, step) for number, step in enumerate(newest)]
    verdicts = [judge(failures[:count], -1, 3) for count in range(1, 7)]
    assert [verdict.go_on for verdict in verdicts] == [True, True, True, True, True, False]
    assert [verdict.wait for verdict in verdicts] == [0.5, 1.0, 0.5, 1.0, 2.0, 0.0]
    many = [Failure(f"cause {number}", number, 3) for number in range(50)]
    assert judge(many, -1, 100).wait == LONGEST_WAIT
    at = [Failure("boom at 0xabc", 4, 3), Failure("boom at 0xdef", 4, 3)]
    assert judge(at, -1, 3).reason == "loop"
    assert judge([at[0], Failure("boom at 0xabc", 5, 3)], -1, 3).go_on  # at another step
    assert judge([at[0], Failure("boom at 0xabc", 4, 4)], -1, 3).go_on  # with a newer checkpoint in between


def test_what_others_do_not_allow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["--resume"], ["--max-restarts", "3"], ["--resume", "auto", "--max-restarts", "x"]):
        with pytest.raises(ConfigError):
            take("fit", words)
    with pytest.raises(ConfigError, match="validate has nothing to resume"):
        take("validate", ["--resume", "auto"])
    with pytest.raises(ConfigError, match="there is no such checkpoint"):
        take("fit", ["--resume", "not there"])
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert not refuse_where_others_restart(Resume(), [])
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert refuse_where_others_restart(Resume(), ["--resume", "auto"])
    with pytest.raises(ConfigError, match="restarted by it alone"):
        refuse_where_others_restart(Resume(), ["--resume", "auto", "--max-restarts=2"])


def test_the_options_are_in_the_help_of_fit_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, shown in (("fit", True), ("validate", False)):
        assert main([verb, "-h"]) == 0
        text = capsys.readouterr().out
        assert all((f"--{option} " in text) == shown for option in OPTIONS)


# -- from what ------------------------------------------------------------------------------------------------------


def test_the_newest_whole_checkpoint_of_all_versions_is_found(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, "run")
    trainer = a_trainer(
        tmp_path, ModelCheckpoint(), ModelCheckpoint(tmp_path / "own", every_n_train_steps=2), logger=logger
    )
    places = search.places(trainer)
    assert search.newest(places) is None
    paths = [tmp_path / "run" / f"version_{n}" / "checkpoints" / f"step={3 * n}.ckpt" for n in (1, 2, 10)]
    for path, step in zip(paths, (3, 6, 9), strict=True):
        save(path, step)
    save(tmp_path / "own" / "a.ckpt", 7)
    save(tmp_path / "other" / "version_0" / "checkpoints" / "b.ckpt", 99)
    found = search.newest(places)
    assert found is not None
    assert (found.path, found.step) == (paths[2], 9)
    assert search.newest(places, since=time.time() + 1) is None
    data = next(paths[2].glob("rank-*.bin"))  # one bit turned over: its size says nothing
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    with pytest.warns(UserWarning, match="is damaged, and passed over"):
        found = search.newest(places)
    assert found is not None
    assert found.path == tmp_path / "own" / "a.ckpt"
    shutil.rmtree(tmp_path / "own")
    (paths[1] / "manifest.json").write_text("{")
    with pytest.warns(UserWarning, match="is damaged, and passed over"):
        found = search.newest(places)
    assert found is not None
    assert found.step == 3


def test_a_run_that_cannot_resume_is_refused_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keeps no checkpoint"):
        search.places(a_trainer(tmp_path))
    with pytest.raises(ConfigError, match="keeps no checkpoint"):
        search.places(a_trainer(tmp_path, ModelCheckpoint(save_weights_only=True)))
    plain = a_trainer(tmp_path, ModelCheckpoint())
    assert type(plain.strategy.checkpoint_io) is TorchCheckpointIO
    search.make_resumable(plain)
    assert isinstance(plain.strategy.checkpoint_io, FaultTolerantCheckpointIO)

    class Foreign(TorchCheckpointIO):
        pass

    with pytest.raises(ConfigError, match="Foreign writes checkpoints without a manifest"):
        search.make_resumable(a_trainer(tmp_path, ModelCheckpoint(), plugins=[Foreign()]))


def test_a_checkpoint_of_another_model_is_refused_by_name_and_shape(tmp_path: Path) -> None:
    save(tmp_path / "x.ckpt", 3)
    search.check_model(tmp_path / "x.ckpt", BoringModel())
    other = BoringModel()
    other.layer = torch.nn.Linear(32, 3)
    other.more = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError) as refusal:
        search.check_model(tmp_path / "x.ckpt", other)
    text = str(refusal.value)
    assert str(tmp_path / "x.ckpt") in text
    assert "'layer.weight' has shape (2, 32) there and (3, 32) here" in text
    fewer = torch.nn.Module()
    fewer.strict_loading = True
    fewer.weight = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"'layer.weight' is not in the model"):
        search.check_model(tmp_path / "x.ckpt", fewer)  # type: ignore[arg-type]


def test_fewer_devices_only_where_the_global_batch_stays(tmp_path: Path) -> None:
    data = LightningDataModule()
    four = a_trainer(tmp_path, devices=4, strategy="ring_ddp")
    with pytest.raises(ConfigError, match="the batch is stated per rank"):
        fitting_devices(four, data, 2)
    data.global_batch = 12
    assert fitting_devices(four, data, 1) == (1, 2, 3, 4)
    data.global_batch = 16
    assert fitting_devices(four, data, 1) == (1, 2, 4)
    with pytest.raises(ConfigError, match="no number of devices from 3 to 3 divides"):
        fitting_devices(four, data, 3)
    with pytest.raises(ConfigError, match="--min-devices"):
        fitting_devices(four, data, 5)
    accumulating = a_trainer(tmp_path, devices=4, strategy="ring_ddp", accumulate_grad_batches=2)
    assert fitting_devices(accumulating, data, 1) == (1, 2, 4)


def test_all_ranks_that_died_are_known(tmp_path: Path) -> None:
    def end(rank: Rank, message: object) -> None:
        if rank.number in (1, 3):
            os.kill(os.getpid(), signal.SIGKILL)

    with supervised(4, timedelta(seconds=60)) as ranks:
        ranks.start(end)
        ranks.tell(None)
        with pytest.raises(RankError) as failure:
            ranks.wait()
    assert failure.value.dead == (1, 3)


# -- the attempts, without a Trainer --------------------------------------------------------------------------------


def play(attempt: Attempt, folder: str, acts: list[str]) -> None:
    """One attempt that does as it is told: saves some steps, then fails, leaves or returns."""
    found = search.newest([folder])
    step = found.step if found is not None else -1
    attempt.tell(Begun(attempt.devices or 4, (2, 3, 4), (folder,), folder, str(found.path) if found else "", step))
    with open(Path(folder) / "log.txt", "a") as log:
        log.write(f"{attempt.number} {attempt.devices} {step} {os.environ['TORCHELASTIC_RESTART_COUNT']}\n")
    act, _, saved = acts[attempt.number].partition(" ")
    assert attempt.slots is not None
    attempt.slots.put(1, 10 * attempt.number if act == "moves" else 5, time.time())
    if saved:
        save(Path(folder) / f"{saved}.ckpt", int(saved))
    if act == "dies":
        raise RankError(1, 4, "it was killed", exitcode=-9)
    if act in ("two-die", "drifts"):
        error = RankError(1, 4, "it was killed", exitcode=-9 if act == "two-die" else None)
        error.dead, error.cause = ((1, 2), None) if act == "two-die" else ((), DriftError("rank 2 is odd"))
        raise error
    if act in ("raises", "moves"):
        raise RankError(1, 4, "boom")
    if act == "vanishes":
        subprocess.Popen(["sleep", "600"])  # a rank of ddp, which would wait for this one
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "refuses":
        raise ConfigError("it is wrong", where="trainer")
    if act == "leaves":
        raise SystemExit(143)


def played(folder: Path, *acts: str, **options: int) -> tuple[Any, list[str]]:
    """The exit code, or what was raised, and one line per attempt."""
    folder.mkdir()
    result: Any
    try:
        result = Restarts(Resume(**options), lambda attempt: play(attempt, str(folder), list(acts))).run()
    except Exception as error:
        result = error
    return result, (folder / "log.txt").read_text().splitlines()


def _is_gone(group: int) -> bool:
    """Whether the process group has no living member; zombies, which wait for their new parent, do not count."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its) == group and state not in "ZX":
                return False
    return True


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts follow at once."""
    monkeypatch.setattr(restart_policy, "LONGEST_WAIT", 0.0)
    monkeypatch.setattr(restart, "_GRACE", 0.2)


@pytest.mark.usefixtures("impatient")
def test_attempts_go_on_until_the_run_is_done(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared: list[int] = []
    monkeypatch.setattr(restart, "_clear", lambda group, clear=restart._clear: (clear(group), cleared.append(group)))
    code, log = played(tmp_path / "a", "dies 3", "raises 4", "vanishes 5", "dies 6", "returns 7")
    assert len(cleared) == 4
    for group in cleared:
        assert _is_gone(group)
    assert code == 0
    assert log == ["0 0 -1 0", "1 3 3 1", "2 3 4 2", "3 3 5 3", "4 2 6 4"]
    summary = json.loads((tmp_path / "a" / "restarts.json").read_text())
    assert [attempt["devices"] for attempt in summary["attempts"]] == [4, 3, 3, 3, 2]
    assert [attempt["redone"] for attempt in summary["attempts"]] == [2, 1, 0, 0, 0]
    assert summary["restarts"] == 4
    assert "Restarts: 5 attempts on 4, 3, 3, 3, 2 devices; 3 steps redone" in capfd.readouterr().out


@pytest.mark.usefixtures("impatient")
def test_attempts_end_where_another_one_would_be_in_vain(tmp_path: Path) -> None:
    for name, acts, options, lines, words in (
        ("loop", ["raises 3", "raises", "returns"], {}, 2, "the same failure at the same step twice"),
        ("many", ["moves", "moves", "moves", "returns"], {"max_restarts": 2}, 3, "--max-restarts"),
        ("none", ["raises", "returns"], {"max_restarts": 0}, 1, "--max-restarts is 0"),
    ):
        error, log = played(tmp_path / name, *acts, **options)  # type: ignore[arg-type]
        assert isinstance(error, RankError), name
        assert len(log) == lines, name
        assert words in str(error)
        assert "boom" in str(error)
    error, log = played(tmp_path / "refused", "raises 3", "refuses", "returns")
    assert (type(error), str(error), len(log)) == (ConfigError, "trainer: it is wrong.", 2)
    assert played(tmp_path / "stopped", "raises 3", "leaves", "returns")[0] == 143


@pytest.mark.usefixtures("impatient")
def test_each_rank_that_died_is_a_device_fewer_and_a_drift_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert played(tmp_path / "two", "two-die 3", "returns 7")[1] == ["0 0 -1 0", "1 2 3 1"]
    assert "may hold the drift" not in capfd.readouterr().out
    assert played(tmp_path / "drift", "drifts 3", "returns 7")[1] == ["0 0 -1 0", "1 4 3 1"]
    assert "may hold the drift, that of step 3 too" in capfd.readouterr().out


def test_what_restarts_cost_is_counted(tmp_path: Path) -> None:
    slots = Slots()
    slots.put(0, 4, 9.0)
    slots.put(3, 5, 8.0)
    assert (slots.reached(), slots.began()) == (5, 8.0)
    slots.clear()
    assert (slots.reached(), slots.began()) == (-1, 0.0)
    records = [report.Record(0, 4, "", 0, 5, "boom", 9.0, 2, 3.5), report.Record(1, 3, "x", 3, 9, "", 8.0)]
    content = json.loads(report.write(tmp_path / "new", records).read_text())
    assert (content["redone_steps"], content["lost_seconds"], len(content["attempts"])) == (2, 3.5, 2)
