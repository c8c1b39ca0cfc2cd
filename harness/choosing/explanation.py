"""Why a candidate stands where it does, in one line: what makes it fit, and what it waits for. Every word follows from
figures of the same situation; where they are not known, nothing is said."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from harness.choosing.amounts import mebibytes, percent
from harness.choosing.candidates import WHOLE, Candidate

_WORDS = {"optimizer": "optimizer states", "gradient": "gradients", "parameter": "parameters"}
_LESS = 0.95  # of another's bytes: cut, not merely a little smaller
_CLEARLY = 0.03  # of a step
_SAME_SPEED = 0.01
_MAX_REASON = 200  # characters; the whole of it stands in the report


@dataclass(frozen=True, kw_only=True)
class Group:
    """The candidates of a situation, and what follows from them whatever memory a device has. `one_process` is the
    single process that does the same work, where it is known."""

    members: tuple[Candidate, ...]
    one_process: Candidate | None

    @cached_property
    def whole(self) -> Candidate | None:
        """The smallest of those that hold all states on every device: what cutting is held against."""
        known = (one for one in self.members if one.strategy == WHOLE and _trains(one) and one.peak_bytes is not None)
        return min(known, key=lambda one: one.peak_bytes or 0.0, default=None)

    @cached_property
    def uncut_bytes(self) -> Mapping[str, float]:
        """The states of the whole model by category; empty where nobody holds them."""
        for one in (self.one_process, self.whole):
            if one is not None and one.state_bytes:
                return one.state_bytes
        return {}

    def cuts(self, candidate: Candidate) -> tuple[str, ...]:
        """The states of which its device holds clearly less than there are, in the order in which sharding cuts them;
        `candidate` is one of the members."""
        return self._cuts[id(candidate)]

    @cached_property
    def _cuts(self) -> Mapping[int, tuple[str, ...]]:
        uncut = self.uncut_bytes
        return {
            id(one): tuple(
                name
                for name in _WORDS
                if name in one.state_bytes and one.state_bytes[name] < _LESS * uncut.get(name, 0.0)
            )
            for one in self.members
        }


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """Of a group those that a device holds, the fastest first and those without a time last."""

    group: Group
    members: tuple[Candidate, ...]
    one_process_fits: bool

    @cached_property
    def num_timed(self) -> int:
        return sum(one.units_per_second is not None for one in self.members)

    @cached_property
    def whole_fits(self) -> bool:
        return any(one is self.group.whole for one in self.members)

    @cached_property
    def _first_with_cuts(self) -> Mapping[frozenset[str], tuple[int, Candidate]]:
        """Of those that cut the same states the first, and where it stands."""
        found: dict[frozenset[str], tuple[int, Candidate]] = {}
        for index, one in enumerate(self.members):
            if one.state_bytes:
                found.setdefault(frozenset(self.group.cuts(one)), (index, one))
        return found

    def cutting_less(self, candidate: Candidate) -> Candidate | None:
        """The fastest one that cuts some of what the candidate cuts and nothing else."""
        cuts = self.group.cuts(candidate)
        if cuts not in self._cutting_less:
            enough = [first for lesser, first in self._first_with_cuts.items() if lesser < set(cuts)]
            self._cutting_less[cuts] = min(enough, key=lambda first: first[0])[1] if enough else None
        return self._cutting_less[cuts]

    @cached_property
    def _cutting_less(self) -> dict[tuple[str, ...], Candidate | None]:
        return {}

    @cached_property
    def lead(self) -> Candidate | None:
        """The next one of another strategy than the fastest, else the next one; None where there is none."""
        timed = self.members[: self.num_timed]
        others = [one for one in timed[1:] if one.strategy != timed[0].strategy]
        return next(iter([*others, *timed[1:]]), None)

    def all_that_matters(self, candidate: Candidate) -> tuple[object, ...]:
        """What the words of a candidate that fits depend on, beside itself and its group."""
        return (id(self.members[0]), id(self.lead), id(self.cutting_less(candidate)), self._what_else_fits)

    @cached_property
    def _what_else_fits(self) -> tuple[bool, bool]:
        return self.whole_fits, self.one_process_fits


def why(candidate: Candidate, state: str, fitting: Fitting) -> str:
    """One line. `state` is where the ranking puts it, `fitting` those that stand before it or behind."""
    if state == "fits":
        return " ".join(_sentence(part) for part in (_place(candidate, fitting), _fit(candidate, fitting)) if part)
    if state == "too large":
        assert candidate.peak_bytes is not None
        return f"Needs {mebibytes(candidate.peak_bytes)} on a device{_foreseen(candidate)}."
    if state == "memory unknown":
        return "What it needs was not measured, and is not foreseen."
    if state == "other work":
        return f"Other work: {_shortened(candidate.other_work or '')}"
    if state == "another model":
        also = f"; other work: {_shortened(candidate.other_work)}" if candidate.other_work else ""
        return f"Trains another model: {_shortened(candidate.reason) or 'it parts from the reference'}{also}"
    return f"{candidate.status.capitalize()}: {_shortened(candidate.reason) or 'no reason was given'}"


def _shortened(text: str) -> str:
    return textwrap.shorten(text, _MAX_REASON, placeholder=" ...")


def _foreseen(candidate: Candidate) -> str:
    return ", predicted" if candidate.memory_basis == "predicted" else ""


def _place(candidate: Candidate, fitting: Fitting) -> str:
    """Where it stands in speed, and what it waits for that the fastest does not."""
    if candidate.units_per_second is None:
        if candidate.basis == "another link":
            return "Memory and bytes as measured over another link; its time over this one is not known"
        return "Predicted: not measured here"
    fastest = fitting.members[0]
    assert fastest.units_per_second is not None
    if candidate is fastest:
        return "The only one that fits" if fitting.num_timed == 1 else f"Fastest that fits{_lead(fitting)}"
    ratio = candidate.units_per_second / fastest.units_per_second
    speed = "As fast as the first" if ratio > 1 - _SAME_SPEED else f"{percent(ratio)} of the first's speed"
    return speed + _waiting(candidate, fastest)


def _lead(fitting: Fitting) -> str:
    """What the fastest has over the next one of another strategy."""
    assert fitting.lead is not None
    return _less_waiting(fitting.members[0], fitting.lead)


def _less_waiting(first: Candidate, other: Candidate) -> str:
    own, others = first.exposed_ratio, other.exposed_ratio
    if own is not None and others is not None and others - own > _CLEARLY:
        text = f": waits {percent(own)} of a step for communication, {other.label} {percent(others)}"
        return text + _across_nodes(first, other)
    if (other.bubble_ratio or 0.0) - (first.bubble_ratio or 0.0) > _CLEARLY:
        return f": {other.label} idles {percent(other.bubble_ratio or 0.0)} of a step in its bubble"
    return ""


def _waiting(candidate: Candidate, fastest: Candidate) -> str:
    """What the slower one waits for: a link, communication, a bubble; whichever is known and clearly more."""
    own, best = candidate.exposed_ratio, fastest.exposed_ratio
    if candidate.bubble_ratio is not None and candidate.bubble_ratio - (fastest.bubble_ratio or 0.0) > _CLEARLY:
        return f": ranks idle {percent(candidate.bubble_ratio)} of a step in the bubble"
    if own is None or best is None or own - best <= _CLEARLY:
        return ""
    text = f": waits {percent(own)} of a step for communication, the first {percent(best)}"
    return text + _across_nodes(candidate, fastest)


def _across_nodes(one: Candidate, other: Candidate) -> str:
    """What crosses the links between nodes, where that is clearly not the same."""
    if not one.node_bytes or not other.node_bytes or _LESS < one.node_bytes / other.node_bytes < 1 / _LESS:
        return ""
    return f"; {mebibytes(one.node_bytes)} a step cross a node's link, {mebibytes(other.node_bytes)} there"


def _fit(candidate: Candidate, fitting: Fitting) -> str:
    """What had to be cut for it to fit, or that nothing had to be."""
    assert candidate.peak_bytes is not None
    group = fitting.group
    uncut = group.uncut_bytes
    cuts = group.cuts(candidate)
    if candidate.strategy == WHOLE:
        return f"Fits uncut: every device holds all states, {mebibytes(candidate.peak_bytes)} at the peak"
    if not cuts:
        return ""
    whole = group.whole
    if whole is None or whole.peak_bytes is None:
        return _beside_one_process(fitting)
    if fitting.whole_fits:
        less = mebibytes(candidate.peak_bytes)
        return f"Nothing has to be cut: {whole.label} fits with {mebibytes(whole.peak_bytes)}, this has {less}"
    enough = fitting.cutting_less(candidate)
    if enough is not None and enough.peak_bytes is not None and candidate is not fitting.members[0]:
        lesser = _listed(group.cuts(enough))
        return f"Cutting {lesser} would do: {enough.label} has {mebibytes(enough.peak_bytes)}"
    shares = [f"{_WORDS[name]} {_change(uncut[name], candidate.state_bytes[name])}" for name in cuts]
    return f"Uncut it would need {mebibytes(whole.peak_bytes)}; {_joined(shares)} make it fit"


def _beside_one_process(fitting: Fitting) -> str:
    alone = fitting.group.one_process
    if alone is None or alone.peak_bytes is None:
        return ""
    needs = mebibytes(alone.peak_bytes)
    return f"One device would hold all of it: {needs}" if fitting.one_process_fits else f"One device would need {needs}"


def _trains(candidate: Candidate) -> bool:
    does_its_work = candidate.trains_the_same is not False and candidate.other_work is None
    return candidate.status == "ok" and does_its_work and bool(candidate.state_bytes)


def _change(before: float, after: float) -> str:
    return f"{mebibytes(before).removesuffix(' MiB')} -> {mebibytes(after)}"


def _listed(names: Sequence[str]) -> str:
    return _joined([_WORDS[name] for name in names])


def _joined(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
