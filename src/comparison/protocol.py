# SPDX-License-Identifier: Apache-2.0
"""What the comparing process and the ranks of a contender say to each other, over one UNIX socket per rank.

    comparing process        every rank
                      <----  Ready       it stands before its first optimizer step
    Turn(observe, n)  ---->
                      <----  Observed    n times
                      <----  Paused      with the file of the final parameters, from rank 0
    Turn(time, k)     ---->
                      <----  Timed
                      <----  Paused
    Turn(stop)        ---->              it ends as a training ends

Between turns a rank waits in `recv`, which costs nothing; no rank is in a collective then, so nobody runs out of time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, final

from stratagem.comparison.observation import Sketch
from stratagem.data.sampler import Mode


@final
@dataclass(frozen=True)
class Turn:
    """What a rank does next.

    Attributes:
        kind: watch closely, run at full speed, or end.
        steps: optimizer steps of the turn.
    """

    kind: Literal["observe", "time", "stop"]
    steps: int = 0


@final
@dataclass(frozen=True)
class Facts:
    """The module as it was built, before the strategy touched it.

    Attributes:
        num_parameters: tied ones once.
        automatic: whether Lightning drives the optimizer.
        batch_norms: names of layers whose result depends on the other samples of the batch.
        synced_batchnorm: whether the Trainer was told to compute their statistics over all ranks.
        accumulate: micro-batches per optimizer step.
        clip: the bound of gradient clipping; None where nothing is clipped.
        parameters: their names; what else a state dict holds are buffers.
        notes: what of the run does not act in a comparison, in sentences.
    """

    num_parameters: int = 0
    automatic: bool = True
    batch_norms: tuple[str, ...] = ()
    synced_batchnorm: bool = False
    accumulate: int = 1
    clip: float | None = None
    parameters: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@final
@dataclass(frozen=True)
class Ready:
    """A rank before its first step.

    Attributes:
        rank: its number.
        num_ranks: of the contender.
        at: when (`time.monotonic`).
        data_rank: ranks with the same one read the same samples.
        num_data_ranks: how many different ones there are.
        mode: what the strategy takes a loader's batch size for.
        coordinates: its place along each axis.
        parameters: parameters of which it holds the values.
        precision: the Trainer's word for it.
        facts: the module.
        sketch: of parameters and buffers before the first step, from the one process.
    """

    rank: int
    num_ranks: int
    at: float
    data_rank: int = 0
    num_data_ranks: int = 1
    mode: Mode = "per_rank"
    coordinates: dict[str, int] = field(default_factory=dict)
    parameters: int = 0
    precision: str = "32-true"
    facts: Facts = field(default_factory=Facts)
    sketch: dict[str, Sketch] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Observed:
    """One rank's optimizer step.

    Attributes:
        rank: its number.
        step: optimizer steps done before.
        loss: mean over this rank's samples; None where the step gave none.
        samples: how many they were.
        samples_hash: which they were, see `batch_hash`.
        gradient_norm: of the whole gradient before clipping; None where it cannot be told.
        draws: whether the training step drew random numbers.
        sketch: parameters and buffers after the step, from rank 0.
    """

    rank: int
    step: int
    loss: float | None
    samples: int
    samples_hash: int
    gradient_norm: float | None
    draws: bool = False
    sketch: dict[str, Sketch] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Timed:
    """One rank's turn at full speed.

    Attributes:
        rank: its number.
        step_s: durations of its optimizer steps, the first one of the turn left out.
        sent: bytes per step along each axis; empty where they could not be counted.
        source: who counted them.
        sent_formula: what the technique states.
        held: bytes held when gradients were complete, by kind; measured in the first turn alone.
        held_formula: what the technique states.
        peak_bytes: how far resident memory has risen since before the module was built.
    """

    rank: int
    step_s: tuple[float, ...]
    sent: dict[str, float] = field(default_factory=dict)
    source: Literal["books", "kernel"] = "books"
    sent_formula: dict[str, float] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    held_formula: dict[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None


@final
@dataclass(frozen=True)
class Paused:
    """The end of a turn.

    Attributes:
        rank: which one waits.
        file: of the final parameters, after an observed turn, from rank 0.
    """

    rank: int
    file: str = ""
