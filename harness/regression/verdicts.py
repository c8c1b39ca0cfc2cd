"""Verdicts: what the gate says of a case, and how bad that is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Verdict = Literal[
    "parity failed", "failed", "regressed", "suspect", "environment shift", "improved", "insufficient data", "ok"
]
"""From the worst on. `failed` has no result to judge; `suspect` is slower by what may yet be chance, or lacks something
that was there; an `environment shift` moved together with software that is not ours to judge."""

RED: frozenset[str] = frozenset({"parity failed", "failed", "regressed"})
MOVED: frozenset[str] = frozenset({"regressed", "environment shift", "improved"})  # against what was accepted

NOMINATED: frozenset[str] = frozenset({"regressed", "suspect"})  # what two revisions in turns can confirm


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one figure of a case says, in one sentence. `figure` is a metric's name, or `status`; `shift` is relative
    (0.05 is 5 % more than the baseline or the accepted value), `since` the suite run that was the first to show it.
    Of a time that is nominated, `commits` are the last one before and tonight's, where the code between them may be
    why, else `no_commits` says why there are none; `confirmed` is what both of them say in turns, None before that.
    `is_absence` where something that was there is not any more."""

    figure: str
    verdict: Verdict
    text: str
    shift: float | None = None
    since: str | None = None
    commits: tuple[str, str] | None = None
    no_commits: str = ""
    confirmed: bool | None = None
    is_absence: bool = False

    @property
    def is_acceptable(self) -> bool:
        """Whether `meshmark accept` makes it right."""
        return self.verdict in MOVED or self.is_absence


def worst(findings: Iterable[Finding]) -> Verdict:
    """The verdict of the case: that of its worst finding; ok where there is none."""
    order = get_args(Verdict)
    verdicts: list[Verdict] = [finding.verdict for finding in findings]
    return min(verdicts, key=order.index, default="ok")
