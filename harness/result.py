"""Result: what became of a case, as one JSON line. The results file is the truth; everything else is filled from it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from harness.case import Case

Status = Literal[
    "ok",
    "unsupported",
    "unavailable",
    "failed",
    "timed out",
    "out of memory",
    "topology mismatch",
    "bytes mismatch",
    "parity failed",
]
HARMLESS: frozenset[str] = frozenset({"ok", "unsupported", "unavailable"})
RESULTS_FILE = "results.jsonl"


@dataclass(frozen=True, kw_only=True)
class Parity:
    """A case held against its reference. `lane` names the yardstick: fp64, fp32 or bf16; relative differences are
    fractions of the reference's magnitude, for parameters of its update (see harness.differences), and infinite where
    something is missing or not finite. `evaluation_loss_relative` is None where the implementation does not evaluate.
    Steps count from 0. `explanation` names one factor that accounts for a gap."""

    ok: bool
    lane: str
    loss_max_relative: float
    gradient_norm_max_relative: float
    gradient_max_relative: float
    parameter_max_relative: float
    worst_parameter: str | None
    first_bad_step: int | None
    explanation: str | None
    replicas_bit_equal: bool
    evaluation_loss_relative: float | None = None
    tolerance: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Result:
    """`metrics` is flat, with the names MLflow shows, finite numbers only; `samples` holds what they were derived from
    (raw, per rank); `culprit` is the first rank that failed."""

    case: Case
    status: Status
    reason: str | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    parity: Parity | None = None
    samples: Mapping[str, Any] = field(default_factory=dict)
    culprit: int | None = None
    traceback: str | None = None
    strategy: str = ""  # the implementation's, where it could be loaded
    comparable_strategies: tuple[str, ...] = ()  # those it is a peer of, where they are more than its own
    unpredicted: Mapping[str, str] = field(default_factory=dict)  # states, peak, bytes: why there is no prediction
    other_work: str | None = None  # what its options have it do otherwise than the recipe says
    beyond_the_textbook: str | None = None  # why it sends more than its strategy's textbook
    suite: str = ""
    suite_run: str = ""
    num_suite_cases: int = 0  # of its suite, with those that its run left out; 0: not known
    started: float = 0.0  # seconds since the epoch
    duration_seconds: float = 0.0
    verdict: str | None = None

    def __post_init__(self) -> None:
        if self.status not in get_args(Status):
            raise ValueError(f"result: status must be one of {', '.join(get_args(Status))}, got {self.status!r}")
        not_finite = [name for name, value in self.metrics.items() if not math.isfinite(value)]
        if not_finite:
            raise ValueError(f"result: metrics must be finite, got {', '.join(not_finite)}")

    @property
    def is_as_expected(self) -> bool:
        """Whether it parts from the reference, as it is known to."""
        return self.status == "parity failed" == self.case.expected

    @property
    def is_harmless(self) -> bool:
        """Whether nothing is wrong that ought not to be."""
        return self.status in HARMLESS or self.is_as_expected

    @property
    def shown_status(self) -> str:
        if self.is_as_expected:
            return f"{self.status}, as expected"
        return "ok, other work" if self.status == "ok" and self.other_work else self.status

    @property
    def is_a_measure(self) -> bool:
        """Whether times of others may be held against its own: it does the work of the recipe, as far as is known."""
        return self.status == "ok" and self.other_work is None

    @property
    def parity_verdict(self) -> Literal["ok", "failed", "not checked"]:
        """Of a case that was timed. One without parity steps was held against nothing."""
        if self.status == "parity failed":
            return "failed"
        if self.parity is None:
            return "not checked"
        return "ok" if self.parity.ok else "failed"

    def stands_beside(self, strategy: str) -> bool:
        """Whether it is to be compared with implementations of `strategy`."""
        return strategy in (self.strategy, *self.comparable_strategies)

    def to_json(self) -> dict[str, Any]:
        data = {key: getattr(self, key) for key in self.__dataclass_fields__ if key not in ("case", "parity")}
        return {
            "case": {"id": self.case.id, **self.case.to_json()},
            **data,
            "parity": asdict(self.parity) if self.parity else None,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Result:
        values = {key: data[key] for key in cls.__dataclass_fields__ if key in data}
        values["case"] = Case.from_json(data["case"])
        values["parity"] = Parity(**data["parity"]) if data.get("parity") else None
        values["comparable_strategies"] = tuple(data.get("comparable_strategies", ()))
        return cls(**values)


def logs_of(directory: Path, case: Case) -> Path:
    """Where, in a results directory, the ranks of a case write theirs: `timed/rank-0.log` and so on."""
    return directory / "logs" / case.id


def append(directory: Path, result: Result) -> None:
    """Adds one line to the directory's results file, on the disk before this returns. OSError, with the file's name, if
    it cannot be written."""
    path = directory / RESULTS_FILE
    line = json.dumps(replace_non_finite(result.to_json()), allow_nan=False) + "\n"
    try:
        with path.open("ab+") as file:
            _end_last_line(file)
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, f"cannot write a result: {error.strerror}", str(path)) from error


def _end_last_line(file: BinaryIO) -> None:
    """What a crash has left behind the last newline is ended where it is a whole result, else cut off."""
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return
    file.seek(size - 1)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    torn = file.read().rpartition(b"\n")[2]
    try:
        Result.from_json(json.loads(torn))
    except (ValueError, KeyError, TypeError):
        file.truncate(size - len(torn))
    else:
        file.write(b"\n")


def read(directory: Path) -> list[Result]:
    """The results of a directory, the last one of each case, in order. A torn last line (a crash while writing) is left
    out. ValueError if there is no results file or a line in it is broken."""
    path = directory / RESULTS_FILE
    if not path.is_file():
        raise ValueError(f"{directory}: expected a results directory with {RESULTS_FILE}, found none")
    latest: dict[str, Result] = {}
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            result = Result.from_json(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                continue
            raise ValueError(f"{path}, line {number}: not a result: {type(error).__name__}: {error}") from error
        latest[result.case.id] = result
    return list(latest.values())


def replace_non_finite(value: Any) -> Any:
    """`value` with NaN and infinities as the texts "nan", "inf", "-inf", which every JSON reader takes."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {key: replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(item) for item in value]
    return value


__all__ = ["HARMLESS", "RESULTS_FILE", "Parity", "Result", "Status", "append", "read", "replace", "replace_non_finite"]
