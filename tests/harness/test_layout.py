from typing import Any

import pytest

from harness.layout import AXES, Coordinates, Layout


def test_ranks_of_an_axis_by_hand() -> None:
    """Two stages of three data ranks of two tensor ranks:

    stage 0   (0 1) (2 3) (4 5)
    stage 1   (6 7) (8 9) (10 11)
    """
    layout = Layout(data=3, tensor=2, pipeline=2)
    assert layout.world_size == 12
    assert layout.coordinates(9) == Coordinates(data=1, tensor=1, pipeline=1)
    assert layout.groups("tensor") == ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11))
    assert layout.groups("data") == ((0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11))
    assert layout.groups("pipeline") == ((0, 6), (1, 7), (2, 8), (3, 9), (4, 10), (5, 11))
    assert layout.groups("world") == (tuple(range(12)),)


def test_shards_are_neighbours_and_replicas_stand_apart() -> None:
    layout = Layout(data=4, shard=2)
    assert layout.groups("shard") == ((0, 1), (2, 3))
    assert layout.groups("replicate") == ((0, 2), (1, 3))
    whole = Layout(data=4)
    assert (whole.groups("shard"), whole.groups("replicate")) == (((0, 1, 2, 3),), ((0,), (1,), (2,), (3,)))


@pytest.mark.parametrize("layout", [Layout(), Layout(data=4, shard=2, tensor=3, pipeline=2), Layout(pipeline=3)])
def test_every_axis_covers_every_rank_once(layout: Layout) -> None:
    everyone = list(range(layout.world_size))
    for axis in AXES:
        assert sorted(rank for group in layout.groups(axis) for rank in group) == everyone
    assert [layout.rank_of(layout.coordinates(rank)) for rank in everyone] == everyone


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(), "single"),
        (Layout(data=2), "data=2"),
        (Layout(data=4, shard=2, tensor=2, pipeline=3), "data=4 shard=2 tensor=2 pipeline=3"),
        (Layout(data=4, shard=1), "data=4 shard=1"),
    ],
)
def test_text_and_back(layout: Layout, text: str) -> None:
    assert str(layout) == text
    assert Layout.parse(text) == layout


def test_bad_layouts() -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"data": 0}, "layout: data must be a positive integer, got 0"),
        ({"tensor": True}, "layout: tensor must be a positive integer, got True"),
        ({"pipeline": 2.0}, r"layout: pipeline must be a positive integer, got 2\.0"),
        ({"data": 4, "shard": 3}, "layout: shard must divide data, got shard 3 and data 4"),
    ]
    for values, message in bad:
        with pytest.raises(ValueError, match=message):
            Layout(**values)
    with pytest.raises(ValueError, match=r"expected parts like data=2 with data, shard, tensor, pipeline, got 'x=2'"):
        Layout.parse("data=2 x=2")
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\) for layout data=2, got 2"):
        Layout(data=2).coordinates(2)
    with pytest.raises(ValueError, match=r"axis must be one of data, .*, got 'depth'"):
        Layout().groups("depth")  # type: ignore[arg-type]
