# SPDX-License-Identifier: Apache-2.0
"""Whoever saved on however many ranks, whoever takes it up on however many goes on as if nothing had happened."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from typing_extensions import override

from stratagem.checkpoint.manifest import MANIFEST
from stratagem.cli import main
from stratagem.plugins.ring_ddp import RingDDPStrategy
from stratagem.registry import strategies
from stratagem.strategy import FaultTolerantCheckpointIO
from stratagem.testing.contract import Subject
from stratagem.testing.contract.narrator import Narrator
from stratagem.testing.contract.resume import assert_goes_on, check_bit_equal, go
from stratagem.testing.contract.resuming import Leg, Moment
from stratagem.testing.contract.runs import Gangs, Run, make_loader, make_trainer
from stratagem.testing.contract.stages import numbered_rows

OURS = sorted(
    name
    for name, entry in strategies().items()
    if entry.distribution == "stratagem" and not name.startswith("deepspeed_")
)
SIZES = (1, 2, 3, 4)

Source = tuple[str, int]


def writers(num_ranks: int) -> list[str]:
    """Who saves and resumes on so many ranks."""
    return [*(["single"] if num_ranks == 1 else []), *OURS, "ddp"]


def subject_of(name: str) -> Subject | None:
    """As a leg wants it."""
    return None if name == "single" else Subject(strategy=name)


def moment_between(source: str, target: str) -> Moment:
    """Lightning's own strategies neither save nor take up the gradients of a window that is not over."""
    return "window" if source in OURS and target in OURS else "step"


def save_all(folder: Path, num_ranks: int) -> list[Source]:
    """Each saves, one after the other in one gang."""
    names = writers(num_ranks)
    legs = [Leg(subject=subject_of(name), quiet=True, save_to=str(folder / f"{name}-{num_ranks}")) for name in names]
    go(Gangs(), num_ranks, legs)
    return [(name, num_ranks) for name in names]


def resume_all(folder: Path, sources: list[Source], num_ranks: int, targets: list[str]) -> None:
    """Each target takes up each source, all in one gang."""
    pairs = [(source, target) for source in sources for target in targets]
    legs = [
        Leg(
            subject=subject_of(target),
            quiet=True,
            resume_from=str(folder / f"{name}-{size}" / moment_between(name, target)),
        )
        for (name, size), target in pairs
    ]
    for ((name, size), target), leg in zip(pairs, go(Gangs(), num_ranks, legs), strict=True):
        what = f"{name} on {size} -> {target} on {num_ranks}"
        assert_goes_on(Gangs(), leg, moment_between(name, target), 1e-10, what)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", SIZES)
def test_every_pair(num_ranks: int, matrix: tuple[Path, list[Source]]) -> None:
    """{single, ours, ddp} x {1, 2, 3, 4} -> the same, on `num_ranks`."""
    resume_all(*matrix, num_ranks, writers(num_ranks))


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Source]]:
    """A checkpoint of everyone on every number of ranks."""
    folder = tmp_path_factory.mktemp("matrix")
    return folder, [source for size in SIZES for source in save_all(folder, size)]


def test_lightnings_ddp_into_ours_and_back(tmp_path: Path) -> None:
    """Two ranks of `ddp` -> three of stage 3; two of `ring_ddp` -> two of `ddp`."""
    legs = [
        Leg(subject=subject_of(name), quiet=True, save_to=str(tmp_path / f"{name}-2")) for name in ("ddp", "ring_ddp")
    ]
    go(Gangs(), 2, legs)
    resume_all(tmp_path, [("ddp", 2)], 3, ["zero_3"])
    resume_all(tmp_path, [("ring_ddp", 2)], 2, ["ddp"])


# -- Lightning's own ways to a checkpoint ---------------------------------------------------------------------------


def fit_and_use(folder: Path, name: str, async_save: bool) -> dict[str, Any]:
    """Trains with the best two kept, and uses what was kept in every stage; what this rank saw."""
    seen: dict[str, Any] = {}
    kept = ModelCheckpoint(folder, "{step}", monitor="val_loss", mode="min", save_top_k=2, save_last=True)
    often = ModelCheckpoint(folder / "often", "{step}", every_n_train_steps=2, save_top_k=-1)
    plugins = [FaultTolerantCheckpointIO(async_save=async_save)]
    subject, module = Subject(strategy=name), Narrator()
    trainer = make_trainer(
        subject,
        Run(),
        kept,
        often,
        max_epochs=4,
        enable_checkpointing=True,
        plugins=plugins,
        use_distributed_sampler=True,
    )
    training, judging = (make_loader(subject, numbered_rows(n), 12) for n in (24, 36))
    trainer.fit(module, training, judging)
    scores = {path: float(score) for path, score in kept.best_k_models.items()}
    seen["folders"] = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.ckpt"))
    seen["hidden"] = sorted(path.name for path in folder.rglob(".*.tmp-*"))
    seen["best is best"] = kept.best_model_path == min(scores, key=lambda path: scores[path])
    last = trainer.validate(module, judging, ckpt_path="last", verbose=False)[0]["val_loss"]
    best = trainer.validate(module, judging, ckpt_path="best", verbose=False)[0]["val_loss"]
    seen["scores"] = (best, scores[kept.best_model_path], last)
    tested = trainer.test(module, judging, ckpt_path=kept.best_model_path, verbose=False)
    seen["stages"] = (len(tested), len(trainer.predict(module, judging, ckpt_path="best") or []))
    trainer.save_checkpoint(folder / "by hand.ckpt")
    more = make_trainer(
        subject, Run(), max_epochs=5, plugins=[FaultTolerantCheckpointIO()], use_distributed_sampler=True
    )
    more.fit(Narrator(), training, judging, ckpt_path=str(folder / "last.ckpt"))
    seen["steps"] = (trainer.global_step, more.global_step)
    plain = make_trainer(subject, Run(), max_epochs=1)
    plain.fit(Narrator(), training, judging, ckpt_path=None)
    plain.save_checkpoint(folder / "plain.ckpt")
    again = make_trainer(subject, Run(), max_epochs=2, plugins=[FaultTolerantCheckpointIO()])
    again.fit(Narrator(), training, judging, ckpt_path=str(folder / "plain.ckpt"))
    unplugged = make_trainer(subject, Run(), max_epochs=6)
    unplugged.fit(Narrator(), training, judging, ckpt_path=str(folder / "last.ckpt"))
    seen["other formats"] = (again.global_step, unplugged.global_step)
    return seen


@pytest.mark.parametrize(("name", "async_save"), [("ring_ddp", True), ("zero_3", False)])
def test_lightnings_ways_to_a_checkpoint(name: str, async_save: bool, tmp_path: Path) -> None:
    kwargs = {"folder": tmp_path, "name": name, "async_save": async_save}
    for seen in Gangs().run(2, fit_and_use, kwargs):
        often = [f"often/step={step}.ckpt" for step in (2, 4, 6, 8)]
        assert len(seen["folders"]) == 3 + len(often), seen["folders"]
        assert {"last.ckpt", *often} < set(seen["folders"])
        assert seen["hidden"] == []
        assert seen["best is best"]
        best, expected, last = seen["scores"]
        assert best == pytest.approx(expected, rel=1e-6)
        assert best <= last
        assert seen["stages"][0] == 1
        assert seen["stages"][1] > 0
        assert seen["steps"] == (8, 10)
        assert seen["other formats"] == (4, 12)
    assert (tmp_path / "last.ckpt" / MANIFEST).is_file()
    assert (tmp_path / "by hand.ckpt" / MANIFEST).is_file()


class Scaled(BoringModel):
    """Has a hyperparameter that a checkpoint brings back."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        scales.append(scale)


scales: list[float] = []


def command(*words: str) -> int:
    """One run of the command line, in a process of its own."""
    scales.clear()
    return main([words[0], "--config", "run.yaml", *words[1:]])


def from_the_command_line(folder: Path) -> list[float]:
    """Fits, goes on from the folder with its hyperparameters, and validates; which scales were built."""
    os.chdir(folder)
    trainer = {"max_steps": 2, "accelerator": "cpu", "devices": 1, "limit_val_batches": 1, "logger": False}
    kept = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"dirpath": ".", "filename": "x"}}
    trainer |= {"plugins": "stratagem.strategy.FaultTolerantCheckpointIO", "callbacks": [kept], "strategy": "ring_ddp"}
    model = {"class_path": f"{__name__}.Scaled"}
    Path("run.yaml").write_text(yaml.safe_dump({"trainer": trainer, "model": model}))
    assert command("fit", "--model.scale", "3") == 0
    assert command("fit", "--ckpt_path", "x.ckpt", "--trainer.max_steps", "4") == 0
    found = list(scales)
    assert command("validate", "--ckpt_path", "x.ckpt") == 0
    return [*found, *scales]


def test_the_command_line_takes_a_folder(tmp_path: Path) -> None:
    """The plugin by a config, the checkpoint by `--ckpt_path`, and the hyperparameters out of it."""
    assert Gangs().run(1, from_the_command_line, {"folder": tmp_path}, group=False) == [[3.0, 3.0]]
    assert (tmp_path / "x.ckpt" / MANIFEST).is_file()


# -- the contract bites ---------------------------------------------------------------------------------------------


class ForgetsRandomness(RingDDPStrategy):
    """Goes on drawing where reading the checkpoint left off."""

    @override
    def _resume_step(self) -> None:
        self._random_state = None
        super()._resume_step()


class ForgetsWindow(RingDDPStrategy):
    """Steps with what the rest of a window brought."""

    @override
    def _resume_window(self, extra: Mapping[str, Any]) -> None:
        """Nothing."""


class ForgetsOptimizer(RingDDPStrategy):
    """Begins with new moments."""

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        empty = [{**state, "state": {}} for state in checkpoint["optimizer_states"]]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": empty})


class ForgetsBuffers(RingDDPStrategy):
    """Restores parameters only."""

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert isinstance(module, nn.Module)
        kept = {name: buffer.clone() for name, buffer in module.named_buffers()}
        super().load_model_state_dict(checkpoint, strict)
        for name, buffer in module.named_buffers():
            buffer.copy_(kept[name])


class ForgetsTheIterator(RingDDPStrategy):
    """Restores randomness behind what the next epoch's iterator draws."""

    @override
    def on_train_start(self) -> None:
        """Nothing."""


class ForgetsToCountAnEpoch(RingDDPStrategy):
    """As Lightning does after a checkpoint of an epoch's last batch; shows in what is resumed from the resumed run."""

    @override
    def _count_epoch(self) -> None:
        """Nothing."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (ForgetsRandomness, "now/window"),
        (ForgetsWindow, "now/window"),
        (ForgetsOptimizer, "now/window"),
        (ForgetsBuffers, "now/window"),
        (ForgetsTheIterator, "later/epoch"),
        (ForgetsToCountAnEpoch, "again/late"),
    ],
)
def test_what_is_forgotten_shows(wrong: type[RingDDPStrategy], where: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)) as caught:
        check_bit_equal(Gangs(), Subject(strategy=wrong), 2, tmp_path)
    assert f"resumed from {where}" in str(caught.value) or wrong is ForgetsToCountAnEpoch
