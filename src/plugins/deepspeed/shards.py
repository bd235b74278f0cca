# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed has divided, seen whole: the norm of the gradient, the parameters, the plain module at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn


def masters(optimizer: Any) -> list[Tensor]:
    """The flat tensors that DeepSpeed's optimizer steps, this rank's share of the parameters. Local."""
    flat = getattr(optimizer, "single_partition_of_fp32_groups", None)  # stages 1 and 2: one per parameter group
    return list(optimizer.fp32_partitioned_groups_flat if flat is None else flat)


def gradient_pieces(optimizer: Any) -> list[list[Tensor]]:
    """This rank's pieces of the averaged gradient, by tensor that the optimizer steps. Local.

    There from a window's last backward to the step.

    Args:
        optimizer: DeepSpeed's, of any stage.
    """
    found = []
    for number, master in enumerate(masters(optimizer)):
        pieces = optimizer.averaged_gradients.get(number)
        if pieces is None:  # offloaded: they lie at the masters
            pieces = [] if master.grad is None else [master.grad]
        found.append(list(pieces))
    return found


def forget_gradients(optimizer: Any) -> None:
    """Zeroes the pieces that stage 3 keeps. Local; right after the step.

    DeepSpeed overwrites a piece in the first micro-batch of a window and adds to it in the others. A parameter that
    rests in the first one would be stepped by what an earlier window has left.
    """
    for piece in getattr(optimizer, "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition", {}).values():
        piece.zero_()


def gradient_norm(optimizer: Any) -> float:
    """The 2-norm of the whole averaged gradient, times the loss scale where there is one.

    Collective over all ranks; one number travels.

    Args:
        optimizer: DeepSpeed's, of any stage.
    """
    device = optimizer.device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for piece in (piece for pieces in gradient_pieces(optimizer) for piece in pieces):
        total += torch.linalg.vector_norm(piece.detach(), dtype=torch.float64).square().to(device)
    dist.all_reduce(total)
    return math.sqrt(float(total))


def whole_state(module: nn.Module) -> dict[str, Any]:
    """The state of a module that DeepSpeed may have divided, under its plain names. Every rank calls it.

    Parameters are gathered one by one; the whole of them is kept on rank 0, elsewhere divided ones are empty.
    """
    state = module.state_dict(keep_vars=True)
    whole: dict[int, Tensor] = {}
    for parameter in _divided(module):
        with _gathered(parameter):
            if dist.get_rank() == 0:
                whole[id(parameter)] = parameter.detach().clone()
    found = {}
    for name, value in state.items():
        found[name] = whole.get(id(value), value.detach() if isinstance(value, Tensor) else value)
    return found


def load_whole_state(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """The inverse of `whole_state`; every rank holds the whole state and calls it."""
    owners = dict(module.named_parameters(remove_duplicate=False))
    divided = {id(parameter) for parameter in _divided(module)}
    plain = {name: value for name, value in state.items() if id(owners.get(name)) not in divided}
    missing, unexpected = module.load_state_dict(plain, strict=False)
    missing = [name for name in missing if name not in state]
    if strict and (missing or unexpected):
        raise RuntimeError(f"the state does not fit the module: {missing} are missing, {unexpected} are not in it")
    for name, value in state.items():
        if name not in plain:
            with _gathered(owners[name], modifier_rank=0):
                if dist.get_rank() == 0:
                    owners[name].data.copy_(value)


def _divided(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if hasattr(parameter, "ds_id")]


def _gathered(parameter: nn.Parameter, modifier_rank: int | None = None) -> Any:
    from deepspeed import zero

    return zero.GatheredParameters([parameter], modifier_rank=modifier_rank)


@final
class PlainModule:
    """Remembers how a module was before DeepSpeed took it over, to make it plain again afterwards.

    DeepSpeed puts attributes on parameters, other dictionaries into modules, hooks onto both, and (stage 3) takes the
    values out of the parameters.

    Args:
        module: not yet DeepSpeed's.
    """

    _HOOKS = (
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_backward_hooks",
        "_backward_pre_hooks",
    )

    _THEIRS = (
        *("ds_", "_ds_", "_z3_", "_external_params", "all_parameters", "_original_parameters"),
        *("pre_bwd_fn", "post_bwd_fn", "applied_pre_backward_ref_cnt"),
    )
    """How the attributes begin that DeepSpeed puts on modules.

    With one left it takes the module for prepared, and a second run's backward would go through the first one's engine.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = {id(p): (p, p.requires_grad, dict(vars(p))) for p in module.parameters()}
        self._whole: dict[int, Tensor] = {}
        self._modules = [(each, dict(vars(each)), self._hooks(each)) for each in module.modules()]

    def changes(self) -> list[str]:
        """Parameters that were added, replaced, frozen or unfrozen since then, by name. Local."""
        found = []
        for name, parameter in self._module.named_parameters():
            known = self._parameters.get(id(parameter))
            if known is None:
                found.append(f"{name} is new")
            elif known[1] != parameter.requires_grad:
                found.append(f"{name} is {'trained' if parameter.requires_grad else 'frozen'} now")
        names = {id(parameter) for parameter in self._module.parameters()}
        gone = [known for known in self._parameters if known not in names]
        return found + ([f"{len(gone)} parameters are gone"] if gone else [])

    def gather(self) -> None:
        """Gives every rank the whole of what stage 3 has divided; `restore` puts it in place. Collective."""
        for parameter, *_ in self._parameters.values():
            if hasattr(parameter, "ds_id"):
                with _gathered(parameter):
                    self._whole[id(parameter)] = parameter.detach().clone()

    def restore(self) -> None:
        """Makes the module plain again, with the values that `gather` has found. Local."""
        for parameter, _, attributes in self._parameters.values():
            parameter.data = self._whole.get(id(parameter), parameter.data)
            parameter.grad = None
            for name in set(vars(parameter)) - set(attributes):
                delattr(parameter, name)
        for each, attributes, hooks in self._modules:
            for name in set(vars(each)) - set(attributes):
                if name.startswith(self._THEIRS):
                    delattr(each, name)
            if type(each._parameters) is not dict:
                each._parameters = dict(each._parameters)
            for name, kept in hooks.items():
                getattr(each, name).clear()
                getattr(each, name).update(kept)

    def _hooks(self, module: nn.Module) -> dict[str, dict[Any, Any]]:
        return {name: dict(getattr(module, name)) for name in self._HOOKS}
