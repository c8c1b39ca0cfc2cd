"""Every implementation on every awkward workload, in fp64, against one process to 1e-12; a new file under impls/ is
covered without a line here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from harness import implementation, models
from harness.models.awkward import KINDS
from harness.workload import in_precision
from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Worlds

_FURTHER_OPTIONS = {
    "native.ddp": [
        {"transport": "shared_memory"},
        {"reduction": "ring", "bucket_bytes": 1000},
        {"reduction": "parameter_server"},
        {"bucket_bytes": 1, "direct_gradients": False},
        {"transport": "shared_memory", "bucket_bytes": 1000, "direct_gradients": False},
    ],
    "torch.ddp": [{"find_unused_parameters": True}],
}
_NOT_TRAINING = {"native.floor"}  # exchanges nothing, by design
_ALL = [
    (name, options)
    for name in implementation.names()
    if name not in _NOT_TRAINING
    for options in [{}, *_FURTHER_OPTIONS.get(name, [])]
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "options"), _ALL, ids=str)
def test_trains_what_one_process_trains(worlds: Worlds, name: str, options: dict[str, object], kind: str) -> None:
    kind_of = implementation.load(name)
    text = f"awkward:kind={kind}"
    precision = "fp32" if models.load(text).fixed_dtypes else "fp64"
    workload = in_precision(models.load(text), precision)
    tried = 0
    for world_size in (1, 2, 3, 4) if not options else (2, 3):
        case = parity_case(text, name, world_size, options=options, precision=precision)
        if kind_of.unsupported(workload, case.layout, torch.device("cpu"), options):
            continue
        parity = worlds.parity(case)
        assert parity.ok, f"world size {world_size}: {parity.explanation}"
        assert parity.replicas_bit_equal
        tried += 1
    if not tried:
        pytest.skip(str(kind_of.unsupported(workload, case.layout, torch.device("cpu"), options)))
