"""Whether memory has room for one more case beside those that wait for their turns to be timed.

A machine that runs out of memory kills some process, and not the one that asked for too much: a run of an hour would
end without a word.
"""

from __future__ import annotations

import re
from pathlib import Path

from harness.launch.failure import LaunchFailed

_MARGIN = 1.25
_GIB = 2**30


class Room:
    """Watches what cases of one comparison take from the machine's memory: they resemble each other."""

    def __init__(self) -> None:
        self._available = available_bytes()
        self._num_started = 0
        self._most = 0

    def check(self) -> None:
        """LaunchFailed if the next case had better not start, going by what the greediest has taken so far."""
        self._available = available_bytes()
        if self._available is not None and self._available < _MARGIN * self._most:
            raise LaunchFailed(
                "out of memory",
                f"{self._num_started} cases of the comparison are in memory and have taken up to "
                f"{self._most / _GIB:.1f} GiB each; {self._available / _GIB:.1f} GiB are left for one more: expected a "
                f"quarter more than that (smaller comparisons have names of their own, Case.comparison)",
            )

    def taken(self) -> None:
        """A case has started and stays."""
        available = available_bytes()
        if available is not None and self._available is not None:
            self._most = max(self._most, self._available - available)
        self._num_started += 1


def available_bytes() -> int | None:
    """Main memory that processes may still take without swapping, on the machine and in this process's cgroup; None
    where the system does not say."""
    found = [bytes_ for bytes_ in (_of_machine(), _of_cgroup()) if bytes_ is not None]
    return min(found, default=None)


def _of_machine() -> int | None:
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None


def _of_cgroup() -> int | None:
    """Version 2; pages of files count as used there and can be given up."""
    try:
        own = Path("/proc/self/cgroup").read_text(encoding="ascii").rsplit("::", 1)[1].split("\n")[0]
        directory = Path("/sys/fs/cgroup") / own.lstrip("/")
        most, used = (directory / name for name in ("memory.max", "memory.current"))
        given_up = re.search(r"^inactive_file (\d+)", (directory / "memory.stat").read_text("ascii"), re.MULTILINE)
        return int(most.read_text("ascii")) - int(used.read_text("ascii")) + (int(given_up[1]) if given_up else 0)
    except (OSError, IndexError, ValueError):  # no such group, or "max"
        return None
