"""Trajectory: what a few training steps left behind, in full, to be held against another run of the same work."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One run's parity steps, counted from 0. Tensors are whole, unpadded, on the CPU and named by logical parameter.

    `losses` are global sums over global counts; `evaluation_loss` is that of the last step's batch in evaluation mode,
    before the step, None where the implementation does not evaluate; `gradient_norms` are global, before clipping;
    `gradients` holds the full normalised gradients of steps 0 and 1 by step, without the parameters that nobody used;
    `parameters` and `buffers` are those after the last step. `replica_checksums` gives, for each rank and step, a
    checksum of all that the rank must hold in common with the others of its group in `replica_groups` (none given:
    with every rank).
    """

    losses: list[float]
    evaluation_loss: float | None
    gradient_norms: list[float | None]
    gradients: dict[int, dict[str, Tensor]]
    starting_parameters: dict[str, Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    skipped: list[bool]
    learning_rates: list[tuple[float, ...]]
    replica_checksums: dict[int, list[str]] = field(default_factory=dict)
    replica_groups: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in ("losses", "gradient_norms", "skipped", "learning_rates")}
        lengths |= {f"replica_checksums of rank {rank}": len(steps) for rank, steps in self.replica_checksums.items()}
        if len(set(lengths.values())) != 1:
            given = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise ValueError(f"trajectory: expected one entry a step in every series, got {given}")
        outside = [step for step in self.gradients if not 0 <= step < self.num_steps]
        if outside:
            raise ValueError(f"trajectory: gradients of steps {outside} in a run of {self.num_steps} steps")

    @property
    def num_steps(self) -> int:
        return len(self.losses)

    def save(self, path: Path) -> None:
        torch.save({f.name: getattr(self, f.name) for f in fields(self)}, path)

    @classmethod
    def load(cls, path: Path) -> Trajectory:
        """ValueError if the file holds something else."""
        data: Any = torch.load(path, weights_only=True)
        expected = {f.name for f in fields(cls)}
        if not isinstance(data, dict) or data.keys() != expected:
            found = ", ".join(map(str, data)) if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"{path}: expected a trajectory with {', '.join(sorted(expected))}, found {found}")
        return cls(**data)
