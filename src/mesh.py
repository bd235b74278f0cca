# SPDX-License-Identifier: Apache-2.0
"""The device mesh: which rank sits where, as pure arithmetic.

Ranks are laid out row-major over the axes, outermost first (the order of torchtitan and of Llama 3 seen from the
inside: tensor parallelism varies fastest, because it speaks most):

    pp  >  dp_replicate  >  dp_shard  >  cp  >  tp

Expert parallelism (`ep`) never multiplies the world: it folds into the data axes. Its rows are runs of `ep`
consecutive members of the flattened `dp_shard x cp` row.

Nothing here starts a process, opens a group or imports torch; `stratagem.technique.Context` turns rows into
communicators.

Example:
    >>> shape = MeshShape.fit(8, pp=2, tp=2)
    >>> shape.dp_replicate, shape.size
    (2, 8)
    >>> shape.rows("tp")
    ((0, 1), (2, 3), (4, 5), (6, 7))
    >>> shape.rows("dp_replicate")
    ((0, 2), (1, 3), (4, 6), (5, 7))
    >>> shape.coordinate(5)
    {'pp': 1, 'dp_replicate': 0, 'dp_shard': 0, 'cp': 0, 'tp': 1}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import product
from typing import final

from stratagem.errors import MeshError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Every axis that multiplies the world size, outermost first."""

DATA_AXES = ("dp_replicate", "dp_shard")
"""Ranks that differ along these read different samples; along all other axes they read the same ones."""


@final
@dataclass(frozen=True)
class MeshShape:
    """Sizes of the axes; the product is the world size.

    Args:
        pp: pipeline stages.
        dp_replicate: data ranks that hold whole replicas.
        dp_shard: data ranks that share one replica between them.
        cp: context-parallel ranks, which split the sequence.
        tp: tensor-parallel ranks, which split the matrices.
        ep: expert-parallel ranks, folded into `dp_shard x cp`.

    Raises:
        MeshError: a size below 1, or an `ep` that does not divide `dp_shard * cp`.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if not isinstance(size, int) or size < 1:
                raise MeshError(
                    f"the axis has size {size!r}", where=f"mesh.{field.name}", allowed="whole numbers from 1"
                )
        if (self.dp_shard * self.cp) % self.ep:
            folded = self.dp_shard * self.cp
            divisors = ", ".join(str(d) for d in range(1, folded + 1) if folded % d == 0)
            raise MeshError(
                f"ep={self.ep} does not divide dp_shard*cp={folded}", where="mesh.ep", allowed=f"one of {divisors}"
            )

    @classmethod
    def fit(cls, world_size: int, *, fill: str = "dp_replicate", **sizes: int) -> MeshShape:
        """The shape whose axis `fill` takes up what the given sizes leave of `world_size`.

        Args:
            world_size: number of ranks.
            fill: the axis that is computed; a size of -1 in `sizes` names another one.
            sizes: sizes by axis name; axes left out have size 1.

        Raises:
            MeshError: an unknown axis, two axes of size -1, or sizes that do not divide the world size.

        Example:
            >>> MeshShape.fit(12, cp=2, tp=3).dp_replicate
            2
            >>> MeshShape.fit(12, cp=2, tp=5)
            Traceback (most recent call last):
            ...
            stratagem.errors.MeshError: mesh: cp=2, tp=5 need a multiple of 10 ranks, and there are 12. Allowed: 10, 20,
            30, ... devices. To mend it: change trainer.devices or one of the sizes.
        """
        for name in (*sizes, fill):
            if name not in AXES and name != "ep":
                raise MeshError(f"unknown axis {name!r}", where="mesh", allowed=", ".join((*AXES, "ep")))
        free = [name for name, size in sizes.items() if size == -1]
        if len(free) > 1:
            raise MeshError(f"{' and '.join(free)} are both -1", where="mesh", allowed="one axis of size -1")
        fill = free[0] if free else fill
        given = {name: size for name, size in sizes.items() if size != -1}
        if fill in given:
            shape = cls(**given)
            if shape.size != world_size:
                raise MeshError(
                    f"the axes multiply to {shape.size} ranks, and there are {world_size}",
                    where="mesh",
                    allowed=f"trainer.devices: {shape.size}",
                    do=f"leave out {fill}, or set it to -1",
                )
            return shape
        taken = math.prod(size for name, size in given.items() if name != "ep")
        if taken < 1 or world_size % taken:
            asked = ", ".join(f"{name}={size}" for name, size in given.items() if name != "ep")
            raise MeshError(
                f"{asked} need a multiple of {taken} ranks, and there are {world_size}",
                where="mesh",
                allowed=f"{taken}, {2 * taken}, {3 * taken}, ... devices",
                do="change trainer.devices or one of the sizes",
            )
        return cls(**{**given, fill: world_size // taken})

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes.values())

    @property
    def sizes(self) -> dict[str, int]:
        """Size by axis, outermost first, without the folded `ep`."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def data_size(self) -> int:
        """How many ranks read different samples."""
        return math.prod(getattr(self, axis) for axis in DATA_AXES)

    def data_rank(self, rank: int) -> int:
        """Which of the `data_size` shares of a batch this rank reads."""
        place = self.coordinate(rank)
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"]

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where a rank sits, by axis, outermost first."""
        if not 0 <= rank < self.size:
            raise MeshError(f"rank {rank} is outside the mesh", allowed=f"0 to {self.size - 1}")
        place: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return {axis: place[axis] for axis in AXES}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank at a coordinate; the inverse of `coordinate`."""
        rank = 0
        for axis in AXES:
            rank = rank * getattr(self, axis) + coordinate.get(axis, 0)
        return rank

    def rows(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """The rows along one axis, or along several flattened into one: disjoint, and together the whole world.

        Args:
            axes: one or more axis names, or `"ep"` alone.

        Returns:
            One tuple of ranks per row, in increasing order of its first rank.

        Example:
            >>> MeshShape(dp_shard=2, cp=2, tp=2).rows("dp_shard", "cp")
            ((0, 2, 4, 6), (1, 3, 5, 7))
            >>> MeshShape(dp_shard=4, ep=2).rows("ep")
            ((0, 1), (2, 3))
        """
        if axes == ("ep",):
            whole = self.rows("dp_shard", "cp")
            runs = (row[start : start + self.ep] for row in whole for start in range(0, len(row), self.ep))
            return tuple(sorted(runs))
        for axis in axes:
            if axis not in AXES:
                raise MeshError(f"unknown axis {axis!r}", allowed=", ".join((*AXES, "ep")))
        along = [axis for axis in AXES if axis in axes]
        across = [axis for axis in AXES if axis not in axes]

        def places(names: list[str]) -> list[dict[str, int]]:
            ranges = (range(getattr(self, name)) for name in names)
            return [dict(zip(names, values, strict=True)) for values in product(*ranges)]

        return tuple(
            sorted(tuple(self.rank({**outer, **inner}) for inner in places(along)) for outer in places(across))
        )

    def row_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The row along `axes` that holds `rank`."""
        if axes == ("ep",):
            return next(row for row in self.rows("ep") if rank in row)
        here = self.coordinate(rank)
        ranges = (range(getattr(self, axis)) if axis in axes else (here[axis],) for axis in AXES)
        return tuple(self.rank(dict(zip(AXES, place, strict=True))) for place in product(*ranges))
