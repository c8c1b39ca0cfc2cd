"""Tensor parallelism: each layer of the workload's tensor plan is cut among the ranks, which exchange activations where
slices meet. Shoeybi et al. 2019, "Megatron-LM"; with `sequence_parallel` what lies between the cut layers is cut along
the sequence (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models").

    x -> [ column-parallel -> row-parallel ] -> sum -> x + ... -> [ column-parallel -> row-parallel ] -> sum -> ...

Gradients and updates are those of data parallelism over one rank (ddp.py) on this rank's slice (parts/tensor_model.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import nn

from harness import traffic
from harness.implementation import DryStep
from harness.layout import Layout
from harness.mesh import Mesh
from harness.parameters import LogicalParameter, MemoryCategory, replicated_state_bytes
from harness.placement import Seats
from harness.traffic import Traffic
from harness.workload import Batch, Workload
from impls.native.ddp import DEFAULT_SMALL_BYTES, NativeDataParallel, bucket_plans
from impls.native.parts import shared_memory, tensor_model
from impls.native.parts.counting_exchange import CountingExchange
from impls.native.parts.dry_step import dry_step
from impls.native.parts.flat_optimizer import converted_bytes
from impls.native.parts.rank_model import RankModel
from impls.native.parts.shared_memory import TIMEOUT_SECONDS
from impls.native.parts.tensor_dry_run import TensorCosts, largest_batch, slice_without_values, tensor_costs
from impls.native.parts.tensor_exchange import ProcessGroupExchange, SharedMemoryExchange, TensorExchange

TensorTransport = Literal["process_group", "shared_memory", "none"]
_ACTIVATIONS, _REST = 0, 1  # lanes: what is asked for between steps waits for no activation


class NativeTensorParallel(NativeDataParallel):
    """`transport="shared_memory"` exchanges activations through mapped memory where the ranks of a slice share a
    machine, and falls back to the process group elsewhere; "none": no training then, but the floor under this very
    code. `sequence_parallel` cuts along the sequence what lies between the cut layers: less memory for activations, as
    many bytes."""

    strategy = "tensor_parallel"
    sends_by_the_book = True
    whose: ClassVar[str] = "native.tensor"

    @classmethod
    def is_floor(cls, options: Mapping[str, Any]) -> bool:
        return options.get("transport") == "none"

    @classmethod
    def unsupported(
        cls, workload: Workload, layout: Layout, device: torch.device, options: Mapping[str, Any]
    ) -> str | None:
        if (layout.data, layout.pipeline) != (1, 1):
            return f"tensor parallelism takes a tensor degree alone, got {layout}"
        cuts_sequence = bool(options.get("sequence_parallel", False)) and layout.tensor > 1
        if cuts_sequence and workload.uses_random_numbers:
            return "dropout on a piece of the sequence draws other masks than one process does on all of it"
        return workload.fits_tensor_degree(layout.tensor, cuts_sequence=cuts_sequence)

    @classmethod
    def predicted_memory(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[MemoryCategory, int] | None:
        """Of the first rank, which holds most where the vocabulary does not divide."""
        costs = _costs(workload, layout, options)
        if costs is None:
            return None
        states = replicated_state_bytes(costs.parameters, workload.precision, workload.training.num_moments)
        shares_memory = options.get("transport") == "shared_memory"
        return {**states, "communication_buffers": 2 * costs.largest_bytes if shares_memory else 0}

    @classmethod
    def dry_steps(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Sequence[Callable[[nn.Module], DryStep]] | None:
        """The first rank's."""
        if layout.tensor == 1:
            return super().dry_steps(workload, parameters, layout, options)
        states = cls.predicted_memory(workload, parameters, layout, options)
        if states is None:
            return ()
        batch = largest_batch(workload, layout.data)
        return [partial(_dry_step, workload, layout, options, batch=batch, held_bytes=sum(states.values()))]

    @classmethod
    def predicted_wire_bytes(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> int | None:
        costs = _costs(workload, layout, options)
        return None if costs is None else costs.activation_bytes + costs.partial_bytes + costs.norm_bytes

    @classmethod
    def predicted_traffic(
        cls,
        workload: Workload,
        parameters: Sequence[LogicalParameter],
        layout: Layout,
        seats: Seats,
        options: Mapping[str, Any],
    ) -> Traffic | None:
        """Sums of activations go around a ring; so do the pieces of a cut sequence."""
        sent_bytes = cls.predicted_wire_bytes(workload, parameters, layout, options)
        return None if sent_bytes is None else traffic.ring(layout.groups("tensor")[0], sent_bytes)

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        *,
        transport: TensorTransport = "process_group",
        sequence_parallel: bool = False,
        direct_gradients: bool = True,
    ) -> None:
        if transport not in get_args(TensorTransport):
            raise ValueError(
                f"{self.whose}: transport must be one of {', '.join(get_args(TensorTransport))}, got {transport!r}"
            )
        self._sequence_parallel = sequence_parallel
        self._wants = transport
        super().__init__(workload, layout, mesh, device, direct_gradients=direct_gradients)

    def facts(self) -> Mapping[str, str]:
        facts = dict(super().facts())
        facts["transport"] = facts.pop("tensor_transport")
        if (fallback := facts.pop("tensor_transport_fallback", None)) is not None:
            facts["transport_fallback"] = fallback
        return facts

    def _make_model(self, workload: Workload, layout: Layout, mesh: Mesh, device: torch.device) -> RankModel:
        return tensor_slice(
            workload, layout, mesh, device, self.whose, transport=self._wants, sequence_parallel=self._sequence_parallel
        )


def tensor_slice(
    workload: Workload,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    whose: str,
    *,
    transport: TensorTransport,
    sequence_parallel: bool,
) -> tensor_model.TensorSlice:
    """This rank's slice of the workload's model, by its place along the tensor axis. Collective."""
    fallback = shared_memory.why_not(mesh, device, axis="tensor") if transport == "shared_memory" else None
    shares_memory = transport == "shared_memory" and fallback is None
    group = mesh.group("tensor", lane=_ACTIVATIONS)
    exchange: TensorExchange = ProcessGroupExchange(group)
    if shares_memory:
        exchange = SharedMemoryExchange(group, timeout_seconds=TIMEOUT_SECONDS, observer=mesh.observer)
    elif transport == "none":
        exchange = CountingExchange(group.size(), group.rank())
    facts = {"tensor_transport": "process_group" if fallback else transport}
    return tensor_model.TensorSlice(
        workload,
        device,
        exchange,
        mesh.group("tensor", lane=_REST),
        whose,
        cuts_sequence=sequence_parallel,
        data_degree=layout.data,
        facts=facts | ({"tensor_transport_fallback": fallback} if fallback else {}),
    )


def _dry_step(
    workload: Workload,
    layout: Layout,
    options: Mapping[str, Any],
    module: nn.Module,
    *,
    batch: Batch,
    held_bytes: int,
) -> DryStep:
    cuts_sequence = options.get("sequence_parallel", False)
    part, _ = slice_without_values(workload, layout.tensor, data_degree=1, cuts_sequence=cuts_sequence, module=module)
    plans = bucket_plans(workload, part.parameters, layout.data, part.kinds)
    return dry_step(
        part,
        batch,
        held_bytes=held_bytes,
        lent_bytes=converted_bytes(plans, workload.precision),
        small_bytes=DEFAULT_SMALL_BYTES,
        direct=options.get("direct_gradients", True),
    )


def _costs(workload: Workload, layout: Layout, options: Mapping[str, Any]) -> TensorCosts | None:
    return tensor_costs(
        workload,
        layout.tensor,
        data_degree=layout.data,
        cuts_sequence=options.get("sequence_parallel", False),
    )
