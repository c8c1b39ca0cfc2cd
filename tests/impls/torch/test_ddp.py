from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from harness import models
from harness.layout import Layout
from harness.workload import in_precision
from impls.torch.ddp import TorchDataParallel
from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Worlds

SCENES = Path(__file__).parent / "scenes.py"


@pytest.mark.parametrize(
    ("kind", "options", "searches"),
    [
        ("unequal_tokens", {}, False),
        ("unused", {}, True),
        ("unequal_tokens", {"find_unused_parameters": True}, True),
    ],
    ids=str,
)
def test_searches_for_unused_parameters_where_the_workload_has_them(
    worlds: Worlds, kind: str, options: dict[str, Any], searches: bool
) -> None:
    options = {**options, "expected_search": searches}
    worlds.adopt(parity_case(f"awkward:kind={kind}", f"{SCENES}:Searching", 2, options=options))


def test_gradients_are_exchanged_with_the_last_micro_batch_alone(worlds: Worlds) -> None:
    parity = worlds.parity(
        parity_case("awkward:kind=unequal_tokens,num_micro_batches=4", f"{SCENES}:Exchanging", 2, precision="fp64")
    )
    assert parity.ok, parity.explanation


@pytest.mark.parametrize("kind", ["clipped", "padding_micro_batch"])
def test_bf16_stays_within_its_envelope(worlds: Worlds, kind: str) -> None:
    """SGD and AdamW, clipped, with masters."""
    parity = worlds.parity(parity_case(f"awkward:kind={kind}", "torch.ddp", 2, precision="bf16"))
    assert parity.ok, parity.explanation


@pytest.mark.parametrize(
    ("workload", "precision", "layout", "device", "reason"),
    [
        ("awkward:kind=sgd", "fp32", Layout(data=2), "cpu", None),
        ("awkward:kind=sgd", "fp32", Layout(data=1, tensor=2), "cpu", "takes only a data degree"),
        ("awkward:kind=synchronised_batch_norm", "fp32", Layout(data=2), "cpu", "runs on accelerators only"),
        ("awkward:kind=synchronised_batch_norm", "fp32", Layout(data=2), "cuda", None),
        ("awkward:kind=sgd", "bf16", Layout(data=2), "cpu", None),
        (
            "awkward:kind=sgd",
            "bf16_fp32_gradients",
            Layout(data=2),
            "cpu",
            "reduces gradients in the parameters' dtype",
        ),
        ("awkward:kind=mixed_dtypes", "bf16_fp32_gradients", Layout(data=2), "cpu", None),
        ("awkward:kind=batch_norm", "fp32", Layout(data=8), "cpu", "cannot be shared by 8 data ranks"),
    ],
)
def test_says_what_it_does_not_do(
    workload: str, precision: str, layout: Layout, device: str, reason: str | None
) -> None:
    work = in_precision(models.load(workload), precision)
    answer = TorchDataParallel.unsupported(work, layout, torch.device(device), {})
    assert answer is None if reason is None else answer is not None and reason in answer
