"""Each page says what the results say; where they say nothing it names the command that would."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import pytest

from dashboards import choose, communication, data, history, memory, parity, pipeline, scaling
from dashboards.blocks import Block
from dashboards.data import Study
from dashboards.pipeline import Box, bubble, theory
from harness.case import Case
from harness.choosing.ranking import rank
from harness.layout import Layout
from harness.regression.history import CaseRun
from harness.result import Result
from tests.harness.choosing.scenes import (
    CLIPPED,
    EVERYTHING,
    HELD,
    MACHINE,
    MIB,
    ON_ONE_NODE,
    PARTED,
    REFERENCE,
    WORK,
    result,
)


def study(*results: Result, nights: Any = ()) -> Study:
    (found,) = data.studies(results, nights=nights)
    return found


def of_kind(blocks: list[Block], kind: str) -> list[Block]:
    return [block for block in blocks if block["kind"] == kind]


def cells(block: Block, column: int) -> list[str]:
    return [row["cells"][column]["text"] for row in block["rows"]]


ALL = study(*EVERYTHING)


def test_the_same_work_is_one_study_and_another_batch_precision_or_machine_another() -> None:
    others = [
        result("native.ddp", workload="gpt:size=17m,global_batch_size=8"),
        result("native.ddp", machine="machine-b"),
        result("native.pipeline", Layout(pipeline=2), workload=f"{WORK},num_micro_batches=4"),
    ]
    found = data.studies([*ON_ONE_NODE, *others])
    assert [(one.work, one.machine, len(one.runs)) for one in found] == [
        (WORK, MACHINE, len(ON_ONE_NODE) + 1),
        (WORK, "machine-b", 1),
        ("gpt:size=17m,global_batch_size=8", MACHINE, 1),
    ]


@pytest.mark.parametrize("page", [memory, communication, parity, pipeline, history])
def test_a_page_without_data_names_the_command_that_measures_it(page: Any) -> None:
    bare = result("native.ddp", peak_mib=None, exposed=None, sent_mib=None, parity=None, samples={"x": 1})
    (block,) = page.blocks(study(bare))
    assert block["kind"] == "missing"
    assert block["command"].startswith("meshmark run ")


def looked_up(place: Mapping[str, Any], interval: int, memory_bytes: float) -> list[tuple[str, str, int | None, str]]:
    """What the page's script makes of it."""
    candidates = place["candidates"]
    fits = {
        index for index, one in enumerate(candidates) if one["state"] == "too large" and one["peak"] <= memory_bytes
    }
    fitting = [index for index in place["bySpeed"] if index in fits]
    shown: list[tuple[str, str, int | None, str]] = []
    for index in [*fitting, *(index for index in place["bySize"] if index not in fits)]:
        one = candidates[index]
        why = [reason for since, reason in one["whys"] if since <= interval][-1]
        position = len(shown) + 1 if index in fits and one["speed"] is not None else None
        shown.append((one["label"], "fits" if index in fits else one["state"], position, place["reasons"][why]))
    return shown


def test_choose_stores_what_the_ranking_says_for_every_memory() -> None:
    stored = choose.choices(ALL)
    assert [(place["devices"], place["link"]) for place in stored["places"]] == [
        (1, ""),
        (2, ""),
        (2, "at 200 Mbit/s"),
        (4, ""),
        (4, "at 200 Mbit/s"),
    ]
    place = stored["places"][1]
    members = [one for one in ALL.candidates if str(one.place) == "2 devices"]
    alone = next(one for one in ALL.candidates if one.strategy == "single")
    for interval, memory_bytes in enumerate((0.0, *place["thresholds"])):
        asked = [(one.candidate.label, one.state, one.rank, one.why) for one in rank(members, memory_bytes, alone)]
        assert looked_up(place, interval, memory_bytes) == asked
    assert stored["memory_mib"] == 50, "everything fits at first"


def test_a_link_that_was_not_measured_with_so_many_devices_has_no_times() -> None:
    stored = choose.choices(ALL)
    elsewhere = stored["places"][2]
    assert {one["basis"] for one in elsewhere["candidates"]} == {"another link"}
    assert all(one["speed"] is None and one["exposed"] is None for one in elsewhere["candidates"])
    assert {one["peak"] for one in elsewhere["candidates"]} >= {44 * MIB, 34 * MIB}


def test_memory_lays_what_was_foreseen_below_what_was_measured() -> None:
    foreseen = {"memory.predicted_parameter_bytes": 9 * MIB, "memory.predicted_peak_bytes": 33 * MIB}
    blocks = memory.blocks(study(result("native.ddp", metrics=foreseen, peak_mib=44)))
    (bars,) = of_kind(blocks, "bars")
    (row,) = bars["rows"]
    measured, predicted = row["stacks"]
    assert (measured["values"], measured["peak"]) == ([10, 10, 20, None, 4, None], 44)
    assert (predicted["values"], predicted["peak"]) == ([9, None, None, None, None, None], 33)
    (table,) = of_kind(blocks, "table")
    assert [cells(table, column) for column in (2, 3, 4)] == [["44.0"], ["33.0"], ["-25.0"]]


def test_memory_that_was_foreseen_alone_stands_alone() -> None:
    blocks = memory.blocks(study(result("native.ddp", peak_mib=None, metrics={"memory.predicted_peak_bytes": 7 * MIB})))
    (bars,) = of_kind(blocks, "bars")
    assert [(stack["name"], stack["peak"]) for stack in bars["rows"][0]["stacks"]] == [("predicted", 7)]


def test_communication_shows_bytes_shares_and_what_crosses_a_nodes_link() -> None:
    blocks = communication.blocks(ALL)
    on_two, on_four = of_kind(blocks, "table")
    assert [column["title"] for column in on_four["columns"]][:3] == ["case", "sent", "a node's link"]
    assert cells(on_four, 2) == ["20.0", "60.0"], "who waits least comes first"
    assert cells(on_four, 4) == ["60", "90"]
    greyed = {row["cells"][0]["text"]: row["greyed"] for row in on_two["rows"]}
    assert greyed["deepspeed.zero"]
    assert not greyed["native.ddp"]
    (figure,) = of_kind(blocks, "figure")
    stage_3 = next(trace for trace in figure["traces"] if trace["name"] == "native hybrid sharding")
    assert (stage_3["x"], stage_3["y"]) == (["2 x 2 at 200 Mbit/s"], [60])


def test_whoever_leaves_out_an_exchange_does_not_wait_least() -> None:
    twice = [
        result("deepspeed.zero", Layout(data=devices), strategy="zero_1", role="peer", exposed=0.4)
        for devices in (2, 4)
    ]
    parted = dataclasses.replace(
        twice[0],
        case=dataclasses.replace(twice[0].case, options={"stage": 0}),
        status="parity failed",
        metrics={**twice[0].metrics, "communication.exposed_ratio": 0.02},
    )
    floor = result("deepspeed.zero", strategy="zero_1", options={"transport": "none"}, role="floor", exposed=0.0)
    (figure,) = of_kind(communication.blocks(study(*twice, CLIPPED, parted, floor)), "figure")
    (trace,) = figure["traces"]
    assert (trace["x"], trace["y"]) == (["2 devices", "4 devices"], [40, 40])
    without = communication.blocks(study(CLIPPED, dataclasses.replace(parted, case=twice[1].case)))
    assert of_kind(without, "figure") == [], "there is nobody to compare"


@pytest.mark.parametrize("page", [memory, communication])
def test_other_work_is_greyed_and_named_on_every_page(page: Any) -> None:
    blocks = page.blocks(study(*ON_ONE_NODE, CLIPPED))
    rows = [row for block in of_kind(blocks, "table") for row in block["rows"]]
    (own,) = [row for row in rows if row["cells"][0]["text"].startswith("deepspeed.zero clipping")]
    assert own["greyed"]
    assert own["cells"][0]["text"] == "deepspeed.zero clipping=default (other work)"


def test_choose_holds_other_work_behind_with_its_words() -> None:
    stored = choose.choices(study(*ON_ONE_NODE, CLIPPED))
    place = next(one for one in stored["places"] if one["devices"] == 2)
    (number,) = [index for index, one in enumerate(place["candidates"]) if one["otherWork"]]
    clipped = place["candidates"][number]
    assert (clipped["state"], clipped["front"], clipped["same"]) == ("other work", False, True)
    assert [place["reasons"][reason] for _, reason in clipped["whys"]] == [
        "Other work: gradients are clipped at 1, DeepSpeed's default"
    ]


def scaled(devices: int, batch: int, speed: float, **more: Any) -> Result:
    work = f"gpt:size=17m,global_batch_size={batch}"
    if devices == 1:
        return result("reference", Layout(), strategy="single", role="reference", workload=work, speed=speed)
    return result("native.ddp", Layout(data=devices), workload=work, speed=speed, **more)


def test_scaling_tells_strong_from_weak() -> None:
    results = [scaled(1, 4, 100), scaled(2, 4, 150), scaled(4, 4, 160), scaled(1, 2, 80), scaled(4, 8, 192)]
    found = data.studies(results)
    blocks = scaling.blocks(next(one for one in found if one.work.endswith("=4")), found)
    strong, weak = of_kind(blocks, "table")
    assert [cells(strong, column) for column in (1, 2, 3, 4)] == [["2", "4"], ["4", "4"], ["150", "160"], ["75", "40"]]
    assert [cells(weak, column) for column in (1, 2, 3, 4)] == [["2", "4"], ["4", "8"], ["150", "192"], ["94", "60"]]
    perfect = of_kind(blocks, "figure")[0]["traces"][-1]
    assert (perfect["x"], perfect["y"]) == ([1, 2, 4], [100, 200, 200]), "two cores are shared"


def test_in_a_line_the_fastest_setting_counts_and_says_which_it_is() -> None:
    def in_parts(devices: int, num_micro_batches: int, speed: float) -> Result:
        work = f"gpt:size=17m,global_batch_size=4,num_micro_batches={num_micro_batches}"
        return result("native.ddp", Layout(data=devices), workload=work, speed=speed)

    results = [
        scaled(1, 4, 100),
        scaled(2, 4, 150),
        in_parts(2, 4, 170),
        in_parts(2, 2, 120),
        in_parts(4, 2, 190),
        scaled(4, 4, 160),
    ]
    found = data.studies(results)
    blocks = scaling.blocks(found[0], found)
    strong = of_kind(blocks, "table")[0]
    assert [cells(strong, column) for column in (0, 1, 3)] == [["native.ddp"] * 2, ["2", "4"], ["170", "190"]]
    assert [row["cells"][0]["under"] for row in strong["rows"]] == ["num_micro_batches=4", "num_micro_batches=2"]
    line = of_kind(blocks, "figure")[0]["traces"][0]
    assert line["text"] == ["native.ddp num_micro_batches=4", "native.ddp num_micro_batches=2"]
    assert any("the fastest way through the batch counts" in block["text"] for block in of_kind(blocks, "text"))


def test_scaling_leaves_other_work_out_and_says_so() -> None:
    clipped = [
        scaled(devices, 4, 900, options={"clipping": "default"}, other_work="clipped at 1") for devices in (2, 4)
    ]
    found = data.studies([scaled(1, 4, 100), scaled(2, 4, 150), scaled(4, 4, 160), *clipped])
    blocks = scaling.blocks(found[0], found)
    assert cells(of_kind(blocks, "table")[0], 3) == ["150", "160"]
    words = "Left out, as their options depart from the recipe: native.ddp clipping=default (other work)."
    assert words in [block["text"] for block in of_kind(blocks, "text")]


def test_scaling_without_a_second_number_of_devices_says_so() -> None:
    found = data.studies([scaled(1, 4, 100), scaled(2, 4, 150)])
    assert [block["command"] for block in of_kind(scaling.blocks(found[0], found), "missing")] == [
        "meshmark run scaling",
        "meshmark run scaling",
    ]


def test_parity_draws_the_distance_step_by_step_and_explains_a_gap() -> None:
    equal = result("torch.ddp", role="peer", samples={"losses": [5.0, 4.0], "reference_losses": [5.0, 4.0]})
    blocks = parity.blocks(study(*ON_ONE_NODE, dataclasses.replace(equal, suite="other", case=equal.case)))
    (heading,) = of_kind(blocks, "heading")
    assert heading["text"] == "deepspeed.zero trains another model"
    assert str(PARTED.explanation) in heading["note"]
    (figure,) = of_kind(blocks, "figure")
    assert figure["layout"]["yaxis"]["type"] == "log"
    assert figure["layout"]["shapes"][0]["y1"] == 2e-6
    own = next(trace for trace in figure["traces"] if "native.ddp" in trace["text"][0])
    assert own["y"][1] == pytest.approx(0.000001 / 4.500001)
    assert "equal to the last bit" in own["text"][0]
    (table,) = of_kind(blocks, "table")
    assert cells(table, 1).count("FAILED at step 1") == 1


def test_a_distance_is_held_against_what_its_own_case_is_allowed() -> None:
    """Beyond its own tolerance, and within that of another."""

    def run(name: str, tolerance: float, distance: float) -> Result:
        held = dataclasses.replace(HELD, tolerance={**HELD.tolerance, "loss": tolerance})
        samples = {"losses": [4.0, 4.0 * (1 + distance)], "reference_losses": [4.0, 4.0]}
        return result(name, parity=held, samples=samples)

    blocks = parity.blocks(study(run("native.ddp", 2e-6, 1e-5), run("torch.ddp", 5e-5, 1e-5)))
    (figure,) = of_kind(blocks, "figure")
    assert [shape["y1"] for shape in figure["layout"]["shapes"]] == [2e-6, 5e-5]
    words = [(one["text"], one["yanchor"]) for one in figure["layout"]["annotations"]]
    assert words == [("allowed to every case: 2.0e-06", "top"), ("allowed to some: 5.0e-05", "bottom")]
    crosses = figure["traces"][-1]
    assert (crosses["name"], crosses["x"]) == ("beyond what its case is allowed", [1])
    assert crosses["y"] == [pytest.approx(1e-5)]
    assert crosses["text"] == ["native.ddp, 2 devices: off by 1.00e-05, 2.0e-06 is allowed"]
    (within,) = [trace for trace in figure["traces"] if "torch.ddp" in trace["text"][0]]
    assert within["text"][1] == "torch.ddp, 2 devices: off by 1.00e-05, 5.0e-05 is allowed"


def test_what_is_no_finite_number_is_crossed_on_the_top_edge() -> None:
    samples = {"losses": [4.0, "nan", "inf", 4.00004], "reference_losses": [4.0] * 4}
    (figure,) = of_kind(parity.blocks(study(result("native.ddp", samples=samples))), "figure")
    top = 10 ** figure["layout"]["yaxis"]["range"][1]
    own, crosses = figure["traces"]
    assert crosses["x"] == [1, 2, 3]
    assert crosses["y"] == pytest.approx([top, top, 1e-5])
    assert crosses["text"][0] == "native.ddp, 2 devices: no finite number, 2.0e-06 is allowed"
    assert own["y"][1:] == pytest.approx([top, top, 1e-5])
    # Without a tolerance, too, as in results of old.
    untold = dataclasses.replace(HELD, tolerance={})
    (figure,) = of_kind(parity.blocks(study(result("native.ddp", parity=untold, samples=samples))), "figure")
    assert figure["traces"][-1]["x"] == [1, 2]
    assert figure["traces"][-1]["text"][0] == "native.ddp, 2 devices: no finite number"


def test_the_first_step_is_held_against_what_it_is_allowed() -> None:
    held = dataclasses.replace(HELD, tolerance={**HELD.tolerance, "loss": 1e-4, "first_loss": 2e-6})
    samples = {"losses": [4.00004, 4.00004], "reference_losses": [4.0, 4.0]}
    (figure,) = of_kind(parity.blocks(study(result("native.ddp", parity=held, samples=samples))), "figure")
    assert figure["traces"][-1]["text"] == ["native.ddp, 2 devices: off by 1.00e-05, 2.0e-06 is allowed"]
    assert figure["traces"][-1]["x"] == [0]


def test_with_one_tolerance_there_is_one_band_and_no_cross_within_it() -> None:
    (figure,) = of_kind(parity.blocks(study(result("native.ddp"))), "figure")
    assert [one["text"] for one in figure["layout"]["annotations"]] == ["allowed: 2.0e-06"]
    assert len(figure["layout"]["shapes"]) == len(figure["traces"]) == 1


def boxes(text: str) -> list[Box]:
    """`0F0 0B0 / 1F0 1B0`: each rank's actions in order, all as long as they come."""
    made = []
    for rank_number, actions in enumerate(text.split("/")):
        for position, action in enumerate(actions.split()):
            stage, kind, micro_batch = int(action[0]), action[1], int(action[2])
            begin = float(position)
            made.append(
                Box(rank=rank_number, stage=stage, kind=kind, micro_batch=micro_batch, begin=begin, end=begin + 1)
            )
    return made


@pytest.mark.parametrize(
    ("actions", "ratio"),
    [
        ("0F0 0F1 0B0 0B1 / 1F0 1F1 1B0 1B1", 1 / 3),  # GPipe: (p-1)/(m+p-1) for p=2, m=2
        ("0F0 0F1 0B0 0F2 0B1 0B2 / 1F0 1B0 1F1 1B1 1F2 1B2", 1 / 4),  # 1F1B, m=3
        ("0F0 0F1 0I0 0W0 0I1 0W1 / 1F0 1I0 1F1 1W0 1I1 1W1", None),
    ],
)
def test_theory_plays_the_same_actions_with_stages_that_are_alike(actions: str, ratio: float | None) -> None:
    measured = boxes(actions)
    played = theory(measured)
    assert sorted((box.rank, box.words) for box in played) == sorted((box.rank, box.words) for box in measured)
    if ratio is not None:
        assert bubble(played) == pytest.approx(ratio)
    ends = {(box.kind, box.stage, box.micro_batch): box.end for box in played}
    for box in played:
        if box.kind == "F" and box.stage:
            assert box.begin >= ends[("F", box.stage - 1, box.micro_batch)]


def test_what_cannot_be_played_is_left_out() -> None:
    assert theory(boxes("0F0 0B0 / 1F0")) == []


def test_pipeline_shows_each_ranks_actions_beside_theory() -> None:
    def step(*actions: tuple[str, float, float]) -> list[dict[str, Any]]:
        return [{"action": name, "begin": 7 + begin, "end": 7 + end} for name, begin, end in actions]

    actions = [[step(("0F0", 0, 1), ("0B0", 4, 6))], [step(("1F0", 1, 2), ("1B0", 2, 4))]]
    own = result(
        "native.pipeline",
        Layout(pipeline=2),
        strategy="pipeline_parallel",
        bubble=0.5,
        samples={"pipeline": {"actions": actions}},
    )
    blocks = pipeline.blocks(study(own))
    (figure,) = of_kind(blocks, "figure")
    assert "measured: 50 % bubble" in json.dumps(figure["layout"]["annotations"])
    first = figure["traces"][0]
    assert (first["base"], first["x"], first["y"]) == ([0, 1000], [1000, 1000], [0, 1])
    (table,) = of_kind(blocks, "table")
    assert (cells(table, 2), cells(table, 4)) == (["50"], ["50"])


def nights_of(case: Case, levels: list[float]) -> list[CaseRun]:
    return [
        CaseRun(
            case_id=case.id,
            suite_run=f"night-{number}",
            suite="sharding",
            started=1_735_689_600.0 + 86400 * number,
            name="n",
            implementation=case.implementation,
            workload=case.workload,
            precision="fp32",
            status="ok",
            reason="",
            explanation="",
            device="cpu",
            machine=MACHINE,
            environment="e",
            commit="c",
            versions={"torch": "2.13.0" if number < 20 else "2.14.0"},
            metrics={
                "step.median_seconds": level * 0.01 * (1 + 0.005 * math.sin(7 * number)),
                "canary.seconds": 0.01,
            },
        )
        for number, level in enumerate(levels)
    ]


def test_history_marks_where_the_level_moved_and_when_software_changed() -> None:
    own = result("native.ddp")
    blocks = history.blocks(study(own, nights=nights_of(own.case, [1.0] * 20 + [1.1] * 10)))
    (table,) = of_kind(blocks, "table")
    assert [cells(table, column)[0] for column in (1, 3, 4)] == ["environment shift", "30", "night-20"]
    told = dict(part.split(": ", 1) for part in table["columns"][2]["help"].split("; "))
    assert set(told) == {"regressed", "improved", "ok", "suspect", "environment shift"}
    assert told["ok"] == "the last night against its own level"
    _, figure = of_kind(blocks, "figure")
    words = [one["text"] for one in figure["layout"]["annotations"]]
    assert any(word.startswith(("+10", "+9.")) for word in words)
    assert "torch 2.14.0" in words
    assert figure["layout"]["shapes"][0]["x0"] == "2025-01-21 00:00"


def test_history_says_how_many_nights_there_are() -> None:
    own = result("native.ddp")
    (block,) = history.blocks(study(own, nights=nights_of(own.case, [1.0, 1.0])))
    assert "there are 2" in block["text"]
    assert REFERENCE.case.id != own.case.id
