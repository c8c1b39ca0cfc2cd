"""The parity gate must fail every broken build, in each lane, and say what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Worlds

_MUTANTS = Path(__file__).with_name("mutants.py")
_FAULTS = [
    # (mutant, awkward workload, options, what the explanation says)
    ("NoReduction", "unequal_tokens", {}, "rank 0's share alone: not reduced"),
    ("RightWhileWatched", "unequal_tokens", {}, "parts at step 2"),
    ("DoubleAverage", "unequal_tokens", {}, "divided once more by the data degree (2)"),
    ("MeanOfMeans", "unequal_tokens", {}, "a mean of means over the data ranks"),
    ("MissingBucket", "unequal_tokens", {"bucket_bytes": 4000}, "the others are right"),
    ("StaleBucket", "unequal_tokens", {}, "not cleared"),
    ("IdenticalData", "unequal_tokens", {}, "identical data on every rank"),
    ("LastMicroBatchOnly", "unequal_tokens", {}, "holds the last micro-batch alone"),
    ("ReducedTooEarly", "unequal_tokens", {}, "holds the first micro-batch alone"),
    ("EverythingDecays", "decay_groups", {}, "weight decay is applied to every parameter"),
    ("UnusedDecays", "unused", {}, "which the reference has not"),
    ("OwnBuffers", "batch_norm", {}, "no longer hold the same bits"),
    ("EvaluatesInTraining", "dropout", {}, "worst in the evaluation loss"),
    ("EvaluationMovesStatistics", "batch_norm", {}, "the buffer of"),
    ("NeverClips", "clipped", {}, "gradients are not clipped"),
]


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize(("mutant", "kind", "options", "explanation"), _FAULTS, ids=[fault[0] for fault in _FAULTS])
def test_gate_catches_and_explains(
    worlds: Worlds, mutant: str, kind: str, options: dict[str, object], explanation: str, precision: str
) -> None:
    implementation = f"{_MUTANTS}:{mutant}"
    parity = worlds.parity(parity_case(f"awkward:kind={kind}", implementation, 2, options=options, precision=precision))
    assert not parity.ok
    assert parity.first_bad_step is not None
    assert parity.explanation is not None
    if explanation not in parity.explanation:
        _expect_within_ceiling(worlds, kind, precision)
    assert explanation in parity.explanation


def test_a_replica_that_drifts_in_the_ninth_digit_is_seen_by_its_bits(worlds: Worlds) -> None:
    parity = worlds.parity(
        parity_case("awkward:kind=unequal_tokens", f"{_MUTANTS}:DriftingReplica", 2, precision="fp64")
    )
    assert not parity.replicas_bit_equal
    assert not parity.ok


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("kind", sorted({fault[1] for fault in _FAULTS}))
def test_gate_passes_what_is_right(worlds: Worlds, kind: str, precision: str) -> None:
    parity = worlds.parity(parity_case(f"awkward:kind={kind}", "native.ddp", 2, precision=precision))
    if not parity.ok:
        _expect_within_ceiling(worlds, kind, precision)
    assert parity.ok, parity.explanation


def _expect_within_ceiling(worlds: Worlds, kind: str, precision: str) -> None:
    """On some processors rounding takes a BatchNorm bias's gradient 0.464 of its size away, beyond the lane's ceiling,
    which must stay below a gradient divided twice; nothing can be told apart there."""
    if (kind, precision) == ("batch_norm", "bf16"):
        peer = worlds.parity(parity_case(f"awkward:kind={kind}", "torch.ddp", 2, precision=precision))
        if not peer.ok:
            pytest.xfail(f"bf16 takes torch.ddp beyond the lane's ceiling too: {peer.explanation}")
