# SPDX-License-Identifier: Apache-2.0
"""Whether an optimizer can work on parts of parameters: found out by trying, not by its name.

An optimizer of the same class and settings takes a few steps on two small matrices, in three ways:

    together       both matrices, whole                      what one process does
    apart          each matrix alone                         what `partition: parameter` does
    in pieces      the first matrix as two flat pieces       what `partition: flat` does

Where `apart` differs from `together`, parameters influence each other (LBFGS, or step sizes found from all parameters)
and the optimizer cannot be divided. Where `in pieces` differs, it needs whole matrices (Muon, Adafactor, Shampoo,
LAMB).
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.errors import ConfigError

Separable = Literal["elements", "parameters", "no", "unknown"]

_STEPS = 3
_NOT = ("LBFGS",)
_WHOLE = (
    "Muon",
    "Adafactor",
    "Shampoo",
    "DistributedShampoo",
    "SOAP",
    "LARS",
    "LAMB",
    "Lamb",
    "NovoGrad",
    "SM3",
    "GaLore",
)


def separable(optimizer: Optimizer) -> Separable:
    """What the optimizer's update may be divided into; local, draws no random number, touches nothing of the optimizer.

    Returns:
        `elements`, `parameters`, `no`; `unknown` if it would not run on the trial matrices.

    Example:
        >>> weight = nn.Parameter(torch.zeros(3, 2))
        >>> separable(torch.optim.AdamW([weight])), separable(torch.optim.Adafactor([weight]))
        ('elements', 'parameters')
    """
    lines = {name for cls in type(optimizer).__mro__ for name in (cls.__name__,)}
    if lines & set(_NOT):
        return "no"
    answers = {_of_group(optimizer, group) for group in optimizer.param_groups}
    found: Separable = next((a for a in ("no", "parameters", "unknown") if a in answers), "elements")
    return "parameters" if found in ("elements", "unknown") and lines & set(_WHOLE) else found


def check_separable(optimizer: Optimizer, partition: Literal["flat", "parameter"]) -> None:
    """Refuses an optimizer that the partition would make wrong; local.

    Raises:
        ConfigError: it needs whole parameters and the partition is flat, or it cannot be divided at all.
    """
    found, name = separable(optimizer), type(optimizer).__name__
    if found == "no":
        raise ConfigError(
            f"{name} lets parameters influence each other, so its state cannot be divided over ranks",
            where="the optimizer",
            allowed="optimizers that step each parameter for itself",
            do="train with ring_ddp",
        )
    if partition == "flat" and found == "parameters":
        raise ConfigError(
            f"{name} needs whole parameters, and partition `flat` cuts them",
            where="zero.partition",
            allowed="parameter (for every optimizer), flat (for SGD, Adam and others that treat elements alike)",
            do="set zero.partition: parameter",
        )


def _of_group(optimizer: Optimizer, group: Mapping[str, Any]) -> Separable:
    first, second = _matrix(4, 6, 1), _matrix(6, 4, 2)
    cut = 11  # within a row, so that neither rows nor columns stay whole
    with torch.random.fork_rng(devices=[]):
        try:
            together = _run(optimizer, group, [first, second])
            apart = _run(optimizer, group, [first]) + _run(optimizer, group, [second])
        except Exception:  # whatever a foreign optimizer raises on foreign matrices says only that it cannot be tried
            return "unknown"
        if not _same(together, apart):
            return "no"
        try:
            pieces = _run(optimizer, group, [first.flatten()[:cut], first.flatten()[cut:]])
        except Exception:  # it refuses vectors
            return "parameters"
    return "elements" if _same([torch.cat(pieces)], [together[0].flatten()]) else "parameters"


def _matrix(rows: int, columns: int, seed: int) -> Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).mul_(seed).add_(seed).sin_().view(rows, columns)


def _run(optimizer: Optimizer, group: Mapping[str, Any], values: Sequence[Tensor]) -> list[Tensor]:
    """The values after a few steps with gradients that depend on them and on the step."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    trial = _like(optimizer, group, parameters)
    for step in range(_STEPS):
        for parameter in parameters:
            parameter.grad = (parameter.detach() * (2.0 + step)).add(0.1).cos()
        trial.step()
    return [parameter.detach() for parameter in parameters]


def _like(optimizer: Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """An optimizer of the same class with the settings of one group, on other parameters."""
    cls = type(optimizer)
    settings = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
    accepted = inspect.signature(cls).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted.values())
    try:
        trial = cls(parameters, **{k: v for k, v in optimizer.defaults.items() if takes_all or k in accepted})
    except Exception:  # a constructor of its own kind: a copy of the object, with nothing of its own in common
        trial = cls.__new__(cls)
        trial.__dict__.update(optimizer.__dict__, state=defaultdict(dict), param_groups=[{"params": parameters}])
        for name in list(trial.__dict__):
            if name.endswith("_hooks"):
                trial.__dict__[name] = OrderedDict()
    if "lr" in settings:  # a warm-up may just have set it to 0, under which all optimizers are alike
        settings["lr"] = torch.tensor(0.1) if isinstance(settings["lr"], Tensor) else 0.1
    trial.param_groups[0].update(settings)
    return trial


def _same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, expected, strict=True))
