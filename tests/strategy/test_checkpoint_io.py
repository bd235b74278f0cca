# SPDX-License-Identifier: Apache-2.0
"""Checkpoints through Lightning's own doors: names, links, other strategies, and what is kept."""

from __future__ import annotations

import copy
import os
import threading
from collections import defaultdict, deque
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core import saving

import stratagem
from stratagem.checkpoint import commit
from stratagem.checkpoint.convert import Settings, convert
from stratagem.checkpoint.manifest import MANIFEST
from stratagem.errors import CheckpointError, ConfigError
from stratagem.strategy import FaultTolerantCheckpointIO
from stratagem.strategy.lightning_loading import FolderLoader, open_doors
from stratagem.strategy.opening import open_folder, read_whole
from stratagem.testing.contract import Subject
from stratagem.testing.contract.narrator import Narrator
from stratagem.testing.contract.runs import Gangs, Run, make_loader, make_trainer
from stratagem.testing.contract.stages import numbered_rows


def fits(folder: Path, name: str | None, epochs: int, *callbacks: Any, **options: Any) -> tuple[Trainer, Narrator]:
    """A trainer of Narrators and its module, with no plugin unless `options` has one; two steps an epoch."""
    subject = Subject(strategy=name) if name else None
    trainer = make_trainer(
        subject,
        Run(),
        *callbacks,
        max_epochs=epochs,
        enable_checkpointing=bool(callbacks),
        default_root_dir=folder,
        use_distributed_sampler=True,
        **options,
    )
    return trainer, Narrator()


def loader(name: str | None) -> Any:
    return make_loader(Subject(strategy=name) if name else None, numbered_rows(24), 12)


def ways(folder: Path, name: str, half: bool) -> dict[str, Any]:
    """The best two, a link to the last, and what Slurm left; each taken up again by this strategy and by `ddp`."""
    kept = ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=2, save_last="link")
    trainer, module = fits(folder, name, 3, kept)
    data = loader(name)
    trainer.fit(module, data, data)
    trainer.save_checkpoint(folder / "hpc_ckpt_3.ckpt")
    seen: dict[str, Any] = {"plugin": type(trainer.strategy.checkpoint_io).__name__}
    best, last = kept.best_model_path, kept.last_model_path
    if trainer.global_rank == 0:
        commit.Draft(folder / "hpc_ckpt_9.ckpt")._lock.close()  # of a job that died
    trainer.strategy.barrier()
    one = Narrator.load_from_checkpoint(best, map_location="cpu")
    whole = read_whole(Path(best))["state_dict"]
    seen["loaded"] = all(torch.equal(whole[key].float(), value) for key, value in one.state_dict().items())
    words: list[tuple[str, str | None]] = [("last", None), ("hpc", None), ("best", best), ("link", last)]
    for number, other in enumerate((name, "ddp")):
        for word, path in words[number::2] if half else words:
            more, anew = fits(folder, other, 4, ModelCheckpoint(folder, save_top_k=0))
            more.fit(anew, loader(other), ckpt_path=path or word)
            seen[f"{other} {word}"] = more.global_step
    judged, anew = fits(folder, name, 3)
    seen["score"] = judged.validate(anew, data, ckpt_path=best, verbose=False)[0]["val_loss"]
    seen["expected"] = float(kept.best_model_score or -1)
    return seen


@pytest.mark.parametrize(
    ("name", "half"),
    [("zero_3", True), pytest.param("ring_ddp", False, marks=pytest.mark.slow)],
)
def test_every_word_for_a_checkpoint_under_ours_and_under_ddp(name: str, half: bool, tmp_path: Path) -> None:
    """`ddp` has Lightning's own plugin, and is given folders."""
    for seen in Gangs().run(2, ways, {"folder": tmp_path, "name": name, "half": half}):
        assert seen.pop("plugin") == "FaultTolerantCheckpointIO"
        assert seen.pop("score") == pytest.approx(seen.pop("expected"), rel=1e-6)
        assert seen.pop("loaded")
        assert set(seen.values()) == {8}, seen
    assert (tmp_path / "last.ckpt").is_symlink()
    assert (tmp_path / "last.ckpt" / MANIFEST).is_file()
    names = [path.name for path in commit.candidates(tmp_path)]
    assert "last.ckpt" not in names, "a link is a second name"
    assert len(names) == 3
    assert len(list(tmp_path.glob("epoch=*.ckpt"))) == 2


def given(folder: Path) -> list[str]:
    """The plugin of a strategy, by who chose it; one process without any strategy goes on from a folder too."""
    theirs, _ = fits(folder, "ring_ddp", 1, plugins=[TorchCheckpointIO()])
    theirs.fit(Narrator(), loader("ring_ddp"))
    theirs.save_checkpoint(folder / "file.ckpt")
    ours, module = fits(folder, "ring_ddp", 2)
    ours.fit(module, loader("ring_ddp"), ckpt_path=str(folder / "file.ckpt"))
    assert ours.global_step == 4
    ours.save_checkpoint(folder / "folder.ckpt")
    alone, module = fits(folder, None, 3)
    alone.fit(module, loader(None), ckpt_path=str(folder / "folder.ckpt"))
    assert alone.global_step == 6
    return [type(trainer.strategy.checkpoint_io).__name__ for trainer in (theirs, ours)]


def test_a_plugin_that_was_given_is_used(tmp_path: Path) -> None:
    assert Gangs().run(1, given, {"folder": tmp_path}) == [["TorchCheckpointIO", "FaultTolerantCheckpointIO"]]
    assert (tmp_path / "file.ckpt").is_file()


def test_doors_are_opened_once_and_only_where_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    door = saving.pl_load
    assert isinstance(door, FolderLoader)
    open_doors()
    assert saving.pl_load is door
    torch.save({"a": 1}, tmp_path / "file.ckpt")
    assert saving.pl_load(tmp_path / "file.ckpt") == {"a": 1}
    monkeypatch.delattr(saving, "pl_load")  # a Lightning that has another name for it
    open_doors()
    assert not hasattr(saving, "pl_load")
    assert stratagem.__version__


def saved(folder: Path, *steps: int, io: FaultTolerantCheckpointIO | None = None) -> None:
    io = io or FaultTolerantCheckpointIO()
    for step in steps:
        io.save_checkpoint(
            {"state_dict": {"w": torch.full((3,), float(step))}, "global_step": step}, folder / f"{step}"
        )
    io.settle()


def test_a_damaged_folder_is_refused_by_the_doors_and_an_older_one_named(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    with open(tmp_path / "2" / "rank-00000.bin", "ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match=r"damaged: rank-00000.bin has .* bytes.*take the one before it, .*/1\.$"):
        saving.pl_load(tmp_path / "2")
    meta = saving.pl_load(tmp_path / "1", map_location=torch.device("meta"))["state_dict"]["w"]
    assert meta.device.type == "meta"


# -- what users put into it -------------------------------------------------------------------------------------------


def test_what_a_user_adds_comes_back_as_tensors_and_of_its_kind(tmp_path: Path) -> None:
    """Only of the model and the optimizers does a strategy want parts; a callback knows nothing of them."""
    extra = {"k": torch.arange(4)}
    mine = {"mine": torch.arange(4), "callbacks": {"C": [{"t": torch.ones(3)}]}, "bag": defaultdict(list, a=[1])}
    FaultTolerantCheckpointIO().save_checkpoint(
        {"state_dict": {"w": torch.zeros(3), "_extra_state": extra}, "global_step": 1, **mine}, tmp_path / "a"
    )
    found = open_folder(tmp_path / "a", weights_only=False)
    assert torch.equal(found["mine"] + 1, torch.arange(4) + 1)
    assert torch.equal(found["callbacks"]["C"][0]["t"], torch.ones(3))
    assert torch.equal(found["state_dict"]["_extra_state"]["k"], torch.arange(4))
    assert torch.equal(copy.deepcopy(found["state_dict"])["w"], torch.zeros(3))
    assert FaultTolerantCheckpointIO().load_checkpoint(tmp_path / "a", weights_only=False)["bag"]["b"] == []


def test_names_that_read_alike_are_kept_apart(tmp_path: Path) -> None:
    one, two, three = (torch.full((3,), float(number)) for number in range(3))
    saved = {"state_dict": {"ema/w": one}, "ema": {"w": two}, "a/b": {"c": three}, "a": {"b/c": one, "b": {"c": two}}}
    FaultTolerantCheckpointIO().save_checkpoint({**saved, "global_step": 1}, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "a.ckpt")
    convert(tmp_path / "a.ckpt", tmp_path / "b", Settings(to="folder"))
    for folder in ("a", "b"):
        found = read_whole(tmp_path / folder)
        assert torch.equal(found["state_dict"]["ema/w"], one)
        assert torch.equal(found["ema"]["w"], two)
        assert torch.equal(found["a/b"]["c"], three)
        assert torch.equal(found["a"]["b/c"], one)
        assert torch.equal(found["a"]["b"]["c"], two)


def test_what_is_no_tensor_is_copied_aside_before_training_goes_on(tmp_path: Path) -> None:
    io = FaultTolerantCheckpointIO(async_save=True)
    changed, steps = threading.Event(), [1]
    history = deque(steps)
    io.watcher = lambda point, *_: changed.wait(10) and None if point == "writing" else None
    io.save_checkpoint({"state_dict": {"w": torch.zeros(3)}, "global_step": 1, "history": history}, tmp_path / "a")
    history.append(2)
    changed.set()
    io.settle()
    assert list(io.load_checkpoint(tmp_path / "a", weights_only=False)["history"]) == [1]
    io.watcher = None
    io.save_checkpoint({"state_dict": {}, "global_step": 2, "no": lambda: 0}, tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"rank 0: .*pickle"):
        io.settle()
    assert os.listdir(tmp_path) == ["a"]


def test_the_home_folder_is_meant_as_lightning_means_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    FaultTolerantCheckpointIO().save_checkpoint({"state_dict": {}, "global_step": 1}, "~/a")
    assert (tmp_path / "a" / MANIFEST).is_file()
    assert saving.pl_load("~/a")["global_step"] == 1


class Keeper(Narrator):
    """A module that saves an object of its own."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["origin"] = Path("/data")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.origin = checkpoint["origin"]


def told(folder: Path) -> list[str]:
    """What a module found of its own, for each answer about `weights_only`."""
    trainer, _ = fits(folder, "zero_2", 1)
    trainer.fit(Keeper(), loader("zero_2"))
    trainer.save_checkpoint(folder / "a", weights_only=False)
    found = []
    for answer in (False, True):
        module = Keeper()
        try:
            fits(folder, "zero_2", 2)[0].fit(module, loader("zero_2"), ckpt_path=folder / "a", weights_only=answer)
            found.append(str(module.origin))
        except UnpicklingError:
            found.append("refused")
    return found


def test_weights_only_reaches_whoever_reads(tmp_path: Path) -> None:
    """Lightning does not hand it on to a strategy that restores after its setup."""
    assert Gangs().run(1, told, {"folder": tmp_path}) == [["/data", "refused"]]


# -- what is kept ---------------------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder), key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else name))


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_the_last_ones_are_kept_and_one_of_every_so_many_steps(async_save: bool, tmp_path: Path) -> None:
    io = FaultTolerantCheckpointIO(async_save, keep_last=2, keep_every=100)
    saved(tmp_path, *range(30, 301, 30), io=io)
    assert names(tmp_path) == ["120", "210", "270", "300"]
    os.symlink("210", tmp_path / "last")
    saved(tmp_path, 330, 360, io=FaultTolerantCheckpointIO(keep_last=1))
    assert names(tmp_path) == ["210", "360", "last"], "what a link points to stays"


def test_retention_makes_up_for_a_death_and_leaves_a_future_that_was_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run dies between a commit and the removal; a run goes back to 10 and saves 15."""
    with monkeypatch.context() as dead:
        dead.setattr(commit, "remove", lambda *_: None)
        saved(tmp_path, 10, 20, 30, 40, io=FaultTolerantCheckpointIO(keep_last=2))
    assert names(tmp_path) == ["10", "20", "30", "40"]
    saved(tmp_path, 5, 15, io=FaultTolerantCheckpointIO(keep_last=2))
    assert names(tmp_path) == ["10", "15", "20", "30", "40"]
    saved(tmp_path, 50, io=FaultTolerantCheckpointIO(keep_last=2))
    assert names(tmp_path) == ["40", "50"]


def test_retention_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="keep_last"):
        FaultTolerantCheckpointIO(keep_last=0)
    with pytest.raises(ConfigError, match="nothing is removed without keep_last"):
        FaultTolerantCheckpointIO(keep_every=10)


def test_a_link_that_leads_nowhere_is_replaced_and_led_around(tmp_path: Path) -> None:
    """`save_last: link` sets the link when an async save was begun; the process dies before the commit."""
    saved(tmp_path, 1)
    os.symlink("2", tmp_path / "last")
    with pytest.warns(UserWarning, match="Resuming from .*/1 instead|is damaged: there is no readable manifest"):
        assert FaultTolerantCheckpointIO().load_checkpoint(tmp_path / "last")["global_step"] == 1
    FaultTolerantCheckpointIO().save_checkpoint({"state_dict": {}, "global_step": 3}, tmp_path / "last")
    assert commit.candidates(tmp_path) == [tmp_path / "last", tmp_path / "1"]
    assert not (tmp_path / "last").is_symlink()


def test_what_was_moved_aside_goes_when_its_name_is_there_again(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    os.rename(tmp_path / "1", tmp_path / ".1.old-00000000")
    assert commit.candidates(tmp_path) == [tmp_path / ".1.old-00000000"]
    assert commit.sweep(tmp_path) == []
    saved(tmp_path, 1)
    assert commit.sweep(tmp_path) == [tmp_path / ".1.old-00000000"]
    assert os.listdir(tmp_path) == ["1"]
