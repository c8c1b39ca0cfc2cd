import io
import time
from dataclasses import replace

import pytest
from rich.console import Console

from harness.case import Case, Suite
from harness.layout import Layout
from harness.progress import PlainProgress, RichProgress, Row, clock, remaining_seconds, shown_on, tally, window
from harness.result import Parity, Result

CASES = tuple(
    Case(workload="gpt:size=tiny,tied=true", implementation=name, layout=Layout(data=data), options=options)
    for name, data, options in (
        ("reference", 1, {}),
        ("native.ddp", 2, {"transport": "shared_memory", "reduction": "parameter_server"}),
        ("torch.ddp", 4, {}),
    )
)
SUITE = Suite(name="smoke", cases=CASES)
OK = Result(case=CASES[0], status="ok", metrics={"throughput.tokens_per_second": 1234.5}, duration_seconds=2.0)
PARITY = Parity(
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
FAILED = Result(case=CASES[1], status="failed", reason="RuntimeError: gone\nand more", duration_seconds=3.25)


def test_a_log_has_one_line_an_event() -> None:
    file = io.StringIO()
    progress = PlainProgress(Console(file=file))
    progress.suite_started(SUITE, CASES)
    progress.case_started(CASES[0])
    for done in range(3):
        progress.phase(CASES[0], "timing", done, 3)
    progress.case_finished(OK)
    progress.case_finished(FAILED)
    progress.note("a note\nin two lines")
    progress.suite_finished([OK, FAILED])
    assert file.getvalue().splitlines() == [
        "smoke: 3 cases",
        "[1/3] reference single gpt:size=tiny,tied=true fp32: started",
        "[1/3] reference single gpt:size=tiny,tied=true fp32: timing",
        "[1/3] reference single gpt:size=tiny,tied=true fp32: ok, 1,234 tokens/s, parity not checked, 2.0 s",
        "[2/3] native.ddp transport=shared_memory reduction=parameter_server data=2 gpt:size=tiny,tied=true fp32: "
        "failed, RuntimeError: gone and more, 3.2 s",
        "a note in two lines",
        "2 cases: 1 ok, 1 failed",
    ]


def test_a_log_counts_where_it_would_say_nothing_for_long() -> None:
    file = io.StringIO()
    progress = PlainProgress(Console(file=file), quiet_seconds=0.05)
    progress.suite_started(SUITE, CASES)
    progress.phase(CASES[0], "timing", 0, 12)
    progress.phase(CASES[0], "timing", 1, 12)
    time.sleep(0.06)
    progress.phase(CASES[0], "timing", 2, 12)
    progress.phase(CASES[0], "timing", 3, 12)
    assert [line.rpartition(": ")[2] for line in file.getvalue().splitlines()[1:]] == ["timing", "timing 2/12"]


def rendered(progress: RichProgress, *, width: int = 80, height: int = 24) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, height=height).print(progress.render())
    return file.getvalue().rstrip("\n").split("\n")


def test_the_live_table_fits_80_columns_with_one_line_a_case() -> None:
    progress = RichProgress(Console(file=io.StringIO(), width=80, height=24, force_terminal=True))
    try:
        progress.suite_started(SUITE, CASES)
        progress.case_started(CASES[0])
        progress.case_finished(OK)
        progress.case_started(CASES[1])
        progress.phase(CASES[1], "timing", 3, 10)
        heading, *rows = rendered(progress)
    finally:
        progress.stop()
    assert heading.startswith("smoke: 1 of 3 cases done, 0:0")
    assert [row.split()[0] for row in rows] == ["ok", "running", "waiting"]
    assert "1,234 tokens/s" in rows[0]
    assert "0:02" in rows[0]
    assert "timing 3/10" in rows[1]
    assert max(map(len, [heading, *rows])) <= 80


def test_short_names_leave_their_room_to_the_figures() -> None:
    progress = RichProgress(Console(file=io.StringIO(), width=80, height=24, force_terminal=True))
    progress.case_finished(replace(OK, parity=PARITY))
    progress.case_started(CASES[2])
    progress.phase(CASES[2], "warming up", 12, 5)
    _, first, second = rendered(progress)
    assert "1,234 tokens/s, parity ok" in first
    assert "warming up 12 " in second, "no 12/5: it takes as many as it needs"


def test_a_case_outside_the_suite_gets_a_row_too() -> None:
    progress = RichProgress(Console(file=io.StringIO(), force_terminal=True))
    progress.case_started(CASES[2])
    assert "torch.ddp" in rendered(progress)[1]


def test_a_failure_is_counted_in_the_heading_and_a_long_reason_stays_on_its_line() -> None:
    progress = RichProgress(Console(file=io.StringIO(), width=80, height=24, force_terminal=True))
    progress.case_finished(replace(FAILED, reason="RuntimeError: " + "long " * 40))
    heading, *rows = rendered(progress)
    assert "1 not ok" in heading
    assert len(rows) == 1


def test_the_kind_of_progress_follows_the_console() -> None:
    with shown_on(Console(file=io.StringIO())) as progress:
        assert isinstance(progress, PlainProgress)
    terminal = Console(file=io.StringIO(), force_terminal=True)
    with pytest.raises(KeyboardInterrupt), shown_on(terminal) as progress:
        assert isinstance(progress, RichProgress)
        progress.suite_started(SUITE, CASES)
        raise KeyboardInterrupt
    assert terminal.file.getvalue().count("\x1b[?25h") == 1, "the cursor is shown again"  # type: ignore[attr-defined]


def test_silent_progress_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_on(Console(), silent=True) as progress:
        progress.suite_started(SUITE, CASES)
        progress.case_finished(OK)
        progress.note("a note")
        progress.suite_finished([OK])
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("num_finished", "shown"),
    [(0, [0, 1, 2, 3, 4, 5]), (5, [3, 4, 5, 6, 7, 8]), (20, [14, 15, 16, 17, 18, 19])],
)
def test_the_window_follows_the_first_unfinished_case(num_finished: int, shown: list[int]) -> None:
    rows = [Row(case=CASES[0], phase=str(index)) for index in range(20)]
    for row in rows[:num_finished]:
        row.result = OK
    assert [int(row.phase) for row in window(rows, 6)] == shown


def test_the_time_left_needs_two_finished_cases() -> None:
    assert remaining_seconds(10.0, 1, 4) is None
    assert remaining_seconds(10.0, 2, 5) == 15.0
    assert remaining_seconds(10.0, 5, 5) is None


def test_figures_for_people() -> None:
    assert [clock(seconds) for seconds in (0, 65, 3723)] == ["0:00", "1:05", "1:02:03"]
    assert tally([OK, FAILED, OK]) == "3 cases: 2 ok, 1 failed"
    parted = replace(OK, status="parity failed", case=replace(OK.case, expected="parity failed"))
    assert tally([OK, parted]) == "2 cases: 1 ok, 1 parity failed, as expected"
