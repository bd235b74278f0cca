# SPDX-License-Identifier: Apache-2.0
"""What a comparison found, as frozen data: what is measured writes it, what is shown reads it, and JSON keeps it.

    Comparison          one config, one reference process, several contenders
      Reference         the losses and norms of one process
      Contender         one strategy: its verdict, its curves, its costs
        Deviation       how far a quantity is from the reference at most, and where
        Departure       the first step and parameter at which it left the reference
        Sent, Held      bytes beside their formula
        Place           one rank's coordinates in the mesh

Bytes are bytes, times are seconds, relative differences are `|found - expected| / max(|expected|, scale)` where `scale`
keeps a value near zero from counting as an infinite difference.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from dataclasses import dataclass, field
from typing import Any, Literal, final

Verdict = Literal["equal", "differs", "other data", "nothing trained", "failed"]
"""`equal`: at every step within the tolerance, or within what rounding alone does to one process (`Reference.twin_loss`
and `stratagem.comparison.judge`). `differs`: not. `other data`: it was not given the reference's samples,
so its numbers cannot be compared. `nothing trained`: as the reference, but no parameter of that moved, so that nothing
is proved. `failed`: it ended before its last step."""


@final
@dataclass(frozen=True)
class Deviation:
    """The largest difference of one quantity from the reference over the whole run.

    Attributes:
        relative: the largest relative difference.
        absolute: the largest absolute difference.
        where: the step (`step 12`) or the parameter at which the relative one is largest.
    """

    relative: float
    absolute: float
    where: str = ""


@final
@dataclass(frozen=True)
class Departure:
    """Where a contender first left the reference.

    Attributes:
        step: optimizer steps done before, so 0 is the first one.
        quantity: the first of the step's quantities, in the order in which a step computes them, that is off.
        parameter: for `parameters` the name of the one that is off most, in the unparallelised module.
        found: the contender's value (of a parameter: its norm).
        expected: the reference's.
    """

    step: int
    quantity: Literal["samples", "loss", "gradient norm", "parameters"]
    found: float | str
    expected: float | str
    parameter: str = ""


@final
@dataclass(frozen=True)
class Sent:
    """Bytes that one rank sends per optimizer step along one axis.

    Attributes:
        axis: the mesh axis; `world` for a strategy without a mesh.
        num_bytes: measured; the mean over the ranks.
        formula: what the technique's docstring says, None where it says nothing.
        source: who counted: the communicators' own books, or the kernel's count of every TCP socket.
    """

    axis: str
    num_bytes: float
    formula: float | None = None
    source: Literal["books", "kernel"] = "books"


@final
@dataclass(frozen=True)
class Held:
    """Bytes of one kind that one rank holds when its gradients are complete; unique storages, the largest rank.

    Attributes:
        kind: `parameters`, `gradients`, `optimizer`.
        num_bytes: measured.
        formula: what the technique's docstring says, None where it says nothing.
    """

    kind: str
    num_bytes: int
    formula: float | None = None


@final
@dataclass(frozen=True)
class Place:
    """One rank in the mesh.

    Attributes:
        rank: its number.
        coordinates: its index along each axis; empty for a strategy without a mesh.
        data_rank: ranks with the same one read the same samples.
        parameters: numbers of parameters of which it holds the values between steps.
    """

    rank: int
    coordinates: dict[str, int]
    data_rank: int
    parameters: int = 0


@final
@dataclass(frozen=True)
class Reference:
    """One process on the whole global batch.

    Attributes:
        losses: mean loss of each step's global batch.
        gradient_norms: of each step, before clipping.
        step_s: durations of its steps; alone on the machine, so no yardstick for several ranks.
        num_parameters: of the module, tied ones once.
        global_batch: samples per optimizer step.
        twin_losses: of a second such process, whose parameters began one rounding apart and which is the same in all
            else: how far rounding alone carries this training. Empty where there was none.
        twin_gradient_norms: likewise of the twin.
        twin_loss: how far the twin's losses are from these.
        twin_gradient_norm: likewise.
        twin_parameters: likewise the final parameters.
        twin_strict_steps: steps from the first on in which all of it stayed within the tolerance, but for `loose`;
            beyond them nobody can be held to the tolerance.
        clip: the bound of gradient clipping; None where nothing is clipped.
        notes: what of the run does not act in a comparison, in sentences.
        loose: names of parameters that rounding alone decides, as the twin shows: their gradient is only noise.
    """

    losses: tuple[float, ...]
    gradient_norms: tuple[float | None, ...]
    step_s: tuple[float, ...] = ()
    num_parameters: int = 0
    global_batch: int = 0
    twin_losses: tuple[float, ...] = ()
    twin_loss: Deviation | None = None
    twin_gradient_norm: Deviation | None = None
    twin_parameters: Deviation | None = None
    twin_strict_steps: int = 0
    twin_gradient_norms: tuple[float | None, ...] = ()
    loose: tuple[str, ...] = ()
    clip: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def unclipped(self) -> bool:
        """Whether gradients were to be clipped, and no step's reached the bound."""
        norms = [norm for norm in self.gradient_norms if norm is not None]
        return bool(self.clip) and bool(norms) and all(norm <= (self.clip or 0.0) for norm in norms)


@final
@dataclass(frozen=True)
class Contender:
    """One strategy's run.

    Attributes:
        name: as it was asked for.
        about: one line: what the strategy is.
        verdict: see `Verdict`.
        reasons: sentences: what is off, why it may be, what to do; the error of a run that failed.
        losses: mean over the global batch, of each step done.
        gradient_norms: before clipping; None where the strategy cannot say.
        loss: deviation of the losses; None where nothing can be compared, and so below.
        gradient_norm: deviation of the gradient norms.
        parameters: deviation of the final parameters.
        departure: where it first left the reference; None if it never did.
        startup_s: from its start to its first step.
        step_s: durations of the measured steps, each the slowest rank's.
        ratio: its median step over the baseline's; None where either has none.
        sent: bytes on the wire per step.
        held: bytes held.
        peak_bytes: of the timed turns, the largest rank's highest resident memory without pages of files, less what
            its process held before the module was built; None where nothing was timed or the kernel does not say.
        layout: its ranks.
        strict_steps: steps from the first on in which losses, gradient norms and parameters stayed within the tolerance
            itself, whatever rounding does later; parameters that rounding alone decides (`Reference.loose`) left out.
        widest: the largest limit that was needed, where something is beyond the tolerance and within what rounding
            alone does; 0 if nothing is beyond the tolerance.
    """

    name: str
    about: str
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    losses: tuple[float, ...] = ()
    gradient_norms: tuple[float | None, ...] = ()
    loss: Deviation | None = None
    gradient_norm: Deviation | None = None
    parameters: Deviation | None = None
    departure: Departure | None = None
    startup_s: float | None = None
    step_s: tuple[float, ...] = ()
    ratio: float | None = None
    sent: tuple[Sent, ...] = ()
    held: tuple[Held, ...] = ()
    peak_bytes: int | None = None
    layout: tuple[Place, ...] = ()
    strict_steps: int = 0
    widest: float = 0.0

    @property
    def median_s(self) -> float | None:
        """The median step."""
        return statistics.median(self.step_s) if self.step_s else None

    @property
    def spread_s(self) -> tuple[float, float] | None:
        """The quartiles of the steps, between which half of them lie."""
        if len(self.step_s) < 2:
            return None
        low, _, high = statistics.quantiles(self.step_s, n=4, method="inclusive")
        return low, high


@final
@dataclass(frozen=True)
class Comparison:
    """Several strategies beside one process, on one config.

    Attributes:
        config: what was compared: the files and overrides, as given.
        ranks: of each contender.
        steps: optimizer steps that were held against the reference.
        precision: Lightning's word for it.
        tolerance: the relative difference up to which a contender is `equal`.
        baseline: the contender whose step time is 1.
        reference: one process.
        contenders: in the order in which they were asked for.
        machine: what it ran on: `cpu`, `cores`, `python`, `torch`, `lightning`, ...
        created: when, as ISO 8601.
        seconds: how long the whole comparison took.
    """

    config: tuple[str, ...]
    ranks: int
    steps: int
    precision: str
    tolerance: float
    baseline: str
    reference: Reference
    contenders: tuple[Contender, ...]
    machine: dict[str, str] = field(default_factory=dict)
    created: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every contender is `equal`."""
        return all(contender.verdict == "equal" for contender in self.contenders)

    def to_json(self) -> str:
        """As JSON of the same shape; a number that JSON has no word for becomes a string (`"nan"`)."""
        return json.dumps(_plain(dataclasses.asdict(self)), indent=1, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
