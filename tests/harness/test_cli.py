import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import cli, suites
from harness.case import Case
from harness.layout import Layout
from harness.result import Result, append
from tests.harness.test_readme_figures import README, RUN

BAD_SUITE = """
from harness.case import Case, Suite

suite = Suite(name="bad", cases=(Case(workload="gpt", implementation="native.ddp", options={OPTIONS}),))
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test in a directory of its own: results and MLflow's store land in the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def bad_suite(options: str) -> str:
    Path("bad_suite.py").write_text(BAD_SUITE.replace("{OPTIONS}", options))
    return "bad_suite.py"


def results(directory: Path, *statuses: str) -> Path:
    directory.mkdir()
    for number, status in enumerate(statuses, start=2):
        case = Case(workload="gpt", implementation="torch.ddp", layout=Layout(data=number))
        metrics = {"throughput.tokens_per_second": 1234.0} if status == "ok" else {}
        append(directory, Result(case=case, status=status, reason="why", metrics=metrics))  # type: ignore[arg-type]
    return directory


IN_PLACE = """
import torch
from torch import nn
from harness.datasets import Tensors
from harness.workload import Workload, children_of_sequential


def own():
    return Workload(
        name="own",
        model=lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)),
        dataset=Tensors(torch.zeros(8, 3), torch.zeros(8, 3)),
        loss=lambda outputs, targets: (outputs - targets).square().sum(),
        chain=children_of_sequential,
    )
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run"], "Missing argument 'SUITE'"),
        (["run", "smoke", "--no-such-option"], "No such option: --no-such-option"),
        (["walk"], "No such command 'walk'"),
        (["list", "everything"], "[suites|implementations|workloads|refusals]': 'everything' is not one of"),
        (["run", "no_such_suite"], "suite 'no_such_suite': expected one of"),
        (["run", "no_such_file.py"], "expected an existing Python file"),
        (["report", "no_such_directory"], "expected a results directory with results.jsonl, found none"),
        (["report", ".", "--format", "xml"], "'xml' is not one of"),
        (["upload", "no_such_directory"], "expected a results directory with results.jsonl, found none"),
        (["compare", "no_such_directory"], "expected a results directory or its results.jsonl, got neither"),
        (["compare", __file__], "expected a results directory or its results.jsonl, got neither"),
        (["try", "native.dpp"], "implementation 'native.dpp': expected one of"),
        (["try", "native.ddp", "--data", "two"], "expected an integer, got 'two'"),
        (["try", "native.ddp", "--data", "0"], "layout: data must be a positive integer, got 0"),
        (["try", "native.ddp", "--steps", "-1"], "timed_steps must be an integer of at least 0, got -1"),
        (["try", "native.ddp", "--data", "2", "--shard", "3"], "shard must divide data, got shard 3 and data 2"),
        (["try", "native.ddp", "--workload", "gpt:size=vast"], "size must be one of"),
        (["try", "native.ddp", "--precision", "fp8"], "precision must be one of fp64, fp32, bf16"),
        (["try", "native.ddp", "--option", "ring"], "--option: expected key=value, got 'ring'"),
        (["try", "native.ddp", "--option", "reducton=ring"], "option reducton: native.ddp takes"),
        (["try", "native.ddp", "--option", "reduction=rign"], "option reduction: native.ddp expects one of"),
        (["try", "native.ddp", "-o", "bucket_bytes=-1"], "native.ddp: bucket_bytes must be at least 1, got -1"),
        (["inspect", "gtp"], "workload 'gtp': expected one of"),
        (["inspect", "gpt", "--pipeline", "5"], "5 stages need as many blocks, got the 4 of gpt"),
        (["inspect", "gpt", "--pipeline", "0"], "layout: pipeline must be a positive integer, got 0"),
        (["inspect", "gpt", "--pipeline", "2", "--schedule", "dfs"], "schedule must be one of gpipe, 1f1b, "),
        (["inspect", "gpt", "--pipeline", "2", "--chunks", "2"], "1f1b: takes one stage a rank, got num_chunks 2"),
        (["inspect", "gpt", "--schedule", "1f1b"], "--schedule needs --pipeline N"),
        (["inspect", "gpt", "--micro-batches", "9"], "num_micro_batches must be at most global_batch_size, got 9"),
        (["inspect", "gpt", "--partition", "luck"], "'luck' is not one of 'uniform', 'parameters', 'flops'"),
        (["inspect", "gpt", "--precision", "fp8"], "precision must be one of fp64, fp32, bf16"),
        (["run", "smoke", "--device", "tpu"], "Invalid value for '--device': 'tpu' is not one of 'cpu', 'cuda'"),
    ],
)
def test_bad_input_is_one_line_on_standard_error_and_exit_code_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("meshmark: ")
    assert expected in output.err
    assert not Path("results").exists(), "nothing is made for a run that cannot start"


@pytest.mark.parametrize(
    ("options", "more", "expected"),
    [
        ('{"reducton": "ring"}', [], "case native.ddp reducton=ring, single: option reducton: native.ddp takes"),
        ("{}", ["--only", "fsdp"], "--only 'fsdp' matches none of the 1 cases of bad"),
        ("{}", ["--resume"], "--resume: expected an earlier run in results/bad-*, found none"),
        ("3", [], "bad_suite.py"),
    ],
)
def test_a_suite_that_cannot_run_is_refused_before_it_starts(
    options: str, more: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", bad_suite(options), *more]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert expected in error


@pytest.mark.parametrize(
    ("name", "text", "value", "role"),
    [
        ("native.ddp", "reduction=none", "none", "floor"),
        ("native.tensor", "transport=none", "none", "floor"),
        ("native.pipeline", "transport=none", "none", "floor"),
        ("native.ddp", "bucket_bytes=9", 9, "subject"),
    ],
)
def test_an_option_keeps_as_text_what_its_implementation_lists_and_may_make_it_a_floor(
    name: str, text: str, value: Any, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    suites = []
    monkeypatch.setattr("harness.suite_run.execute", lambda suite, *_, **__: suites.append(suite) or 0)
    assert cli.main(["try", name, "--data", "2", "-o", text]) == 0
    assert suites[0].cases[1].options == {text.partition("=")[0]: value}
    assert suites[0].cases[1].role == role


def test_a_block_that_cannot_be_timed_by_itself_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.py").write_text(IN_PLACE)
    assert cli.main(["inspect", "own.py:own", "--pipeline", "2", "--partition", "time"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "pipeline: 1 changes in place what it is given" in error


def test_a_run_on_gpus_needs_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["run", bad_suite("{}"), "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "meshmark: --device cuda: expected a CUDA device on this machine, found none\n"


@pytest.mark.parametrize(
    "arguments", [[], ["--device", "cuda"], ["--engine", "torchrun", "--ranks-per-node", "2"]], ids=str
)
def test_a_run_is_on_the_device_asked_for_and_goes_on_there(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = []
    commands = []

    def interrupted(*_: Any, device: str, command: str, **__: Any) -> None:
        devices.append(device)
        commands.append(command)
        raise KeyboardInterrupt

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("harness.runner.run", interrupted)
    assert cli.main(["run", bad_suite("{}"), *arguments, "--results", "r"]) == 130
    assert devices == ["cuda" if "cuda" in arguments else "cpu"]
    assert commands == [" ".join(["meshmark run bad_suite.py", *arguments])], "kept beside the results"
    again = " ".join(["meshmark run bad_suite.py", *arguments, "--results r --resume"])
    assert capsys.readouterr().err.endswith(f"; to go on: {again}\n")


def test_results_are_not_mixed_with_an_earlier_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = results(tmp_path / "r", "ok")
    assert cli.main(["run", bad_suite("{}"), "--results", str(directory)]) == 2
    assert "add --resume, or name another directory" in capsys.readouterr().err


@pytest.mark.parametrize("below", ["", "/x"])
def test_a_results_directory_that_cannot_be_made_is_one_line(below: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    assert cli.main(["run", bad_suite("{}"), "--results", f"file{below}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "'file" in error


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_is_not_writable_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("locked").mkdir(mode=0o500)
    assert cli.main(["run", bad_suite("{}"), "--results", "locked"]) == 2
    assert "Permission denied" in capsys.readouterr().err


def test_report_prints_table_markdown_and_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = str(results(tmp_path / "r", "ok", "failed"))
    assert cli.main(["report", directory]) == 0
    assert "1,234" in capsys.readouterr().out
    assert cli.main(["report", directory, "--format", "markdown"]) == 0
    assert "| torch.ddp | data=2 | 1,234 |" in capsys.readouterr().out
    assert cli.main(["report", directory, "--format", "json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert [(each["case"]["layout"], each["status"]) for each in read] == [("data=2", "ok"), ("data=3", "failed")]


def test_report_names_a_broken_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = results(tmp_path / "r", "ok")
    with (directory / "results.jsonl").open("a") as file:
        file.write("{}\n")
    assert cli.main(["report", str(directory)]) == 2
    assert "results.jsonl, line 2: not a result" in capsys.readouterr().err


def test_compare_prints_the_page_or_writes_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    results(tmp_path / "r", "ok", "failed")
    assert cli.main(["compare", "r"]) == 0
    page = capsys.readouterr().out
    assert "| torch.ddp | 1,234 |" in page
    assert "`meshmark compare r`" in page
    assert cli.main(["compare", "r/results.jsonl", "--out", "page.md"]) == 0
    assert capsys.readouterr().out == "page.md: 2 cases\n"
    assert Path("page.md").read_text() == page.replace("compare r`", "compare r/results.jsonl`")
    assert cli.main(["compare", "r", "--out", "nowhere/page.md"]) == 2
    assert "'nowhere/page.md'" in capsys.readouterr().err


def test_compare_leaves_a_readme_alone_that_it_cannot_make_anew(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    results(tmp_path / "r", "ok")
    Path("mine.md").write_text("no marks")
    assert cli.main(["compare", "r", "--readme", "mine.md"]) == 2
    assert "meshmark: --readme mine.md: expected " in capsys.readouterr().err
    assert Path("mine.md").read_text() == "no marks"
    assert cli.main(["compare", "main", "mine", "--suite", "smoke", "--readme", "mine.md"]) == 2
    assert "--readme is for the page of results directories" in capsys.readouterr().err


def test_compare_leaves_a_readme_alone_whose_page_it_cannot_write(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "r").mkdir()
    for one in RUN:
        append(tmp_path / "r", one)
    Path("mine.md").write_text(README)
    assert cli.main(["compare", "r", "--out", "nowhere/page.md", "--readme", "mine.md"]) == 2
    assert "'nowhere/page.md'" in capsys.readouterr().err
    assert Path("mine.md").read_text() == README
    assert cli.main(["compare", "r", "--out", "page.md", "--readme", "mine.md"]) == 0
    assert "| zero_2 |" in Path("mine.md").read_text()


def test_an_upload_that_did_not_arrive_fails_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = str(results(tmp_path / "r", "ok"))
    assert cli.main(["upload", directory, "--tracking-uri", "http://127.0.0.1:1"]) == 1
    output = capsys.readouterr().out
    assert "2 failed: " in output
    assert f"`meshmark upload {directory}` sends them later" in output


def test_list_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    output = capsys.readouterr().out
    for expected in (
        "native.ddp", "available", "reduction=all_reduce | ring", "convnet", "size=tiny | ", *suites.names()
    ):  # fmt: skip
        assert expected in output
    assert "meshmark list refusals" in output  # which takes a while: every implementation is asked about every workload


def test_inspect_shows_blocks_and_cut(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "gpt:size=tiny", "--pipeline", "2", "--schedule", "gpipe", "--micro-batches", "2"]) == 0
    output = capsys.readouterr().out
    assert "block0-1" in output
    assert "2 stages by flops; gpipe, micro-batches: 2, bubble 33.3 %" in output
    assert "rank 0  0F0 0F1" in output


def test_help_teaches_and_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    output = capsys.readouterr().out
    for expected in ("run", "try", "list", "inspect", "report", "compare", "upload", "Exit code"):
        assert expected in output


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    """A rank imports it again, and help should be instant."""
    check = "import sys, harness.cli; print([name for name in ('torch', 'mlflow', 'numpy') if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "[]"


def test_a_case_is_tried_beside_its_reference(capfd: pytest.CaptureFixture[str]) -> None:
    workload = ["--workload", "gpt:optimizer=sgd", "--precision", "fp64", "--steps", "2"]
    assert cli.main(["try", "native.ddp", "--data", "2", *workload, "--results", "r", "--no-upload"]) == 0
    output = capfd.readouterr().out
    table = [line.split() for line in output.partition("2 cases: 2 ok")[2].splitlines()]
    rows = {row[0]: row for row in table if row and row[-1] == "ok"}
    assert rows.keys() == {"reference", "native.ddp"}
    layout, *figures, verdict, status = rows["native.ddp"][1:]
    assert (layout, verdict, status) == ("data=2", "ok", "ok")
    assert len(figures) == 7, "every figure of the wide table is there"
    assert all(float(figure.replace(",", "")) >= 0 for figure in figures)
    assert "| native.ddp | data=2 |" in Path("r/report.md").read_text()
    lines = [json.loads(line) for line in Path("r/results.jsonl").read_text().splitlines()]
    assert [line["case"]["implementation"] for line in lines] == ["reference", "native.ddp"]


def test_json_leaves_standard_output_to_the_results() -> None:
    arguments = ["try", "reference", "--steps", "0", "--workload", "awkward:kind=odd_shapes", "--precision", "fp64"]
    command = [sys.executable, "-m", "harness", *arguments, "--json", "--no-upload"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr
    (result,) = json.loads(answer.stdout)
    assert (result["status"], result["parity"]["ok"]) == ("ok", True)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Of a short name: a process's sockets lie below it, whose paths the system limits to some hundred characters."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_keeps_what_is_finished_and_says_how_to_go_on(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch, scratch: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(scratch))
    command = [sys.executable, "-m", "harness", "run", bad_suite("{}"), "--results", "r", "--no-upload"]
    # A shell's background jobs ignore Ctrl-C, and so do their children: whoever tests this may be one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    with process:
        assert process.stdout is not None
        assert any(line.endswith(": parity\n") for line in process.stdout), "the run ended before its parity steps"
        process.send_signal(number)
        if number == signal.SIGTERM:
            process.send_signal(number)  # as `timeout` does
        _, error = process.communicate(timeout=60)
    assert process.returncode == code, error
    assert error == (
        "meshmark: interrupted, what is finished is in r; to go on: meshmark run bad_suite.py --results r --resume\n"
    )
    # torch keeps a cache there; ours and multiprocessing's must be gone.
    assert [path.name for path in scratch.iterdir() if path.name.startswith(("meshmark", "pymp"))] == []


def test_a_directory_another_run_is_writing_to_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("r").mkdir()
    with Path("r/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert cli.main(["run", bad_suite("{}"), "--results", "r", "--no-upload"]) == 2
    assert capsys.readouterr().err == "meshmark: r: another run is writing here\n"
