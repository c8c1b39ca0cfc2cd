"""Clocks: suite runs that are dated ahead of this machine's clock. Some clock is wrong, and nobody knows which night
they were; taken at their word they would stay the latest until that night comes."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

TOLERANCE_SECONDS = 3600.0  # machines that take part differ by less
_NUM_NAMED = 3


def ahead(began: Mapping[str, float], now: float) -> list[str]:
    """Those of the suite runs, by name with when they began (seconds since the epoch), that lie ahead, the first one
    first."""
    return [name for name in in_order(began) if began[name] > now + TOLERANCE_SECONDS]


def in_order(began: Mapping[str, float]) -> list[str]:
    """Suite runs from the first to the last."""
    return sorted(began, key=lambda name: (began[name], name))


def latest(began: Mapping[str, float], now: float) -> str:
    """The suite run that began last; one that lies ahead only where all do. There must be one."""
    order = in_order(began)
    lies_ahead = set(ahead(began, now))
    return next((name for name in reversed(order) if name not in lies_ahead), order[-1])


def passed_over(names: Collection[str], began: Mapping[str, float]) -> str:
    """That these, which lie ahead, were not taken for the latest, in one sentence."""
    told = ", ".join(f"{name} ({date(began[name])})" for name in list(names)[:_NUM_NAMED])
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return f"dated ahead of this machine's clock, and passed over: {told}{more}; --suite-run takes one all the same"


def date(seconds: float) -> str:
    """When that was, or will be, by the minute."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
