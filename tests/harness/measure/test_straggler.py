import pytest

from harness.measure.straggler import Straggler, find, speeds


def test_a_speed_is_a_share_of_the_others_median() -> None:
    rounds = [[0.1, 0.5, 0.2, 0.1], [0.1, 0.4, 0.2, 0.1], [0.1, 0.6, 0.2, 9.9]]
    assert speeds(rounds) == pytest.approx([0.2 / 0.1, 0.1 / 0.5, 0.1 / 0.2, 0.2 / 0.1])
    assert find(rounds) == Straggler(rank=1, speed=pytest.approx(0.2))  # type: ignore[arg-type]
    assert str(find(rounds)) == "rank 1 is a straggler: it works at 20% of the others' speed, and all wait for it"


@pytest.mark.parametrize(
    "rounds", [[], [[0.1]], [[0.1, 0.15]], [[0.0, 0.1]], [[0.1, 0.1, 0.1], [0.1, 0.9, 0.1], [0.1, 0.1, 0.1]]]
)
def test_neighbours_single_ranks_and_one_bad_round_are_no_stragglers(rounds: list[list[float]]) -> None:
    assert find(rounds) is None


def test_ranks_that_share_processors_differ_by_as_much_again() -> None:
    rounds = [[0.1, 0.25, 0.1, 0.1]]
    assert find(rounds) == Straggler(rank=1, speed=pytest.approx(0.4))  # type: ignore[arg-type]
    assert find(rounds, processors_a_rank=2.0) is not None
    assert find(rounds, processors_a_rank=0.5) is None
    assert find([[0.1, 0.5, 0.1, 0.1]], processors_a_rank=0.5) is not None
