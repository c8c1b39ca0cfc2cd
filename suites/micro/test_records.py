"""Records: a result with what several hundred steps left behind, onto the disk, and read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import result
from harness.case import Case
from harness.layout import Layout


@pytest.fixture
def measured() -> result.Result:
    return result.Result(
        case=Case(workload="gpt", implementation="native.ddp", layout=Layout(data=4)),
        status="ok",
        metrics={f"figure.{number}": number / 7 for number in range(60)},
        samples={"step_seconds": [[step / 3 for step in range(400)] for _ in range(4)]},
    )


def test_write(benchmark: Any, measured: result.Result, tmp_path: Path) -> None:
    benchmark.pedantic(result.append, args=(tmp_path, measured), rounds=30, iterations=1, warmup_rounds=1)
    assert [found.to_json() for found in result.read(tmp_path)] == [measured.to_json()]


def test_read(benchmark: Any, measured: result.Result, tmp_path: Path) -> None:
    for _ in range(10):
        result.append(tmp_path, measured)
    found = benchmark.pedantic(result.read, args=(tmp_path,), rounds=20, iterations=1, warmup_rounds=1)
    assert [each.to_json() for each in found] == [measured.to_json()]
