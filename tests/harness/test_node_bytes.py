"""The gate on bytes between nodes: within 3 % of the closed form, or the case has failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.case import Case
from harness.judging import judge
from harness.layout import Layout
from harness.measured_case import MeasuredCase
from harness.node_bytes import FORESEEN, SENT, apart, mismatch
from harness.references import References
from harness.result import Result, Status
from harness.topology import Topology


@pytest.mark.parametrize(
    ("sent", "foreseen", "expected"),
    [(1.03e6, 1e6, 0.03), (0.9e6, 1e6, 0.1), (1e6, None, None), (None, 1e6, None), (1e6, 0.0, None)],
)
def test_how_far_they_are_apart(sent: float | None, foreseen: float | None, expected: float | None) -> None:
    found = apart({name: value for name, value in ((SENT, sent), (FORESEEN, foreseen)) if value is not None})
    assert found is None if expected is None else found == pytest.approx(expected)


def judged(tmp_path: Path, sent: float, foreseen: float) -> Result:
    case = Case(
        workload="gpt:size=tiny",
        implementation="native.ddp",
        layout=Layout(data=2),
        topology=Topology(num_nodes=2, ranks_per_node=1),
    )
    measured = MeasuredCase(
        case=case,
        scratch=tmp_path,
        logs=tmp_path,
        references=References(tmp_path, tmp_path),
        on_start=lambda: None,
        on_phase=lambda *_: None,
        metrics={SENT: sent, FORESEEN: foreseen},
    )
    judge(measured)
    return measured.result("suite", "run")


@pytest.mark.parametrize(
    ("sent", "foreseen", "status"),
    [
        (1_009_000.0, 1_000_000.0, "ok"),
        (1_031_000.0, 1_000_000.0, "bytes mismatch"),
        (969_000.0, 1_000_000.0, "bytes mismatch"),
        (275_000.0, 263_000.0, "bytes mismatch"),
        (275_000.0, 262_000.0, "ok"),  # fewer than 256 KiB: headers of small messages count
    ],
)
def test_a_case_that_sends_other_bytes_than_foreseen_fails(
    tmp_path: Path, sent: float, foreseen: float, status: Status
) -> None:
    result = judged(tmp_path, sent, foreseen)
    assert result.status == status
    assert result.is_harmless is (status == "ok")


def test_both_numbers_are_told(tmp_path: Path) -> None:
    assert judged(tmp_path, 4_400_000.0, 4_000_000.0).reason == (
        "a node sends 4,400,000 bytes in a step, where 4,000,000 are foreseen: 10.0% apart, expected at most 3%"
    )
    assert mismatch({}) is None
