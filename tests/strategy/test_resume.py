# SPDX-License-Identifier: Apache-2.0
"""Whoever saved on however many ranks, whoever takes it up on however many goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from typing_extensions import override

from stratagem.plugins.ring_ddp import RingDDPStrategy
from stratagem.registry import strategies
from stratagem.testing.contract import Subject
from stratagem.testing.contract.resume import assert_goes_on, check_bit_equal, go
from stratagem.testing.contract.resuming import Leg, Moment
from stratagem.testing.contract.runs import Gangs

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


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [ForgetsRandomness, ForgetsWindow, ForgetsOptimizer, ForgetsBuffers])
def test_what_is_forgotten_shows(wrong: type[RingDDPStrategy], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="resumed from now/window"):
        check_bit_equal(Gangs(), Subject(strategy=wrong), 2, tmp_path)
