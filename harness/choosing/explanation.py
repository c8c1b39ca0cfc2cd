"""Why a candidate stands where it does, in one line: what makes it fit, and what it waits for. Every word follows from
figures of the same situation; where they are not known, nothing is said."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.choosing.amounts import mebibytes, percent
from harness.choosing.candidates import WHOLE, Candidate

_WORDS = {"optimizer": "optimizer states", "gradient": "gradients", "parameter": "parameters"}
_LESS = 0.95  # of another's bytes: cut, not merely a little smaller
_CLEARLY = 0.03  # of a step
_SAME_SPEED = 0.01
_MAX_REASON = 200  # characters; the whole of it stands in the report


@dataclass(frozen=True, kw_only=True)
class Group:
    """The candidates of a situation; `fitting` those that a device holds, the fastest first. `one_process` is the
    single process that does the same work, where it is known."""

    members: tuple[Candidate, ...]
    fitting: tuple[Candidate, ...]
    one_process: Candidate | None
    one_process_fits: bool

    @property
    def whole(self) -> Candidate | None:
        """The smallest of those that hold all states on every device: what cutting is held against."""
        known = (one for one in self.members if one.strategy == WHOLE and _trains(one) and one.peak_bytes is not None)
        return min(known, key=lambda one: one.peak_bytes or 0.0, default=None)

    @property
    def uncut_bytes(self) -> Mapping[str, float]:
        """The states of the whole model by category; empty where nobody holds them."""
        for one in (self.one_process, self.whole):
            if one is not None and one.state_bytes:
                return one.state_bytes
        return {}


def why(candidate: Candidate, state: str, group: Group) -> str:
    """One line. `state` is where the ranking puts it."""
    if state == "fits":
        return " ".join(_sentence(part) for part in (_place(candidate, group), _fit(candidate, group)) if part)
    if state == "too large":
        assert candidate.peak_bytes is not None
        return f"Needs {mebibytes(candidate.peak_bytes)} on a device{_foreseen(candidate)}."
    if state == "memory unknown":
        return "What it needs was not measured, and is not foreseen."
    if state == "another model":
        return f"Trains another model: {_shortened(candidate.reason) or 'it parts from the reference'}"
    return f"{candidate.status.capitalize()}: {_shortened(candidate.reason) or 'no reason was given'}"


def _shortened(text: str) -> str:
    return textwrap.shorten(text, _MAX_REASON, placeholder=" ...")


def _foreseen(candidate: Candidate) -> str:
    return ", predicted" if candidate.memory_basis == "predicted" else ""


def _place(candidate: Candidate, group: Group) -> str:
    """Where it stands in speed, and what it waits for that the fastest does not."""
    if candidate.units_per_second is None:
        if candidate.basis == "another link":
            return "Memory and bytes as measured over another link; its time over this one is not known"
        return "Predicted: not measured here"
    fastest = group.fitting[0]
    assert fastest.units_per_second is not None
    if candidate is fastest:
        return "The only one that fits" if len(_timed(group.fitting)) == 1 else f"Fastest that fits{_lead(group)}"
    ratio = candidate.units_per_second / fastest.units_per_second
    speed = "As fast as the first" if ratio > 1 - _SAME_SPEED else f"{percent(ratio)} of the first's speed"
    return speed + _waiting(candidate, fastest)


def _timed(members: Sequence[Candidate]) -> list[Candidate]:
    return [one for one in members if one.units_per_second is not None]


def _lead(group: Group) -> str:
    """What the fastest has over the next one of another strategy."""
    first = group.fitting[0]
    others = _timed(group.fitting)[1:]
    other = next((one for one in others if one.strategy != first.strategy), others[0])
    return _less_waiting(first, other)


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


def _fit(candidate: Candidate, group: Group) -> str:
    """What had to be cut for it to fit, or that nothing had to be."""
    assert candidate.peak_bytes is not None
    uncut = group.uncut_bytes
    cuts = _cuts(candidate, uncut)
    if candidate.strategy == WHOLE:
        return f"Fits uncut: every device holds all states, {mebibytes(candidate.peak_bytes)} at the peak"
    if not cuts:
        return ""
    whole = group.whole
    if whole is None or whole.peak_bytes is None:
        return _beside_one_process(group)
    if whole in group.fitting:
        less = mebibytes(candidate.peak_bytes)
        return f"Nothing has to be cut: {whole.label} fits with {mebibytes(whole.peak_bytes)}, this has {less}"
    enough = _cut_less(candidate, group)
    if enough is not None and enough.peak_bytes is not None and candidate is not group.fitting[0]:
        lesser = _listed(_cuts(enough, uncut))
        return f"Cutting {lesser} would do: {enough.label} has {mebibytes(enough.peak_bytes)}"
    shares = [f"{_WORDS[name]} {_change(uncut[name], candidate.state_bytes[name])}" for name in cuts]
    return f"Uncut it would need {mebibytes(whole.peak_bytes)}; {_joined(shares)} make it fit"


def _beside_one_process(group: Group) -> str:
    if group.one_process is None or group.one_process.peak_bytes is None:
        return ""
    needs = mebibytes(group.one_process.peak_bytes)
    return f"One device would hold all of it: {needs}" if group.one_process_fits else f"One device would need {needs}"


def _cut_less(candidate: Candidate, group: Group) -> Candidate | None:
    """The fastest fitting one that cuts some of what the candidate cuts and nothing else."""
    uncut = group.uncut_bytes
    cuts = set(_cuts(candidate, uncut))
    return next((one for one in group.fitting if one.state_bytes and set(_cuts(one, uncut)) < cuts), None)


def _cuts(candidate: Candidate, uncut: Mapping[str, float]) -> tuple[str, ...]:
    """The states of which its device holds clearly less than there are, in the order in which sharding cuts them."""
    held = candidate.state_bytes
    return tuple(name for name in _WORDS if name in held and held[name] < _LESS * uncut.get(name, 0.0))


def _trains(candidate: Candidate) -> bool:
    return candidate.status == "ok" and candidate.trains_the_same is not False and bool(candidate.state_bytes)


def _change(before: float, after: float) -> str:
    return f"{mebibytes(before).removesuffix(' MiB')} -> {mebibytes(after)}"


def _listed(names: Sequence[str]) -> str:
    return _joined([_WORDS[name] for name in names])


def _joined(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
