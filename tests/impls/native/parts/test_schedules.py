"""Pipeline schedules, without a process: complete, possible, within their bounds, and as long as theory says."""

import re
from itertools import product
from pathlib import Path

import pytest

from impls.native.parts.pipeline_actions import Action, Kind, check, in_an_order, most_in_flight, read, write
from impls.native.parts.pipeline_timeline import play
from impls.native.parts.schedules import SCHEDULES, Schedule, forwards, make

GOLDEN = sorted(Path(__file__).with_name("golden_schedules").glob("*.txt"))
EVERY = [
    (name, num_ranks, num_micro_batches, num_chunks)
    for name, num_ranks, num_micro_batches in product(SCHEDULES, (1, 2, 3, 4, 8), (*range(1, 10), 16))
    for num_chunks in ((1, 2, 3) if name == "interleaved_1f1b" else (1,))
]


def made(name: str, num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> Schedule:
    return make(name, num_ranks=num_ranks, num_micro_batches=num_micro_batches, num_chunks=num_chunks)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_size_can_be_run(name: str) -> None:
    """`table` raises where work is missing, done twice or on the wrong rank, and where ranks wait for each other."""
    for numbers in (sizes for sizes in EVERY if sizes[0] == name):
        table = made(*numbers).table()
        assert read(write(table)) == table


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bubble_is_theorys(name: str) -> None:
    """Where there are micro-batches enough to fill the pipeline; Narayanan et al. 2021, Qi et al. 2023."""
    for numbers in (sizes for sizes in EVERY if sizes[0] == name and sizes[2] >= sizes[1]):
        schedule = made(*numbers)
        timeline = play(schedule.table(), schedule.num_stages)
        worst = max(timeline.bubble(rank) for rank in range(schedule.num_ranks))
        assert worst == pytest.approx(schedule.bubble()), numbers


@pytest.mark.parametrize(
    ("name", "num_chunks", "bubble"),
    [
        ("gpipe", 1, 3 / 7),
        ("1f1b", 1, 3 / 7),
        ("interleaved_1f1b", 2, 3 / 11),
        ("zero_bubble", 1, 1 / 5),
        ("zero_bubble_h2", 1, 1 / 5),
    ],
)
def test_four_ranks_and_four_micro_batches(name: str, num_chunks: int, bubble: float) -> None:
    """By hand: a micro-batch takes 3, a rank works 12; it waits 9, 4.5, and 3."""
    schedule = made(name, 4, 4, num_chunks)
    assert schedule.bubble() == pytest.approx(bubble)
    assert play(schedule.table(), schedule.num_stages).bubble(0) == pytest.approx(bubble)


def test_activations_in_flight_are_bounded() -> None:
    for num_ranks, num_micro_batches in product((2, 3, 4), range(1, 9)):
        for rank in range(num_ranks):
            most = {name: most_in_flight(made(name, num_ranks, num_micro_batches).table()[rank]) for name in SCHEDULES}
            assert most["gpipe"] == num_micro_batches
            assert most["1f1b"] == min(num_ranks - rank, num_micro_batches)
            assert most["zero_bubble"] <= min(num_ranks, num_micro_batches)
            assert most["zero_bubble_h2"] <= min(2 * num_ranks - 1, num_micro_batches)


def test_further_ahead_waits_less_where_a_backwards_parts_differ() -> None:
    """The backward towards the inputs takes longer than that of the weights. By hand, two ranks and four micro-batches
    of 24 + 30 + 24: the first rank waits 30 for its first gradient, and with H2 no longer than the last for its first
    input."""
    costs = {Kind.FORWARD: 24.0, Kind.INPUT: 30.0, Kind.WEIGHT: 24.0}
    spans = {name: play(made(name, 2, 4).table(), 2, costs).makespan for name in ("zero_bubble", "zero_bubble_h2")}
    assert spans == {"zero_bubble": 4 * 78 + 30, "zero_bubble_h2": 4 * 78 + 24}
    assert made("zero_bubble_h2", 2, 4).bubble(backward=54 / 24, weights=1.0) == pytest.approx(24 / (4 * 78 + 24))


def test_a_stage_holds_what_its_own_actions_leave_open() -> None:
    """Counted off the golden tables: of two chunks the rank's first has all four micro-batches under way."""
    assert made("1f1b", 4, 8).in_flight() == (4, 3, 2, 1)
    assert made("gpipe", 2, 3).in_flight() == (3, 3)
    assert made("interleaved_1f1b", 2, 4, 2).in_flight() == (4, 3, 2, 1)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_tables_are_the_golden_ones(path: Path) -> None:
    match = re.fullmatch(r"(\w+)-(\d+)-ranks-(\d+)-micro-batches-(\d+)-chunks", path.stem)
    assert match is not None
    name, *numbers = match.groups()
    assert write(made(name, *map(int, numbers)).table()) == path.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0B0\n1F0\n", "stage 1 must do F and B, or F, I and W, of micro-batch 0, got F"),
        ("0F0 0B0\n1F0 1B0 1W0\n", "got B F W"),
        ("0F0 0F0 0B0\n1F0 1B0\n", "0F0 is done 2 times"),
        ("0F0 0B0 1F0\n1B0\n", "rank 0 of 2 has no stage 1: 1F0"),
        ("0B0 0F0\n1F0 1B0\n", "deadlock, every rank waits: at 0B0, 1F0"),
        ("0F0 0B0 0F1\n1F0 1B0\n", "1 actions are of no micro-batch below 1"),
    ],
)
def test_tables_that_cannot_work_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check(read(text), num_stages=2, num_micro_batches=1)


def test_a_drawing_has_a_cell_for_each_unit_of_time() -> None:
    drawing = play(made("1f1b", 2, 2).table(), 2).draw()
    assert drawing == ("rank 0  0F0 0F1 ... ... 0B0 0B0 ... 0B1 0B1\nrank 1  ... 1F0 1B0 1B0 1F1 1B1 1B1 ... ...\n")


def test_actions_are_text_and_back() -> None:
    assert Action.parse("12I3") == Action(12, Kind.INPUT, 3)
    with pytest.raises(ValueError, match=r"expected an action such as 2F0 .*, got '2X0'"):
        Action.parse("2X0")


def test_numbers_without_meaning_are_refused() -> None:
    with pytest.raises(ValueError, match="zero_bubble: takes one stage a rank, got num_chunks 2"):
        made("zero_bubble", 2, 4, 2)
    with pytest.raises(ValueError, match="num_micro_batches must be at least 1, got 0"):
        made("1f1b", 2, 0)
    with pytest.raises(ValueError, match=r"schedule must be one of gpipe, .*, got 'dfs'"):
        made("dfs", 2, 4)


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 5])
def test_forwards_alone_are_complete_and_possible(num_ranks: int, num_chunks: int, num_micro_batches: int) -> None:
    num_stages = num_ranks * num_chunks
    table = tuple(
        forwards(rank, num_ranks=num_ranks, num_stages=num_stages, num_micro_batches=num_micro_batches)
        for rank in range(num_ranks)
    )
    wanted = {Action(s, Kind.FORWARD, m) for s in range(num_stages) for m in range(num_micro_batches)}
    assert len(in_an_order(table, num_stages)) == len(wanted)
    assert {action for actions in table for action in actions} == wanted
    assert all(action.stage % num_ranks == rank for rank, actions in enumerate(table) for action in actions)
