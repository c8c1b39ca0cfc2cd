import pytest

from harness.launch.timeouts import ON_A_CLUSTER, ON_ONE_MACHINE, hard_deadline_seconds


@pytest.mark.parametrize(
    ("step_seconds", "here", "on_a_cluster"),
    [(0.01, 20.0, 120.0), (3.0, 30.0, 120.0), (15.0, 150.0, 150.0), (100.0, 1000.0, 300.0)],
)
def test_a_collective_takes_ten_steps_within_bounds(step_seconds: float, here: float, on_a_cluster: float) -> None:
    assert ON_ONE_MACHINE.of_collective(step_seconds) == here
    assert ON_A_CLUSTER.of_collective(step_seconds) == on_a_cluster


def test_the_hard_deadline_is_three_times_what_is_expected_and_a_minute() -> None:
    assert hard_deadline_seconds(40.0) == 180.0
    assert hard_deadline_seconds(float("inf")) == float("inf")
