"""The ranking: what fits, in which order, and why, in the words that the figures ask for."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest

from harness.choosing.candidates import Candidate, Place, candidates, one_process
from harness.choosing.explanation import Fitting, Group
from harness.choosing.ranking import Contest, Ranked, interval, rank, situation_of, situations, thresholds
from harness.layout import Layout
from harness.result import Result
from tests.harness.choosing.scenes import (
    ACROSS,
    CLIPPED,
    DATA_PARALLEL,
    EVERYTHING,
    IN_PAIRS,
    MACHINE,
    MIB,
    ON_ONE_NODE,
    SLOW_LINK,
    STAGE_1,
    STAGE_2,
    STAGE_3,
    WORK,
    result,
)

ALONE = one_process(candidates(ON_ONE_NODE), WORK, "fp32", MACHINE)
ON_TWO = [one for one in candidates(ON_ONE_NODE) if one.place == Place(num_devices=2)]


def ranked(memory_mib: float) -> dict[str, Ranked]:
    return {one.candidate.label: one for one in rank(ON_TWO, memory_mib * MIB, ALONE)}


def test_the_fastest_that_fits_and_trains_the_same_model_is_first() -> None:
    order = [(one.candidate.label, one.state, one.rank) for one in rank(ON_TWO, 40 * MIB, ALONE)]
    assert order == [
        ("native.zero stage=1", "fits", 1),
        ("native.zero stage=2", "fits", 2),
        ("native.zero stage=3", "fits", 3),
        ("native.ddp", "too large", None),
        ("torch.ddp", "too large", None),
        ("deepspeed.zero", "another model", None),
        ("fairscale.oss", "no result", None),
    ]


def test_other_work_has_no_rank_whatever_its_speed_and_parity_and_says_what_it_does() -> None:
    members = candidates([*ON_ONE_NODE, CLIPPED])
    on_two = [one for one in members if one.place == Place(num_devices=2)]
    for memory_mib in (10, 25, 100):
        order = rank(on_two, memory_mib * MIB, ALONE)
        (clipped,) = [one for one in order if one.candidate.other_work is not None]
        assert (clipped.state, clipped.rank, clipped.on_front) == ("other work", None, False)
        assert clipped.why == "Other work: gradients are clipped at 1, DeepSpeed's default"
        position = order.index(clipped)
        assert {one.state for one in order[:position]} <= {"fits", "too large"}
        without = rank(ON_TWO, memory_mib * MIB, ALONE)
        assert [one for one in order if one is not clipped] == without, "the others are not held against it"
    assert CLIPPED.metrics["memory.peak_allocated_bytes.max_rank"] not in thresholds(on_two, ALONE)


def test_other_work_that_parts_says_both() -> None:
    (parted,) = rank(candidates([replace(CLIPPED, status="parity failed", reason="it parts")]), 100 * MIB)
    assert parted.state == "another model"
    assert parted.why == "Trains another model: it parts; other work: gradients are clipped at 1, DeepSpeed's default"


def test_a_single_process_that_does_other_work_is_no_yardstick() -> None:
    alone = replace(ON_ONE_NODE[0], other_work="clipped at 1")
    assert one_process(candidates([alone]), WORK, "fp32", MACHINE) is None


def test_a_floor_is_no_candidate() -> None:
    assert all(one.implementation != "native.floor" for one in candidates(ON_ONE_NODE))


def test_a_device_of_exactly_the_peak_holds_it() -> None:
    assert ranked(44)["native.ddp"].state == "fits"
    assert ranked(43.999)["native.ddp"].state == "too large"


@pytest.mark.parametrize(
    ("memory_mib", "label", "words"),
    [
        (100, "native.ddp", "Fastest that fits. Fits uncut: every device holds all states, 44.0 MiB at the peak."),
        (100, "torch.ddp", "90 % of the first's speed: waits 28 % of a step for communication, the first 20 %."),
        (
            100,
            "native.zero stage=1",
            "95 % of the first's speed. Nothing has to be cut: native.ddp fits with 44.0 MiB, this has 34.0 MiB.",
        ),
        (
            40,
            "native.zero stage=1",
            "waits 20 % of a step for communication, native.zero stage=2 40 %. Uncut it would need 44.0 MiB; "
            "optimizer states 20.0 -> 10.0 MiB make it fit.",
        ),
        (
            40,
            "native.zero stage=3",
            "Cutting optimizer states would do: native.zero stage=1 has 34.0 MiB.",
        ),
        (
            30,
            "native.zero stage=2",
            "44.0 MiB; optimizer states 20.0 -> 10.0 MiB and gradients 10.0 -> 5.00 MiB make it fit.",
        ),
        (
            25,
            "native.zero stage=3",
            "The only one that fits. Uncut it would need 44.0 MiB; optimizer states 20.0 -> 10.0 MiB, gradients 10.0 "
            "-> 5.00 MiB and parameters 10.0 -> 5.00 MiB make it fit.",
        ),
        (40, "native.ddp", "Needs 44.0 MiB on a device."),
        (100, "deepspeed.zero", "Trains another model: every gradient is 2 x the right one"),
        (100, "fairscale.oss", "Unavailable: FairScale is not installed"),
    ],
)
def test_why(memory_mib: float, label: str, words: str) -> None:
    assert words in ranked(memory_mib)[label].why


def test_why_tells_what_crosses_a_slow_link() -> None:
    first, second = rank(candidates([ACROSS, IN_PAIRS]), 100 * MIB)
    assert (first.candidate.strategy, second.candidate.strategy) == ("hybrid_sharding", "zero_3")
    assert first.why.startswith(
        "Fastest that fits: waits 60 % of a step for communication, native.zero stage=3 90 %; 20.0 MiB a step cross a "
        "node's link, 60.0 MiB there."
    )
    assert second.why.startswith(
        "33 % of the first's speed: waits 90 % of a step for communication, the first 60 %; 60.0 MiB a step cross a "
        "node's link, 20.0 MiB there."
    )


def test_why_tells_of_a_bubble() -> None:
    slow = replace(ON_TWO[1], strategy="pipeline_parallel", units_per_second=500.0, bubble_ratio=0.4, label="p")
    assert "ranks idle 40 % of a step in the bubble" in rank([ON_TWO[0], slow], 100 * MIB)[1].why


def test_without_data_parallel_one_process_is_what_cutting_is_held_against() -> None:
    (only,) = rank(candidates([STAGE_3]), 30 * MIB, ALONE)
    assert "One device would need 44.0 MiB." in only.why
    (only,) = rank(candidates([STAGE_3]), 50 * MIB, ALONE)
    assert "One device would hold all of it: 44.0 MiB." in only.why


def test_the_front_is_what_nothing_beats_in_both() -> None:
    front = {one.candidate.label for one in rank(ON_TWO, 0, ALONE) if one.on_front}
    # torch.ddp is as large as native.ddp and slower; what trains another model counts for nothing.
    assert front == {"native.ddp", "native.zero stage=1", "native.zero stage=2", "native.zero stage=3"}


def _dump(found: list[Ranked]) -> list[tuple[object, ...]]:
    return [(one.candidate.label, one.state, one.rank, one.why) for one in found]


def test_between_two_thresholds_every_memory_has_the_same_ranking() -> None:
    """That is what lets a page look rankings up."""
    everything = candidates(EVERYTHING)
    for situation in situations(everything):
        members = [one for one in everything if situation_of(one) == situation]
        limits = thresholds(members, ALONE)
        stored = [_dump(rank(members, memory, ALONE)) for memory in (0.0, *limits)]
        assert all(before != after for before, after in itertools.pairwise(stored))
        for memory in (1.0, *(limit + offset for limit in limits for offset in (-1.0, 0.0, 0.5, 1.0)), 1e12):
            assert _dump(rank(members, memory, ALONE)) == stored[interval(limits, memory)]


def test_a_contest_answers_for_every_memory_as_each_alone_would() -> None:
    """And what would do with less is the fastest of all that fit, looked for one by one."""
    random = Random(5)
    kinds = ((10, 10, 20), (10, 10, 10), (10, 5, 10), (5, 5, 10), (5, 10, 20), (4, 4, 8))
    members = [
        replace(
            one,
            label=f"way {number}",
            peak_bytes=(sum(states) + random.uniform(1, 20)) * MIB,
            units_per_second=random.choice((None, random.uniform(500, 1500))),
            state_bytes=dict(zip(("parameter", "gradient", "optimizer"), (MIB * part for part in states), strict=True)),
        )
        for number in range(40)
        for states in [random.choice(kinds)]
        for one in [random.choice(ON_TWO[:5])]
    ]
    members.append(next(one for one in ON_TWO if one.status != "ok"))
    contest = Contest(members, ALONE)
    for memory in (0.0, *thresholds(members, ALONE)):
        ranked = contest.ranking(memory)
        assert ranked == rank(members, memory, ALONE)
        fits = [one.candidate for one in ranked if one.state == "fits"]
        fitting = Fitting(
            group=Group(members=tuple(members), one_process=ALONE), members=tuple(fits), one_process_fits=True
        )
        for one in fits:
            cut = _cut(one)
            assert fitting.cutting_less(one) is next((other for other in fits if _cut(other) < cut), None)


def _cut(one: Candidate) -> set[str]:
    assert ALONE is not None
    return {name for name, held in one.state_bytes.items() if held < 0.95 * ALONE.state_bytes[name]}


def test_of_a_case_that_ran_twice_on_a_machine_the_latest_counts() -> None:
    later = replace(
        STAGE_2, started=STAGE_2.started + 1, metrics={**STAGE_2.metrics, "throughput.tokens_per_second": 7.0}
    )
    elsewhere = replace(later, environment={"machine_fingerprint": "machine-b"})
    found: list[Result] = [later, STAGE_2, elsewhere]
    assert [(one.machine, one.units_per_second) for one in candidates(found)] == [(MACHINE, 7.0), ("machine-b", 7.0)]


def test_memory_that_was_not_measured_is_another_links_and_else_what_was_foreseen() -> None:
    foreseen = {"memory.predicted_peak_bytes": 30 * MIB, "memory.predicted_parameter_bytes": 9 * MIB}
    bare = result("native.zero", Layout(data=4), topology=SLOW_LINK, peak_mib=None, metrics=foreseen, speed=500)
    (one,) = candidates([bare])
    assert (one.memory_basis, one.peak_bytes, one.state_bytes) == ("predicted", 30 * MIB, {"parameter": 9 * MIB})
    assert rank([one], 20 * MIB)[0].why == "Needs 30.0 MiB on a device, predicted."
    measured = result("native.zero", Layout(data=4), peak_mib=28)
    one, _ = candidates([bare, measured])
    assert (one.basis, one.memory_basis, one.peak_bytes) == ("measured", "another link", 28 * MIB)
    assert one.units_per_second == 500


def test_a_case_that_stands_in_two_comparisons_is_one_candidate() -> None:
    second = replace(STAGE_2, case=replace(STAGE_2.case, comparison="zero_3"), started=STAGE_2.started + 1)
    assert second.case.id != STAGE_2.case.id
    assert [one.case_id for one in candidates([second, STAGE_2])] == [second.case.id]


def test_places_come_with_few_devices_and_fast_links_first() -> None:
    places = [situation.place for situation in situations(candidates(EVERYTHING))]
    assert [str(place) for place in places] == ["1 device", "2 devices", "4 devices on 2 nodes at 200 Mbit/s"]


def test_what_has_no_time_stands_behind_by_what_it_sends() -> None:
    def unknown(label: str, sent: float | None) -> Candidate:
        return replace(ON_TWO[0], label=label, units_per_second=None, basis="predicted", sent_bytes=sent)

    members = [unknown("much", 9.0), unknown("not known", None), unknown("little", 3.0), ON_TWO[0]]
    order = [(one.candidate.label, one.rank) for one in rank(members, 1e12)]
    assert order == [(DATA_PARALLEL.case.label, 1), ("little", None), ("much", None), ("not known", None)]
    assert STAGE_1.case.label not in dict(order)
