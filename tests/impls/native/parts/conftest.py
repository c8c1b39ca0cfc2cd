"""Several ranks of shared memory in one process, so that a test decides who moves when."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from impls.native.parts import shared_region

PlayedGroups = Callable[[int], list[Any]]


@pytest.fixture
def played_groups(monkeypatch: pytest.MonkeyPatch) -> PlayedGroups:
    """Makes one process group of `num_ranks` ranks, global ranks 10, 11, ...: as each of them sees it. What is made
    over these views lies in the same memory."""
    monkeypatch.setattr(shared_region.dist, "get_process_group_ranks", lambda group: list(group.global_ranks))
    monkeypatch.setattr(shared_region, "_map_everyone", lambda sizes, purpose, group: group.map_everyone(sizes))

    def make(num_ranks: int) -> list[Any]:
        maps: list[mmap.mmap] = []

        def map_everyone(sizes: Sequence[int]) -> list[mmap.mmap]:
            if not maps:
                maps.extend(mmap.mmap(-1, size) for size in sizes)
            return list(maps)

        return [
            SimpleNamespace(
                rank=lambda rank=rank: rank,
                size=lambda: num_ranks,
                global_ranks=range(10, 10 + num_ranks),
                map_everyone=map_everyone,
            )
            for rank in range(num_ranks)
        ]

    return make


class ReportedCollectives:
    """Keeps what a transport reports to it."""

    def __init__(self) -> None:
        self.null = False
        self.launches: list[tuple[str, tuple[int, ...], int, int]] = []  # operation, ranks, payload and wire bytes
        self.completions: list[int] = []
        self.blocks: list[int] = []
        self.on_their_way: set[int] = set()  # tickets of what has not arrived

    @property
    def wire_bytes(self) -> list[int]:
        return [wire_bytes for _, _, _, wire_bytes in self.launches]

    def launched(self, operation: str, ranks: tuple[int, ...], tensor: torch.Tensor, wire: int, transport: str) -> int:
        assert transport == "shared_memory"
        self.launches.append((operation, ranks, tensor.numel() * tensor.itemsize, wire))
        return len(self.launches) - 1

    def arrived(self, ticket: int) -> bool:
        return ticket not in self.on_their_way

    def completed(self, ticket: int) -> None:
        self.completions.append(ticket)

    @contextmanager
    def blocked(self, ticket: int) -> Iterator[None]:
        self.blocks.append(ticket)
        yield


@pytest.fixture
def reported() -> ReportedCollectives:
    return ReportedCollectives()
