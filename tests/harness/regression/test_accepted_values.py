"""The file of accepted values: every digit, one line a figure, and a broken line is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.regression.accepted_values import Accepted, directory_at_hand, file_of, read, write

ACCEPTED = Accepted(
    values={("b-1", "cpu"): {"communication.bytes_per_step": 2.0**53, "loss": 1 / 3}, ("a-1", "cuda"): {"loss": 5.0}},
    times={("b-1", "cpu"): 1_893_499_200.0},
    absences={("c-1", "cpu"): 1_893_499_201.0},
)


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    path = file_of("smoke", tmp_path / "new")
    write(path, "smoke", ACCEPTED)
    assert read(path) == ACCEPTED
    assert path.read_text().splitlines()[1:] == [
        "a-1 cuda loss 5",
        "b-1 cpu accepted_time 2030-01-01T12:00:00Z",
        "b-1 cpu communication.bytes_per_step 9007199254740992",
        "b-1 cpu loss 0.3333333333333333",
        "c-1 cpu accepted_absence 2030-01-01T12:00:01Z",
    ]
    assert [file.name for file in path.parent.iterdir()] == ["smoke.txt"]


def test_it_lies_here_or_at_the_root_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = tmp_path / "project/some/where"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert directory_at_hand() == Path("accepted")
    (tmp_path / "project/.git").mkdir()
    assert directory_at_hand() == tmp_path / "project/accepted"
    assert directory_at_hand(Path("given")) == Path("given")
    (below / "accepted").mkdir()
    assert directory_at_hand() == Path("accepted")


def test_no_file_accepts_nothing(tmp_path: Path) -> None:
    assert read(tmp_path / "smoke.txt") == Accepted()


@pytest.mark.parametrize(
    "line",
    [
        "a-1 cpu loss",
        "a-1 cpu loss many",
        "a-1 cpu loss nan",
        "a-1 cpu accepted_time soon",
        "a-1 cpu accepted_absence 12",
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "smoke.txt"
    path.write_text(f"# header\n\n{line}\n")
    with pytest.raises(ValueError, match=f"smoke.txt, line 3: expected `case device figure value`, got '{line}'"):
        read(path)
