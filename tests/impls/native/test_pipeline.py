"""What conformance does not show of native.pipeline: every number of micro-batches, borders of all sorts, weights
large enough to be put off, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from harness import models
from harness.implementation import load
from harness.layout import Layout
from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Worlds

CHAINS = Path(__file__).with_name("chains.py")
SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "gpipe"},
    {"schedule": "1f1b"},
    {"schedule": "interleaved_1f1b", "chunks": 2},
    {"schedule": "zero_bubble"},
]


@pytest.mark.parametrize("options", SCHEDULES, ids=lambda options: options["schedule"])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 5, 8])
def test_any_number_of_micro_batches(worlds: Worlds, options: dict[str, Any], num_micro_batches: int) -> None:
    """Fewer than stages too; the embedding tied to the head, on the first stage and the last."""
    text = f"gpt:size=tiny,tied=true,num_micro_batches={num_micro_batches}"
    parity = worlds.parity(
        parity_case(text, "native.pipeline", 2, layout=Layout(pipeline=2), options=options, precision="fp64")
    )
    assert parity.ok, parity.explanation


@pytest.mark.parametrize(
    ("name", "num_stages", "options"),
    [
        ("several_tensors", 2, {"partition": "time"}),
        ("several_tensors", 3, {"partition": "memory"}),
        ("several_tensors", 4, {"schedule": "zero_bubble", "partition": "uniform"}),
        ("several_tensors", 2, {"schedule": "interleaved_1f1b", "chunks": 2, "partition": "uniform"}),
        ("more_in_training", 2, {"partition": "uniform"}),
        ("empty_stage", 3, {"partition": "uniform"}),
        ("frozen_start", 3, {"schedule": "gpipe", "partition": "uniform"}),
        ("statistics", 2, {"partition": "uniform", "schedule": "zero_bubble"}),
        ("crossing_ties", 4, {"partition": "uniform"}),
        ("crossing_ties", 3, {"partition": "uniform", "schedule": "zero_bubble"}),
        ("changing_lengths", 3, {"partition": "uniform"}),
        ("changing_lengths", 2, {"schedule": "zero_bubble", "partition": "uniform"}),
    ],
)
def test_borders_of_all_sorts(worlds: Worlds, name: str, num_stages: int, options: dict[str, Any]) -> None:
    layout = Layout(pipeline=num_stages)
    case = parity_case(
        f"{CHAINS}:{name}", "native.pipeline", num_stages, layout=layout, options=options, precision="fp64"
    )
    parity = worlds.parity(case)
    assert parity.ok, parity.explanation
    assert parity.evaluation_loss_relative is not None


@pytest.mark.parametrize(
    ("workload", "num_stages", "options"),
    [
        ("llama:tied=true,num_micro_batches=3,clip_norm=1.0", 2, {"schedule": "zero_bubble"}),
        ("llama:num_micro_batches=2,activation_checkpointing=true", 4, {"partition": "uniform"}),
    ],
)
def test_trains_a_model_of_transformers(
    worlds: Worlds, workload: str, num_stages: int, options: dict[str, Any]
) -> None:
    """Grouped-query attention and rotary positions, the embedding tied to the head across stages."""
    pytest.importorskip("transformers", reason="transformers is not installed (the hf extra)")
    layout = Layout(pipeline=num_stages)
    parity = worlds.parity(
        parity_case(workload, "native.pipeline", num_stages, layout=layout, options=options, precision="fp64")
    )
    assert parity.ok, parity.explanation


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_weights_large_enough_to_be_put_off(worlds: Worlds, precision: str) -> None:
    case = parity_case(
        f"{CHAINS}:even:num_blocks=3,width=192,length=4,num_micro_batches=5",
        "native.pipeline",
        3,
        layout=Layout(pipeline=3),
        options={"schedule": "zero_bubble"},
        precision=precision,
    )
    parity = worlds.parity(case)
    assert parity.ok, parity.explanation


@pytest.mark.parametrize(
    ("workload", "layout", "options", "message"),
    [
        (
            f"{CHAINS}:skipping",
            Layout(pipeline=3),
            {},
            "pipeline: 2 uses what 0 has made, past the blocks between them",
        ),
        ("gpt:size=tiny", Layout(pipeline=8), {}, "8 stages need as many blocks, got the 4 of gpt"),
        ("convnet", Layout(pipeline=2), {}, "workload convnet has no chain"),
        ("gpt", Layout(pipeline=2, data=2), {}, "pipeline parallelism takes a pipeline degree alone, got"),
    ],
    ids=str,
)
def test_what_is_no_pipeline_is_refused_before_any_process_starts(
    workload: str, layout: Layout, options: dict[str, Any], message: str
) -> None:
    reason = load("native.pipeline").unsupported(models.load(workload), layout, torch.device("cpu"), options)
    assert reason is not None
    assert reason.startswith(message), reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"schedule": "dfs"},
            "schedule must be one of gpipe, 1f1b, interleaved_1f1b, zero_bubble, zero_bubble_h2, got 'dfs'",
        ),
        ({"schedule": "1f1b", "chunks": 2}, "1f1b: takes one stage a rank, got num_chunks 2"),
    ],
    ids=str,
)
def test_options_without_meaning_are_refused(options: dict[str, Any], message: str) -> None:
    assert load("native.pipeline").refused_options(options) == message
