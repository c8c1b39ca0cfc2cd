"""The page that compares strategies: every figure in its column and sentence, and nothing that was not measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import suite_file
from harness.case import Case
from harness.comparison_page import LEGEND, page
from harness.layout import Layout
from harness.report import RATIO_MEANING_WITHOUT_TURNS
from harness.result import Parity, Result

MIB = 2**20
ENVIRONMENT = {
    "device": {"name": "a processor"},
    "logical_cores": 2,
    "threads_per_rank": 1,
    "os": "Linux-6",
    "python": "3.11.7",
    "torch": "2.13.0",
    "numpy": None,
    "libraries": {"deepspeed": "0.19"},
    "commit": "abc123",
    "dirty": True,
}
HELD = Parity(
    ok=True,
    lane="fp32",
    loss_max_relative=0.0,
    gradient_norm_max_relative=0.0,
    gradient_max_relative=0.0,
    parameter_max_relative=0.0,
    worst_parameter=None,
    first_bad_step=None,
    explanation=None,
    replicas_bit_equal=True,
)


def result(name: str, role: str = "subject", *, options: Any = None, metrics: Any = None, **fields: Any) -> Result:
    case = Case(
        workload="gpt:size=17m",
        implementation=name,
        layout=Layout(data=2),
        options=options or {},
        role=role,  # type: ignore[arg-type]
    )
    common = {"status": "ok", "suite": "sharding", "environment": ENVIRONMENT, "started": 1893456000.0}
    return Result(**{"case": case, "metrics": metrics or {}, **common, **fields})


FLOOR = result("native.floor", "floor", metrics={"step.median_seconds": 0.1})
DATA_PARALLEL = result(
    "native.ddp",
    parity=HELD,
    metrics={
        "memory.parameter_bytes": 256 * MIB,
        "memory.gradient_bytes": 256 * MIB,
        "memory.optimizer_bytes": 512 * MIB,
        "memory.predicted_parameter_bytes": 256 * MIB,
        "memory.predicted_gradient_bytes": 256 * MIB,
        "memory.predicted_optimizer_bytes": 511 * MIB,
        "memory.communication_buffer_bytes": 0,
        "memory.activation_bytes": 12.34 * MIB,
        "memory.predicted_activation_bytes": 12 * MIB,
        "memory.other_bytes": 3 * MIB,
        "memory.peak_allocated_bytes.max_rank": 1045 * MIB,
        "memory.predicted_peak_bytes": 1036 * MIB,
        "communication.bytes_per_step": 64.7 * MIB,
        "communication.predicted_bytes_per_step": 64.5 * MIB,
        "communication.textbook_bytes_per_step": 64 * MIB,
        "communication.calls_per_step": 3.0,
        "communication.exposed_ratio": 0.123,
        "communication.exposed_latencies_per_step": 1.04,
        "communication.delay_seconds": 0.02,
        "communication.busy_ratio": 0.25,
        "throughput.tokens_per_second": 853.0,
        "step.median_seconds": 0.15,
    },
)
SHARDED = result(
    "native.zero",
    options={"stage": 2},
    parity=replace(HELD, ok=False),
    status="parity failed",
    reason="every gradient is twice the reference's",
    metrics={
        "memory.parameter_bytes": 256 * MIB,
        "memory.gradient_bytes": 66 * MIB,
        "memory.optimizer_bytes": 128 * MIB,
        "memory.communication_buffer_bytes": 8 * MIB,
        "memory.predicted_communication_buffer_bytes": 7.5 * MIB,
        "communication.bytes_per_step": 64.7 * MIB,
        "communication.calls_per_step": 30.5,
        "communication.exposed_latencies_per_step": 14.26,
        "communication.delay_seconds": 0.075,
    },
)
PEER = result(
    "torch.zero",
    "peer",
    options={"text": "a|b"},
    metrics={
        "communication.bytes_per_step": 97.05 * MIB,
        "communication.exposed_latencies_per_step": 1.0,
        "code.changed_lines": 18.0,
        "step.median_seconds": 0.25,
    },
)
OTHER_PEER = result("torch.ddp", "peer", metrics={"code.changed_lines": 13.0})
FAILED = result("torch.fsdp", "peer", status="failed", reason="rank 1: gone\nfar")
ALL = [FLOOR, DATA_PARALLEL, SHARDED, PEER, OTHER_PEER, FAILED]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").replace(r"\|", "¦").split("|")]


def rows(results: list[Result]) -> dict[str, dict[str, str]]:
    tables = page(results, Path("results/r")).partition("\n## `")[2]
    lines = [line for line in tables.splitlines() if line.startswith("|")]
    header, _, *body = map(cells, lines)
    return {row[0]: dict(zip(header, row, strict=True)) for row in body}


def bullets(text: str, after: str) -> list[str]:
    lines = text.partition(f"## {after}\n")[2].partition("\n## ")[0].splitlines()
    return [line.removeprefix("- ") for line in lines if line.startswith("- ")]


def test_every_figure_stands_in_its_column_beside_its_closed_form() -> None:
    assert rows(ALL)["native.ddp"] == {
        "implementation": "native.ddp",
        "tokens/s": "853",
        "step / floor": "1.50",
        "step / best peer": "0.6, its parity not checked",
        "states MiB": "1,024",
        "states predicted": "1,023",
        "by category MiB": "parameters 256 (predicted 256), gradients 256 (predicted 256), optimizer states 512 "
        "(predicted 511), activations 12.3 (predicted 12.0), other 3.00",
        "peak MiB": "1,045",
        "peak predicted": "1,036",
        "sent MiB": "64.7",
        "sent predicted": "64.5",
        "textbook MiB": "64.0",
        "collectives": "3",
        "busy %": "25.0",
        "exposed %": "12.3",
        "latencies": "1.04",
        "lines changed": "-",
        "parity": "ok",
    }


def test_what_was_not_measured_is_a_dash_and_what_parted_says_so() -> None:
    sharded = rows(ALL)["native.zero stage=2"]
    assert sharded["by category MiB"].endswith("optimizer states 128, communication buffers 8.00 (predicted 7.50)")
    assert (sharded["collectives"], sharded["parity"]) == ("30.5", "FAILED")
    peer = rows(ALL)["torch.zero text=a¦b"]
    assert (peer["step / floor"], peer["lines changed"]) == ("2.50", "18")
    assert {name for name, cell in peer.items() if cell == "-"} == {
        "tokens/s", "states MiB", "states predicted", "by category MiB", "peak MiB", "peak predicted",
        "sent predicted", "textbook MiB", "collectives", "busy %", "exposed %",
    }  # fmt: skip
    assert peer["parity"] == "not checked"
    assert rows(ALL)["native.floor (floor)"]["parity"] == "-"
    assert rows(ALL)["native.floor (floor)"]["step / floor"] == "1.00"


def test_times_have_no_floor_where_none_ran() -> None:
    assert rows([DATA_PARALLEL, PEER])["native.ddp"]["step / fastest"] == "1.00"


def test_sentences_say_what_the_table_shows() -> None:
    assert bullets(page(ALL, Path("r")), "`gpt:size=17m`, data=2, fp32") == [
        "A rank holds 1,024 MiB of states under `native.ddp`; of that 0.44 under `native.zero stage=2`.",
        "A rank sends 64.7 MiB a step under `native.ddp`; of that 1.00 under `native.zero stage=2` and 1.50 under "
        "`torch.zero text=a|b`.",
        "A step waits for 1.0 latencies of the link, one after another, under `torch.zero text=a|b` and `native.ddp`; "
        "14.3 under `native.zero stage=2`.",
        "Our use of a peer differs from plain training in one process by 13 lines under `torch.ddp`; 18 under "
        "`torch.zero text=a|b`.",
    ]


def test_a_sentence_without_figures_is_not_said() -> None:
    bare = result("native.ddp", metrics={"step.median_seconds": 0.2})
    assert bullets(page([bare], Path("r")), "`gpt:size=17m`, data=2, fp32") == []


def test_what_failed_and_what_ran_otherwise_than_asked_is_named() -> None:
    fallback = result(
        "native.zero",
        options={"transport": "shared_memory"},
        metrics={"step.median_seconds": 0.2},
        environment={**ENVIRONMENT, "facts": {"transport": "process_group", "transport_fallback": "two nodes"}},
    )
    text = page([*ALL, fallback], Path("r"))
    notes = bullets(text, "Not as asked")
    assert len(notes) == 3
    assert notes[0].startswith(
        "parity failed: native.zero stage=2, data=2, gpt:size=17m, fp32; every gradient is twice"
    )
    assert notes[1] == "failed: torch.fsdp, data=2, gpt:size=17m, fp32; rank 1: gone far"
    assert notes[2] == "native.zero transport=shared_memory, data=2: ran with transport=process_group (two nodes)"
    assert "Not as asked" not in page([DATA_PARALLEL], Path("r"))


def test_other_work_is_labelled_in_its_row_and_said_in_words() -> None:
    clipped = result("deepspeed.zero", "peer", parity=HELD, metrics=FLOOR.metrics, other_work="clipped at 1")
    assert rows([DATA_PARALLEL, clipped])["deepspeed.zero"]["parity"] == "ok, other work"
    assert bullets(page([DATA_PARALLEL, clipped], Path("r")), "Not as asked") == [
        "deepspeed.zero, data=2: other work: clipped at 1"
    ]


@pytest.mark.parametrize(("path", "shown"), [("results/r", "results/r"), ("/somewhere/of/mine/r", "r")])
def test_the_page_says_where_its_figures_come_from_and_names_no_place_on_this_machine(path: str, shown: str) -> None:
    text = page(ALL, Path(path))
    assert text.startswith("# sharding: strategies compared\n")
    assert bullets(text, "What the columns say") == list(LEGEND)
    assert bullets(text, "Where the figures come from") == [
        "measured on: a processor, 2 cores, 1 thread(s) a rank, torch 2.13.0, deepspeed 0.19",
        "versions: os Linux-6, python 3.11.7, torch 2.13.0",
        "delay of an operation: 20.0 ms to 75.0 ms",
        "date: 2030-01-01",
        "commit: abc123 with local changes",
        "suite: `sharding`",
        f"commands: `meshmark compare {shown}`",
    ]


def test_commands_are_those_that_were_given_and_versions_all_that_there_were(tmp_path: Path) -> None:
    for name, patterns in (("a", ("data=2", "zero_1")), ("b", ("pipeline",))):
        for number, pattern in enumerate(patterns):
            (tmp_path / name).mkdir(exist_ok=True)
            command = f"meshmark run /somewhere/of/mine/peers.py --only {pattern}"
            suite_file.begin("peers", tmp_path / name, resume=number > 0, command=command)
    later = replace(DATA_PARALLEL, environment={**ENVIRONMENT, "torch": "2.14.0", "commit": "def456", "dirty": False})
    text = page([*ALL, later], tmp_path / "a", tmp_path / "b" / "results.jsonl")
    lines = dict(line.split(": ", 1) for line in bullets(text, "Where the figures come from")[2:])
    assert lines["versions"] == "os Linux-6, python 3.11.7, torch 2.13.0 and 2.14.0"
    assert lines["commits"] == "abc123 with local changes, def456"
    assert lines["commands"] == (
        "`meshmark run peers.py --only data=2`; `meshmark run peers.py --only zero_1`; "
        "`meshmark run peers.py --only pipeline`; `meshmark compare a results.jsonl`"
    )


def test_what_the_results_do_not_know_of_their_making_is_a_dash() -> None:
    text = page([replace(DATA_PARALLEL, environment={}, started=0.0, suite="")], Path("r"))
    assert text.startswith("# Cases: strategies compared\n")
    assert bullets(text, "Where the figures come from") == [
        "versions: -",
        "delay of an operation: 20.0 ms",
        "date: -",
        "commit: -",
        "suite: -",
        "commands: `meshmark compare r`",
    ]


def test_what_took_turns_has_its_ratios_and_their_spread() -> None:
    ours, peer = (
        result(
            name,
            role,
            strategy="ddp",
            parity=HELD,
            metrics={"step.median_seconds": seconds},
            samples={"step_seconds": [[seconds] * 4], "steps_per_round": 1},
        )
        for name, role, seconds in (("native.ddp", "subject", 0.3), ("torch.ddp", "peer", 0.4))
    )
    lines = page([FLOOR, ours, peer], Path("r")).splitlines()
    assert "### ddp, gpt:size=17m, fp32" in lines
    (row,) = (line for line in lines if line.startswith("| native.ddp | ours | 2 | 300 |"))
    assert row == "| native.ddp | ours | 2 | 300 | - | torch.ddp | 0.75 | - | - | 0 | 4 | ok |"
    assert "## Timed in turns" not in page([FLOOR, DATA_PARALLEL], Path("r"))
    # The same cases one after another: the peer began when ours was over.
    apart = [replace(ours, duration_seconds=30.0), replace(peer, started=peer.started + 31.0)]
    lines = page([FLOOR, *apart], Path("r")).splitlines()
    assert "## Timed in turns" not in lines
    assert RATIO_MEANING_WITHOUT_TURNS in lines[lines.index("## Timed one after another") :]
    assert "| native.ddp | ours | 2 | 300 | - | torch.ddp | 0.75 | - | - | - | 4 | ok |" in lines


def test_a_best_peer_whose_parity_nobody_checked_is_marked_wherever_it_is_a_measure() -> None:
    ours, peer = (
        result(
            name,
            role,
            strategy="ddp",
            parity=parity,
            metrics={"step.median_seconds": seconds},
            samples={"step_seconds": [[seconds]], "steps_per_round": 1},
        )
        for name, role, seconds, parity in (("native.ddp", "subject", 0.3, HELD), ("torch.ddp", "peer", 0.4, None))
    )
    assert rows([ours, peer])["native.ddp"]["step / best peer"] == "0.75, its parity not checked"
    text = page([ours, peer], Path("r"))
    assert "| native.ddp | ours | 2 | 300 | - | torch.ddp, parity not checked | 0.75 |" in text


def test_what_sends_more_than_the_textbook_of_its_stage_says_why_at_the_table() -> None:
    def with_bytes(sent: float, name: str = "torch.zero", why: str | None = "it all-reduces") -> Result:
        metrics = {"communication.bytes_per_step": sent, "communication.textbook_bytes_per_step": 64.0}
        return result(name, "peer", strategy="zero_1", metrics=metrics, beyond_the_textbook=why)

    both = [with_bytes(96.0), with_bytes(128.0, "a.b"), with_bytes(65.0, "c.d"), with_bytes(96.0, "e.f", None)]
    told = [line for line in page(both, Path("r")).splitlines() if "textbook is" in line]
    assert told == ["- more than the textbook is sent under torch.zero, a.b, because it all-reduces"]
    assert "because it all-reduces" not in page([with_bytes(65.0)], Path("r"))


def test_the_settings_in_the_matrix_are_told_below_it() -> None:
    seconds = {"step.median_seconds": 0.2}
    ours = result("native.pipeline", strategy="pp", metrics=seconds, options={"schedule": "zero_bubble"})
    peer = result("torch.pipeline", "peer", strategy="pp", metrics=seconds, parity=HELD)
    lines = page([replace(ours, parity=HELD), peer], Path("r")).splitlines()
    row = lines.index("| pp | `gpt:size=17m`, data=2, fp32 | 200 ms (1.00) a | 200 ms (1.00) |")
    assert lines[row + 2] == "a: `native.pipeline schedule=zero_bubble`"


def test_an_empty_cell_of_a_prediction_says_why_under_its_table() -> None:
    unknown = result("torch.tensor", "peer", metrics=FLOOR.metrics, unpredicted={"bytes": "nobody knows"})
    tables = page([DATA_PARALLEL, unknown], Path("r")).partition("\n## What the columns say")[0]
    assert tables.rstrip().endswith("\n\n- torch.tensor predicts no bytes because nobody knows")
