"""The roll call: once a collective has failed for want of a peer, all ranks that still can meet in a barrier."""

from __future__ import annotations

import re
import threading
from datetime import timedelta

import torch.distributed as dist

from harness.launch.timeouts import BARRIER_SECONDS

_MARGIN_SECONDS = 1.0


def missing_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Whom the first rank misses there; the others learn nothing. `group` is of gloo, over all ranks, and used for
    nothing else: once an operation of a group has timed out, so does every other one of it."""
    found: list[int] = []

    def meet() -> None:
        try:
            dist.monitored_barrier(group, timedelta(seconds=BARRIER_SECONDS), wait_all_ranks=True)
        except RuntimeError as error:
            told = re.search(r"Ranks? ([\d, ]+) failed to pass", str(error))
            found.extend(int(rank) for rank in (told[1] if told else "").split(",") if rank.strip())

    # The time-out is the first rank's: the others would wait for it as long as for any collective of the group.
    meeting = threading.Thread(target=meet, daemon=True)
    meeting.start()
    meeting.join(BARRIER_SECONDS + _MARGIN_SECONDS)
    return tuple(found)
