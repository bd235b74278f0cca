# SPDX-License-Identifier: Apache-2.0
"""Comparisons as they come out of real runs: a GPT of 17 million parameters on two ranks, and what may go wrong."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from stratagem.comparison.results import (
    Comparison,
    Contender,
    Departure,
    Deviation,
    Held,
    Place,
    Reference,
    Sent,
)

NUM_PARAMETERS = 17_059_840
WHOLE = 4 * NUM_PARAMETERS  # bytes of the parameters in float32
STEPS = 50
TRACEBACK = """\
RankError: rank 1 raised in step 3
Traceback (most recent call last):
  File "engine.py", line 1822, in _wait
    handle.wait()
  File "training.py", line 41, in training_step
    raise ValueError("expected <Tensor[16, 128]> & got [16, 64]")
ValueError: expected <Tensor[16, 128]> & got [16, 64]"""

_SHARES = {  # of parameters, gradients and optimizer state that one of two ranks holds; bytes sent over parameter bytes
    "ddp": (1, 1, 1, 1.0),
    "ring_ddp": (1, 1, 1, 1.0),
    "zero_1": (1, 1, 0.5, 1.0),
    "zero_2": (1, 0.5, 0.5, 1.0),
    "zero_3": (0.5, 0.5, 0.5, 1.5),
    "deepspeed_zero_1": (1, 1, 0.5, 1.5),
    "deepspeed_zero_2": (1, 0.5, 0.5, 1.5),
    "deepspeed_zero_3": (0.5, 0.5, 0.5, 2.0),
}
_STEP_MS = {
    "ddp": 438,
    "ring_ddp": 381,
    "zero_1": 400,
    "zero_2": 396,
    "zero_3": 420,
    "deepspeed_zero_1": 655,
    "deepspeed_zero_2": 700,
    "deepspeed_zero_3": 812,
}
REFERENCE = Reference(
    losses=tuple(2.2 + 3.4 * math.exp(-step / 14) + 0.05 * math.sin(2.1 * step) for step in range(STEPS)),
    gradient_norms=tuple(0.8 + 2.5 * math.exp(-step / 8) + 0.06 * math.cos(1.7 * step) for step in range(STEPS)),
    step_s=(0.61,) * 10,
    num_parameters=NUM_PARAMETERS,
    global_batch=16,
    twin_losses=tuple(
        2.2 + 3.4 * math.exp(-step / 14) + 0.05 * math.sin(2.1 * step) + 1.2e-7 * 1.09**step * math.sin(4.4 * step)
        for step in range(STEPS)
    ),
    twin_loss=Deviation(3.1e-6, 7.6e-6, "step 48"),
    twin_gradient_norm=Deviation(2.2e-5, 1.8e-5, "step 47"),
    twin_parameters=Deviation(4.0e-5, 1e-6, "transformer.blocks.0.attention.qkv.weight"),
)


def contender(name: str, *, noise: float = 2e-7, seed: int = 0) -> Contender:
    """A strategy that equals the reference up to rounding; `noise` 0 is bit-equal."""
    draw = random.Random(f"{name}{seed}")
    parameters, gradients, optimizer, factor = _SHARES.get(name, _SHARES["ddp"])
    own = not name.startswith("deepspeed") and name != "ddp"
    kinds = (("parameters", parameters, 1), ("gradients", gradients, 1), ("optimizer", optimizer, 2))
    step_s = tuple(_STEP_MS.get(name, 450) * 1e-3 * draw.gauss(1, 0.02) for _ in range(20))
    losses = tuple(loss * (1 + noise * draw.uniform(-1, 1) * (step > 1)) for step, loss in enumerate(REFERENCE.losses))
    norms = [norm * (1 + 3 * noise * draw.uniform(-1, 1)) for norm in REFERENCE.gradient_norms if norm is not None]
    return Contender(
        name=name,
        about="replicas that average their gradients" if name.endswith("ddp") else "shards of the training state",
        verdict="equal",
        losses=losses,
        gradient_norms=tuple(norms),
        loss=Deviation(noise, noise * 5, "step 31" if noise else ""),
        gradient_norm=Deviation(3 * noise, noise * 3, "step 12" if noise else ""),
        parameters=Deviation(4 * noise, noise, "transformer.blocks.3.mlp.up.weight" if noise else ""),
        startup_s=4.2 if own else 2.1,
        step_s=step_s,
        ratio=_STEP_MS.get(name, 450) / 438,
        sent=(
            Sent(
                "dp_replicate" if own else "world",
                factor * WHOLE * (1.0 if own else 1.0006),
                None if "deepspeed" in name else factor * WHOLE,
                "books" if own else "kernel",
            ),
        ),
        held=tuple(Held(kind, int(share * times * WHOLE), share * times * WHOLE) for kind, share, times in kinds),
        peak_bytes=int(WHOLE * (parameters + gradients + 2 * optimizer + 2.2)),
        layout=tuple(
            Place(rank, {"dp_replicate": rank} if own else {}, rank, int(NUM_PARAMETERS * parameters))
            for rank in range(2)
        ),
        strict_steps=STEPS,
    )


def comparison(*contenders: Contender, reference: Reference = REFERENCE, steps: int = STEPS) -> Comparison:
    """These contenders on one config."""
    return Comparison(
        config=("--config", "configs/gpt_tiny.yaml", "--model.init_args.optimizer.lr=0.001"),
        ranks=2,
        steps=steps,
        precision="32-true",
        tolerance=1e-5,
        baseline="ddp",
        reference=reference,
        contenders=contenders,
        machine={"cpu": "AMD EPYC 9554", "cores": "2", "python": "3.12.7", "torch": "2.13.0", "lightning": "2.6.0"},
        created="2026-12-01T11:40:02+00:00",
        seconds=141.3,
    )


def diverging(name: str = "zero_2", at: int = 12) -> Contender:
    """Bit-equal until one parameter goes its own way."""
    same = contender(name, noise=0.0)
    losses = tuple(
        loss * (1 + (4e-5 * 1.13 ** (step - at) if step > at else 0.0)) for step, loss in enumerate(same.losses)
    )
    norms = tuple(
        norm * (1 + (1e-4 * 1.15 ** (step - at) if step > at else 0.0))
        for step, norm in enumerate(same.gradient_norms)
        if norm is not None
    )
    return replace(
        same,
        verdict="differs",
        losses=losses,
        gradient_norms=norms,
        loss=Deviation(2.6e-3, 6.1e-3, "step 49"),
        gradient_norm=Deviation(1.4e-2, 1.3e-2, "step 49"),
        parameters=Deviation(3.1e-2, 4.4e-3, "transformer.blocks.3.mlp.up.weight"),
        departure=Departure(at, "parameters", 12.4380021, 12.4391187, "transformer.blocks.3.mlp.up.weight"),
        reasons=(
            "After step 12 only transformer.blocks.3.mlp.up.weight is off; the gradients before it agree: look at the "
            "bucket that holds it and at its weight decay.",
        ),
    )


def on_other_data(name: str = "deepspeed_zero_1") -> Contender:
    """A run whose loader gave it other samples."""
    return replace(
        contender(name, noise=3e-2),
        verdict="other data",
        loss=None,
        gradient_norm=None,
        parameters=None,
        departure=Departure(0, "samples", "sha256 41c9a0…", "sha256 9bd27e…"),
        reasons=("Its ranks read 32 samples per step, the reference 16: set `data.init_args.global_batch`.",),
    )


def failed(name: str = "deepspeed_zero_3", steps: int = 3) -> Contender:
    """A run that ended early, with the losses of the steps done and nothing else."""
    whole = contender(name)
    return Contender(
        name,
        whole.about,
        "failed",
        reasons=(TRACEBACK,),
        losses=whole.losses[:steps],
        gradient_norms=whole.gradient_norms[:steps],
    )


def good() -> Comparison:
    """Eight strategies that all equal one process."""
    names = list(_SHARES)
    return comparison(*(contender(name, noise=0.0 if name == "ring_ddp" else 2e-7) for name in names))


def troubled() -> Comparison:
    """Eight strategies of which one diverges, one had other data and one failed."""
    names = ["ddp", "ring_ddp", "zero_1", "zero_3", "deepspeed_zero_2"]
    equal = {name: contender(name, noise=0.0 if name == "ring_ddp" else 2e-7) for name in names}
    rest = [diverging(), on_other_data(), failed()]
    return comparison(*equal.values(), *rest)
