"""Suites of cases that go wrong: each gets a result true to fact, leaves no rank, and the suite goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness import room, runner, suite_file
from harness.case import Case, Measurement, Suite
from harness.launch.failure import LaunchFailed
from harness.layout import Layout
from harness.progress import SilentProgress
from harness.result import RESULTS_FILE, Result, read
from harness.runner import NotWritten

FAULTY = Path(__file__).with_name("launch") / "faulty.py"
TIMED = Measurement(parity_steps=0, warm_up_steps=1, timed_steps=2, rounds=6, communication_steps=0, memory_steps=0)


def case(fault: str, world_size: int = 2, **others: Any) -> Case:
    values: dict[str, Any] = {
        "workload": "awkward:kind=unequal_tokens",
        "implementation": f"{FAULTY}:{fault}",
        "layout": Layout(data=world_size),
        "measurement": TIMED,
        "deadline_seconds": 60.0,
    }
    return Case(**{**values, **others})


def ranks_of(case: Case) -> list[str]:
    """The processes that write to the case's logs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if f"/{case.id}/" in str(path.readlink()):
                found.append(path.parts[2])
        except OSError:
            continue
    return found


class Watched(SilentProgress):
    """Sees at the end of every case that none of its ranks is left."""

    def __init__(self) -> None:
        self.started: list[Case] = []
        self.left: list[str] = []

    def case_started(self, case: Case) -> None:
        self.started.append(case)

    def case_finished(self, result: Result) -> None:
        self.left += ranks_of(result.case)


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """One interleaved suite of cases of which only two are sound, by the name of the fault."""
    cases = (
        case("Sound", role="subject"),
        case("DiesInWarmUp", role="peer"),
        case("Raises"),
        case("Slow", role="peer", deadline_seconds=4.0),
        case("NotFinite"),
        case("Unsupported"),
        case("NoLoss", measurement=Measurement(timed_steps=0, memory_steps=0, communication_steps=0)),
        case("Talks", role="peer"),
    )
    progress = Watched()
    directory = tmp_path_factory.mktemp("side_by_side")
    results = runner.run(Suite(name="faults", cases=cases, interleaved=True), directory, progress=progress)
    assert [result.case.id for result in results] == [each.id for each in cases]
    written = {result.case.id: (result.status, result.reason, result.metrics) for result in read(directory)}
    assert written == {result.case.id: (result.status, result.reason, result.metrics) for result in results}
    assert progress.left == []
    rows = json.loads((directory / "ratios.json").read_text())
    assert [row["implementation"].rpartition(":")[2] for row in rows] == ["Sound", "Talks"]
    return {result.case.implementation.rpartition(":")[2]: result for result in results}


@pytest.mark.parametrize("name", ["Sound", "Talks"])
def test_what_is_sound_is_measured_beside_what_is_not(side_by_side: dict[str, Result], name: str) -> None:
    result = side_by_side[name]
    assert (result.status, result.reason, result.culprit, result.traceback) == ("ok", None, None, None)
    assert [len(seconds) for seconds in result.samples["step_seconds"]] == [12, 12]
    assert result.metrics["step.num_samples"] == 12.0


@pytest.mark.parametrize(
    ("name", "status", "culprit", "reason"),
    [
        ("DiesInWarmUp", "failed", 1, "rank 1 left with exit code 3 and no record during warm_up (warming up 0/1)"),
        ("Raises", "failed", 1, "rank 1: ValueError: the third bucket"),
        ("NotFinite", "failed", None, "not a finite number: cpu.seconds_per_step"),
        ("Unsupported", "failed", None, "KeyError: 'tensor'"),
        ("NoLoss", "failed", None, "ValueError: step 0: expected the loss on some rank, every rank answered none"),
    ],
)
def test_a_failed_case_says_what_happened(
    side_by_side: dict[str, Result], name: str, status: str, culprit: int | None, reason: str
) -> None:
    result = side_by_side[name]
    assert (result.status, result.culprit) == (status, culprit)
    assert result.reason is not None
    assert result.reason.startswith(reason)
    assert "\n" not in result.reason
    assert result.traceback is not None or name in ("DiesInWarmUp", "NotFinite")


def test_the_deadline_holds_over_all_rounds(side_by_side: dict[str, Result]) -> None:
    """Each round takes a second, well within it."""
    slow = side_by_side["Slow"]
    assert slow.status == "timed out"
    assert "within the deadline of 4 s" in (slow.reason or "")
    assert "step.median_seconds" not in slow.metrics


def test_a_case_without_a_reference_fails_and_the_next_one_is_sound(tmp_path: Path) -> None:
    cases = (case("Sound", workload=f"{FAULTY}:unbuildable"), case("Sound", world_size=1))
    suite, figures = Suite(name="s", cases=cases), {"seconds": 0.5}
    failed, sound = runner.run(suite, tmp_path, progress=SilentProgress(), canary=lambda: figures)
    assert sound.environment["canary"] == figures
    assert (failed.status, failed.culprit) == ("failed", None)
    assert failed.reason == "the reference: rank 0: RuntimeError: no such layer"
    assert "_cannot_be_built" in (failed.traceback or "")
    assert sound.status == "ok"


class Interrupts(Watched):
    """Ctrl-C while a case is timed."""

    def __init__(self, when: Callable[[Case, str], bool]) -> None:
        super().__init__()
        self.when = when

    def phase(self, case: Case, text: str, done: int, total: int) -> None:
        if self.when(case, text):
            raise KeyboardInterrupt


def test_an_interrupted_suite_is_resumed_where_it_was(tmp_path: Path) -> None:
    first, second, broken = (case("Sound", 1), case("Sound", 2), case("LeavesWithThree"))
    suite = Suite(name="s", cases=(first, second, broken))
    with pytest.raises(KeyboardInterrupt):
        runner.run(suite, tmp_path, progress=Interrupts(lambda case, text: case == second and text == "timing"))
    assert ranks_of(second) == []
    assert [result.case.id for result in read(tmp_path)] == [first.id]

    with (tmp_path / RESULTS_FILE).open("a") as file:
        file.write('{"case": {"id": "torn')
    with pytest.raises(ValueError, match="holds results already"):
        runner.run(suite, tmp_path, progress=SilentProgress())
    for expected in ([second, broken], [broken]):  # what failed is tried again
        progress = Watched()
        results = runner.run(suite, tmp_path, progress=progress, resume=True)
        assert progress.started == expected
        assert [(result.case.id, result.status) for result in results] == [
            (first.id, "ok"), (second.id, "ok"), (broken.id, "failed"),
        ]  # fmt: skip
        assert {r.case.id: r.status for r in read(tmp_path)} == {r.case.id: r.status for r in results}
        assert {result.suite_run for result in results} == {read(tmp_path)[0].suite_run}


@pytest.fixture
def unavailable(tmp_path: Path) -> Suite:
    """A suite that starts no process."""
    (tmp_path / "missing.py").write_text("import nonesuch")
    return Suite(name="s", cases=(case("", implementation=f"{tmp_path / 'missing.py'}:Plan"),))


def test_a_resume_does_not_time_a_group_again_for_what_cannot_run_here_still(tmp_path: Path) -> None:
    plan = tmp_path / "peer.py"
    plan.write_text("import nonesuch")
    sound, peer = case("Sound", role="subject"), case("", implementation=f"{plan}:Plan", role="peer")
    suite = Suite(name="s", cases=(sound, peer), interleaved=True)
    for expected in ([sound, peer], []):
        progress = Watched()
        results = runner.run(suite, tmp_path / "results", progress=progress, resume=True)
        assert progress.started == expected
        assert [result.status for result in results] == ["ok", "unavailable"]
    plan.write_text(f"import runpy\nPlan = runpy.run_path({str(FAULTY)!r})['Sound']")
    progress = Watched()
    results = runner.run(suite, tmp_path / "results", progress=progress, resume=True)
    assert progress.started == [sound, peer]
    assert [result.status for result in results] == ["ok", "ok"]


@pytest.mark.parametrize("torn", ["", '{"suite": "s", "sui', "[]", "{}"])
def test_a_resume_writes_a_torn_suite_file_anew(torn: str, unavailable: Suite, tmp_path: Path) -> None:
    (tmp_path / "suite.json").write_text(torn)
    (result,) = runner.run(unavailable, tmp_path, progress=SilentProgress(), resume=True)
    assert json.loads((tmp_path / "suite.json").read_text()) == {"suite": "s", "suite_run": result.suite_run}
    assert result.suite_run.startswith("s-")


def test_what_was_typed_is_kept_beside_the_results(unavailable: Suite, tmp_path: Path) -> None:
    for pattern in ("one", "two", "two"):
        runner.run(
            unavailable, tmp_path, progress=SilentProgress(), resume=True, command=f"meshmark run s --only {pattern}"
        )
    assert suite_file.commands(tmp_path) == ["meshmark run s --only one", "meshmark run s --only two"]


def test_commands_that_are_not_all_known_are_not_told(unavailable: Suite, tmp_path: Path) -> None:
    assert suite_file.commands(tmp_path) == []
    runner.run(unavailable, tmp_path, progress=SilentProgress())
    runner.run(unavailable, tmp_path, progress=SilentProgress(), resume=True, command="meshmark run s --only two")
    assert suite_file.commands(tmp_path) == []


def test_a_directory_takes_one_run_at_a_time(unavailable: Suite, tmp_path: Path) -> None:
    class StartsAnother(SilentProgress):
        refusal = ""

        def suite_started(self, suite: Suite, cases: Sequence[Case]) -> None:
            with pytest.raises(ValueError) as raised:
                runner.run(suite, tmp_path, progress=SilentProgress(), resume=True)
            self.refusal = str(raised.value)

    progress = StartsAnother()
    runner.run(unavailable, tmp_path, progress=progress)
    assert progress.refusal == f"{tmp_path}: another run is writing here"
    assert len((tmp_path / RESULTS_FILE).read_text().splitlines()) == 1
    runner.run(unavailable, tmp_path, progress=SilentProgress(), resume=True)  # the lock ended with the run


def test_a_full_disk_ends_the_run_keeps_the_result_elsewhere_and_leaves_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / RESULTS_FILE).symlink_to("/dev/full")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr(runner.tempfile, "tempdir", str(elsewhere))
    cases = (case("Sound", 1), case("Sound", 2))
    suite = Suite(name="s", cases=cases, interleaved=True)
    with pytest.raises(NotWritten) as raised:
        runner.run(suite, tmp_path, progress=SilentProgress())
    (kept,) = elsewhere.glob("unwritten-*/results.jsonl")
    assert str(raised.value) == (
        f"cannot write a result: No space left on device: {tmp_path}/results.jsonl; the last result is in {kept}"
    )
    assert [(result.case.id, result.status) for result in read(kept.parent)] == [(cases[0].id, "ok")]
    assert [ranks_of(each) for each in cases] == [[], []]


def test_memory_does_not_depend_on_what_ran_before(tmp_path: Path) -> None:
    measurement = Measurement(parity_steps=0, timed_steps=0, communication_steps=0, memory_steps=1)
    cases = [
        case("Sound", data, implementation=name, measurement=measurement)
        for name, data in (("native.ddp", 2), ("reference", 1))
    ]
    peaks = []
    for number, order in enumerate((cases, cases[::-1])):
        results = runner.run(Suite(name="s", cases=tuple(order)), tmp_path / str(number), progress=SilentProgress())
        assert [result.status for result in results] == ["ok", "ok"]
        peaks.append({r.case.id: r.metrics["memory.peak_allocated_bytes.max_rank"] for r in results})
    assert peaks[0] == peaks[1]
    assert len(set(peaks[0].values())) == 2


def test_a_pipelines_waiting_stands_beside_theorys(tmp_path: Path) -> None:
    measurement = Measurement(parity_steps=0, timed_steps=0, communication_steps=0, memory_steps=0, pipeline_steps=2)
    of = {"workload": "gpt:size=tiny,num_micro_batches=2", "measurement": measurement}
    cases = (
        case("", implementation="native.pipeline", layout=Layout(pipeline=2), **of),
        case("", implementation="native.ddp", **of),
    )

    def dead() -> Mapping[str, float]:
        raise LaunchFailed("failed", "rank 1 died")

    piped, other = runner.run(Suite(name="s", cases=cases), tmp_path, progress=SilentProgress(), canary=dead)
    assert "canary" not in other.environment, "and its case is none the worse for it"
    assert (piped.status, other.status) == ("ok", "ok"), piped.reason
    assert 0 < piped.metrics["pipeline.bubble_ratio"] < 1
    assert 0 < piped.metrics["pipeline.replayed_bubble_ratio"] < 1
    assert piped.metrics["pipeline.predicted_bubble_ratio"] == pytest.approx(1 / 3)
    assert piped.metrics["pipeline.in_flight_micro_batches"] == 2
    assert piped.metrics["pipeline.predicted_in_flight_micro_batches"] == 2
    kept = read(tmp_path)[0].samples["pipeline"]
    assert kept["in_flight"] == kept["predicted_in_flight"] == [2, 1]
    assert [len(ratios) for ratios in (kept["bubble_ratios"], kept["replayed_bubble_ratios"])] == [2, 2]
    last = [[recorded["action"] for recorded in step] for step in kept["actions"][1]]
    assert last == [["1F0", "1B0", "1F1", "1B1"]] * 2
    assert not [name for name in other.metrics if name.startswith("pipeline.")]


def test_a_case_for_which_there_is_no_room_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter([100, 100, 40, 40])
    monkeypatch.setattr(room, "available_bytes", lambda: next(left) * 2**20)
    progress = Watched()
    suite = Suite(name="s", cases=(case("Sound"), case("Talks", role="peer")), interleaved=True)
    sound, crowded = runner.run(suite, tmp_path, progress=progress)
    assert (sound.status, crowded.status) == ("ok", "out of memory")
    assert len(sound.samples["step_seconds"][0]) == 12
    assert crowded.samples == {}
    assert "1 cases of the comparison are in memory" in str(crowded.reason)
    assert progress.left == []


def test_cases_are_timed_side_by_side_with_their_like_only() -> None:
    like = [case("Sound"), case("Slow")]
    others = [case("Sound", 1), case("Sound", precision="bf16"), case("Sound", workload="gpt:size=tiny")]
    mixed = (like[0], *others, like[1])
    assert runner._groups(Suite(name="s", cases=mixed, interleaved=True)) == [like, *([other] for other in others)]
    assert runner._groups(Suite(name="s", cases=mixed)) == [[each] for each in mixed]


def test_a_case_that_is_known_to_part_must_part(tmp_path: Path) -> None:
    measurement = Measurement(parity_steps=3, timed_steps=0, communication_steps=0, memory_steps=0)
    of = {"implementation": "native.ddp", "measurement": measurement, "expected": "parity failed"}
    cases = (case("", options={"reduction": "none"}, **of), case("", 1, **of))
    unreduced, right = runner.run(Suite(name="s", cases=cases), tmp_path, progress=SilentProgress())
    assert (unreduced.status, unreduced.is_harmless) == ("parity failed", True)
    assert "rank 0's share alone: not reduced" in (unreduced.reason or "")
    assert (right.status, right.is_harmless) == ("failed", False)
    assert right.reason == "expected to part from the reference, and did not"
    assert right.parity is not None
    assert right.parity.ok
    assert [each.case.expected for each in read(tmp_path)] == ["parity failed", "parity failed"]


@pytest.mark.parametrize(
    ("source", "status", "reason"),
    [
        ("import nonesuch", "unavailable", "ModuleNotFoundError: No module named 'nonesuch'"),
        ("from harness.layout import Plan", "failed", "cannot import name 'Plan'"),
        ("Plan", "failed", "NameError: name 'Plan' is not defined"),
        ("class Plan: pass", "failed", "expected a subclass of Implementation"),
    ],
)
def test_a_missing_library_is_harmless_and_broken_code_is_not(
    source: str, status: str, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / f"{status}.py"
    file.write_text(source)
    cases = (case("", implementation=f"{file}:Plan"),)
    (result,) = runner.run(Suite(name="s", cases=cases), tmp_path / "results", progress=SilentProgress())
    assert result.status == status
    assert reason in (result.reason or "")


_UNPREPARED = """
from impls.native.floor import *
class Plan(ComputeFloor):
    @classmethod
    def prepare(cls, options):
        raise RuntimeError("no compiler\\nand a long log")
"""


def test_what_cannot_be_prepared_is_unavailable_with_one_line(tmp_path: Path) -> None:
    file = tmp_path / "plan.py"
    file.write_text(_UNPREPARED)
    cases = (case("", implementation=f"{file}:Plan"),)
    (result,) = runner.run(Suite(name="s", cases=cases), tmp_path / "results", progress=SilentProgress())
    assert (result.status, result.reason) == ("unavailable", "RuntimeError: no compiler")


_CLIPPING_BY_ITSELF = """
from impls.native.ddp import *
class Plan(NativeDataParallel):
    @classmethod
    def other_work(cls, workload, layout, options):
        return f"clips by {options['bucket_bytes']} over {layout}" if "bucket_bytes" in options else None
"""


def test_other_work_is_told_in_the_results_of_whatever_parity_says(tmp_path: Path) -> None:
    file = tmp_path / "plan.py"
    file.write_text(_CLIPPING_BY_ITSELF)
    measurement = Measurement(parity_steps=3, timed_steps=0, communication_steps=0, memory_steps=0)
    of = {"implementation": f"{file}:Plan", "measurement": measurement}
    cases = (case("", 1, options={"bucket_bytes": 999}, **of), case("", 1, **of))
    runner.run(Suite(name="s", cases=cases, num_left_out=3), tmp_path / "results", progress=SilentProgress())
    found = read(tmp_path / "results")
    assert [each.status for each in found] == ["ok", "ok"]
    assert [each.other_work for each in found] == ["clips by 999 over single", None]
    assert [each.num_suite_cases for each in found] == [5, 5], "with those that were left out"
