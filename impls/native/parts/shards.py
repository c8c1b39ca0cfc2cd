"""A bucket cut into even shards, one for each rank of the shard group.

    bucket   | w3 . w2 . b3 . b2 |               elements of parameters, the decayed ones first
    shards   |  0  |  1  |  2  |pp               num_shard_elements each; only the end of the last ones is padding

A shard's own plan holds the parts of parameters that lie in it, so decay groups, step counts and moments follow the
parameters across the cut, and the padding belongs to nobody: it has no moments, takes no step and counts in no norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from impls.native.parts.buckets import BucketPlan, Segment


@dataclass(frozen=True, kw_only=True)
class ShardedPlan:
    """`bucket` cut for `num_ranks` ranks."""

    bucket: BucketPlan
    num_ranks: int

    @property
    def num_shard_elements(self) -> int:
        return -(-self.bucket.num_elements // self.num_ranks)

    @property
    def num_padded_elements(self) -> int:
        return self.num_shard_elements * self.num_ranks

    def shard(self, rank: int) -> BucketPlan:
        """What lies in the shard of `rank`; places count from the start of the shard. Empty parameters lie in none."""
        lower = rank * self.num_shard_elements
        upper = lower + self.num_shard_elements
        return BucketPlan(
            dtype=self.bucket.dtype,
            segments=tuple(
                Segment(
                    parameter=segment.parameter,
                    start=max(segment.start, lower) - lower,
                    stop=min(segment.stop, upper) - lower,
                )
                for segment in self.bucket.segments
                if max(segment.start, lower) < min(segment.stop, upper)
            ),
        )

    @cached_property
    def first_elements(self) -> dict[str, tuple[int, ...]]:
        """By parameter: where in the bucket each of its parts begins that lies in one shard."""
        size = self.num_shard_elements
        return {
            segment.parameter.name: (
                segment.start,
                *(cut for cut in range(size, self.num_padded_elements, size) if segment.start < cut < segment.stop),
            )
            if segment.start < segment.stop
            else ()
            for segment in self.bucket.segments
        }
