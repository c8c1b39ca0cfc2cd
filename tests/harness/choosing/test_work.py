"""Which work a workload's text is, and amounts of memory."""

from __future__ import annotations

import pytest

from harness.choosing import work
from harness.choosing.amounts import mebibytes, parse_bytes, three_digits

TEXT = "gpt:size=17m,global_batch_size=4,num_micro_batches=4"


def test_micro_batches_are_no_other_work_and_a_batch_is() -> None:
    assert work.work_of(TEXT) == "gpt:size=17m,global_batch_size=4"
    assert work.model_of(TEXT) == "gpt:size=17m"
    assert work.settings_of(TEXT) == "num_micro_batches=4"
    assert work.batch_of(TEXT) == 4
    assert work.work_of("gpt:num_micro_batches=2") == "gpt"


def test_a_users_own_is_shown_by_its_files_name() -> None:
    text = "/somewhere/my_workload.py:sine:width=64"
    assert work.work_of(text) == text
    assert work.shown(text) == "my_workload.py:sine width=64"
    assert work.shown(TEXT) == "gpt size=17m global_batch_size=4 num_micro_batches=4"


@pytest.mark.parametrize(
    ("asked", "is_it"),
    [
        ("gpt", True),
        ("gpt:size=17m", True),
        ("gpt:global_batch_size=4,size=17m", True),
        ("gpt:size=30m", False),
        ("llama", False),
    ],
)
def test_what_is_asked_for_need_not_name_every_option(asked: str, is_it: bool) -> None:
    assert work.is_asked_for(TEXT, asked) is is_it


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("24GiB", 24 * 2**30), ("512 MiB", 512 * 2**20), ("80gb", 80e9), ("1.5KiB", 1536), ("7", 7), ("7B", 7)],
)
def test_amounts_of_memory(text: str, num_bytes: float) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "much", "24 GiBs", "-1GiB", "0", "1e3", "nan"])
def test_what_is_no_amount_is_said(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as 24GiB or 512MiB, got"):
        parse_bytes(text)


def test_three_digits_matter() -> None:
    shown = [three_digits(value) for value in (0, 0.01234, 1.2345, 12.345, 123.45, 12345.6)]
    assert shown == ["0", "0.0123", "1.23", "12.3", "123", "12,346"]
    assert (mebibytes(44 * 2**20), mebibytes(20 * 2**30)) == ("44.0 MiB", "20.0 GiB")
