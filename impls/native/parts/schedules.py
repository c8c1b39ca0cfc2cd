"""Pipeline schedules. Each is one class that says what one rank does, in order; a further one is a further class.

    4 ranks, 4 micro-batches, time from left to right          F forward, B backward, I and W its two parts

    gpipe      F F F F . . . . . . B B B B                      all forwards, then all backwards
    1f1b       F . . . F F F B ...                              a backward as soon as there can be one
    interleaved_1f1b                                            several stages a rank: shorter waits, more messages
    zero_bubble                                                 weights' gradients where 1f1b waits
    zero_bubble_h2                                              the same, further ahead: shorter waits, more memory

Huang et al. 2019, "GPipe"; Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM" (1F1B, interleaved); Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (ZB-H1, ZB-H2).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from typing import ClassVar

from impls.native.parts.pipeline_actions import Action, Kind, Table, check, most_in_flight


@dataclass(frozen=True, kw_only=True)
class Schedule(ABC):
    """`num_ranks` ranks with `num_chunks` stages each, and `num_micro_batches` of a step."""

    name: ClassVar[str]

    num_ranks: int
    num_micro_batches: int
    num_chunks: int = 1

    def __post_init__(self) -> None:
        for field in ("num_ranks", "num_micro_batches", "num_chunks"):
            if getattr(self, field) < 1:
                raise ValueError(f"{self.name}: {field} must be at least 1, got {getattr(self, field)}")

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    @abstractmethod
    def actions(self, rank: int) -> Iterator[Action]:
        """What the rank does, in order."""

    def table(self) -> Table:
        """Every rank's actions, checked: complete, in a possible order, free of deadlock."""
        made = tuple(tuple(self.actions(rank)) for rank in range(self.num_ranks))
        check(made, self.num_stages, self.num_micro_batches)
        return made

    def in_flight(self) -> tuple[int, ...]:
        """Of each stage, how many micro-batches' activations it holds at a time, at most."""
        table = self.table()
        of_stages = ([a for a in table[stage % self.num_ranks] if a.stage == stage] for stage in range(self.num_stages))
        return tuple(map(most_in_flight, of_stages))

    def bubble(self, backward: float = 2.0, weights: float = 1.0) -> float:
        """By theory, the part of a rank's time in which it waits, where stages are equal, messages take no time, and a
        forward takes 1, a whole backward `backward`, of which `weights` for the weights."""
        return (self.num_ranks - 1) / (self.num_chunks * self.num_micro_batches + self.num_ranks - 1)


class _OneStage(Schedule):
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_chunks != 1:
            raise ValueError(f"{self.name}: takes one stage a rank, got num_chunks {self.num_chunks}")


class GPipe(_OneStage):
    name = "gpipe"

    def actions(self, rank: int) -> Iterator[Action]:
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            yield from (Action(rank, kind, micro_batch) for micro_batch in range(self.num_micro_batches))


class OneForwardOneBackward(_OneStage):
    """No rank ever holds the activations of more than `num_ranks - rank` micro-batches."""

    name = "1f1b"

    def actions(self, rank: int) -> Iterator[Action]:
        num_ahead = min(self.num_ranks - rank - 1, self.num_micro_batches)
        for micro_batch in range(self.num_micro_batches + num_ahead):
            if micro_batch < self.num_micro_batches:
                yield Action(rank, Kind.FORWARD, micro_batch)
            if micro_batch >= num_ahead:
                yield Action(rank, Kind.BACKWARD, micro_batch - num_ahead)


class InterleavedOneForwardOneBackward(Schedule):
    """Micro-batches go through a rank's stages in groups of `num_ranks`, or a little more where they do not divide: a
    smaller group would have to wait for itself."""

    name = "interleaved_1f1b"

    def actions(self, rank: int) -> Iterator[Action]:
        forwards = [Action(s, Kind.FORWARD, m) for s, m in self._order(rank, backward=False)]
        backwards = [Action(s, Kind.BACKWARD, m) for s, m in self._order(rank, backward=True)]
        first_group = self._groups()[0]
        num_ahead = min(2 * (self.num_ranks - rank - 1) + (self.num_chunks - 1) * len(first_group), len(forwards))
        if self.num_chunks == 1:
            num_ahead = min(self.num_ranks - rank - 1, len(forwards))
        yield from forwards[:num_ahead]
        for index, forward in enumerate(forwards[num_ahead:]):
            yield forward
            yield backwards[index]
        yield from backwards[len(forwards) - num_ahead :]

    def _groups(self) -> list[range]:
        """The micro-batches of each, larger groups first."""
        num_groups = max(1, self.num_micro_batches // self.num_ranks)
        each, more = divmod(self.num_micro_batches, num_groups)
        bounds = [index * each + min(index, more) for index in range(num_groups + 1)]
        return [range(begin, end) for begin, end in pairwise(bounds)]

    def _order(self, rank: int, *, backward: bool) -> Iterator[tuple[int, int]]:
        """(stage, micro-batch) of the rank's forwards or backwards."""
        chunks = range(self.num_chunks)
        for group in self._groups():
            for chunk in reversed(chunks) if backward else chunks:
                yield from ((chunk * self.num_ranks + rank, micro_batch) for micro_batch in group)


class ZeroBubble(_OneStage):
    """ZB-H1: as 1F1B, but that the backward towards the weights comes later, up to `rank` micro-batches: later ranks
    hold their activations for fewer micro-batches under way, so that all hold `num_ranks` at most."""

    name = "zero_bubble"
    # By how many micro-batches a rank is further ahead than the next one; of as many fewer it puts weights off.
    lead: ClassVar[int] = 1

    def actions(self, rank: int) -> Iterator[Action]:
        num_ahead = min(self.lead * (self.num_ranks - rank - 1), self.num_micro_batches)
        num_put_off = 0
        weights = 0
        for micro_batch in range(self.num_micro_batches + num_ahead):
            if micro_batch < self.num_micro_batches:
                yield Action(rank, Kind.FORWARD, micro_batch)
            if micro_batch >= num_ahead:
                yield Action(rank, Kind.INPUT, micro_batch - num_ahead)
                num_put_off += 1
                is_ending = micro_batch >= self.num_micro_batches
                if num_put_off > self.lead * rank or is_ending:
                    yield Action(rank, Kind.WEIGHT, weights)
                    weights, num_put_off = weights + 1, num_put_off - 1
        yield from (Action(rank, Kind.WEIGHT, micro_batch) for micro_batch in range(weights, self.num_micro_batches))

    def bubble(self, backward: float = 2.0, weights: float = 1.0) -> float:
        return self._bubble(max(0.0, 1.0 + backward - 2.0 * weights), backward)

    def _bubble(self, wait_a_rank: float, backward: float) -> float:
        wait = (self.num_ranks - 1) * wait_a_rank
        return wait / (self.num_micro_batches * (1.0 + backward) + wait)


class ZeroBubbleH2(ZeroBubble):
    """ZB-H2: goes forward twice as far ahead, so that no rank waits between its first action and its last; all hold up
    to 2 * `num_ranks` - 1 micro-batches. What is left is that the last rank begins when the first micro-batch has come
    to it: the update waits for every rank here."""

    name = "zero_bubble_h2"
    lead = 2

    def bubble(self, backward: float = 2.0, weights: float = 1.0) -> float:
        """Where there are 2 * `num_ranks` - 1 micro-batches or more, or all parts take as long."""
        return self._bubble(1.0, backward)


SCHEDULES: dict[str, type[Schedule]] = {
    schedule.name: schedule
    for schedule in (GPipe, OneForwardOneBackward, InterleavedOneForwardOneBackward, ZeroBubble, ZeroBubbleH2)
}


def make(name: str, *, num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> Schedule:
    """ValueError for a name that is none, or numbers that the schedule does not take."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {name!r}")
    return SCHEDULES[name](num_ranks=num_ranks, num_micro_batches=num_micro_batches, num_chunks=num_chunks)


def forwards(rank: int, *, num_ranks: int, num_stages: int, num_micro_batches: int) -> tuple[Action, ...]:
    """What the rank does where no backward follows: stage s comes to micro-batch m at clock s + m."""
    own = product(range(rank, num_stages, num_ranks), range(num_micro_batches))
    in_order = sorted(own, key=lambda forward: (sum(forward), forward))
    return tuple(Action(stage, Kind.FORWARD, micro_batch) for stage, micro_batch in in_order)
