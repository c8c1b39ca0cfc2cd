"""How long anyone waits for anyone: ranks for their peers, agents for each other, the harness for an answer.

while they join             JOIN_SECONDS until every rank is there; READ_SECONDS for one look at torchrun's store
until a step's length is    a collective outlasts the launch's deadline: the harness, which can tell who is to
known                       blame, loses patience first
from then on                a collective takes ten steps, within the launcher's bounds (`Timeouts`)
whatever the ranks do       a command takes three times what it should and a minute (`hard_deadline_seconds`),
                            and all commands together the case's deadline; the harness ends the ranks then
"""

from __future__ import annotations

import math
from dataclasses import dataclass

JOIN_SECONDS = 60.0
READ_SECONDS = 30.0
BARRIER_SECONDS = 5.0  # after a collective has timed out, for ranks to find out who is missing
COLLECTIVE_MARGIN_SECONDS = 60.0  # by which a collective of unknown length outlasts the launch's deadline
_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """The bounds on what a collective may take once a step's length is known."""

    least_seconds: float
    most_seconds: float = math.inf

    def of_collective(self, step_seconds: float) -> float:
        """Seconds, where a step takes `step_seconds`."""
        return min(self.most_seconds, max(self.least_seconds, _STEPS * step_seconds))


# A link that comes back within some seconds does no harm, since TCP sends again.
ON_ONE_MACHINE = Timeouts(least_seconds=20.0)
ON_A_CLUSTER = Timeouts(least_seconds=120.0, most_seconds=300.0)


def hard_deadline_seconds(expected_seconds: float) -> float:
    """What a command may take that ought to take `expected_seconds`."""
    return 3 * expected_seconds + 60.0
