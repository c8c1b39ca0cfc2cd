"""As which strategy a case is compared: the one rule for its best peer and for its textbook."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from harness import implementation
from harness.case import Case
from harness.result import Result


def compared_as(case: Case, strategies: Sequence[str], ours: Collection[str]) -> str:
    """Of the `strategies` that it stands beside, its own first: the one that its comparison is named after; else the
    first that is one of `ours`, those of the subjects beside it; else its own."""
    if case.comparison in strategies:
        return case.comparison
    return next((name for name in strategies if name in ours), strategies[0])


def strategies_of(result: Result) -> tuple[str, ...]:
    """Those that it stands beside, its own first."""
    return (result.strategy, *result.comparable_strategies)


def ours_among(results: Iterable[Result]) -> set[str]:
    """The strategies of the subjects."""
    return {result.strategy for result in results if result.case.role == "subject"}


def ours_planned(cases: Iterable[Case]) -> set[str]:
    """The same of cases that may not have run yet. One whose implementation cannot be loaded has none."""
    found = set()
    for case in cases:
        if case.role == "subject":
            try:
                found.add(implementation.load(case.implementation).strategy_of(case.options))
            except Exception:  # whatever a third-party library raises while it is imported
                continue
    return found
