"""Layout: the parallel degrees of a case and their map to ranks.

Ranks are numbered with the tensor axis innermost, then data, then pipeline outermost (Narayanan et al. 2021,
"Efficient Large-Scale Language Model Training on GPU Clusters"): the ranks that talk most are neighbours.

    rank = (pipeline_rank * data + data_rank) * tensor + tensor_rank
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

Axis = Literal["data", "tensor", "pipeline", "shard", "replicate", "world"]
AXES: tuple[Axis, ...] = get_args(Axis)
_DEGREES = ("data", "shard", "tensor", "pipeline")


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """Where one rank stands on each axis."""

    data: int
    tensor: int
    pipeline: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel degrees. `shard` divides `data`: `data=8, shard=4` is two replicas of four shards each;
    None means that a sharding strategy shards over the whole data axis."""

    data: int = 1
    shard: int | None = None
    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for name in _DEGREES:
            degree = getattr(self, name)
            if name == "shard" and degree is None:
                continue
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ValueError(f"layout: {name} must be a positive integer, got {degree!r}")
        if self.shard is not None and self.data % self.shard:
            raise ValueError(f"layout: shard must divide data, got shard {self.shard} and data {self.data}")

    @property
    def world_size(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def shard_degree(self) -> int:
        """The number of shards within the data axis."""
        return self.data if self.shard is None else self.shard

    def coordinates(self, rank: int) -> Coordinates:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be in [0, {self.world_size}) for layout {self}, got {rank}")
        data_and_pipeline, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(data_and_pipeline, self.data)
        return Coordinates(data=data, tensor=tensor, pipeline=pipeline)

    def rank_of(self, coordinates: Coordinates) -> int:
        return (coordinates.pipeline * self.data + coordinates.data) * self.tensor + coordinates.tensor

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Every group of ranks along `axis`, each in the order of that axis; together they cover all ranks once."""
        if axis not in AXES:
            raise ValueError(f"axis must be one of {', '.join(AXES)}, got {axis!r}")
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            replica, shard = divmod(at.data, self.shard_degree)
            key = {
                "world": (),
                "data": (at.pipeline, at.tensor),
                "tensor": (at.pipeline, at.data),
                "pipeline": (at.data, at.tensor),
                "shard": (at.pipeline, at.tensor, replica),
                "replicate": (at.pipeline, at.tensor, shard),
            }[axis]
            groups.setdefault(key, []).append(rank)
        return tuple(tuple(group) for group in groups.values())

    def __str__(self) -> str:
        """`data=2 tensor=2`: the degrees above one; `single` for one rank."""
        parts = [f"{name}={getattr(self, name)}" for name in _DEGREES if getattr(self, name) not in (None, 1)]
        if self.shard == 1:
            parts.append("shard=1")
        return " ".join(parts) or "single"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The inverse of `str`: `data=2 tensor=2`."""
        if text.strip() in ("", "single"):
            return cls()
        degrees: dict[str, Any] = {}
        for part in text.split():
            match = re.fullmatch(r"(\w+)=(\d+)", part)
            if match is None or match[1] not in _DEGREES:
                raise ValueError(f"layout: expected parts like data=2 with {', '.join(_DEGREES)}, got {part!r}")
            degrees[match[1]] = int(match[2])
        return cls(**degrees)
