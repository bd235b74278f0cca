# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to a save, what was committed before is there, whole."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from stratagem.checkpoint import commit
from stratagem.checkpoint.commit import Draft, candidates, faults, remove, sweep
from stratagem.checkpoint.manifest import MANIFEST, Manifest, rank_file
from stratagem.checkpoint.parts import Part
from stratagem.checkpoint.reading import Reader
from stratagem.checkpoint.writing import choose, write
from stratagem.errors import CheckpointError
from stratagem.strategy import FaultTolerantCheckpointIO


def save(target: Path, value: float, step: int = 0) -> None:
    draft = Draft(target)
    written = write(draft.folder, 0, choose({"w": Part.whole(torch.full((100,), value))}))
    draft.commit(Manifest.join([written], {}, {"global_step": step}))


def value_of(target: Path) -> float:
    assert faults(target) == []
    return float(Reader(target).whole("w")[0])


def test_a_draft_is_no_checkpoint_until_it_is_committed(tmp_path: Path) -> None:
    draft = Draft(tmp_path / "a")
    written = write(draft.folder, 0, choose({"w": Part.whole(torch.zeros(3))}))
    assert candidates(tmp_path) == []
    assert not (tmp_path / "a").exists()
    draft.commit(Manifest.join([written], {}, {}))
    assert candidates(tmp_path) == [tmp_path / "a"]
    assert sorted(os.listdir(tmp_path / "a")) == [MANIFEST, rank_file(0)]


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "aside"])
def test_a_new_one_takes_the_name_of_an_old_one(
    exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(commit, "_exchange", lambda *_: False)
    for value in (1.0, 2.0, 3.0):
        save(tmp_path / "last", value)
        assert value_of(tmp_path / "last") == value
        assert os.listdir(tmp_path) == ["last"]


def test_a_file_of_that_name_is_replaced_too(tmp_path: Path) -> None:
    (tmp_path / "last").write_text("a checkpoint in one file")
    save(tmp_path / "last", 1.0)
    assert value_of(tmp_path / "last") == 1.0


def die(*_: object, **__: object) -> None:
    """As a machine that stops."""
    os.kill(os.getpid(), signal.SIGKILL)


def arrange_death(place: str) -> None:
    """Lets this process die before or after a function of the commit."""
    when, _, name = place.partition(" ")
    owner: Any = Draft if name == "commit" else os if name in ("rename", "unlink") else commit
    real = getattr(owner, name)

    def does_and_dies(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        die()

    setattr(owner, name, die if when == "before" else does_and_dies)
    if name == "rename":
        commit._exchange = lambda *_: False  # type: ignore[assignment]  # renames are the other way to commit


def save_and_die(place: str, target: Path) -> int:
    """Saves in a process of its own; how that ended."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if place != "nowhere":
                arrange_death(place)
            save(target, 2.0, step=2)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


_PLACES = [
    "before commit",
    "before write_text",
    "after write_text",
    "after unlink",
    "before _take_name",
    "before rename",
    "after rename",
    "before _remove",
    "after commit",
    "nowhere",
]


@pytest.mark.parametrize("place", _PLACES)
def test_killed_anywhere_the_old_or_the_new_one_is_there_whole(place: str, tmp_path: Path) -> None:
    save(tmp_path / "last", 1.0, step=1)
    assert save_and_die(place, tmp_path / "last") == (0 if place == "nowhere" else -signal.SIGKILL)
    newest = candidates(tmp_path)[0]
    assert value_of(newest) in (1.0, 2.0)
    if place in ("after commit", "nowhere"):
        assert value_of(newest) == 2.0
    if place.startswith("before") and place not in ("before _remove", "before rename"):
        assert value_of(newest) == 1.0
    sweep(tmp_path)
    assert value_of(candidates(tmp_path)[0]) in (1.0, 2.0), "sweeping took the checkpoint"


def test_sweeping_takes_what_the_dead_left_and_nothing_of_the_living(tmp_path: Path) -> None:
    alive = Draft(tmp_path / "a")
    dead = Draft(tmp_path / "b")
    dead._lock.close()
    save(tmp_path / "c", 1.0)
    assert sweep(tmp_path) == [dead.folder]
    assert sorted(os.listdir(tmp_path)) == [alive.folder.name, "c"]
    alive.discard()
    assert os.listdir(tmp_path) == ["c"]


def test_another_run_in_the_folder_may_sweep_at_any_moment_of_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[str] = []

    def sweeping(where: str) -> None:
        if where not in swept:
            swept.append(where)
            sweep(tmp_path)

    make, lock = Path.mkdir, fcntl.flock

    def mkdir(path: Path, *args: Any, **kwargs: Any) -> None:
        make(path, *args, **kwargs)
        sweeping("made, without a lock")

    def flock(file: Any, how: int) -> None:
        if not how & fcntl.LOCK_NB:
            sweeping("with a lock that nobody holds")
        lock(file, how)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(fcntl, "flock", flock)
    draft = Draft(tmp_path / "a")
    written = write(draft.folder, 0, choose({"w": Part.whole(torch.ones(3))}))
    draft.commit(Manifest.join([written], {}, {}), lambda step, _: sweeping(step))
    assert swept == ["made, without a lock", "with a lock that nobody holds", "manifest", "renamed"]
    assert value_of(tmp_path / "a") == 1.0
    assert os.listdir(tmp_path) == ["a"]


def test_newest_first_by_step_then_time(tmp_path: Path) -> None:
    for step in (10, 9, 100):
        save(tmp_path / f"step={step}", 0.0, step)
    assert [path.name for path in candidates(tmp_path)] == ["step=100", "step=10", "step=9"]


def test_damage_is_found_and_named(tmp_path: Path) -> None:
    save(tmp_path / "a", 1.0)
    file = tmp_path / "a" / rank_file(0)
    intact = file.read_bytes()
    file.write_bytes(intact[:-1])
    assert "bytes" in faults(tmp_path / "a")[0]
    flipped = bytearray(intact)
    flipped[600] ^= 1
    file.write_bytes(flipped)
    assert "checksum" in faults(tmp_path / "a")[0]
    assert faults(tmp_path / "a", deep=False) == []
    assert faults(tmp_path / "a", share=1, num_shares=2) == [], "that file is another rank's to read"
    file.unlink()
    assert "cannot be read" in faults(tmp_path / "a")[0]
    (tmp_path / "a" / MANIFEST).write_text("{")
    assert "no manifest" in faults(tmp_path / "a")[0]


def test_removing_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a", 1.0)
    monkeypatch.setattr(commit, "_remove", lambda *_: None)  # dies before the files are gone
    remove(tmp_path / "a")
    assert candidates(tmp_path) == []
    monkeypatch.undo()
    sweep(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_to_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be made"):
        Draft(tmp_path / "file" / "a")


def test_a_checkpoint_stays_when_the_save_that_replaces_it_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its removal was asked for while that save was in flight; a later call must not make up for it."""
    io = FaultTolerantCheckpointIO(async_save=True)
    io.save_checkpoint({"state_dict": {"w": torch.ones(3)}}, tmp_path / "a")
    io.settle()
    with monkeypatch.context() as broken:
        broken.setattr(Draft, "commit", lambda *_: (_ for _ in ()).throw(OSError("the disk is gone")))
        io.save_checkpoint({"state_dict": {"w": torch.zeros(3)}}, tmp_path / "b")
        io.remove_checkpoint(tmp_path / "a")
        with pytest.raises(CheckpointError):
            io.settle()
    io.settle()
    assert value_of(tmp_path / "a") == 1.0
