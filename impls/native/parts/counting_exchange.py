"""The exchange of tensor parallelism as any of any number of ranks sees it, in one process."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from harness.parameters import all_reduce_wire_bytes
from impls.native.parts.tensor_exchange import Finish, TensorExchange


class CountingExchange(TensorExchange):
    """Exchanges nothing, and counts, as `rank` of `num_ranks`, of which the first has the largest pieces: `sent_bytes`,
    and `largest_bytes`, what it sends at once. What peers would send reads as zeros."""

    def __init__(self, num_ranks: int, rank: int = 0) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.sent_bytes = 0
        self.largest_bytes = 0

    def room(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return like.new_empty(shape)

    def start_sum(self, own: Tensor) -> Finish:
        self._sends(own, all_reduce_wire_bytes(own.nbytes, self.num_ranks))
        return lambda: own

    def start_gather(self, own: Tensor, dim: int, sizes: Sequence[int]) -> Finish:
        self._sends(own, (self.num_ranks - 1) * own.nbytes)
        shape = list(own.shape)
        shape[dim] = sum(sizes)
        whole = own.new_zeros(shape)
        whole.narrow(dim, sum(sizes[: self.rank]), own.shape[dim]).copy_(own)
        return lambda: whole

    def start_scatter_sum(self, own: Tensor, dim: int, sizes: Sequence[int]) -> Finish:
        row_bytes = own.nbytes // max(1, own.shape[dim])
        self._sends(own, (sum(sizes) - sizes[self.rank]) * row_bytes)
        return lambda: own.narrow(dim, 0, sizes[self.rank]).contiguous()

    def _sends(self, own: Tensor, num_bytes: int) -> None:
        self.sent_bytes += num_bytes
        self.largest_bytes = max(self.largest_bytes, own.nbytes)
