"""The self-test: a sound gate passes it, and one that never or always alarms does not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from harness.regression import paired_self_test, self_test
from harness.regression.check_report import self_test_lines
from harness.regression.paired_comparison import PairedVerdict
from harness.regression.time_history import TimeChange
from harness.regression.verdicts import Verdict


def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kind of noise, no slow ones."""
    monkeypatch.setattr(self_test, "NOISES", {"normal": self_test.NOISES["normal"]})
    monkeypatch.setattr(self_test, "SLOWDOWNS", (0.1,))


def test_the_gate_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch)
    tested = self_test.self_test(num_series=2, quiet_series=1, seed=1)
    assert tested.failures == []
    (quiet,), (power,) = tested.false_alarms, tested.powers
    assert (quiet.num_nights, quiet.regressed) == (2 * 71, 0.0)
    # Two draws of 2 % differ by more than 5 % on one side in one of 26 nights.
    assert 10 < quiet.last_night_rule < 120
    assert power.found == 1.0
    assert power.median_delay_nights is not None
    assert 3 <= power.median_delay_nights <= 8
    (recovery,) = tested.recoveries
    assert recovery.ended == 1.0
    assert recovery.median_delay_nights is not None
    assert 1 <= recovery.median_delay_nights <= 6
    unchanged, *_, slow = tested.paired
    assert (unchanged.shift, unchanged.regressed, slow.shift, slow.regressed) == (0.0, 0.0, 0.15, 1.0)
    *_, limits, _, verdict = self_test_lines(tested)
    assert limits.startswith("must hold: at most 2 false alarms in 142 nights of a kind and 2 in all 142 (1.7 in 1,000")
    assert "finds what did" in verdict


@pytest.mark.parametrize(
    ("verdict", "complaint"),
    [("ok", "was found in 0%"), ("regressed", "4 false alarms in 284 nights, expected at most 3")],
)
def test_a_broken_gate_does_not(monkeypatch: pytest.MonkeyPatch, verdict: Verdict, complaint: str) -> None:
    few(monkeypatch)

    def broken(logarithms: Sequence[float], *, accepted: int = 0) -> TimeChange:
        return TimeChange(verdict=verdict)

    monkeypatch.setattr(self_test, "last_night", broken)
    failures = self_test.self_test(num_series=1).failures
    assert any(complaint in failure for failure in failures)
    assert any("slower and mended was let go of in 0%" in failure for failure in failures) is (verdict == "regressed")
    assert "FAILED: " in "\n".join(self_test_lines(self_test.self_test(num_series=1)))


@pytest.mark.parametrize(
    ("verdict", "complaint"),
    [
        ("ok", "pairs: 15% slower was called regressed in 0.0%, expected at least 95%"),
        ("regressed", "pairs: 0% slower was called regressed in 100.0%, expected at most 1%"),
    ],
)
def test_pairs_that_say_always_the_same_fail(
    monkeypatch: pytest.MonkeyPatch, verdict: PairedVerdict, complaint: str
) -> None:
    monkeypatch.setattr(paired_self_test, "verdicts", lambda comparisons: [verdict] * len(comparisons))
    powers = paired_self_test.paired_powers(num_comparisons=2, random=np.random.default_rng(0))
    assert complaint in paired_self_test.paired_failures(powers)


def test_alarms_are_allowed_as_many_as_the_sample_is_worth() -> None:
    assert [self_test.most_alarms(num_nights) for num_nights in (71, 2840, 11_360)] == [1, 11, 30]


@pytest.mark.parametrize("name", self_test.NOISES)
def test_noises_are_as_large_as_stated(name: str) -> None:
    random = np.random.default_rng(0)
    nights = np.concatenate([self_test.NOISES[name](random) for _ in range(200)])
    assert np.std(nights) == pytest.approx(self_test.NOISE, rel=0.2)
