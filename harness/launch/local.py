"""The local launcher: one process per rank on this machine, each a fork of the fork server.

A rank leads its own session, writes to its own log, and answers commands over a channel; see `harness.worker`.
"""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path
from typing import Any

from harness.case import Case
from harness.launch.emulated import EmulatedNodes
from harness.launch.fork_server import Fork
from harness.launch.timeouts import COLLECTIVE_MARGIN_SECONDS, ON_ONE_MACHINE
from harness.launch.watched import Job, Launch, Rank
from harness.placement import seats


class LocalLaunch(Launch):
    """The ranks of one case, waiting for commands, each in the network of its node where there are `nodes`. Use as a
    context manager: leaving it ends every rank.

    The deadline bounds the time that its commands take, all together, with the ranks' start: a launch that waits while
    others have their turn loses nothing.
    """

    def __init__(
        self,
        case: dict[str, Any],
        world_size: int,
        directory: Path,
        *,
        weights: Path | None = None,
        device: str = "cpu",
        threads: int = 1,
        instrumented: bool = False,
        deadline_seconds: float = 300.0,
        nodes: EmulatedNodes | None = None,
    ) -> None:
        from harness.worker import main

        super().__init__(deadline_seconds)
        directory.mkdir(parents=True, exist_ok=True)
        # Another name for every launch: a file that is left over from a killed one would admit nobody.
        for left_over in directory.glob("rendezvous-*"):
            left_over.unlink(missing_ok=True)
        self._rendezvous = directory.resolve() / f"rendezvous-{uuid.uuid4().hex}"
        placed = None if nodes is None else seats(Case.from_json(case).layout, nodes.topology)
        try:
            for rank in range(world_size):
                job = Job(
                    case=case,
                    rank=rank,
                    directory=directory,
                    rendezvous=self._rendezvous,
                    weights=weights,
                    device=device,
                    local_rank=rank,
                    threads=threads,
                    instrumented=instrumented,
                    timeout_seconds=deadline_seconds + COLLECTIVE_MARGIN_SECONDS,
                    timeouts=ON_ONE_MACHINE,
                    network=None if nodes is None or placed is None else nodes.network_of(placed.node_of_rank[rank]),
                )
                self._ranks.append(Rank(process=Fork(main, job, f"meshmark rank {rank}"), job=job))
        except BaseException:
            self.kill()
            raise

    def _clean_up(self) -> None:
        with contextlib.suppress(OSError):
            self._rendezvous.unlink(missing_ok=True)
