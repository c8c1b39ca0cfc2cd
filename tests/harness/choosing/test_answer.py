"""`meshmark choose`: which work is meant, and what is said where nothing was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness import cli
from harness.choosing import answer as answers
from harness.choosing.answer import Answer, answer
from harness.choosing.candidates import Place
from harness.choosing.predictions import grown
from harness.choosing.sources import on_their_machines
from harness.layout import Layout
from harness.result import append
from tests.harness.choosing.scenes import CLIPPED, EVERYTHING, MACHINE, MIB, MISSING, WORK, result


def ask(place: Place, *, model: str | None = WORK, mib: float = 100.0) -> Answer:
    return answer(EVERYTHING, model=model, precision=None, place=place, memory_bytes=mib * MIB)


def text(said: Answer) -> str:
    console = Console(file=StringIO(), width=160)
    console.print(answers.table(said))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_what_was_measured_is_ranked_with_its_reasons() -> None:
    said = ask(Place(num_devices=2), mib=40)
    assert (said.ranked[0].candidate.label, said.ranked[0].rank, said.notes) == ("native.zero stage=1", 1, ())
    lines = text(said).splitlines()
    assert "gpt size=17m global_batch_size=4, fp32: 2 devices with 40.0 MiB each" in lines[0]
    first = next(line for line in lines if "native.zero stage=1, data=2" in line)
    assert first.split()[:1] == ["1"]
    assert [word in first for word in ("950", "34.0 MiB", "20 %", "10.0 MiB", "ok")] == [True] * 5
    assert "Unavailable: FairScale is not installed." in text(said) or "FairScale is not installed" in text(said)


def test_other_work_is_labelled_in_words_and_dimmed() -> None:
    said = answer(
        [*EVERYTHING, CLIPPED], model=WORK, precision=None, place=Place(num_devices=2), memory_bytes=100 * MIB
    )
    assert said.ranked[0].candidate.label == "native.ddp"
    assert "Other work: gradients are clipped at 1, DeepSpeed's default" in text(said)
    (row,) = [line for line in text(said).splitlines() if "clipping=default" in line]
    assert row.split()[0] == "-"
    assert "ok, other" in row
    strategies: Any = answers.to_json(said)["strategies"]
    (clipped,) = [one for one in strategies if one["other_work"]]
    assert (clipped["state"], clipped["rank"], clipped["on_front"]) == ("other work", None, False)


def test_what_is_predicted_of_other_work_is_none_of_the_recipe_s(tmp_path: Path) -> None:
    file = tmp_path / "plan.py"
    file.write_text(_CLIPPING_BY_ITSELF)
    measured = [
        result(f"{file}:Plan", options={"bucket_bytes": 999}, workload="gpt:size=tiny", other_work="clips"),
        result("native.ddp", workload="gpt:size=tiny"),
    ]
    said = answer(measured, model=None, precision=None, place=Place(num_devices=4), memory_bytes=1e9)
    assert [(one.candidate.label, one.state) for one in said.ranked] == [
        ("native.ddp", "fits"),
        (f"{file}:Plan bucket_bytes=999", "other work"),
    ]
    assert said.ranked[1].why == "Other work: clips by 999 over data=4"


_CLIPPING_BY_ITSELF = """
from impls.native.ddp import *
class Plan(NativeDataParallel):
    @classmethod
    def other_work(cls, workload, layout, options):
        return f"clips by {options['bucket_bytes']} over {layout}" if "bucket_bytes" in options else None
"""


def test_the_machine_is_named_and_so_are_others_that_did_the_same() -> None:
    faster = result("native.ddp", machine="machine-b", speed=2000, started=1.9e9)
    elsewhere = {(WORK, "fp32", "machine-c"), (WORK, "bf16", "machine-d"), (WORK, "fp32", MACHINE)}

    def asked(machine: str | None) -> Answer:
        return answer(
            [*EVERYTHING, faster],
            model=WORK,
            precision=None,
            place=Place(num_devices=2),
            memory_bytes=100 * MIB,
            machine=machine,
            elsewhere=elsewhere,
        )

    last = asked(None)
    assert last.origins == ("on a processor, 2 cores, torch 2.13.0 (machine machine-b), in sharding-20300101",)
    assert last.notes == (
        "the same work was measured on other machines, too; --machine takes one: machine-a (a processor, 2 cores, "
        "torch 2.13.0), machine-c",
    )
    assert "measured on a processor, 2 cores, torch 2.13.0 (machine machine-b)" in text(last)
    assert answers.to_json(last)["machine"] == "machine-b"
    assert [one.candidate.units_per_second for one in last.ranked if one.rank == 1] == [2000]
    first = asked("machine-a")
    assert first.situation.machine == MACHINE
    assert [one.candidate.units_per_second for one in first.ranked if one.rank == 1] == [1000]
    with pytest.raises(
        ValueError, match=r"--machine z: expected the fingerprint of one that measured: machine-a, mach"
    ):
        asked("z")


@pytest.mark.parametrize("name", ["[bold]", "[/]", "[red]x[/red]"])
def test_a_workload_that_looks_like_markup_stays_what_it_is(name: str) -> None:
    own = result("native.ddp", workload=f"gpt:note={name}")
    said = answer([own], model=None, precision=None, place=Place(num_devices=2), memory_bytes=100 * MIB)
    assert f"gpt note={name}, fp32: 2 devices" in text(said).splitlines()[0]


def test_a_part_of_a_suite_is_told_of() -> None:
    part = result("native.ddp", suite_run="sharding-20300102", started=1.9e9, num_suite_cases=12)
    said = answer([*EVERYTHING, part], model=WORK, precision=None, place=Place(num_devices=2), memory_bytes=100 * MIB)
    assert said.notes == (
        "suite sharding: 1 case of sharding-20300102, 10 of sharding-20300101; 1 case of the suite was not measured",
    )
    assert said.origins[0].endswith(", in sharding-20300101, sharding-20300102")


def test_over_a_link_that_was_not_measured_times_are_not_known() -> None:
    said = ask(Place(num_devices=2, num_nodes=2, link_mbits=1000))
    assert all(one.candidate.units_per_second is None for one in said.ranked)
    assert said.notes == (
        "nothing was measured on 2 devices on 2 nodes at 1 Gbit/s: times are not known, measured were 1 device, "
        "2 devices, 4 devices on 2 nodes at 200 Mbit/s",
    )
    assert "note: nothing was measured" in text(said).replace("\n", " ")


def test_with_devices_that_were_not_measured_memory_and_bytes_are_predicted() -> None:
    measured = [
        result("native.ddp", workload="gpt:size=tiny"),
        result("native.zero", strategy="zero_3", options={"stage": 3}, workload="gpt:size=tiny"),
        result("native.pipeline", Layout(pipeline=2), strategy="pipeline_parallel", workload="gpt:size=tiny"),
    ]
    place = Place(num_devices=4)
    said = answer(measured, model="gpt:size=tiny", precision=None, place=place, memory_bytes=1e9)
    by_label = {one.candidate.label: one for one in said.ranked}
    assert by_label.keys() == {"native.ddp", "native.zero stage=3", "native.pipeline num_micro_batches=8"}
    assert {one.candidate.basis for one in said.ranked} == {"predicted"}
    whole, sharded = (by_label[label].candidate for label in ("native.ddp", "native.zero stage=3"))
    assert whole.state_bytes["parameter"] == pytest.approx(4 * sharded.state_bytes["parameter"], rel=0.01)
    assert whole.peak_bytes is not None
    assert sharded.peak_bytes is not None
    assert whole.peak_bytes > sharded.peak_bytes > sum(sharded.state_bytes[name] for name in ("parameter", "optimizer"))
    assert whole.sent_bytes is not None
    assert whole.sent_bytes == pytest.approx(2 * 3 / 4 * whole.state_bytes["gradient"])
    assert by_label["native.zero stage=3"].rank is None, "what has no time has no rank"
    assert "are predicted, times are not known" in said.notes[0]
    assert "predicted" in text(said)


@pytest.mark.parametrize(
    ("measured", "place", "layout"),
    [
        (Layout(data=2), Place(num_devices=8), Layout(data=8)),
        (Layout(tensor=2), Place(num_devices=8), Layout(tensor=8)),
        (Layout(pipeline=4), Place(num_devices=2), Layout(pipeline=2)),
        (Layout(data=2, tensor=2), Place(num_devices=8), Layout(data=4, tensor=2)),
        (Layout(data=2, tensor=2), Place(num_devices=3), None),
        (Layout(data=4, shard=2), Place(num_devices=8, num_nodes=2), Layout(data=8, shard=4)),
        (Layout(data=4, shard=2), Place(num_devices=8), Layout(data=8, shard=2)),
        (Layout(data=4, shard=2), Place(num_devices=2), None),
        (Layout(data=2), Place(num_devices=3, num_nodes=2), None),
    ],
)
def test_how_a_layout_grows(measured: Layout, place: Place, layout: Layout | None) -> None:
    assert grown(measured, place) == layout


def test_it_must_be_clear_which_work_is_meant() -> None:
    two = [result("native.ddp"), result("native.ddp", workload="gpt:size=17m,global_batch_size=8")]
    with pytest.raises(
        ValueError, match=r"--model gpt: expected one piece of work with one precision, got 2: gpt:size=17m"
    ):
        answer(two, model="gpt", precision=None, place=Place(num_devices=2), memory_bytes=1e9)
    said = answer(two, model="gpt:global_batch_size=8", precision=None, place=Place(num_devices=2), memory_bytes=1e9)
    assert said.situation.work == "gpt:size=17m,global_batch_size=8"


def test_a_precision_that_was_not_measured_is_named_beside_those_that_were() -> None:
    with pytest.raises(ValueError, match=rf"--precision fp7: expected one piece of work .* measured were {WORK} fp32"):
        answer(EVERYTHING, model=None, precision="fp7", place=Place(num_devices=2), memory_bytes=MIB)


def test_a_case_that_never_started_is_put_on_the_machine_of_its_suite_run() -> None:
    lost = replace(MISSING, environment={})
    elsewhere = replace(lost, suite="another", suite_run="another")
    before = replace(lost, suite_run="before", started=lost.started - 1)
    # Nothing started in that run: it is taken to be on the machine of the one before.
    after = replace(lost, suite_run="after", started=lost.started + 1)
    found = on_their_machines([*EVERYTHING, lost, elsewhere, before, after])
    assert [one.environment.get("machine_fingerprint") for one in found[-4:]] == [MACHINE, None, None, MACHINE]


def test_what_never_started_is_not_the_last_machine_that_did_the_work() -> None:
    lost = replace(MISSING, environment={}, started=1.9e9)
    said = answer([*EVERYTHING, lost], model=WORK, precision=None, place=Place(num_devices=2), memory_bytes=100 * MIB)
    assert said.situation.machine == MACHINE


def test_the_command_prints_the_same_and_says_bad_input_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "results"
    directory.mkdir()
    for one in EVERYTHING:
        append(directory, one)
    common = ["choose", "--devices", "2", "--results", str(directory)]
    assert cli.main([*common, "--memory", "40MiB", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [one["label"] for one in said["strategies"] if one["rank"]] == [
        "native.zero stage=1",
        "native.zero stage=2",
        "native.zero stage=3",
    ]
    assert cli.main([*common, "--memory", "lots"]) == 2
    assert "expected an amount of memory such as 24GiB or 512MiB, got 'lots'" in capsys.readouterr().err
    assert cli.main([*common, "--memory", "1GiB", "--nodes", "3"]) == 2
    assert "cannot be spread evenly over 3 nodes" in capsys.readouterr().err
    assert cli.main(["choose", "--devices", "2", "--memory", "1GiB", "--results", str(tmp_path)]) == 2
    assert "expected a results directory" in capsys.readouterr().err
