"""The textbook: what a strategy has one rank send in a step, whoever implements it.

    G gradients, P parameters, in bytes as they are exchanged; N ranks; m micro-batches

    data_parallel   2(N-1)/N G           summed once a step
    zero_1          (N-1)/N (G + P)      reduced and scattered once, gathered after the update
    zero_2          (N-1)/N (mG + P)     reduced and scattered after every micro-batch
    zero_3          (N-1)/N m(G + 2P)    gathered for forward and again for backward

With one micro-batch and gradients as wide as parameters 2, 2, 2 and 3 (N-1)/N G (Rajbhandari et al. 2020, "ZeRO").
Where shards have replicas N are the shards, and each rank's are summed over the R replicas, 2(R-1)/R of them.

Tensor parallelism sends what its layers sum (Shoeybi et al. 2019, "Megatron-LM"), a pipeline one activation and its
gradient over each border and for each micro-batch (Narayanan et al. 2021): the closed forms of our own, which do just
that over the process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from harness import implementation, models
from harness.code_change import PLAIN_TRAINING
from harness.compared_strategy import compared_as, ours_among, strategies_of
from harness.implementation import Implementation
from harness.layout import Layout
from harness.measure.predicted_memory import registry
from harness.parameters import LogicalParameter, all_reduce_wire_bytes, replicated_state_bytes
from harness.result import Result
from harness.workload import Workload, in_precision

METRIC = "communication.textbook_bytes_per_step"
_ALONG_DATA = ("data_parallel", "zero_1", "zero_2", "zero_3")


def bytes_per_step(
    strategy: str, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout
) -> int | None:
    """Of the rank that sends most. None for a strategy without a textbook, for a product of degrees, for a rank alone,
    and where what layers exchange is not known without running them."""
    axis = {"tensor_parallel": layout.tensor, "pipeline_parallel": layout.pipeline}.get(strategy, layout.data)
    if axis != layout.world_size or axis == 1:
        return None
    if strategy not in _ALONG_DATA:
        kind = _by_the_book(strategy)
        if kind is None or kind.unsupported(workload, layout, torch.device("cpu"), {}):
            return None
        return kind.predicted_wire_bytes(workload, parameters, layout, {})
    gradients = replicated_state_bytes(parameters, workload.precision, workload.training.num_moments)["gradients"]
    if strategy == "data_parallel":
        return all_reduce_wire_bytes(gradients, layout.data)
    trained = sum(parameter.num_bytes for parameter in parameters if parameter.trainable)
    num_micro_batches, shards = workload.training.num_micro_batches, layout.shard_degree
    exchanged = {
        "zero_1": gradients + trained,
        "zero_2": num_micro_batches * gradients + trained,
        "zero_3": num_micro_batches * (gradients + 2 * sum(parameter.num_bytes for parameter in parameters)),
    }[strategy]
    return -(-(shards - 1) * exchanged // shards) + all_reduce_wire_bytes(
        -(-gradients // shards), layout.data // shards
    )


def _by_the_book(strategy: str) -> type[Implementation] | None:
    """An implementation that sends what the textbook of its strategy says. The family of plain training is asked first,
    so that where it answers no library is loaded; what cannot be loaded answers nothing."""
    family = PLAIN_TRAINING.partition(".")[0]
    for name in sorted(implementation.names(), key=lambda name: name.partition(".")[0] != family):
        try:
            kind = implementation.load(name)
        except Exception:  # whatever a third-party library raises while it is imported
            continue
        if kind.sends_by_the_book and kind.strategy_of({}) == strategy:
            return kind
    return None


def filled_in(results: Sequence[Result]) -> list[Result]:
    """The results with this figure where they were written down without it, or with that of another strategy than the
    one as which they are compared here, and with the reason of who sends more. Left as they are where workload or
    implementation are no longer what can be loaded."""
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        groups.setdefault(result.case.side_by_side, []).append(result)
    ours = {key: ours_among(members) for key, members in groups.items()}
    known: dict[tuple[str, str, Layout, str], int | None] = {}
    filled = []
    for result in map(_with_reason, results):
        case, strategies = result.case, strategies_of(result)
        strategy = compared_as(case, strategies, ours[case.side_by_side])
        # Alone, as it may have been when it was written down.
        is_told = METRIC in result.metrics and strategy == compared_as(case, strategies, ())
        if not result.metrics or is_told or case.role == "floor":
            filled.append(result)
            continue
        key = (case.workload, case.precision, case.layout, strategy)
        if key not in known:
            known[key] = _loaded_bytes(*key)
        num_bytes = known[key]
        more = {} if num_bytes is None else {METRIC: float(num_bytes)}
        filled.append(replace(result, metrics={**result.metrics, **more}))
    return filled


def _with_reason(result: Result) -> Result:
    case = result.case
    if result.beyond_the_textbook is not None or not result.metrics or case.role == "floor":
        return result
    device = (result.environment.get("device") or {}).get("kind") or "cpu"
    try:
        kind = implementation.load(case.implementation)
        return replace(result, beyond_the_textbook=kind.beyond_the_textbook(torch.device(device), case.options))
    except Exception:  # whatever a third-party library, or a user's file, raises while it is imported
        return result


def _loaded_bytes(text: str, precision: str, layout: Layout, strategy: str) -> int | None:
    try:
        workload = in_precision(models.load(text), precision)
        return bytes_per_step(strategy, workload, registry(workload), layout)
    except Exception:  # a user's file may be gone by now, or do anything else
        return None
