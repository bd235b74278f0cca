# SPDX-License-Identifier: Apache-2.0
"""One run as one sequence of optimizer steps, whatever the number of ranks that took them.

Note [one value per data rank]: ranks that read the same samples say the same; of each data rank the lowest rank counts.
A step's loss is the mean over its samples, so a rank weighs as much as it has of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from stratagem.comparison.observation import Sketch
from stratagem.comparison.protocol import Facts, Observed, Ready
from stratagem.comparison.results import Deviation

_SMALL = 1e-3  # of the largest parameter


@final
@dataclass(frozen=True)
class Step:
    """One optimizer step of a whole run.

    Attributes:
        loss: mean over the samples of the global batch; None where no rank gave one.
        gradient_norm: before clipping; None where it cannot be told.
        samples: of the global batch.
        samples_hash: which they were, in any order.
        draws: whether any rank drew random numbers.
        sketch: of every parameter and buffer, after the step.
        rank_losses: per data rank.
        rank_samples: likewise.
    """

    loss: float | None
    gradient_norm: float | None
    samples: int
    samples_hash: int
    draws: bool = False
    sketch: Mapping[str, Sketch] = field(default_factory=dict)
    rank_losses: tuple[float | None, ...] = ()
    rank_samples: tuple[int, ...] = ()


@final
@dataclass(frozen=True)
class Trace:
    """The steps of one run, and what its module is.

    Attributes:
        steps: in order.
        facts: the module.
        num_data_ranks: that shared a global batch.
        precision: the Trainer's word.
        initial: parameters and buffers before the first step; empty where nobody looked.
    """

    steps: tuple[Step, ...]
    facts: Facts = field(default_factory=Facts)
    num_data_ranks: int = 1
    precision: str = "32-true"
    initial: Mapping[str, Sketch] = field(default_factory=dict)

    @property
    def trained(self) -> bool:
        """Whether any parameter has moved; True where that is not known."""
        moved = [
            step.sketch.get(name) != self.initial[name]
            for step in self.steps
            for name in self.facts.parameters
            if step.sketch and name in self.initial
        ]
        return any(moved) or not moved


def trace(ready: Mapping[int, Ready], observed: Iterable[Observed]) -> Trace:
    """Put together what the ranks saw; a step that not all of them have finished is left out."""
    if not ready:
        return Trace(())
    by_step: dict[int, dict[int, Observed]] = {}
    for each in observed:
        by_step.setdefault(each.step, {})[each.rank] = each
    steps = [_step(seen, ready) for _, seen in sorted(by_step.items()) if len(seen) == len(ready)]
    first = ready[min(ready)]
    return Trace(tuple(steps), first.facts, first.num_data_ranks, first.precision, first.sketch)


def _step(seen: Mapping[int, Observed], ready: Mapping[int, Ready]) -> Step:
    speakers: dict[int, Observed] = {}
    for rank in sorted(seen):
        speakers.setdefault(ready[rank].data_rank, seen[rank])
    counted = [(each.loss, each.samples) for each in speakers.values() if each.loss is not None and each.samples]
    total = sum(samples for _, samples in counted)
    norms = [each.gradient_norm for _, each in sorted(seen.items()) if each.gradient_norm is not None]
    return Step(
        sum(loss * samples for loss, samples in counted) / total if total else None,
        norms[0] if norms else None,
        sum(each.samples for each in speakers.values()),
        sum(each.samples_hash for each in speakers.values()) % 2**64,
        any(each.draws for each in seen.values()),
        next((each.sketch for each in seen.values() if each.sketch), {}),
        tuple(speakers[number].loss for number in sorted(speakers)),
        tuple(speakers[number].samples for number in sorted(speakers)),
    )


@torch.no_grad()
def compare_parameters(found: Path, expected: Path, parameters: Collection[str] = ()) -> dict[str, Deviation]:
    """How far two state dicts are apart, by name: the largest difference of a tensor over its own largest magnitude.

    In float64, one tensor at a time; a magnitude counts as no less than 0.1 % of the largest one of all. Names that
    only one side has, other shapes, and what is no number on one side are an infinite difference.
    """
    mine: dict[str, Tensor] = torch.load(found, mmap=True, map_location="cpu")
    its: dict[str, Tensor] = torch.load(expected, mmap=True, map_location="cpu")
    odd = sorted(mine.keys() ^ its.keys())
    odd += [name for name, value in its.items() if name in mine and mine[name].shape != value.shape]
    if odd:
        return {odd[0]: Deviation(math.inf, math.inf, odd[0])}
    scales = {name: _magnitude(value) for name, value in its.items()}
    large = [scales[name] for name, value in its.items() if value.is_floating_point()]
    if parameters:  # a buffer may be huge (a mask of the least number) and would make every difference small
        large = [scales[name] for name in its if name in parameters]
    floor = _SMALL * max(large, default=0.0)
    apart: dict[str, Deviation] = {}
    for name, value in its.items():
        left, right = mine[name].double(), value.double()
        same = (left == right) | (left.isnan() & right.isnan())
        off = float(torch.where(same, 0.0, (left - right).abs().nan_to_num(math.inf)).max()) if value.numel() else 0.0
        over = off / max(scales[name], floor) if off and max(scales[name], floor) > 0 else (math.inf if off else 0.0)
        apart[name] = Deviation(over, off, name)
    return apart


def furthest(apart: Mapping[str, Deviation]) -> Deviation:
    """The one with the largest relative difference, beside the largest absolute one of all.

    Example:
        >>> furthest({"a": Deviation(0.1, 2.0, "a"), "b": Deviation(0.2, 1.0, "b")})
        Deviation(relative=0.2, absolute=2.0, where='b')
    """
    worst = max(apart.values(), key=lambda each: each.relative, default=Deviation(0.0, 0.0))
    absolute = max((each.absolute for each in apart.values()), default=0.0)
    return Deviation(worst.relative, absolute, worst.where if worst.relative else "")


def _magnitude(tensor: Tensor) -> float:
    """The largest finite magnitude."""
    values = tensor.double().abs()
    values = values[values.isfinite()]
    return float(values.max()) if values.numel() else 0.0
