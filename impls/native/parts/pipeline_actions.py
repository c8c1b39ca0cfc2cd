"""What the ranks of a pipeline do, as data: each rank has a list of actions, and a schedule is one list a rank.

    2F0   stage 2, forward of micro-batch 0
    2B0   its backward, whole
    2I0   its backward towards the inputs alone, which the stage before waits for
    2W0   its backward towards the weights alone, which nobody waits for

With several stages a rank (chunks) stage s lies on rank s modulo the number of ranks. Backward in two parts: Qi et al.
2023, "Zero Bubble Pipeline Parallelism".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


class Kind(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"


@dataclass(frozen=True, order=True)
class Action:
    """One piece of work of one stage on one micro-batch."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of `str`. ValueError, which shows the text."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(
                f"pipeline: expected an action such as 2F0 (stage, one of F B I W, micro-batch), got {text!r}"
            )
        return cls(int(match[1]), Kind(match[2]), int(match[3]))


Table = tuple[tuple[Action, ...], ...]
"""The actions of each rank, in order."""


def write(table: Table) -> str:
    """One line a rank."""
    return "".join(f"{' '.join(map(str, actions))}\n" for actions in table)


def read(text: str) -> Table:
    """The inverse of `write`."""
    return tuple(tuple(map(Action.parse, line.split())) for line in text.splitlines())


def needs(action: Action, num_stages: int) -> Iterator[tuple[Action, ...]]:
    """What must be done before the action, whoever does it; each item is alternatives of which one must be done."""
    stage, kind, micro_batch = action.stage, action.kind, action.micro_batch
    if kind == Kind.FORWARD:
        if stage:
            yield (Action(stage - 1, Kind.FORWARD, micro_batch),)
    elif kind == Kind.WEIGHT:
        yield (Action(stage, Kind.INPUT, micro_batch),)
    else:
        yield (Action(stage, Kind.FORWARD, micro_batch),)
        if stage + 1 < num_stages:
            yield (Action(stage + 1, Kind.BACKWARD, micro_batch), Action(stage + 1, Kind.INPUT, micro_batch))


def check(table: Table, num_stages: int, num_micro_batches: int) -> None:
    """ValueError, which names the first action at fault, unless each rank does its own stages' work, all of it once,
    and no rank ever waits for what comes after."""
    done = Counter(action for actions in table for action in actions)
    for rank, actions in enumerate(table):
        for action in actions:
            if action.stage % len(table) != rank or not 0 <= action.stage < num_stages:
                raise ValueError(f"pipeline: rank {rank} of {len(table)} has no stage {action.stage}: {action}")
            if done[action] > 1:
                raise ValueError(f"pipeline: {action} is done {done[action]} times")
    for stage in range(num_stages):
        for micro_batch in range(num_micro_batches):
            kinds = {kind for kind in Kind if done[Action(stage, kind, micro_batch)]}
            if kinds not in ({Kind.FORWARD, Kind.BACKWARD}, {Kind.FORWARD, Kind.INPUT, Kind.WEIGHT}):
                got = " ".join(sorted(kinds)) or "nothing"
                raise ValueError(
                    f"pipeline: stage {stage} must do F and B, or F, I and W, of micro-batch {micro_batch}, got {got}"
                )
    extra = sum(done.values()) - sum(
        done[Action(s, k, m)] for s in range(num_stages) for k in Kind for m in range(num_micro_batches)
    )
    if extra:
        raise ValueError(f"pipeline: {extra} actions are of no micro-batch below {num_micro_batches}")
    in_an_order(table, num_stages)


def in_an_order(table: Table, num_stages: int) -> list[Action]:
    """All actions in an order in which they can happen. ValueError where every rank waits: a deadlock."""
    positions = [0] * len(table)
    done: dict[Action, None] = {}
    while any(position < len(actions) for position, actions in zip(positions, table, strict=True)):
        moved = False
        for rank, actions in enumerate(table):
            while positions[rank] < len(actions) and _can_start(actions[positions[rank]], done, num_stages):
                done[actions[positions[rank]]] = None
                positions[rank] += 1
                moved = True
        if not moved:
            waiting = [str(a[p]) for p, a in zip(positions, table, strict=True) if p < len(a)]
            raise ValueError(f"pipeline: deadlock, every rank waits: at {', '.join(waiting)}")
    return list(done)


def _can_start(action: Action, done: Mapping[Action, object], num_stages: int) -> bool:
    return all(any(one in done for one in alternatives) for alternatives in needs(action, num_stages))


def most_in_flight(actions: Sequence[Action]) -> int:
    """How many forwards of a rank wait for their backward (the weights' part too) at a time, at most: activations that
    it holds."""
    alive = most = 0
    for action in actions:
        alive += (action.kind == Kind.FORWARD) - (action.kind in (Kind.BACKWARD, Kind.WEIGHT))
        most = max(most, alive)
    return most
