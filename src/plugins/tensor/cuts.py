# SPDX-License-Identifier: Apache-2.0
"""From a plan to cuts: which layer is cut how, as frozen data, or the reason why it cannot be. Nothing is changed here.

    plan     {"blocks.*.ffn.up_proj": "colwise", ...}
    cuts     [Cut("blocks.0.ffn.up_proj", "column", ((0, 64), (64, 128))), ...]

Note [tied weights]: a weight that two layers share is cut once. If the plan names one of them, the other is cut along:
an embedding by tokens, a linear layer by output features that are put together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, final

from torch import nn

from stratagem.errors import PlanError
from stratagem.plan import Plan
from stratagem.plugins.tensor.functions import Span
from stratagem.plugins.tensor.heads import Illegal, cut_columns, even, head_size
from stratagem.plugins.tensor.layers import Output, why_not
from stratagem.plugins.tensor.settings import STYLES, TensorSettings

Kind = Literal["column", "shared", "row", "vocab", "wide", "sequence", "summed", "dropout", "experts", "parameter"]

_GATHERED = ("colwise_gather_output", "colwise_rep")
_SPLITTING = ("rowwise_split_input", "rowwise_rep")
_LARGEST = 64
"""Degrees up to this one are tried to name a legal one."""


@final
@dataclass(frozen=True)
class Cut:
    """What is done with one layer.

    Args:
        name: the layer's.
        kind: `column`, `shared`, `row`, `vocab`, `wide`: see `layers`. `sequence`: parameters whole, it sees a share of
            the sequence. `summed`: parameters whole, it sees some heads. Gradients of both are summed over the axis.
            `dropout`: it sees some features. `experts`: a module of which every expert is cut, called with whole rows.
            `parameter`: a parameter by itself, of such a module.
        spans: every rank's span of the dim that is cut.
        output: of a column layer.
        splits: whether a row layer's input is whole.
        packed: equal runs of the dim that is cut, each of which is cut by the spans: 2 for a fused `[gate; up]`.
        dim: of a parameter, which dim is cut.
    """

    name: str
    kind: Kind
    spans: tuple[Span, ...] = ()
    output: Output = "cut"
    splits: bool = False
    packed: int = 1
    dim: int = 0


@final
@dataclass(frozen=True)
class Heads:
    """What an attention module's counts become: in all, and by rank.

    Args:
        name: the module's.
        size: features of a head.
        queries: query heads in all, then by rank.
        keys: key and value heads, the same.
    """

    name: str
    size: int
    queries: tuple[int, tuple[int, ...]]
    keys: tuple[int, tuple[int, ...]]


@final
@dataclass(frozen=True)
class Cuts:
    """All that is done with a module.

    Args:
        layers: in the order of the module; parameters by themselves last.
        heads: attention modules whose counts change.
        sequence: whether the sequence is cut between blocks.
        whole: parameters that stay whole on every rank.
    """

    layers: tuple[Cut, ...]
    heads: tuple[Heads, ...]
    sequence: bool
    whole: tuple[str, ...]


def plan_cuts(module: nn.Module, plan: Plan, degree: int, settings: TensorSettings = TensorSettings()) -> Cuts:
    """How `plan` cuts `module` over `degree` ranks. Pure.

    Raises:
        PlanError: it cannot; names the layer, the reason and the nearest legal degrees.
    """
    try:
        return _plan(module, plan, degree, settings)
    except Illegal as error:
        legal = [n for n in range(1, _LARGEST + 1) if n != degree and _is_legal(module, plan, n, settings)]
        below, above = [n for n in legal if n < degree][-1:], [n for n in legal if n > degree][:1]
        raise PlanError(
            error.what,
            where=error.where,
            allowed=" or ".join(f"tp={n}" for n in (*below, *above)) or "no degree",
            do="change tp; where only a rest is left, set tensor.uneven: true; or replicate the layer in tensor.plan",
        ) from error


def _is_legal(module: nn.Module, plan: Plan, degree: int, settings: TensorSettings) -> bool:
    try:
        _plan(module, plan, degree, settings)
    except (Illegal, PlanError):
        return False
    return True


def _plan(module: nn.Module, plan: Plan, degree: int, settings: TensorSettings) -> Cuts:
    modules = dict(module.named_modules())
    styles = _with_tied(_styles(module, modules, plan, settings), modules)
    sequence = _cuts_sequence(styles, settings)
    by_parent: dict[str, dict[str, str]] = defaultdict(dict)
    found: dict[str, Cut] = {}
    for name, style in styles.items():
        layer = modules[name]
        if style in ("colwise", "rowwise"):
            by_parent[name.rpartition(".")[0]][name] = style
            if not (style == "colwise" and isinstance(layer, nn.Dropout)):
                _check_linear(layer, name)
        elif style in _GATHERED:
            _check_linear(layer, name)
            output: Output = "whole" if any(part.isdigit() for part in name.split(".")) else "lazy"
            along = even(_features(layer)[0], degree, 1, name, uneven=True)
            found[name] = Cut(name, "column", along, output=output)
        elif style in _SPLITTING:
            _check_linear(layer, name)
            along = even(_features(layer)[1], degree, 1, name, uneven=True)
            found[name] = Cut(name, "row", along, splits=True)
        elif style in ("embedding_rowwise", "embedding_colwise"):
            found[name] = _embedding(layer, name, style, degree)
        elif style == "packed_colwise":
            found[name] = _packed(modules, name, styles, degree, settings)
        elif style == "moe_tp_experts":
            if sequence:
                raise PlanError("experts see whole sequences", where=name, do="set sequence_parallel: off")
            found[name] = Cut(name, "experts")
        elif style == "replicated_with_grad_allreduce":
            found[name] = Cut(name, "summed")
        elif style == "sequence_parallel" and sequence:
            found[name] = Cut(name, "sequence")
    heads = []
    for parent, members in by_parent.items():
        cuts, counts = _siblings(modules, parent, members, degree, settings, styles)
        found.update({cut.name: cut for cut in cuts})
        heads += counts
    alone = _parameter_styles(module, plan, styles)
    for name, style in alone.items():
        found[name] = _parameter(module.get_parameter(name), name, style, degree, settings)
    cut_layers = tuple(found[name] for name in (*styles, *alone) if name in found)
    return Cuts(cut_layers, tuple(heads), sequence, _whole(module, cut_layers))


def _styles(
    module: nn.Module, modules: Mapping[str, nn.Module], plan: Plan, settings: TensorSettings
) -> dict[str, str]:
    """The style of every layer that the plan names, in the order of the module."""
    found = {}
    for name in modules:
        style = plan.style_of(name) if name else None
        if style is not None:
            if style not in STYLES:
                raise PlanError(f"the style {style!r} is not supported", where=name, allowed=", ".join(STYLES))
            found[name] = style
    return found


def _parameter_styles(module: nn.Module, plan: Plan, styles: Mapping[str, str]) -> dict[str, str]:
    """The style of every parameter that the plan names by itself: those of experts."""
    found = {}
    for name, _ in module.named_parameters():
        style, owner = plan.style_of(name), name.rpartition(".")[0]
        if style not in (None, "replicate"):
            if styles.get(owner) != "moe_tp_experts" or style not in ("colwise", "packed_colwise", "rowwise"):
                raise PlanError(
                    f"the style {style!r} of a parameter is not supported here",
                    where=name,
                    allowed="colwise, packed_colwise, rowwise, in a module that is `moe_tp_experts`",
                    do="take it and its module out by tensor.plan: {...: replicate}",
                )
            found[name] = str(style)
    return found


def _parameter(parameter: nn.Parameter, name: str, style: str, degree: int, settings: TensorSettings) -> Cut:
    """Of `[..., out, in]`, as every expert's own linear layer would be cut."""
    dim = parameter.dim() - 1 if style == "rowwise" else parameter.dim() - 2
    packed = 2 if style == "packed_colwise" else 1
    along = even(parameter.shape[dim] // packed, degree, 1, name, uneven=settings.uneven)
    return Cut(name, "parameter", along, packed=packed, dim=dim)


def _cuts_sequence(styles: Mapping[str, str], settings: TensorSettings) -> bool:
    named = "sequence_parallel" in styles.values()
    if settings.sequence_parallel == "on" and not named:
        raise PlanError(
            "the plan does not say which layers see a share of the sequence",
            where="tensor.sequence_parallel",
            allowed="on for plans that name every norm of the residual stream `sequence_parallel`",
            do="name them in tensor.plan, or set sequence_parallel: auto",
        )
    return named and settings.sequence_parallel != "off"


def _with_tied(styles: dict[str, str], modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """See Note [tied weights]."""
    owners: dict[int, list[str]] = defaultdict(list)
    for name, layer in modules.items():
        for parameter in layer._parameters.values():
            if parameter is not None:
                owners[id(parameter)].append(name)
    for names in owners.values():
        cut = [name for name in names if styles.get(name, "replicate") not in ("replicate", "sequence_parallel")]
        for name in names if cut else ():
            if name in cut:
                continue
            if isinstance(modules[name], nn.Embedding):
                styles[name] = "embedding_rowwise"
            elif isinstance(modules[name], nn.Linear):
                styles[name] = "colwise_gather_output"
            else:
                raise PlanError(f"its weight is that of {cut[0]}, which is cut", where=name, do="replicate both")
    return {name: styles[name] for name in modules if name in styles}


def _siblings(
    modules: Mapping[str, nn.Module],
    parent: str,
    members: Mapping[str, str],
    degree: int,
    settings: TensorSettings,
    styled: Mapping[str, str],
) -> tuple[list[Cut], list[Heads]]:
    """The column and row layers of one module."""
    dropouts = [name for name in members if isinstance(modules[name], nn.Dropout)]
    members = {name: style for name, style in members.items() if name not in dropouts}
    columns = {name: _features(modules[name])[0] for name, style in members.items() if style == "colwise"}
    rows = {name: _features(modules[name])[1] for name, style in members.items() if style == "rowwise"}
    of_columns, of_rows, head = cut_columns(modules[parent], columns, rows, degree, uneven=settings.uneven)
    cuts = [Cut(n, "shared" if c.shared else "column", c.spans) for n, c in of_columns.items()]
    cuts += [Cut(name, "row", along) for name, along in of_rows.items()]
    if dropouts and len(set(of_rows.values())) != 1:
        raise PlanError("the features that it sees are unknown: no one row layer beside it", where=dropouts[0])
    cuts += [Cut(name, "dropout", next(iter(of_rows.values()))) for name in dropouts]
    if columns and rows:
        _check_dropout(modules[parent], parent, head > 1, styled)
    if head == 1:
        return cuts, []
    sizes, along = columns or rows, {name: cut.spans for name, cut in of_columns.items()} or of_rows

    def count(name: str) -> tuple[int, tuple[int, ...]]:
        return sizes[name] // head, tuple((b - a) // head for a, b in along[name])

    ordered = sorted(sizes, key=sizes.__getitem__)
    return cuts, [Heads(parent, head, count(ordered[-1]), count(ordered[0]))]


def _packed(
    modules: Mapping[str, nn.Module], name: str, styles: Mapping[str, str], degree: int, settings: TensorSettings
) -> Cut:
    """A fused layer, of two equal runs or of as many as the row layer beside it tells: `[gate; up]`, `[q; k; v]`."""
    layer, parent = modules[name], name.rpartition(".")[0]
    _check_linear(layer, name)
    beside = [n for n, style in styles.items() if style == "rowwise" and n.rpartition(".")[0] == parent]
    size, number = _features(layer)[0], 2
    if beside and size % _features(modules[beside[0]])[1] == 0:
        number = size // _features(modules[beside[0]])[1]
    if size % number:
        raise PlanError(f"{size} features are not {number} equal runs", where=name)
    unit = head_size(modules[parent], size // number) or 1
    of = "heads" if unit > 1 else "features"
    along = even(size // number, degree, unit, name, uneven=settings.uneven, of=of)
    return Cut(name, "column", along, packed=number)


def _check_dropout(module: nn.Module, name: str, has_heads: bool, styled: Mapping[str, str]) -> None:
    """Nothing may be drawn between column and row layers that is not drawn as one process would. Pure.

    Raises:
        PlanError: there is dropout of which the plan does not say where it is.
    """
    for key, child in module.named_children():
        full = f"{name}.{key}" if name else key
        if isinstance(child, nn.Dropout) and child.p > 0 and full not in styled:
            raise PlanError(
                f"the plan does not say whether its dropout of {child.p} sees some features or all",
                where=full,
                allowed="colwise: before the row layer; replicate: after it",
                do=f"add it to tensor.plan: {{{full}: colwise}}",
            )
    for key, value in vars(module).items():
        if has_heads and "drop" in key and isinstance(value, float) and value > 0:
            raise PlanError(
                f"its {key} of {value} is drawn for each rank's heads alone, not as in one process",
                where=name,
                allowed="0.0",
                do=f"set {key} to 0.0",
            )


def _embedding(layer: nn.Module, name: str, style: str, degree: int) -> Cut:
    if not isinstance(layer, nn.Embedding):
        raise PlanError(f"{type(layer).__name__} is no embedding", where=name, allowed="nn.Embedding")
    _check_forward(layer, name, nn.Embedding)
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(layer, option):
            raise PlanError(f"an embedding with {option} cannot be cut", where=name, do=f"leave {option} out")
    if style == "embedding_colwise":
        return Cut(name, "wide", even(layer.embedding_dim, degree, 1, name, uneven=True))
    return Cut(name, "vocab", even(layer.num_embeddings, degree, 1, name, uneven=True, of="tokens"))


def _check_linear(layer: nn.Module, name: str) -> None:
    if not isinstance(layer, nn.Linear):
        raise PlanError(f"{type(layer).__name__} is no linear layer", where=name, allowed="nn.Linear")
    if tuple(layer.weight.shape) != (layer.out_features, layer.in_features):
        raise PlanError(
            f"its weight is {tuple(layer.weight.shape)}, not {(layer.out_features, layer.in_features)}",
            where=name,
            do="build the module anew: a run that failed has left it cut",
        )
    _check_forward(layer, name, nn.Linear)


def _check_forward(layer: nn.Module, name: str, plain: type[nn.Module]) -> None:
    reason = why_not(layer, plain)
    if reason is not None:
        raise PlanError(reason, where=name, do=f"replicate it and the layers beside it: {{{name}: replicate, ...}}")


def _features(layer: nn.Module) -> tuple[int, int]:
    assert isinstance(layer, nn.Linear)
    return layer.out_features, layer.in_features


def _whole(module: nn.Module, layers: tuple[Cut, ...]) -> tuple[str, ...]:
    cut = {f"{layer.name}.weight" for layer in layers if layer.kind in ("column", "row", "vocab", "wide")}
    cut |= {f"{layer.name}.bias" for layer in layers if layer.kind == "column"}
    cut |= {layer.name for layer in layers if layer.kind == "parameter"}
    return tuple(name for name, _ in module.named_parameters() if name not in cut)
