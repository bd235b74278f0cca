# SPDX-License-Identifier: Apache-2.0
"""Where attention may be cut: between heads, and which key and value heads go with which query heads.

    4 query heads, 2 key and value heads      t = 2    rank 0: q0 q1  k0      rank 1: q2 q3  k1
                                              t = 4    rank 0: q0     k0      rank 1: q1     k0     rank 2: q2  k1  ...

With fewer key and value heads than ranks a head is needed on several ranks. Each keeps all of the projection's rows and
computes the heads that it needs (`layers.SharedColumn`).

What the user's module knows of heads is read off its attributes, in the names that models use; the counts among them
are set to this rank's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from torch import nn

from stratagem.errors import PlanError
from stratagem.plugins.tensor.functions import Span, spans

HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "d_head")
QUERY_COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "nhead")
KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
GROUPS = ("num_key_value_groups", "n_rep")
WIDTHS = ("all_head_size", "split_size", "inner_dim", "n_embd")
FUSED_BY_HEAD = ("query_key_value",)


@final
class Illegal(Exception):
    """Something that this degree cannot cut.

    Args:
        what: the reason.
        where: the layer.
    """

    def __init__(self, what: str, where: str) -> None:
        super().__init__(what)
        self.what, self.where = what, where


@final
@dataclass(frozen=True)
class ColumnCut:
    """How one column layer is cut: every rank's span of its output features, which overlap where rows are shared."""

    spans: tuple[Span, ...]
    shared: bool = False


def head_size(parent: nn.Module, widest: int) -> int | None:
    """Features of a head of an attention module, None for a module that has no heads.

    Args:
        parent: the module that holds the projections.
        widest: output features of its widest projection.
    """
    for name in HEAD_SIZES:
        found = getattr(parent, name, None)
        if isinstance(found, int) and found > 0 and widest % found == 0:
            return found
    for name in QUERY_COUNTS:
        count = getattr(parent, name, None)
        if isinstance(count, int) and count > 0 and widest % count == 0:
            return widest // count
    return None


def even(size: int, parts: int, unit: int, where: str, *, uneven: bool, of: str = "features") -> tuple[Span, ...]:
    """`spans`, or the reason why not.

    Raises:
        Illegal: fewer units than parts, or with `uneven=False` a rest.
    """
    count = size // unit
    if count < parts:
        raise Illegal(f"{count} {of} cannot be cut over {parts} ranks", where)
    if count % parts and not uneven:
        raise Illegal(f"{count} {of} are not divided by {parts} ranks", where)
    return spans(size, parts, unit)


def cut_columns(
    parent: nn.Module, columns: Mapping[str, int], rows: Mapping[str, int], parts: int, *, uneven: bool
) -> tuple[dict[str, ColumnCut], dict[str, tuple[Span, ...]], int]:
    """How the column and row layers of one module are cut, heads kept whole.

    Args:
        parent: the module that holds them.
        columns: output features by name.
        rows: input features by name.
        parts: t.
        uneven: whether ranks may have different numbers of heads or features.

    Returns:
        The cuts of the columns, the spans of the rows' input features, and the size of a head (1 without heads).

    Raises:
        Illegal: with the reason and the layer.
        PlanError: a fused layer whose order nobody knows.
    """
    widest = max([*columns.values(), *rows.values()])
    fused = len(columns) == 1 and list(rows.values()) == [n // 3 for n in columns.values()]
    head = head_size(parent, min(rows.values(), default=widest) if fused else widest)
    if head is None or any(size % head for size in (*columns.values(), *rows.values())):
        cuts = {name: ColumnCut(even(size, parts, 1, name, uneven=uneven)) for name, size in columns.items()}
        return cuts, {name: even(size, parts, 1, name, uneven=uneven) for name, size in rows.items()}, 1
    for name in columns if fused else ():
        if name.rpartition(".")[2] not in FUSED_BY_HEAD:
            raise PlanError(
                "it has three times the features that the row layer reads, in an order that its name does not tell",
                where=name,
                allowed=f"colwise for q, k, v of each head, called {' or '.join(FUSED_BY_HEAD)}; packed_colwise",
                do="for [q; k; v], say packed_colwise",
            )
    unit = 3 * head if fused else head
    found: dict[str, ColumnCut] = {}
    for name, size in columns.items():
        if size == widest or fused:
            found[name] = ColumnCut(even(size, parts, unit, name, uneven=uneven, of="heads"))
        else:
            found[name] = _keys(widest // head, size // head, head, parts, name, uneven=uneven)
    of_rows = {name: even(size, parts, head, name, uneven=uneven, of="heads") for name, size in rows.items()}
    return found, of_rows, head


def _keys(queries: int, keys: int, head: int, parts: int, where: str, *, uneven: bool) -> ColumnCut:
    """Key or value heads along with the query heads that read them."""
    if queries % keys:
        raise Illegal(f"{keys} key heads do not divide {queries} query heads", where)
    if queries % parts == 0 and keys % parts == 0:
        return ColumnCut(spans(keys * head, parts, head))
    group = queries // keys
    found = []
    for start, stop in even(queries, parts, 1, where, uneven=uneven, of="heads"):
        first, last = start // group, -(-stop // group)
        if last - first > 1 and (start % group or stop % group):
            raise Illegal(f"query heads {start} to {stop} read parts of {last - first} key heads", where)
        found.append((first * head, last * head))
    return ColumnCut(tuple(found), shared=True)


def localise(parent: nn.Module, head: int, queries: tuple[int, int], keys: tuple[int, int]) -> dict[str, int]:
    """Sets the counts of heads among a module's attributes to this rank's; returns what they were.

    Args:
        parent: an attention module.
        head: features of a head.
        queries: query heads in all, and on this rank.
        keys: key and value heads, the same.
    """
    before: dict[str, int] = {}

    def put(names: tuple[str, ...], old: int, new: int) -> None:
        for name in names:
            if type(parent.__dict__.get(name)) is int and parent.__dict__[name] == old and old != new:
                before[name] = old
                setattr(parent, name, new)

    put(QUERY_COUNTS, *queries)
    put(KEY_COUNTS, *keys)
    put(GROUPS, queries[0] // keys[0], queries[1] // max(keys[1], 1))
    put(WIDTHS, queries[0] * head, queries[1] * head)
    return before
