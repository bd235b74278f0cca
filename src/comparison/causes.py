# SPDX-License-Identifier: Apache-2.0
"""Why a contender may have left the reference, in sentences: what was seen, and what it may mean."""

from __future__ import annotations

import math
from collections.abc import Iterator

from stratagem.comparison.results import Departure, Deviation
from stratagem.comparison.trace import Trace

_CLOSE = 0.02  # of a ratio to a whole number


def reasons(found: Trace, expected: Trace, departure: Departure | None, final: Deviation | None) -> tuple[str, ...]:
    """What is off first, and why it may be.

    Args:
        found: the contender.
        expected: one process.
        departure: where it left; None if no step did.
        final: how far its final parameters are off.
    """
    if departure is None:
        if final is None:
            return tuple(_nothing_proved(found, expected))
        return (f"No step is off, but {final.where or 'a final parameter'} is in the end, by {final.relative:.1e}.",)
    return (_where(departure), *_why(found, expected, departure))


def _nothing_proved(found: Trace, expected: Trace) -> Iterator[str]:
    """Why being equal says less than it seems to."""
    if not expected.trained:
        yield (
            "Nothing was trained, so nothing is proved: no parameter of the one process has moved. Its learning rate "
            "may begin at 0 (a warm-up), its gradients may be 0, or all parameters are frozen."
        )
    numberless = [
        step
        for step, (mine, its) in enumerate(zip(found.steps, expected.steps, strict=False))
        if mine.loss is not None and its.loss is not None and not math.isfinite(its.loss)
    ]
    if numberless:
        yield (
            f"From step {numberless[0]} on the loss of one process is no number, and this one's neither: only the "
            "steps before say that they are equal."
        )


def _where(departure: Departure) -> str:
    what = f"the {departure.quantity}" if not departure.parameter else f"the parameter {departure.parameter}"
    if departure.quantity == "samples":
        return (
            f"In step {departure.step} it read {departure.found}; one process on the same global batch read "
            f"{departure.expected}."
        )
    assert isinstance(departure.found, float)
    assert isinstance(departure.expected, float)
    values = f"{departure.found:.8g}, and {departure.expected:.8g} in one process"
    norm = "has the norm" if departure.parameter else "is"
    return f"The first to be off is {what} of step {departure.step}: it {norm} {values}."


def _why(found: Trace, expected: Trace, departure: Departure) -> Iterator[str]:
    mine, its = found.steps[departure.step], expected.steps[departure.step]
    ranks = found.num_data_ranks
    if departure.quantity == "samples":
        if mine.samples != its.samples:
            yield (
                f"Its global batch is {mine.samples} samples ({ranks} data ranks, {found.facts.accumulate} "
                f"micro-batches per step), the reference's {its.samples}: give all strategies the same "
                "(run.batch_size, the loader's batch size, accumulate_grad_batches)."
            )
        else:
            yield (
                "As many samples, but others: ranks that read the same ones, an order that depends on the number of "
                "ranks, or data that is drawn anew (augmentation) in each process."
            )
        return
    samples = next((s.rank_samples for s in found.steps[: departure.step + 1] if len(set(s.rank_samples)) > 1), ())
    if samples:
        yield (
            f"Its ranks had {', '.join(map(str, samples))} samples: a plain mean over ranks, as Lightning's ddp takes, "
            "weighs them alike, and one process weighs each sample. With batches that all ranks share evenly "
            "(drop_last: true) the two are the same."
        )
    if any(step.draws for step in (*found.steps[: departure.step + 1], *expected.steps[: departure.step + 1])):
        yield (
            "The training step draws random numbers (dropout?). Ranks draw them for their own samples, so they differ "
            "from one process's: set it to 0 for a comparison."
        )
    if found.facts.batch_norms and ranks > 1 and not found.facts.synced_batchnorm:
        yield (
            f"{found.facts.batch_norms[0]} normalises by the statistics of a rank's own samples: "
            "trainer.sync_batchnorm: true takes those of all ranks."
        )
    if found.precision.startswith("64") and _is_single(departure):
        yield (
            "The difference is of the size of float32's rounding: part of the module may compute in float32 whatever "
            "the precision is."
        )
    if departure.quantity == "gradient norm":
        yield from _ratio(departure, ranks)
        if mine.loss is not None:
            yield "The losses agree up to this step: the forward pass is right, the reduction of the gradients is not."
    elif departure.quantity == "parameters":
        norms = "and gradient norms " if mine.gradient_norm is not None and its.gradient_norm is not None else ""
        yield (
            f"The losses {norms}agree up to this step: what is done between the norm and the new parameters differs "
            "(clipping, the optimizer, the parameters' return to the ranks), or gradients that hardly add to the norm."
        )
    elif departure.step == 0:
        yield "It is off before any optimizer step: other initial parameters, or another loss for the same samples."


def _is_single(departure: Departure) -> bool:
    """Whether the difference is what float32 would make of equal numbers."""
    if not (isinstance(departure.found, float) and isinstance(departure.expected, float) and departure.expected):
        return False
    return 1e-10 < abs(departure.found / departure.expected - 1) < 1e-5


def _ratio(departure: Departure, ranks: int) -> Iterator[str]:
    assert isinstance(departure.found, float)
    assert isinstance(departure.expected, float)
    if not departure.found or not departure.expected or ranks < 2:
        return
    ratio = departure.found / departure.expected
    if abs(ratio / ranks - 1) < _CLOSE:
        yield f"It is {ratio:.3g} times the reference's on {ranks} ranks: gradients summed in place of averaged?"
    elif abs(ratio * ranks - 1) < _CLOSE:
        yield f"It is 1/{1 / ratio:.3g} of the reference's on {ranks} ranks: gradients averaged twice?"
