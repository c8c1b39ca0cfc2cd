"""What collectives reach between the ranks of a machine or cluster, by size: a table, measured once, that predictions
can read later.

    algorithm bandwidth   payload / seconds
    bus bandwidth         algorithm bandwidth x the bytes that each rank must send for a byte of payload: what the links
                          carried, comparable between numbers of ranks (nccl-tests, doc/PERFORMANCE.md)

    all_reduce                                 2 (n - 1) / n
    all_gather, reduce_scatter, all_to_all       (n - 1) / n
    point_to_point                                         1     each rank sends to the next one (nccl-tests' sendrecv)

The payload of an all_gather is its output, that of a reduce_scatter or an all_to_all its input.
"""

from __future__ import annotations

import bisect
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, get_args

from harness.topology import Topology

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "point_to_point"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One operation on `payload_bytes`; `seconds` of each repeat, on the slowest rank."""

    operation: Operation
    payload_bytes: int
    seconds: tuple[float, ...]

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes a second."""
        return self.payload_bytes / self.median_seconds


@dataclass(frozen=True, kw_only=True)
class LinkTable:
    """All measurements between the ranks of one topology; `environment` is harness.environment's."""

    topology: Topology
    backend: str
    emulated: bool
    environment: Mapping[str, Any]
    measurements: tuple[Measurement, ...]

    def bus_bandwidth(self, measurement: Measurement) -> float:
        """Bytes a second."""
        factor = bus_factor(measurement.operation, self.topology.world_size)
        return measurement.algorithm_bandwidth * float(factor)

    def seconds(self, operation: Operation, payload_bytes: int) -> float:
        """What an operation on so many bytes takes: between two sizes measured, a straight line; below the least as
        long as that, above the largest at its bandwidth. ValueError where the operation was not measured."""
        known = sorted((m.payload_bytes, m.median_seconds) for m in self.measurements if m.operation == operation)
        if not known:
            raise ValueError(f"links: expected measurements of {operation}, got none")
        sizes = [size for size, _ in known]
        place = bisect.bisect_left(sizes, payload_bytes)
        if place == 0:
            return known[0][1]
        low_size, low_seconds = known[place - 1]
        if place == len(known):
            return low_seconds * payload_bytes / low_size
        high_size, high_seconds = known[place]
        part = (payload_bytes - low_size) / (high_size - low_size)
        return low_seconds + part * (high_seconds - low_seconds)

    def to_json(self) -> dict[str, Any]:
        """Plain values; with both bandwidths of each measurement."""
        return {
            "format": FORMAT,
            "topology": asdict(self.topology),
            "backend": self.backend,
            "emulated": self.emulated,
            "environment": dict(self.environment),
            "measurements": [
                {
                    **asdict(measurement),
                    "seconds": list(measurement.seconds),
                    "algorithm_bytes_per_second": measurement.algorithm_bandwidth,
                    "bus_bytes_per_second": self.bus_bandwidth(measurement),
                }
                for measurement in self.measurements
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LinkTable:
        return cls(
            topology=Topology(**data["topology"]),
            backend=data["backend"],
            emulated=data["emulated"],
            environment=data["environment"],
            measurements=tuple(
                Measurement(
                    operation=each["operation"],
                    payload_bytes=each["payload_bytes"],
                    seconds=tuple(each["seconds"]),
                )
                for each in data["measurements"]
            ),
        )


def bus_factor(operation: Operation, num_ranks: int) -> Fraction:
    """Bytes that a rank must send for each byte of payload."""
    if operation == "point_to_point":
        return Fraction(1)
    return Fraction((2 if operation == "all_reduce" else 1) * (num_ranks - 1), num_ranks)


def write(table: LinkTable, path: Path) -> None:
    """Whole or not at all."""
    written = path.with_name(f"{path.name}.new")
    written.write_text(json.dumps(table.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    written.replace(path)


def read(path: Path) -> LinkTable:
    """ValueError if the file holds no such table; OSError if it cannot be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"{path}: expected a table of links in format {FORMAT}, got {data['format']!r}")
        return LinkTable.from_json(data)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: expected a table of links as `meshmark links` writes it, got {error!r}") from None


def sizes_between(least_bytes: int, most_bytes: int, factor: int) -> list[int]:
    """`least_bytes`, times `factor` again and again, as far as `most_bytes`. ValueError where that is no range."""
    if not (0 < least_bytes <= most_bytes and factor > 1):
        raise ValueError(
            f"links: expected sizes from 1 byte up and a factor of at least 2, got {least_bytes} to {most_bytes} by "
            f"{factor}"
        )
    count = math.floor(math.log(most_bytes / least_bytes, factor) + 1e-9)
    return [least_bytes * factor**power for power in range(count + 1)]


def lines(table: LinkTable) -> list[str]:
    """The table as text, as nccl-tests prints it: sizes by operation, in microseconds and GB/s (1e9)."""
    head = f"{'operation':<16}{'bytes':>12}{'us':>12}{'algbw GB/s':>12}{'busbw GB/s':>12}"
    rows = [
        f"{m.operation:<16}{m.payload_bytes:>12,}{m.median_seconds * 1e6:>12.1f}"
        f"{m.algorithm_bandwidth / 1e9:>12.4f}{table.bus_bandwidth(m) / 1e9:>12.4f}"
        for m in table.measurements
    ]
    return [f"{table.topology}, {table.backend}", "", head, *rows]


def slowest(of_ranks: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Of each repeat the slowest rank's seconds."""
    return tuple(max(repeat) for repeat in zip(*of_ranks, strict=True))
