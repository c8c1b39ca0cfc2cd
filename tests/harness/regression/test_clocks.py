"""Clocks: what is dated ahead is the latest only where all is, and is named."""

from __future__ import annotations

from harness.regression import clocks

NOW = 1_735_732_800.0  # 2025-01-01 12:00 UTC
HOUR = 3600.0


def test_what_lies_ahead_is_not_the_latest() -> None:
    began = {"ahead": NOW + 24 * HOUR, "first": NOW - 48 * HOUR, "last": NOW - 24 * HOUR}
    assert clocks.latest(began, NOW) == "last"
    assert clocks.ahead(began, NOW) == ["ahead"]
    assert clocks.in_order(began) == ["first", "last", "ahead"]
    assert clocks.latest(began, NOW + 23.5 * HOUR) == "ahead", "that night has come"


def test_clocks_differ_a_little() -> None:
    began = {"first": NOW - HOUR, "running": NOW + 0.9 * HOUR}
    assert clocks.ahead(began, NOW) == []
    assert clocks.latest(began, NOW) == "running"


def test_where_all_lie_ahead_one_is_the_latest() -> None:
    assert clocks.latest({"a": NOW + 10 * HOUR, "b": NOW + 20 * HOUR}, NOW) == "b"


def test_it_is_said_which_and_when() -> None:
    began = {f"night-{number}": NOW + 24 * HOUR * number for number in range(1, 6)}
    told = clocks.passed_over(clocks.ahead(began, NOW), began)
    assert "night-1 (2025-01-02 12:00 UTC), night-2" in told
    assert "and 2 more; --suite-run" in told
