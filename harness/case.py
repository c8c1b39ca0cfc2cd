"""Case and Suite: what is run. Plain values that can be written down, stored and compared."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from harness.layout import Layout
from harness.placement import Seats, seats
from harness.topology import Topology

Role = Literal["subject", "peer", "floor", "reference"]
Expected = Literal["ok", "parity failed"]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """How a case is measured: parity steps, then warm-up steps (at least; more until the time is stationary), then
    `timed_steps` in each of `rounds` windows; instrumented steps run in processes of their own, `pipeline_steps` where
    the layout has a pipeline. 0 steps of a kind leave it out."""

    parity_steps: int = 4
    warm_up_steps: int = 3
    timed_steps: int = 10
    rounds: int = 1
    communication_steps: int = 3
    memory_steps: int = 2
    pipeline_steps: int = 5

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"measurement: {name} must be an integer of at least 0, got {value!r}")
        if self.timed_steps and not self.rounds:
            raise ValueError("measurement: timed_steps need at least one round, got rounds 0")
        if 0 < self.parity_steps < 3:
            raise ValueError(f"measurement: parity_steps must be 0 or at least 3, got {self.parity_steps}")


@dataclass(frozen=True, kw_only=True)
class Case:
    """workload x layout x topology x implementation x its options x precision.

    `role` says what the case is for in a comparison: ours (subject), someone else's (peer), or the compute-only floor,
    which exchanges nothing and is therefore not held against the reference. `comparison` names those that an
    interleaved suite times together, where not all of the same work are: they are all in memory at a time. `lane`
    (fp64, fp32, bf16) follows from the precision. `expected` is "parity failed" where it is known to train another
    model than the reference: then that is how it has to end.
    """

    workload: str
    implementation: str
    layout: Layout = field(default_factory=Layout)
    topology: Topology | None = None  # None: all ranks on one node, unshaped
    options: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    role: Role = "subject"
    comparison: str = ""
    expected: Expected = "ok"
    measurement: Measurement = field(default_factory=Measurement)
    deadline_seconds: float = 300.0

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise ValueError(f"case: role must be one of {', '.join(get_args(Role))}, got {self.role!r}")
        if self.expected not in get_args(Expected):
            raise ValueError(f"case: expected must be one of {', '.join(get_args(Expected))}, got {self.expected!r}")
        if not isinstance(self.comparison, str):
            raise ValueError(f"case: comparison must be a name, got {self.comparison!r}")
        if not isinstance(self.layout, Layout):
            raise ValueError(f"case: layout must be a Layout, got {self.layout!r}")
        if not isinstance(self.measurement, Measurement):
            raise ValueError(f"case: measurement must be a Measurement, got {self.measurement!r}")
        if self.expected == "parity failed" and (self.role == "floor" or not self.measurement.parity_steps):
            raise ValueError(
                f"case: expected 'parity failed' needs a case that is held against the reference, got role "
                f"{self.role} with parity_steps {self.measurement.parity_steps}"
            )
        deadline = self.deadline_seconds
        if not isinstance(deadline, int | float) or isinstance(deadline, bool) or not 0 < deadline < math.inf:
            raise ValueError(f"case: deadline_seconds must be a finite number above 0, got {deadline!r}")
        try:
            seats(self.layout, self.placed)
        except ValueError as error:
            raise ValueError(f"case: {error}") from None

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def placed(self) -> Topology:
        """The topology, with the default filled in."""
        return self.topology or Topology(ranks_per_node=self.world_size)

    @property
    def seats(self) -> Seats:
        """On which node each rank sits."""
        return seats(self.layout, self.placed)

    @property
    def side_by_side(self) -> tuple[str, ...]:
        """What cases have in common that an interleaved suite compares."""
        return (self.comparison, self.workload, str(self.layout), str(self.placed), self.precision)

    @property
    def id(self) -> str:
        """Stable over sessions: a readable head and a hash of everything that identifies the work."""
        not_identity = ("measurement", "deadline_seconds", "role", "expected", "is_unplaced")
        identity = {key: value for key, value in self.to_json().items() if key not in not_identity}
        if not self.comparison:
            del identity["comparison"]  # a case is the same one as before there were names for comparisons
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:10]
        head = f"{self.implementation.rsplit('/', 1)[-1]}-{self.layout}"
        return f"{head.replace(' ', '-').replace(':', '.').replace('=', '')}-{digest}"

    @property
    def label(self) -> str:
        """The implementation with its options, as shown to people."""
        options = " ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.implementation} {options}".strip()

    def to_json(self) -> dict[str, Any]:
        """Plain values; with `id`."""
        return {
            "workload": self.workload,
            "implementation": self.implementation,
            "layout": str(self.layout),
            "topology": asdict(self.placed),
            "is_unplaced": self.topology is None,
            "options": dict(self.options),
            "precision": self.precision,
            "role": self.role,
            "comparison": self.comparison,
            "expected": self.expected,
            "measurement": asdict(self.measurement),
            "deadline_seconds": self.deadline_seconds,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Case:
        """One that was written down before it said whether a topology was named had none where it is the plain one."""
        return cls(
            workload=data["workload"],
            implementation=data["implementation"],
            layout=Layout.parse(data["layout"]),
            topology=_topology(data),
            options=data["options"],
            precision=data["precision"],
            role=data["role"],
            comparison=data.get("comparison", ""),
            expected=data.get("expected", "ok"),
            measurement=Measurement(**data["measurement"]),
            deadline_seconds=data["deadline_seconds"],
        )


def _topology(data: Mapping[str, Any]) -> Topology | None:
    topology = Topology(**data["topology"])
    is_plain = topology == Topology(ranks_per_node=topology.world_size)
    return None if data.get("is_unplaced", is_plain) else topology


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A list of cases. With `interleaved`, cases of the same comparison, workload, layout, topology and precision are
    timed side by side, in rounds that take turns, and a ratio table is made of them. `num_left_out`: how many more it
    has, of which these were chosen."""

    name: str
    cases: tuple[Case, ...]
    interleaved: bool = False
    description: str = ""
    num_left_out: int = 0

    def __post_init__(self) -> None:
        # It becomes part of a directory's name.
        if not isinstance(self.name, str) or not re.fullmatch(r"[A-Za-z0-9._-]+", self.name):
            raise ValueError(f"suite: name must be letters, digits, '-', '_' and '.' only, got {self.name!r}")
        if not self.cases:
            raise ValueError(f"suite {self.name!r}: expected at least one case, got none")
        seen: dict[str, Case] = {}
        for case in self.cases:
            if case.id in seen:
                raise ValueError(
                    f"suite {self.name!r}: the same case twice: {case.label}, {case.layout}, {case.workload}"
                )
            seen[case.id] = case
