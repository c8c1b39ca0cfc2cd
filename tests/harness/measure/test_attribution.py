"""Which category a block gets, on timelines written by hand."""

import torch

from harness.measure.allocations import FOREVER, Block, Mark, Timeline
from harness.measure.attribution import LIST_MARK, STEP_MARK, by_category, storages

#   time        0    10         20   30         40   50   60
#   step        [.................................)
#   forward          [..........)
#   backward                         [..........)
#   list                                             |
MARKS = (
    Mark(STEP_MARK, 0, 50),
    Mark("meshmark.forward", 10, 20),
    Mark("meshmark.backward", 30, 40),
    Mark(LIST_MARK, 60, 61),
)


def test_what_a_phase_leaves_behind_belongs_to_it() -> None:
    blocks = {
        "saved for backward": Block(0x100, 1, 12, 35),
        "temporary of forward": Block(0x200, 2, 13, 14),
        "loss that outlives the step": Block(0x300, 4, 15, 70),
        "gradient freed by the optimizer": Block(0x400, 8, 32, 45),
        "temporary of backward": Block(0x500, 16, 33, 34),
        "before the phases": Block(0x600, 32, 5, 45),
        "never freed": Block(0x700, 64, 16, FOREVER),
    }
    timeline = Timeline(blocks=tuple(sorted(blocks.values(), key=lambda block: block.born)), marks=MARKS)
    found, mapped = by_category(timeline, [{}])
    assert found["activations"] == [blocks["saved for backward"]]
    assert found["gradients"] == [blocks["gradient freed by the optimizer"]]
    assert sum(block.num_bytes for block in found["other"]) == 2 + 4 + 16 + 32 + 64
    assert mapped == {}


def test_a_block_claimed_twice_goes_to_the_first_category() -> None:
    block = Block(0x100, 64, 5, FOREVER)
    timeline = Timeline(blocks=(block,), marks=MARKS)
    claims = {"communication_buffers": [(0x100, 64)], "gradients": [(0x110, 16)]}
    for listed in (claims, dict(reversed(claims.items()))):
        found, _ = by_category(timeline, [listed])
        assert (found["gradients"], found["communication_buffers"]) == ([block], [])


def test_an_address_means_what_lived_there_when_it_was_listed() -> None:
    first, second = Block(0x100, 64, 5, 65), Block(0x100, 64, 70, FOREVER)
    marks = (*MARKS, Mark(STEP_MARK, 66, 80), Mark(LIST_MARK, 90, 91))
    found, _ = by_category(
        Timeline(blocks=(first, second), marks=marks), [{"gradients": [(0x100, 64)]}, {"parameters": [(0x100, 64)]}]
    )
    assert (found["gradients"], found["parameters"]) == ([first], [second])


def test_mapped_bytes_count_once_though_their_storages_overlap() -> None:
    timeline = Timeline(blocks=(Block(0x100, 64, 5, FOREVER),), marks=MARKS)
    listed = {"gradients": [(0x1000, 100), (0x1000 + 60, 100)], "communication_buffers": [(0x1000, 400)]}
    _, mapped = by_category(timeline, [listed])
    assert mapped == {"gradients": 160, "communication_buffers": 240}


def test_without_a_forward_mark_there_are_no_activations_to_tell() -> None:
    found, _ = by_category(Timeline(blocks=(Block(0x100, 64, 5, FOREVER),), marks=(MARKS[0], MARKS[3])), [{}])
    assert "activations" not in found


def test_communication_buffers_are_told_apart_where_somebody_lists_or_marks_them() -> None:
    blocks = (Block(0x100, 64, 5, FOREVER),)
    unmarked, lent = Timeline(blocks=blocks, marks=MARKS), Mark("meshmark.lending.communication_buffers", 6, 7)
    assert "communication_buffers" not in by_category(unmarked, [{}])[0]
    assert by_category(unmarked, [{"communication_buffers": []}])[0]["communication_buffers"] == []
    marked = Timeline(blocks=blocks, marks=tuple(sorted((*MARKS, lent), key=lambda mark: mark.begin)))
    assert by_category(marked, [{}])[0]["communication_buffers"] == []


def test_storages_of_a_device() -> None:
    whole = torch.zeros(10)
    elsewhere = torch.zeros(10, device="meta")
    assert list(storages([whole[3:], elsewhere, torch.zeros(0)], torch.device("cpu"))) == [(whole.data_ptr(), 40)]
