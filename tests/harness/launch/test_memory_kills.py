import signal

import pytest

from harness.launch.memory_kills import num_memory_kills, was_killed_for_memory


def test_a_process_that_was_killed_is_a_memory_kill_only_where_the_count_has_grown() -> None:
    now = num_memory_kills()
    if now is None:
        pytest.skip("this system does not count them")
    assert was_killed_for_memory(-signal.SIGKILL, now - 1)
    assert not was_killed_for_memory(-signal.SIGKILL, now)
    assert not was_killed_for_memory(-signal.SIGTERM, now - 1)
    assert not was_killed_for_memory(None, now - 1)
    assert not was_killed_for_memory(-signal.SIGKILL, None)
