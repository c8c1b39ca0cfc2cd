from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness import room
from harness.launch.failure import LaunchFailed

GIB = 2**30


def test_a_case_starts_while_there_is_room_for_the_greediest_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    left = 10.0
    monkeypatch.setattr(room, "available_bytes", lambda: int(left * GIB))
    watched = room.Room()
    for taken in (2.0, 3.0, 1.0):
        watched.check()
        left -= taken
        watched.taken()
    watched.check()  # 4 GiB are left for one of up to 3
    left = 3.7
    with pytest.raises(LaunchFailed) as failure:
        watched.check()
    assert failure.value.status == "out of memory"
    assert "3 cases of the comparison are in memory and have taken up to 3.0 GiB each; 3.7 GiB" in failure.value.reason


def test_where_the_system_does_not_say_every_case_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "available_bytes", lambda: None)
    watched = room.Room()
    watched.check()
    watched.taken()
    watched.check()


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="the system does not say")
def test_what_is_available_is_no_more_than_the_machine_says() -> None:
    says = re.search(r"^MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    available = room.available_bytes()
    assert says is not None
    assert available is not None
    assert 0 < available < int(says[1]) * 1024
