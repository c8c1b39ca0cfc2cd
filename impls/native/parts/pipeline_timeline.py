"""When each action of a schedule happens, if each takes a given time and messages take none: the bubble, and a drawing.

rank 0   0F0 0F1 ... ... 0B0 ... 0B1            one column a unit of time
rank 1       1F0 1B0 ... 1F1 1B1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from impls.native.parts.pipeline_actions import Action, Kind, Table, in_an_order, needs

UNIT_COSTS: Mapping[Kind, float] = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """(begin, end) of each action, and the table they come from."""

    table: Table
    times: Mapping[Action, tuple[float, float]]

    @property
    def makespan(self) -> float:
        return max(end for _, end in self.times.values())

    def bubble(self, rank: int) -> float:
        """The part of the whole time in which the rank waits."""
        busy = sum(end - begin for begin, end in map(self.times.__getitem__, self.table[rank]))
        return 1.0 - busy / self.makespan

    def draw(self) -> str:
        """A line a rank and a cell a unit of time; an action fills as many as it takes."""
        width = max(len(str(action)) for action in self.times)
        lines = []
        for rank, actions in enumerate(self.table):
            cells = ["." * width] * round(self.makespan)
            for action in actions:
                begin, end = self.times[action]
                for cell in range(round(begin), round(end)):
                    cells[cell] = str(action).rjust(width)
            lines.append(f"rank {rank}  {' '.join(cells)}\n")
        return "".join(lines)


def play(table: Table, num_stages: int, costs: Mapping[Kind, float] = UNIT_COSTS) -> Timeline:
    """ValueError where the table deadlocks."""
    times: dict[Action, tuple[float, float]] = {}
    free_at = [0.0] * len(table)
    for action in in_an_order(table, num_stages):
        rank = action.stage % len(table)
        awaited = [times[one][1] for options in needs(action, num_stages) for one in options if one in times]
        begin = max([free_at[rank], *awaited])
        free_at[rank] = begin + costs[action.kind]
        times[action] = begin, free_at[rank]
    return Timeline(table=table, times=times)
