"""What conformance on the awkward workloads does not show of native.zero: when it does things, what it refuses, low
precision, steps that are skipped, and blocks that come and go."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from harness import implementation, models
from harness.launch.failure import LaunchFailed
from harness.layout import Layout
from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Worlds

HERE = Path(__file__).parent
SCENES = HERE / "zero_scenes.py"
STACK = f"{HERE / 'deep.py'}:stack"
STAGES = [{"stage": 1}, {"stage": 2}, {"stage": 3}]


@pytest.mark.parametrize("transport", ["process_group", "shared_memory"])
@pytest.mark.parametrize("options", STAGES, ids=str)
def test_overlap_changes_no_bit(worlds: Worlds, options: dict[str, Any], transport: str) -> None:
    options = {**options, "transport": transport, "bucket_bytes": 4000}
    with_overlap, without = (
        worlds.trajectory(parity_case("awkward:kind=clipped", name, 3, options=options))
        for name in ("native.zero", f"{SCENES}:WithoutOverlap")
    )
    assert with_overlap.losses == without.losses
    assert with_overlap.parameters.keys() == without.parameters.keys()
    for name, value in with_overlap.parameters.items():
        assert torch.equal(value, without.parameters[name]), name


@pytest.mark.parametrize("scene", ["BlocksComeAndGo", "SavesNothingWhole"])
def test_scene_of_stage_3(worlds: Worlds, scene: str) -> None:
    text = f"{STACK}:num_micro_batches=2"
    parity = worlds.parity(parity_case(text, f"{SCENES}:{scene}", 2, options={"stage": 3}, precision="fp64"))
    assert parity.ok, parity.explanation


@pytest.mark.parametrize("transport", ["process_group", "shared_memory"])
@pytest.mark.parametrize("name", ["pairs", "reentrant", "whole_numbers"])
def test_stage_3_trains_blocks_that_backward_calls_again_and_whole_numbers(
    worlds: Worlds, name: str, transport: str
) -> None:
    options = {"stage": 3, "transport": transport}
    text = f"{HERE / 'called_in_backward.py'}:{name}"
    parity = worlds.parity(parity_case(text, "native.zero", 2, options=options, precision="fp64"))
    assert parity.ok, parity.explanation


@pytest.mark.parametrize(
    "options",
    [{"stage": 1}, {"stage": 2}, {"stage": 2, "bucket_bytes": 1}, {"stage": 3, "bucket_bytes": 1}],
    ids=str,
)
def test_gradients_of_backwards_within_backward_add_up(worlds: Worlds, options: dict[str, Any]) -> None:
    """Whether their bucket has room for them or not before the last, which nobody can tell from the first."""
    text = f"{HERE / 'called_in_backward.py'}:one_layer"
    parity = worlds.parity(parity_case(text, "native.zero", 2, options=options, precision="fp64"))
    assert parity.ok, parity.explanation


@pytest.mark.parametrize("name", ["triples", "reentrant_pairs"])
def test_stage_3_refuses_more_blocks_in_one_checkpoint_than_it_holds(worlds: Worlds, name: str) -> None:
    """Fewer are `pairs` and `reentrant` above."""
    text = f"{HERE / 'called_in_backward.py'}:{name}"
    with pytest.raises(LaunchFailed, match=r"called again .* in backward: .* checkpoint fewer at once, or keep them"):
        worlds.trajectory(parity_case(text, "native.zero", 2, options={"stage": 3}, precision="fp64"))
    kept = {"stage": 3, "reshard_after_forward": False}
    parity = worlds.parity(parity_case(text, "native.zero", 2, options=kept, precision="fp64"))
    assert parity.ok, parity.explanation


@pytest.mark.parametrize(
    ("order", "num_out", "reshards", "reason"),
    [
        ("1-0-2-3-4", 1, True, r"blocks\.0 is called after blocks\.1, and was called before that when"),
        (
            "1-0-2-3-4",
            1,
            False,
            r"backward comes to blocks\.1 after blocks\.0, and forward called",
        ),
        ("0-1-2-3-4-0", 1, True, r"blocks\.0 is called a second time, and was called once when"),
    ],
)
def test_stage_3_refuses_blocks_in_another_order_than_they_were_seen_in(
    worlds: Worlds, order: str, num_out: int, reshards: bool, reason: str
) -> None:
    """And trains as it recommends."""
    options = {"stage": 3, "reshard_after_forward": reshards}
    text = f"{HERE / 'called_in_backward.py'}:reordered:order={order}"
    with pytest.raises(LaunchFailed, match=rf"{reason} .* leave others out of the workload's blocks"):
        worlds.trajectory(parity_case(text, "native.zero", 2, options=options, precision="fp64"))
    followed = f"{text},num_out={num_out}"
    parity = worlds.parity(parity_case(followed, "native.zero", 2, options=options, precision="fp64"))
    assert parity.ok, parity.explanation


@pytest.mark.parametrize("options", STAGES, ids=str)
def test_all_ranks_skip_a_step_together(worlds: Worlds, options: dict[str, Any]) -> None:
    case = parity_case("awkward:kind=nonfinite", "native.zero", 3, options=options, precision="fp64")
    trajectory = worlds.trajectory(case)
    assert trajectory.skipped == [False, True, False]
    assert all(bool(torch.isfinite(value).all()) for value in trajectory.parameters.values())
    first, *others = trajectory.replica_checksums.values()
    assert all(checksums == first for checksums in others)


@pytest.mark.parametrize("precision", ["bf16", "bf16_fp32_gradients"])
@pytest.mark.parametrize("options", STAGES, ids=str)
def test_low_precision_stays_within_its_envelope(worlds: Worlds, options: dict[str, Any], precision: str) -> None:
    for kind in ("clipped", "padding_micro_batch"):
        parity = worlds.parity(
            parity_case(f"awkward:kind={kind}", "native.zero", 2, options=options, precision=precision)
        )
        assert parity.ok, parity.explanation


@pytest.mark.parametrize("options", STAGES, ids=str)
def test_hybrid_is_right_and_replicas_are_bit_equal(worlds: Worlds, options: dict[str, Any]) -> None:
    layout = Layout(data=4, shard=2)
    parity = worlds.parity(
        parity_case("awkward:kind=clipped", "native.zero", 4, options=options, precision="fp64", layout=layout)
    )
    assert parity.ok, parity.explanation
    assert parity.replicas_bit_equal


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_bytes": 0}, "bucket_bytes must be at least 1, got 0"),
        ({"stage": 2, "reshard_after_forward": False}, "reshard_after_forward is for stage 3, .* got stage 2"),
    ],
    ids=str,
)
def test_options_without_meaning_are_refused(options: dict[str, Any], message: str) -> None:
    refused = implementation.load("native.zero").refused_options(options)
    assert refused is not None
    assert re.search(message, refused), refused


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(pipeline=2), Layout(data=2, tensor=2)], ids=str)
def test_other_degrees_are_refused_before_any_process_starts(layout: Layout) -> None:
    kind = implementation.load("native.zero")
    reason = kind.unsupported(models.load("gpt"), layout, torch.device("cpu"), {})
    assert reason == f"a sharded optimizer cuts no layer: it takes a data degree and a shard degree, got {layout}"


@pytest.mark.parametrize("transport", ["process_group", "shared_memory"])
@pytest.mark.parametrize(
    "name",
    [
        "mixture",
        "packed",
        "mixture:activation_checkpointing=true",
        "packed:activation_checkpointing=true",
        "noting",
        "transformed",
    ],
)
def test_stage_3_notices_that_backward_has_come_to_a_block(worlds: Worlds, name: str, transport: str) -> None:
    """Though no gradient has reached a tensor that the block gave out."""
    text = f"{HERE / 'odd_blocks.py'}:{name}"
    options = {"stage": 3, "transport": transport}
    parity = worlds.parity(parity_case(text, "native.zero", 2, options=options, precision="fp64"))
    assert parity.ok, parity.explanation


@pytest.mark.parametrize("stage", [2, 3])
def test_slots_have_no_memory_before_they_are_needed(worlds: Worlds, stage: int) -> None:
    parity = worlds.parity(
        parity_case(STACK, f"{SCENES}:HoldsNothingInAdvance", 2, options={"stage": stage}, precision="fp64")
    )
    assert parity.ok, parity.explanation


def test_stage_3_keeps_no_graph_that_the_loss_does_not_reach(worlds: Worlds) -> None:
    """Nor minds that a sparse tensor is saved, which has no storage."""
    text, scene = f"{HERE / 'odd_blocks.py'}:with_side", f"{SCENES}:KeepsNoGraph"
    parity = worlds.parity(parity_case(text, scene, 2, options={"stage": 3}, precision="fp64"))
    assert parity.ok, parity.explanation


@pytest.mark.parametrize("transport", ["process_group", "shared_memory"])
def test_stage_3_refuses_writes_to_parameters(worlds: Worlds, transport: str) -> None:
    text = f"{HERE / 'odd_blocks.py'}:clamped"
    with pytest.raises(
        LaunchFailed, match=r"the model writes to parameter 0\.weight in place; under stage 3 that is l"
    ):
        worlds.trajectory(parity_case(text, "native.zero", 2, options={"stage": 3, "transport": transport}))
    parity = worlds.parity(parity_case(text, "native.zero", 2, options={"stage": 2}, precision="fp64"))
    assert parity.ok, parity.explanation


@pytest.mark.parametrize(("name", "options"), [("native.ddp", {}), *(("native.zero", o) for o in STAGES)], ids=str)
def test_views_kept_from_construction_are_named(worlds: Worlds, name: str, options: dict[str, Any]) -> None:
    text = f"{HERE / 'odd_blocks.py'}:mirrored"
    with pytest.raises(LaunchFailed, match=rf"{name}: 0\.mirrors\[0\] was made of parameter 0\.weight"):
        worlds.trajectory(parity_case(text, name, 2, options=options))


@pytest.mark.parametrize("options", STAGES, ids=str)
@pytest.mark.parametrize(("transport", "num_micro_batches"), [("process_group", 1), ("shared_memory", 2)])
@pytest.mark.parametrize("name", ["normed", "packed_norms"])
def test_ranks_that_use_fewer_parameters_hold_up_no_synchronised_batch_norm(
    worlds: Worlds, name: str, options: dict[str, Any], transport: str, num_micro_batches: int
) -> None:
    text = f"{HERE / 'odd_blocks.py'}:{name}:num_micro_batches={num_micro_batches}"
    options = {**options, "transport": transport, "bucket_bytes": 1}
    parity = worlds.parity(parity_case(text, "native.zero", 2, options=options, precision="fp64"))
    assert parity.ok, parity.explanation
