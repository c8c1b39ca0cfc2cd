"""An answer to `meshmark choose`: which work is meant, its candidates at the asked place, ranked; and what was left to
foresee."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness import suites
from harness.choosing import origins
from harness.choosing.amounts import mebibytes, percent, three_digits
from harness.choosing.candidates import Candidate, Place, candidates, latest, one_process
from harness.choosing.predictions import foreseen, over_another_link, settings_in, settings_in_suite
from harness.choosing.ranking import Ranked, Situation, rank, situation_of
from harness.choosing.work import is_asked_for, shown, work_of
from harness.result import Result

SETTINGS_SUITE = "scaling"  # one setting of each strategy, where none was measured


@dataclass(frozen=True, kw_only=True)
class Answer:
    """`ranked` best first. `origins`: on which machine and in which suite runs the figures were measured; `notes`: what
    to know of them."""

    situation: Situation
    memory_bytes: float
    ranked: tuple[Ranked, ...]
    notes: tuple[str, ...]
    origins: tuple[str, ...] = ()


def answer(
    results: Sequence[Result],
    *,
    model: str | None,
    precision: str | None,
    place: Place,
    memory_bytes: float,
    machine: str | None = None,
    elsewhere: Collection[tuple[str, str, str]] = (),
    on_progress: Callable[[str], None] = lambda text: None,
) -> Answer:
    """The strategies for `model` on `place`, from what was measured, else from predictions: on the machine whose
    fingerprint begins with `machine`, by itself the last one that did it. `elsewhere`: work, precision and machine of
    results that are not among these. ValueError where it is not clear which work is meant."""
    found = candidates(results)
    work, precision, machine = _meant(found, model, precision, machine)
    of_work = [one for one in found if (one.work, one.precision, one.machine) == (work, precision, machine)]
    situation = Situation(work=work, precision=precision, machine=machine, place=place)
    here = [one for one in of_work if situation_of(one) == situation]
    notes = []
    if not here:
        here = over_another_link(of_work, place)
        if here:
            notes.append(f"nothing was measured on {place}: times are not known, measured were {_places(of_work)}")
    if not any(one.status == "ok" for one in here):
        settings = settings_in(results) or settings_in_suite(suites.load(SETTINGS_SUITE).cases)
        here += foreseen(work, precision, machine, place, settings, on_progress=on_progress)
        notes.append(f"nothing was measured with {place.devices}: memory and bytes are predicted, times are not known")
    alone = one_process(of_work, work, precision, machine)
    there = [one for one in results if origins.machine_of(one) == machine]
    own = [one for one in latest(there) if (work_of(one.case.workload), one.case.precision) == (work, precision)]
    own_suites = {one.suite for one in own}
    notes += origins.completed(one for one in there if one.suite in own_suites)
    known = {(one.work, one.precision, one.machine) for one in found} | set(elsewhere)
    others = sorted(one[2] for one in known if one[:2] == (work, precision) and one[2] not in ("", machine))
    if others:
        named = origins.machines(results)
        told = [f"{other} ({named[other]})" if named.get(other) else other for other in others]
        notes.append(f"the same work was measured on other machines, too; --machine takes one: {', '.join(told)}")
    return Answer(
        situation=situation,
        memory_bytes=memory_bytes,
        ranked=tuple(rank(here, memory_bytes, alone)),
        notes=tuple(notes),
        origins=_origins(own, machine),
    )


def _origins(own: Sequence[Result], machine: str) -> tuple[str, ...]:
    """Nothing where nothing was measured."""
    if not own:
        return ()
    where = origins.machines(own).get(machine) or "a machine that nothing is known of"
    runs = origins.suite_runs(own)
    return (f"on {where}{f' (machine {machine})' if machine else ''}{f', in {runs}' if runs else ''}",)


def _meant(
    found: Sequence[Candidate], model: str | None, precision: str | None, machine: str | None
) -> tuple[str, str, str]:
    """The work, precision and machine; the machine is the last one that did it: what never started names none."""
    if machine is not None:
        measured = ", ".join(dict.fromkeys(one.machine for one in found if one.machine)) or "none"
        found = [one for one in found if one.machine.startswith(machine)]
        if not found:
            raise ValueError(f"--machine {machine}: expected the fingerprint of one that measured: {measured}")
    fitting = [
        one for one in found if (model is None or is_asked_for(one.work, model)) and precision in (None, one.precision)
    ]
    kinds = list(dict.fromkeys((one.work, one.precision) for one in fitting))
    if not kinds and model is not None:
        return model, precision or "fp32", _last_machine(found)
    if len(kinds) != 1:
        asked = " ".join(f"--{name} {text}" for name, text in (("model", model), ("precision", precision)) if text)
        everything = "; ".join(dict.fromkeys(f"{one.work} {one.precision}" for one in found))
        known = "; ".join(f"{work} {kind}" for work, kind in kinds) or f"measured were {everything or 'none'}"
        raise ValueError(
            f"{asked or '--model'}: expected one piece of work with one precision, got {len(kinds)}: {known}"
        )
    work, precision = kinds[0]
    return work, precision, _last_machine(fitting)


def _last_machine(found: Sequence[Candidate]) -> str:
    return next((one.machine for one in reversed(found) if one.machine), "")


def _places(found: Sequence[Candidate]) -> str:
    return ", ".join(dict.fromkeys(str(one.place) for one in found)) or "none"


def table(said: Answer) -> RenderableType:
    """For a terminal: a row a candidate, the reason below its name."""
    asked = said.situation
    title = f"{shown(asked.work)}, {asked.precision}: {asked.place} with {mebibytes(said.memory_bytes)} each"
    unit = next((one.candidate.unit for one in said.ranked), "tokens")
    # As text: a user's workload may look like markup.
    made = Table(box=box.SIMPLE, title=Text(title, style="italic"), title_justify="left", pad_edge=False)
    made.add_column("", justify="right")
    made.add_column("strategy, and why")
    for name in (f"{unit}/s", "peak", "exposed", "sent"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("parity")
    for one in said.ranked:
        candidate = one.candidate
        style = "" if one.state == "fits" else "dim"
        made.add_row(
            str(one.rank or "-"),
            Text.assemble((_named(candidate), "bold" if one.rank == 1 else ""), f"\n{one.why}"),
            _or_dash(candidate.units_per_second, three_digits),
            _or_dash(candidate.peak_bytes, mebibytes)
            + ("\npredicted" if candidate.memory_basis == "predicted" and candidate.peak_bytes else ""),
            _or_dash(candidate.exposed_ratio, percent),
            _or_dash(candidate.sent_bytes, mebibytes),
            parity(candidate),
            style=style,
        )
    measured = (Text(f"measured {origin}", style="dim") for origin in said.origins)
    return Group(made, *measured, *(Text(f"note: {note}") for note in said.notes))


def _named(candidate: Candidate) -> str:
    """With the layout, where the label does not tell it."""
    return candidate.label if candidate.layout in candidate.label else f"{candidate.label}, {candidate.layout}"


def parity(candidate: Candidate) -> str:
    """`ok`, `FAILED`, or `-` where nothing was held against the reference; and whether it does the recipe's work."""
    verdict = "-" if candidate.trains_the_same is None else "ok" if candidate.trains_the_same else "FAILED"
    return verdict if candidate.other_work is None else f"{verdict}, other work"


def _or_dash(value: float | None, written: Callable[[float], str]) -> str:
    return "-" if value is None else written(value)


def to_json(said: Answer) -> dict[str, object]:
    """Plain values."""
    return {
        "model": said.situation.work,
        "precision": said.situation.precision,
        "devices": said.situation.place.num_devices,
        "memory_bytes": said.memory_bytes,
        "place": str(said.situation.place),
        "machine": said.situation.machine,
        "measured": list(said.origins),
        "notes": list(said.notes),
        "strategies": [
            {
                "rank": one.rank,
                "state": one.state,
                "why": one.why,
                "on_front": one.on_front,
                **{
                    name: getattr(one.candidate, name)
                    for name in (
                        "label",
                        "layout",
                        "strategy",
                        "basis",
                        "memory_basis",
                        "status",
                        "unit",
                        "units_per_second",
                        "peak_bytes",
                        "sent_bytes",
                        "exposed_ratio",
                        "trains_the_same",
                        "other_work",
                        "case_id",
                    )
                },
            }
            for one in said.ranked
        ],
    }
