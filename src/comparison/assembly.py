# SPDX-License-Identifier: Apache-2.0
"""From what the processes said to the words of the result."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from stratagem.comparison import causes
from stratagem.comparison.contender import Candidate
from stratagem.comparison.judge import Allowed, allowed, curves, judge, strict_steps, tolerance_for
from stratagem.comparison.protocol import Timed
from stratagem.comparison.results import Contender, Held, Place, Reference, Sent
from stratagem.comparison.running import Running
from stratagem.comparison.trace import Trace, compare_parameters, furthest, trace


@final
@dataclass(frozen=True)
class Expected:
    """What contenders are held against.

    Attributes:
        trace: the steps of one process.
        running: it.
        limit: how far a contender may be off.
        tolerance: what is always allowed.
        result: as it is reported.
    """

    trace: Trace
    running: Running
    limit: Allowed
    tolerance: float
    result: Reference


def reference(running: Running, twin: Running, tolerance: float | None) -> Expected:
    """One process and its twin.

    Args:
        running: the process.
        twin: the same run, begun one rounding apart.
        tolerance: relative difference that counts as equal; None for what the precision allows.
    """
    found, other = trace(running.ready, running.observed), trace(twin.ready, twin.observed)
    tolerance = tolerance if tolerance is not None else tolerance_for(found.precision)
    final = compare_parameters(twin.final, running.final, found.facts.parameters)
    differences = curves(other, found)
    limit = allowed(found, other, tolerance, final)
    return Expected(
        found,
        running,
        limit,
        tolerance,
        Reference(
            tuple(step.loss if step.loss is not None else float("nan") for step in found.steps),
            tuple(step.gradient_norm for step in found.steps),
            (),
            found.facts.num_parameters,
            found.steps[0].samples if found.steps else 0,
            tuple(step.loss if step.loss is not None else float("nan") for step in other.steps),
            differences["loss"].worst(),
            differences["gradient norm"].worst(),
            furthest(final),
            strict_steps(other, found, tolerance, limit.loose),
            tuple(step.gradient_norm for step in other.steps),
            tuple(sorted(limit.loose)),
            found.facts.clip,
            found.facts.notes,
        ),
    )


def contender(candidate: Candidate, running: Running, expected: Expected, steps: int) -> Contender:
    """What is reported about one candidate."""
    found = trace(running.ready, running.observed)
    names = expected.trace.facts.parameters
    final = compare_parameters(running.final, expected.running.final, names) if running.has_final else None
    short = len(found.steps) < steps
    failed = short or bool(running.error)
    judged = judge(found, expected.trace, final, expected.limit, failed=failed)
    error = running.error or (f"its training ended after {len(found.steps)} of {steps} steps" if short else "")
    off_at_last = judged.verdict == "differs" and judged.departure is None
    told = causes.reasons(found, expected.trace, judged.departure, judged.final if off_at_last else None)
    return Contender(
        candidate.name,
        candidate.about,
        judged.verdict,
        (*([error] if failed else []), *told),
        tuple(step.loss if step.loss is not None else float("nan") for step in found.steps),
        tuple(step.gradient_norm for step in found.steps),
        judged.loss,
        judged.gradient_norm,
        furthest(final) if final is not None else None,
        judged.departure,
        running.startup_s,
        step_s=_durations(running.timed),
        sent=_sent(running.timed),
        held=_held(running.timed),
        peak_bytes=max((t.peak_bytes for turn in running.timed for t in turn if t.peak_bytes), default=None),
        layout=tuple(
            Place(rank, dict(ready.coordinates), ready.data_rank, ready.parameters)
            for rank, ready in sorted(running.ready.items())
        ),
        strict_steps=strict_steps(found, expected.trace, expected.tolerance, expected.limit.loose),
        widest=judged.widest,
    )


def _durations(turns: Sequence[Sequence[Timed]]) -> tuple[float, ...]:
    """Each step as long as it took the slowest rank."""
    return tuple(max(ranks) for turn in turns for ranks in zip(*(timed.step_s for timed in turn), strict=False))


def _sent(turns: Sequence[Sequence[Timed]]) -> tuple[Sent, ...]:
    every = [timed for turn in turns for timed in turn]
    axes = dict.fromkeys(axis for timed in every for axis in timed.sent)
    found = []
    for axis in axes:
        formulas = [timed.sent_formula[axis] for timed in every if axis in timed.sent_formula]
        whole = [sum(timed.sent_formula.values()) for timed in every if timed.sent_formula and axis == "world"]
        stated = formulas or whole
        found.append(
            Sent(
                axis,
                statistics.mean(timed.sent.get(axis, 0.0) for timed in every),
                statistics.mean(stated) if stated else None,
                every[0].source,
            )
        )
    return tuple(found)


def _held(turns: Sequence[Sequence[Timed]]) -> tuple[Held, ...]:
    every = [timed for turn in turns for timed in turn if timed.held]
    kinds = dict.fromkeys(kind for timed in every for kind, size in timed.held.items() if size)  # 0: kept out of sight
    found = []
    for kind in kinds:
        largest = max(every, key=lambda timed: timed.held.get(kind, 0))  # used at once
        found.append(Held(kind, largest.held.get(kind, 0), largest.held_formula.get(kind)))
    return tuple(found)
