# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism as a technique: a module is cut by plan, and every parameter's place is stated.

    before      blocks.0.ffn.up_proj     nn.Linear        weight [F, D]
    after       blocks.0.ffn.up_proj     ColumnLinear     weight [F/t, D]     box ((r F/t, (r+1) F/t), (0, D))

The module is built as one process builds it; each rank keeps its slice of the values of rank 0 of its row, so initial
values do not depend on t. Parameters stay the same objects, so optimizers, tied names and hooks find them.

Note [gradients of what is whole]: see Note [equal gradients] in `functions`. The exceptions, norms and biases that see
a share of the sequence and parameters that see some heads, get a hook that sums their gradient over the axis before it
is accumulated, so that whoever owns the gradients sees that of the whole batch.

Note [torch's fast path]: `nn.TransformerEncoderLayer` reads the weights of its linear layers in evaluation, unless one
of its modules has a hook; so a cut layer of one has a hook that does nothing.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from stratagem.boxes import box_of, put_together
from stratagem.checkpoint.parts import Box
from stratagem.collectives import Worker
from stratagem.errors import PlanError
from stratagem.placement import Placement
from stratagem.plan import Plan, matches
from stratagem.plugins.tensor.axis import SEQUENCE_DIM, TensorAxis
from stratagem.plugins.tensor.cuts import Cut, Cuts, plan_cuts
from stratagem.plugins.tensor.functions import all_reduced, copy_to, reduce_from
from stratagem.plugins.tensor.heads import localise
from stratagem.plugins.tensor.infer import infer_plan
from stratagem.plugins.tensor.layers import (
    ColumnLinear,
    CutDropout,
    CutLayer,
    RowLinear,
    SharedColumn,
    VocabEmbedding,
    WideEmbedding,
    install,
    uninstall,
)
from stratagem.plugins.tensor.settings import TensorSettings
from stratagem.technique import Context, Technique, check_same_structure, unique

log = logging.getLogger(__name__)

_KINDS: dict[str, type[CutLayer]] = {
    "column": ColumnLinear,
    "shared": SharedColumn,
    "row": RowLinear,
    "vocab": VocabEmbedding,
    "wide": WideEmbedding,
}
_DIM_OF_WEIGHT = {"column": 0, "row": 1, "vocab": 0, "wide": 1}


def resolve(module: nn.Module, degree: int, settings: TensorSettings = TensorSettings()) -> Cuts:
    """How a module is cut over `degree` ranks: by its own plan, the settings' over it, or by an inferred one. Pure.

    Raises:
        PlanError: it cannot be cut so; with the layer, the reason and the nearest legal degrees.
    """
    carried = Plan.read(module)
    overrides = Plan(tensor=dict(settings.plan))
    names = [name for name, _ in module.named_modules()]
    for pattern in overrides.tensor:
        if not any(matches(pattern, name) for name in names):
            raise PlanError(
                f"no layer is called {pattern!r}", where="tensor.plan", allowed="names and patterns of layers"
            )
    if not carried.tensor and not overrides.tensor:
        if settings.without_plan == "refuse":
            raise PlanError(
                f"{type(module).__name__} has no plan",
                where="tensor.without_plan",
                allowed="modules with a `_tp_plan`",
                do="write one into tensor.plan, or set without_plan: infer",
            )
        return plan_cuts(module, infer_plan(module, degree), degree, settings)
    return plan_cuts(module, carried.overridden_by(overrides), degree, settings)


@final
class TensorParallel(Technique):
    """Megatron's tensor parallelism, in place, by plan.

    Wire, per layer of a transformer and micro-batch, from each of t ranks: four all-reduces of the activation `[B, T,
    D]`, two forward and two backward, `8 (t-1)/t B T D` elements; the same with sequence parallelism, as all-gathers
    and reduce-scatters, of which backward adds two all-gathers, `2 (t-1)/t B T D`, since only a share of the input is
    kept. Memory: matrices divided by t, the rest whole. Source: arXiv 1909.08053, 2104.04473, 2205.05198.

    Args:
        settings: see `TensorSettings`.
    """

    axis: ClassVar[str] = "tp"

    def __init__(self, settings: TensorSettings = TensorSettings()) -> None:
        self.settings = settings
        self.cuts: Cuts | None = None
        self._worker: Worker | None = None
        self._handles: list[RemovableHandle] = []
        self._placed: dict[str, Placement] = {}
        """As stated here; a later technique may divide further."""
        self._layers: list[nn.Module] = []
        self._counts: list[tuple[nn.Module, dict[str, int]]] = []

    @override
    def apply(self, module: nn.Module, context: Context) -> None:
        """Gives the ranks of a row rank 0's values, cuts the module, and states placements.

        Collective over the axis. Moves the model once.

        Raises:
            PlanError: the module cannot be cut so.
            ConfigError: the ranks built different modules.
        """
        self._module, self._context = module, context
        self._comm = context.communicator("tp", lane="tensor")
        if self._comm.size == 1:
            return
        check_same_structure(module, self._comm)
        self.cuts = resolve(module, self._comm.size, self.settings)
        with torch.no_grad():
            self._comm.broadcast_tensors([*unique(module.parameters()), *unique(module.buffers())])
        later = None
        if self.settings.overlap:
            self._worker = Worker(name="tensor")
            later = context.communicator("tp", lane="tensor-gradients"), self._worker
        self._axis = TensorAxis(self._comm, sequence=self.cuts.sequence, later=later)
        self._cut(self.cuts)
        if context.rank == 0:
            log.info(describe(module, self.cuts, self._comm.size))

    def _cut(self, cuts: Cuts) -> None:
        modules = dict(self._module.named_modules())
        dims: dict[int, tuple[int, Cut]] = {}  # by parameter
        summed: list[nn.Parameter] = []
        for cut in cuts.layers:
            if cut.kind == "parameter":
                dims[id(self._module.get_parameter(cut.name))] = cut.dim, cut
                continue
            layer = modules[cut.name]
            weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
            self._replace(layer, cut, modules.get(cut.name.rpartition(".")[0]))
            if cut.kind in _DIM_OF_WEIGHT:
                assert weight is not None
                dims[id(weight)] = _DIM_OF_WEIGHT[cut.kind], cut
            if cut.kind == "column" and bias is not None:
                dims[id(bias)] = 0, cut
            elif cut.kind == "row" and bias is not None and cuts.sequence:
                summed.append(bias)
            elif cut.kind in ("shared", "sequence", "summed"):
                summed += layer.parameters(recurse=False)
        self._place(dims)
        for parameter in unique(summed):
            self._sum_gradient(parameter)
        rank = self._comm.rank
        for heads in cuts.heads:
            queries, keys = ((total, of_ranks[rank]) for total, of_ranks in (heads.queries, heads.keys))
            parent = modules[heads.name]
            self._counts.append((parent, localise(parent, heads.size, queries, keys)))

    def _replace(self, layer: nn.Module, cut: Cut, parent: nn.Module | None) -> None:
        if isinstance(layer, nn.Dropout) and cut.kind in ("sequence", "dropout"):
            dim = SEQUENCE_DIM if cut.kind == "sequence" else -1
            install(layer, CutDropout, self._axis, cut.spans, dim=dim)
            self._layers.append(layer)
        if cut.kind == "experts":
            self._handles.append(layer.register_forward_pre_hook(self._enter_experts))
            self._handles.append(layer.register_forward_hook(lambda *args: reduce_from(args[-1], self._comm)))
        if cut.kind not in _KINDS:
            return
        options: dict[str, Any] = {}
        if cut.kind == "column":
            options["output"] = cut.output
        elif cut.kind == "row":
            options["splits"] = cut.splits
        install(layer, _KINDS[cut.kind], self._axis, cut.spans, **options)
        self._layers.append(layer)
        if isinstance(parent, nn.TransformerEncoderLayer):  # see Note [torch's fast path]
            self._handles.append(layer.register_forward_hook(lambda *_: None))

    def _enter_experts(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Rows and routing weights reach every rank's part of every expert. Nothing is sent before backward."""
        return tuple(
            copy_to(x, self._comm) if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad else x
            for x in args
        )

    @torch.no_grad()
    def _place(self, dims: dict[int, tuple[int, Cut]]) -> None:
        """Keeps this rank's slice of every parameter that is cut, and states it."""
        sizes = self._context.shape.sizes
        data = tuple(axis for axis in ("dp_replicate", "dp_shard", "cp") if sizes[axis] > 1)
        names: dict[int, list[str]] = defaultdict(list)
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            names[id(parameter)].append(name)
        for name, parameter in self._module.named_parameters():
            if id(parameter) not in dims:
                continue
            dim, cut = dims[id(parameter)]
            start, stop = cut.spans[self._comm.rank]
            shape = tuple(parameter.shape)
            packed = (dim, cut.packed) if cut.packed > 1 else None
            box: Box = tuple((start, stop) if d == dim else (0, size) for d, size in enumerate(shape))
            if packed is not None:
                box = (*box[:dim], (0, cut.packed), *box[dim:])
            place = Placement(
                name,
                shape,
                box=box,
                shard_axes=("tp",),
                reduce_axes=data,
                aliases=tuple(names[id(parameter)][1:]),
                packed=packed,
            )
            self._context.placements[name] = self._placed[name] = place
            parameter.data = box_of(parameter.data, place)

    def _sum_gradient(self, parameter: nn.Parameter) -> None:
        """See Note [gradients of what is whole]. A frozen parameter may be trained later, so it has the hook too."""
        wanted = parameter.requires_grad
        parameter.requires_grad_(True)
        self._handles.append(parameter.register_hook(lambda gradient: all_reduced(gradient, self._comm)))
        parameter.requires_grad_(wanted)

    @override
    @torch.no_grad()
    def close(self) -> None:
        """Gives the module whole parameters and its own layers back. Collective over the axis; moves the model once."""
        if self.cuts is None:
            return
        boxes = self._placed
        everyone = self._comm.gather_objects({name: place.box for name, place in boxes.items()})
        parameters = dict(self._module.named_parameters())
        for name, place in boxes.items():
            parameter: Tensor | None = parameters.get(name)
            if parameter is not None and tuple(parameter.shape) == place.local_shape:
                whole = put_together(parameter, place.view_shape, [theirs[name] for theirs in everyone], self._comm)
                assert whole is not None
                parameter.data = whole.view(place.shape)
        self._release()

    @override
    def abort(self) -> None:
        """Gives the module its own layers back, whose parameters stay this rank's slices. Local."""
        if self.cuts is not None:
            self._comm.abort()
            self._release()

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        for layer in self._layers:
            uninstall(layer)
        for parent, counts in self._counts:
            for name, value in counts.items():
                setattr(parent, name, value)
        if self._worker is not None:
            self._worker.close()
        self._handles, self._layers, self._counts, self._worker, self.cuts = [], [], [], None, None


def describe(module: nn.Module, cuts: Cuts, degree: int) -> str:
    """What is cut how and what stays whole, as YAML. Local."""
    lines = [f"tensor parallelism over {degree} ranks cuts {type(module).__name__}:"]
    lines += [f"  {cut.name}: {cut.kind}" for cut in cuts.layers]
    whole = ", ".join(cuts.whole)
    return "\n".join([*lines, f"whole on every rank: [{whole}]"])
