"""The suites that come with Meshmark hold what README promises of them."""

from collections import defaultdict
from pathlib import Path

import pytest

from harness import implementation, models, runner, suites, validation
from harness.case import Case
from harness.progress import SilentProgress

LIBRARIES = {"torch", "deepspeed", "fairscale"}  # FairScale leaves data parallel to torch
TRANSPORTS = ("process_group", "shared_memory")
OURS = {
    "data_parallel": ("native.ddp", "native.floor"),
    "tensor_parallel": ("native.tensor", "native.tensor transport=none"),
    "pipeline_parallel": ("native.pipeline schedule=", "native.pipeline transport=none"),
}


@pytest.mark.parametrize("name", suites.names())
def test_a_suite_can_run_as_it_is(name: str) -> None:
    suite = suites.load(name)
    assert suite.name == name
    assert suite.description
    validation.check(suite.cases)


def test_smoke_holds_both_implementations_against_one_process_on_text_and_on_images() -> None:
    cases = suites.load("smoke").cases
    covered = {(models.load(case.workload).unit, case.implementation, case.world_size) for case in cases}
    parallel = {(name, size) for name in ("native.ddp", "torch.ddp") for size in (2, 4)}
    assert covered == {(unit, *row) for unit in ("tokens", "samples") for row in {("reference", 1), *parallel}}
    assert all(case.measurement.parity_steps >= 3 and case.measurement.communication_steps for case in cases)


def test_peers_compares_ours_over_both_transports_with_a_peer_and_the_floor_everywhere() -> None:
    suite = suites.load("peers")
    assert suite.interleaved
    groups: dict[tuple[str, ...], list[Case]] = defaultdict(list)
    for case in suite.cases:
        groups[case.side_by_side].append(case)
    places = [
        (models.load(cases[0].workload).training.global_batch_size, cases[0].world_size, cases[0].comparison)
        for cases in groups.values()
    ]
    sharded = ["zero_1", "zero_2", "zero_3"]
    at_small_batch = ["data_parallel", *sharded, "tensor_parallel", "pipeline_parallel"]
    assert sorted(places) == sorted(
        [
            *((4, world_size, strategy) for world_size in (2, 4) for strategy in at_small_batch),
            (8, 2, "pipeline_parallel"),
            (16, 2, "data_parallel"),
        ]
    )
    for cases in groups.values():
        roles = {role: {case.label for case in cases if case.role == role} for role in ("subject", "floor", "peer")}
        strategy = cases[0].comparison
        sharded = f"native.zero stage={strategy.removeprefix('zero_')}", "native.floor shards_update=True"
        ours, floor = OURS.get(strategy, sharded)
        variants = (
            ("1f1b", "zero_bubble", "zero_bubble_h2")
            if strategy == "pipeline_parallel"
            else ("", " transport=shared_memory")
        )
        assert roles["subject"] == {f"{ours}{variant}" for variant in variants}
        assert floor in roles["floor"]
        for case in cases:
            if case.role != "floor":
                kind = implementation.load(case.implementation)
                strategies_of_case = {kind.strategy_of(case.options), *kind.comparable_strategies(case.options)}
                assert case.comparison in strategies_of_case, f"{case.label} does not belong in {case.comparison}"
        libraries = {case.implementation.partition(".")[0] for case in cases if case.role == "peer"}
        assert libraries == LIBRARIES - ({"fairscale"} if strategy == "data_parallel" else set())
        assert len({case.measurement for case in cases}) == 1, "a comparison measures all of its members alike"
        assert cases[0].measurement.rounds >= 4, "fewer rounds have no spread"


def test_sharding_compares_every_stage_with_data_parallel_and_a_peer_against_the_floor() -> None:
    suite = suites.load("sharding")
    assert suite.interleaved
    cases = [case for case in suite.cases if case.role != "reference"]
    over_all, in_pairs = ({case.label: case for case in cases if case.world_size == size} for size in (2, 4))
    ours = {f"native.zero stage={stage} transport={name}" for stage in (1, 2, 3) for name in TRANSPORTS}
    theirs = {"torch.ddp", "torch.zero", *(f"torch.fsdp reshard_after_forward={value}" for value in (True, False))}
    assert over_all.keys() == {"native.floor", "native.ddp", *ours, *theirs}
    assert {label for label, case in over_all.items() if case.role == "peer"} == theirs
    floor = "native.floor shards_update=True"
    assert in_pairs.keys() == {floor, "native.zero stage=3", "torch.fsdp reshard_after_forward=True"}
    assert all(case.layout.shard == 2 for case in in_pairs.values())
    for members, label in ((over_all, "native.floor"), (in_pairs, floor)):
        assert members[label].role == "floor"
        assert len({case.measurement for case in members.values()}) == 1, "a comparison measures all alike"
    measurement = over_all["native.ddp"].measurement
    assert measurement.memory_steps
    assert measurement.communication_steps
    assert next(iter(over_all)) == "native.floor"
    assert list(over_all)[1] == "native.ddp", "the first that trains is what the page compares the others with"


def test_nightly_holds_every_family_and_ours_to_the_last_digit() -> None:
    cases = suites.load("nightly").cases
    timed = [case for case in cases if case.measurement.timed_steps]
    assert {case.implementation.partition(".")[0] for case in timed} == {"reference", "native", *LIBRARIES}
    ours = {(case.label, case.layout) for case in timed if case.role == "subject"}
    assert {label.partition(" ")[0] for label, _ in ours} == set(implementation.names()) & {
        "native.ddp",
        "native.zero",
        "native.tensor",
        "native.pipeline",
        "native.hybrid",
    }
    exact = [case for case in cases if case.precision == "fp64"]
    assert {(case.label, case.layout) for case in exact} == ours, "fp64 losses must stay what they are"
    assert not any(case.measurement.timed_steps for case in exact), "and are not timed"
    assert {case.workload for case in cases} == {cases[0].workload}
    assert max(case.world_size for case in cases) <= 4


def test_peers_trains_the_model_that_is_heavy_on_communication() -> None:
    workload = models.load(suites.load("peers").cases[0].workload)
    num_parameters = sum(parameter.numel() for parameter in workload.build_model().parameters())
    assert 16e6 < num_parameters < 18e6


def test_every_pitfall_stands_beside_the_same_work_without_it() -> None:
    cases = suites.load("pitfalls").cases
    pitfalls = [case for case in cases if case.expected == "parity failed"]
    sound = {(case.implementation, case.workload, case.layout) for case in cases if case.expected == "ok"}
    assert len(pitfalls) >= 2
    for case in pitfalls:
        assert case.options, f"{case.label}: no setting of its own"
        assert (case.implementation, case.workload, case.layout) in sound


@pytest.mark.baselines
def test_the_gate_sees_every_pitfall_and_nothing_else(tmp_path: Path) -> None:
    results = runner.run(suites.load("pitfalls"), tmp_path, progress=SilentProgress())
    known = [result for result in results if result.status != "unavailable"]
    if not known:
        pytest.skip(f"no library is there: {results[0].reason}")
    assert [result.status for result in known] == [result.case.expected for result in known]
    for result in known:
        if result.is_as_expected:
            assert "no single factor" not in str(result.reason), result.reason


def test_scaling_keeps_the_batch_or_each_ranks_share_of_it() -> None:
    cases = suites.load("scaling").cases
    batches: dict[tuple[str, int], set[int]] = defaultdict(set)
    for case in cases:
        batches[case.label, case.world_size].add(models.load(case.workload).training.global_batch_size)
    assert batches["reference", 1] == {2, 4}, "one process at either end"
    along_data = {case.label for case in cases if case.layout.data > 1}
    assert along_data == {"native.ddp", "torch.ddp", *(f"native.zero stage={stage}" for stage in (1, 2, 3))}
    for label in along_data:
        assert (batches[label, 2], batches[label, 4]) == ({4}, {4, 8})
    strong = [case for case in cases if case.layout.tensor * case.layout.pipeline > 1]
    assert {case.implementation for case in strong} == {"native.tensor", "native.pipeline"}
    assert all(models.load(case.workload).training.global_batch_size == 4 for case in strong)
