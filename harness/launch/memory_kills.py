"""Whether the system has killed a process because memory had run out: by its own count, a rank cannot tell."""

from __future__ import annotations

import re
import signal
from pathlib import Path


def num_memory_kills() -> int | None:
    """How many processes this machine has killed for want of memory, its own or a cgroup's, since it started; None
    where it does not count."""
    try:
        match = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


def was_killed_for_memory(exit_code: int | None, before: int | None) -> bool:
    """Whether a process that ended so since there were `before` kills is one of them, as far as can be told."""
    now = num_memory_kills()
    return exit_code == -signal.SIGKILL and before is not None and now is not None and now > before
