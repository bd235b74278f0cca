# SPDX-License-Identifier: Apache-2.0
"""Wherever a rank is killed, and whatever the disk does: what was committed loads, and no rank waits for ever."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from stratagem.checkpoint.commit import candidates, faults
from stratagem.checkpoint.manifest import MANIFEST, OBJECTS, rank_file
from stratagem.checkpoint.parts import Part
from stratagem.checkpoint.reading import Reader
from stratagem.errors import CheckpointError
from stratagem.mesh import MeshShape
from stratagem.strategy.checkpoint_io import FaultTolerantCheckpointIO, Point
from stratagem.technique import Context
from stratagem.testing import Fault, Faults, RanksFailed, run_ranks
from stratagem.testing.contract import Subject
from stratagem.testing.contract.resuming import BATCHES, GLOBAL_BATCH, Everything, _Tokens
from stratagem.testing.contract.runs import Run, make_trainer
from stratagem.testing.ranks import RankFailure

POINTS: tuple[Point, ...] = get_args(Point)
ALONE = ("agreed", "described", "manifest", "renamed", "committed")
"""Points at which rank 0 alone is."""

BEFORE_COMMIT = POINTS[: POINTS.index("renamed")]


def joined(io: FaultTolerantCheckpointIO) -> Context:
    """The plugin with all ranks of this gang as its crew."""
    context = Context(
        MeshShape.fit(dist.get_world_size()), dist.get_rank(), torch.device("cpu"), timeout=timedelta(seconds=30)
    )
    io.join(context.communicator(*context.shape.sizes, lane="checkpoint"))
    return context


def state_of(step: int, rows: int = 60) -> dict[str, Any]:
    """A checkpoint all of whose elements say the step: replicas, and a tensor of which each rank holds its rows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    share = rows // size
    mine = torch.full((share, 3), float(step))
    part = Part((share * size, 3), mine.dtype, (((rank * share, (rank + 1) * share), (0, 3)),), (mine,))
    whole = {f"whole{number}": torch.full((40, 2), float(step)) for number in range(4)}
    optimizer = {"state": {0: {"exp_avg": part}}, "param_groups": []}
    own = {"rank": {"noise": torch.full((5,), float(step))}}
    return {
        "state_dict": {**whole, "cut": part},
        "optimizer_states": [optimizer],
        "global_step": step,
        "stratagem": own,
    }


def step_in(folder: Path) -> float:
    """The one step that all of a whole checkpoint says; nothing of it may be of another save."""
    assert faults(folder) == []
    reader = Reader(folder)
    values = {value for name in reader.manifest.entries for value in reader.whole(name).reshape(-1).tolist()}
    values.add(float(torch.load(folder / OBJECTS)["global_step"]))
    assert len(values) == 1, f"{folder} is a mix of {values}"
    return values.pop()


def save_twice(folder: Path, same_name: bool, async_save: bool, injected: Sequence[Fault]) -> None:
    """The body of every rank: two saves, the faults in the second one."""
    io = FaultTolerantCheckpointIO(async_save)
    context = joined(io)
    io.watcher = lambda point, step, path: struck.strike_save(context.rank, point, step, path)
    struck = Faults(injected)
    for step in (1, 2):
        io.save_checkpoint(state_of(step), folder / ("last" if same_name else f"step={step}"))
    io.leave()


def fail(num_ranks: int, body: Any, kwargs: dict[str, Any], **options: Any) -> dict[int, RankFailure]:
    """How the ranks failed, none of them by waiting; empty if none did."""
    failures: dict[int, RankFailure] = {}
    try:
        run_ranks(num_ranks, body, kwargs, deadline=timedelta(seconds=40), grace=timedelta(seconds=20), **options)
    except RanksFailed as error:
        failures = error.failures
    hung = [f"rank {rank}: {failure.details}" for rank, failure in failures.items() if failure.exitcode is None]
    assert not hung, "\n".join(hung)
    return failures


# -- killed in a save -----------------------------------------------------------------------------------------------


def check_killed(point: Point, rank: int, async_save: bool, folder: Path) -> None:
    """Kills `rank` at `point` of a save under a new name, and of one that takes the name of an old one."""
    for same_name in (False, True):
        here = folder / str(same_name)
        fault = Fault("kill", rank, 2, f"save_{point}")  # type: ignore[arg-type]
        kwargs = {"folder": here, "same_name": same_name, "async_save": async_save, "injected": [fault]}
        fail(2, save_twice, kwargs, dies={rank: -signal.SIGKILL})
        newest = candidates(here)[0]
        assert step_in(newest) == (1.0 if point in BEFORE_COMMIT else 2.0)
        run_ranks(1, save_after, {"folder": here})
        left = sorted(path.name for path in here.iterdir())
        assert left == sorted({*(["last"] if same_name else [f"step={int(step_in(newest))}", "step=1"]), "step=3"})


def save_after(folder: Path) -> None:
    """The next run: what it finds is whole, and its first save sweeps."""
    io = FaultTolerantCheckpointIO()
    io.load_checkpoint(candidates(folder)[0])
    io.save_checkpoint(state_of(3), folder / "step=3")
    assert step_in(folder / "step=3") == 3.0


@pytest.mark.parametrize(("point", "rank"), [("writing", 1), ("manifest", 0)])
def test_killed_in_a_save(point: Point, rank: int, tmp_path: Path) -> None:
    check_killed(point, rank, True, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_every_point_of_a_save(point: Point, rank: int, async_save: bool, tmp_path: Path) -> None:
    if rank == 1 and point in ALONE:
        pytest.skip("rank 0 alone is there")
    check_killed(point, rank, async_save, tmp_path)


# -- killed again and again -----------------------------------------------------------------------------------------

EVERY = 2


class _Keeper(Callback):
    """Saves every few steps, and writes down what was read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        number = trainer.current_epoch * BATCHES + batch_idx
        with open(self.folder / f"read-{trainer.global_rank}", "a") as file:
            file.write(f"{number} {' '.join(str(row) for row in batch[0].tolist())}\n")
        if trainer.global_step % EVERY == 0:
            trainer.save_checkpoint(self.folder / f"step={trainer.global_step}")


def live(folder: Path, epochs: int, resume_from: str | None, injected: Sequence[Fault], name: str) -> dict[str, Tensor]:
    """The body of every rank: one life of a run; the weights at its end."""
    seed_everything(1, verbose=False)
    plugins = [FaultTolerantCheckpointIO(async_save=True, keep_last=2)]
    callbacks = (_Keeper(folder), Faults(injected))
    trainer = make_trainer(
        Subject(strategy=name), Run(), *callbacks, max_epochs=epochs, plugins=plugins, use_distributed_sampler=True
    )
    loader = DataLoader(_Tokens(), batch_size=GLOBAL_BATCH, shuffle=True)
    module = Everything(quiet=False)
    trainer.fit(module, loader, ckpt_path=resume_from)
    return {key: value.detach().clone() for key, value in module.state_dict().items()}


def read_in(folder: Path) -> dict[int, set[tuple[int, ...]]]:
    """By batch, what its ranks read, each time that it was trained; one set if it was always the same."""
    found: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    for rank in range(2):
        for line in (folder / f"read-{rank}").read_text().splitlines():
            number, *rows = (int(word) for word in line.split())
            found.setdefault((number, rank), set()).add(tuple(rows))
    assert all(len(times) == 1 for times in found.values()), "a batch was read again with other samples"
    numbers = {number for number, _ in found}
    return {number: found[number, 0] | found[number, 1] for number in numbers}


def check_random_kills(num_kills: int, name: str, folder: Path) -> None:
    """One run with so many deaths ends as the run that never died."""
    draw = random.Random(num_kills)
    epochs = -(-(num_kills * 2 + 5) // BATCHES)
    never, often = folder / "never", folder / "often"
    never.mkdir(), often.mkdir()
    kwargs: dict[str, Any] = {"epochs": epochs, "name": name}
    expected = run_ranks(2, live, {**kwargs, "folder": never, "resume_from": None, "injected": []})
    moments = [f"save_{point}" for point in POINTS] + ["before_forward", "after_backward", "after_step"]
    died = 0
    while died < num_kills:
        newest = next(iter(candidates(often)), None)
        begins = int(Reader(newest).manifest.about["global_step"]) if newest is not None else 0
        moment, rank = draw.choice(moments), draw.randrange(2)
        step = begins + draw.randint(1, 3)
        if moment.startswith("save_"):
            step, rank = begins + EVERY, 0 if moment.removeprefix("save_") in ALONE else rank
        fault = Fault("kill", rank, step, moment)  # type: ignore[arg-type]
        life = {**kwargs, "folder": often, "resume_from": str(newest) if newest is not None else None}
        assert step < epochs * BATCHES, "the run is over before all have died"
        fail(2, live, {**life, "injected": [fault]}, dies={rank: -signal.SIGKILL})
        died += 1
    newest = candidates(often)[0]
    ended = run_ranks(2, live, {**kwargs, "folder": often, "resume_from": str(newest), "injected": []})
    for rank in range(2):
        wrong = [key for key, value in expected[rank].items() if not torch.equal(value, ended[rank][key])]
        assert not wrong, f"rank {rank} ends with other bits in {wrong}"
    assert read_in(often) == read_in(never)
    kept = sorted(path.name for path in often.iterdir() if not path.name.startswith("read-"))
    last = epochs * BATCHES // EVERY * EVERY
    assert kept == sorted([f"step={last}", f"step={last - EVERY}"]), "checkpoints or orphans were left"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ring_ddp", "zero_3"])
def test_killed_again_and_again(name: str, tmp_path: Path) -> None:
    """`STRATAGEM_TEST_KILLS=100` for a long evening."""
    check_random_kills(int(os.environ.get("STRATAGEM_TEST_KILLS", "6")), name, tmp_path)


# -- one rank fails -------------------------------------------------------------------------------------------------


def save_on_bad_ground(folder: Path, async_save: bool, limited: bool) -> list[str]:
    """Rank 1 cannot write its second save; returns what each call said on this rank."""
    io = FaultTolerantCheckpointIO(async_save)
    context = joined(io)
    struck = Faults([Fault("full", 1, 2, "save_writing")])
    said = []

    def save(step: int) -> None:
        try:
            io.save_checkpoint(state_of(step), folder / f"step={step}")
            said.append("")
        except CheckpointError as error:
            said.append(str(error))

    save(1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limited and context.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    elif not limited:
        io.watcher = lambda point, step, path: struck.strike_save(context.rank, point, step, path)
    save(2)
    if async_save:
        save(3)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    save(4)
    try:
        io.leave()
        said.append("")
    except CheckpointError as error:
        said.append(str(error))
    return said


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_a_disk_that_is_full_on_one_rank_is_an_error_on_all(async_save: bool, tmp_path: Path) -> None:
    """At that save, or at the next one; what follows is saved, and what went before is untouched."""
    kwargs = {"folder": tmp_path, "async_save": async_save, "limited": False}
    for said in run_ranks(2, save_on_bad_ground, kwargs):
        failed = 2 if async_save else 1
        assert [bool(text) for text in said] == [number == failed for number in range(len(said))], said
        assert said[failed].startswith(f"{tmp_path}/step=2: rank 1: the checkpoint cannot be written: No space left")
        assert "To mend it: free some space" in said[failed]
    assert sorted(os.listdir(tmp_path)) == ["step=1", "step=4"]
    assert [step_in(path) for path in candidates(tmp_path)] == [4.0, 1.0]


def test_a_limit_of_the_system_is_met_for_real(tmp_path: Path) -> None:
    """The kernel refuses rank 1's file beyond 1000 bytes."""
    for said in run_ranks(2, save_on_bad_ground, {"folder": tmp_path, "async_save": False, "limited": True}):
        assert "rank 1: the checkpoint cannot be written: File too large" in said[1]
        assert said[2:] == ["", ""]
    assert sorted(os.listdir(tmp_path)) == ["step=1", "step=4"]


def save_at_the_end(folder: Path) -> str:
    """An async save that fails and that no other one follows."""
    io = FaultTolerantCheckpointIO(async_save=True)
    context = joined(io)
    struck = Faults([Fault("full", 1, 1, "save_written")])
    io.watcher = lambda point, step, path: struck.strike_save(context.rank, point, step, path)
    io.save_checkpoint(state_of(1), folder / "a")
    with pytest.raises(CheckpointError, match="rank 1") as caught:
        io.leave()
    return str(caught.value)


def test_a_failure_in_the_background_is_raised_at_the_end(tmp_path: Path) -> None:
    assert len(set(run_ranks(2, save_at_the_end, {"folder": tmp_path}))) == 1
    assert os.listdir(tmp_path) == []


def save_where_nothing_can_be(folder: Path) -> str:
    """Returns what was said."""
    io = FaultTolerantCheckpointIO()
    joined(io)
    with pytest.raises(CheckpointError) as caught:
        io.save_checkpoint(state_of(1), folder / "a")
    return str(caught.value)


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    """Only rank 0 tries, and all ranks say why not."""
    (tmp_path / "file").write_text("")
    grounds = {tmp_path / "file": "a part of this path is a file"}
    if os.geteuid() != 0:  # root writes wherever it likes
        (tmp_path / "locked").mkdir(mode=0o500)
        grounds[tmp_path / "locked"] = "choose a folder that can be written to"
    for ground, remedy in grounds.items():
        for said in run_ranks(2, save_where_nothing_can_be, {"folder": ground}):
            assert said.startswith(f"{ground}/a: the checkpoint cannot be made")
            assert remedy in said


DAMAGES = ("truncated", "flipped", "missing", "no objects", "no manifest", "half a manifest", "no folder", "all")


def damage(folder: Path, how: str) -> None:
    """Does it to the second of two checkpoints, or to both."""
    for target in [folder / "step=2", *([folder / "step=1"] if how == "all" else [])]:
        file = target / rank_file(1)
        if how in ("truncated", "all"):
            os.truncate(file, file.stat().st_size - 1)
        elif how == "flipped":
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        elif how == "missing":
            file.unlink()
        elif how == "no objects":
            (target / OBJECTS).unlink()
        elif how == "no manifest":
            (target / MANIFEST).unlink()
        elif how == "half a manifest":
            os.truncate(target / MANIFEST, 100)
        else:
            shutil.rmtree(target)


def load_damaged(folder: Path) -> dict[str, tuple[float, str]]:
    """By damage, which step was loaded instead (-1 for none) and what was said."""
    io = FaultTolerantCheckpointIO()
    joined(io)
    found = {}
    for how in DAMAGES:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                loaded = io.load_checkpoint(folder / how / "step=2")
                step = float(loaded["state_dict"]["cut"].unique())
                said = " ".join(str(each.message) for each in warned)
            except CheckpointError as error:
                step, said = -1.0, str(error)
        found[how] = (step, said)
    return found


def test_what_is_damaged_is_passed_over_aloud_and_by_all(tmp_path: Path) -> None:
    """Every rank takes the same older one; where there is none, every rank says so."""
    for how in DAMAGES:
        (tmp_path / how).mkdir()
    run_ranks(2, save_many, {"folders": [tmp_path / how for how in DAMAGES]})
    for how in DAMAGES:
        damage(tmp_path / how, how)
    ranks = run_ranks(2, load_damaged, {"folder": tmp_path})
    for rank, found in enumerate(ranks):
        for how, (step, said) in found.items():
            assert step == (-1.0 if how in ("all", "no folder") else 1.0), f"{how} on rank {rank}: {step} {said}"
            if step < 0:
                assert "there is no whole checkpoint" in said
                assert "name another one" in said
            elif rank == 0:
                assert "is damaged" in said
                assert f"Resuming from {tmp_path / how / 'step=1'} instead" in said


def save_many(folders: Sequence[Path]) -> None:
    """Steps 1, 2 and 3 in each folder; the last one is newer than what will be asked for."""
    io = FaultTolerantCheckpointIO()
    joined(io)
    for folder in folders:
        for step in (1, 2, 3):
            io.save_checkpoint(state_of(step), folder / f"step={step}")
