# SPDX-License-Identifier: Apache-2.0
"""What can be chosen about DeepSpeed, and the dictionary that DeepSpeed is given.

DeepSpeed takes one nested dictionary. What Lightning's Trainer decides (batch sizes, accumulation, clipping, precision)
is not chosen here a second time; a raw key that would contradict it is refused instead of winning or losing silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from stratagem.errors import ConfigError

_DECIDED_ELSEWHERE = {
    "train_batch_size": "the DataLoader decides batch sizes",
    "train_micro_batch_size_per_gpu": "the DataLoader decides batch sizes",
    "gradient_accumulation_steps": "set trainer.accumulate_grad_batches",
    "managed_gradient_accumulation": "set trainer.accumulate_grad_batches",
    "gradient_clipping": "set trainer.gradient_clip_val",
    "optimizer": "return the optimizer from configure_optimizers",
    "scheduler": "return the schedule from configure_optimizers",
    "fp16.enabled": "set trainer.precision",
    "bf16.enabled": "set trainer.precision",
    "amp": "set trainer.precision",
    "torch_autocast": "set trainer.precision",
    "data_types": "set trainer.precision",
    "zero_optimization.stage": "choose deepspeed_zero_1, deepspeed_zero_2 or deepspeed_zero_3",
    "zero_optimization.compute_grad_norm": "clipping needs the norm",
}


@dataclass(frozen=True)  # not @final: jsonargparse takes no default value of a final class
class DeepSpeedSettings:
    """How DeepSpeed packs and sends.

    Args:
        bucket_mib: memory for the gradients that are reduced at once, and for the parameters that stage 3 fetches
            ahead.
        gather_mib: memory for the parameters that stages 1 and 2 gather at once.
        overlap_comm: send while backward goes on; on the CPU DeepSpeed's sends block, so that it gains nothing there.
        comparable: make stage 3 send what the textbook says, by keeping no parameter fetched beyond its use: every
            module is fetched in forward and again in backward, the smallest too. Without effect on stages 1 and 2.
        offload: `cpu` keeps masters and optimizer state in host memory when the model is on CUDA.
        config: raw DeepSpeed keys, nested or dotted, laid over all the others.
    """

    bucket_mib: float = 25.0
    gather_mib: float = 100.0
    overlap_comm: bool = True
    comparable: bool = False
    offload: Literal["none", "cpu"] = "none"
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("bucket_mib", "gather_mib"):
            if getattr(self, name) <= 0:
                what = f"{name} is {getattr(self, name)}"
                raise ConfigError(what, where=f"deepspeed.{name}", allowed="numbers above 0")
        for key in _paths(self.config):
            for decided, remedy in _DECIDED_ELSEWHERE.items():
                if key == decided or key.startswith(f"{decided}."):
                    raise ConfigError(f"{key} is decided elsewhere", where="deepspeed.config", do=remedy)


def engine_config(settings: DeepSpeedSettings, stage: int, precision: str) -> dict[str, Any]:
    """The dictionary for `deepspeed.initialize`.

    Accumulation is 1 and clipping 0 for DeepSpeed: Lightning divides the loss by its own `accumulate_grad_batches`, and
    the strategy tells the engine before each backward whether a step follows it, and before each step the norm to clip
    to.

    Args:
        settings: as the user chose.
        stage: 1, 2 or 3.
        precision: the Trainer's.

    Example:
        >>> engine_config(DeepSpeedSettings(bucket_mib=4), 2, "32-true")["zero_optimization"]["reduce_bucket_size"]
        1048576
    """
    half = {"16-true": "fp16", "16-mixed": "fp16", "bf16-true": "bf16"}.get(precision)
    width = 2 if half else torch.float64.itemsize if precision == "64-true" else 4
    bucket = max(2, int(settings.bucket_mib * 2**20) // width)
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "overlap_comm": settings.overlap_comm,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": max(2, int(settings.gather_mib * 2**20) // width // 2 * 2),  # an even number
    }
    if stage == 3:
        zero["stage3_prefetch_bucket_size"] = bucket
        if settings.comparable:
            limits = ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_param_persistence_threshold")
            zero |= dict.fromkeys(limits, 0)
    if settings.offload == "cpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed wants a number for its log; the loaders decide
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    if half:
        config[half] = {"enabled": True}
    return _merged(config, _nested(settings.config))


def _nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys, as a command line has them, as nested ones."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        first, _, rest = key.partition(".")
        inner = _nested({rest: value}) if rest else _nested(value) if isinstance(value, Mapping) else value
        found = _merged(found, {first: inner})
    return found


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(under)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = _merged(found[key], value) if both else value
    return found


def _paths(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _paths(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
