"""How the sharded optimizer lays a model out: which flats there are, in which order backward completes them, and which
of them take turns in the same memory.

    stage 1   one flat a bucket; every flat has its own gradients and its own parameters
    stage 2   gradients gather in three slots in turn (one fills, two are on their way) and are kept as shards
    stage 3   parameters too: the root unit has a slot of its own, blocks take turns in two

    unit       root   1   2   3   4        forward order; a unit is a block of the model
    slot         0    1   2   1   2        while block 2 computes in slot 2, block 3 is gathered into slot 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from harness.layout import Layout
from harness.parameters import LogicalParameter
from harness.workload import Workload
from impls.native.parts.buckets import plan_buckets
from impls.native.parts.order_of_use import in_order_of_use
from impls.native.parts.shards import ShardedPlan
from impls.native.parts.units import plan_units

_LEAST_BUCKET_BYTES, _MOST_BUCKET_BYTES = 1 << 20, 16 << 20
_BUCKETS_OF_A_MODEL = 12
_NUM_GRADIENT_SLOTS = 3
_NUM_BLOCK_SLOTS = 2


@dataclass(frozen=True, kw_only=True)
class PlannedFlat:
    """One flat of parameters that are gathered, reduced and stepped together; `unit` counts from the root unit, 0.
    `after_flat` is the last flat before it whose gradients gather in the same slot."""

    plan: ShardedPlan
    unit: int
    trainable: bool
    gradient_slot: int
    parameter_slot: int
    after_flat: int | None = None


@dataclass(frozen=True, kw_only=True)
class ZeroPlan:
    """`flats` are the trainable ones in the order in which backward completes them, then the frozen ones. `modules` are
    the names of the units' modules in forward order, None for the root unit. `untraced_because` says why there is only
    one unit, if nobody could find the blocks' own parameters; `of_norms` and `transforms_functions` are UnitPlan's."""

    stage: int
    reshards: bool
    flats: tuple[PlannedFlat, ...]
    modules: tuple[str | None, ...] = (None,)
    untraced_because: str | None = None
    of_norms: tuple[int, ...] = ()
    transforms_functions: bool = False

    @property
    def num_trained(self) -> int:
        return sum(flat.trainable for flat in self.flats)

    @property
    def shards_parameters(self) -> bool:
        return self.stage == 3

    def slot_of_unit(self, unit: int) -> int:
        """Units in the same slot take turns."""
        return _slot_of_unit(unit, reshards=self.reshards)

    def gathered_units(self, num_micro_batches: int) -> Iterator[int]:
        """The units that a step of stage 3 gathers, one after another: what is still in its slot is not gathered
        again."""
        occupants: dict[int, int] = {}
        num_units = len(self.modules)
        for _ in range(num_micro_batches):
            for unit in (*range(num_units), *range(num_units - 1, 0, -1)):
                if occupants.get(self.slot_of_unit(unit)) != unit:
                    occupants[self.slot_of_unit(unit)] = unit
                    yield unit


def plan_zero(
    workload: Workload,
    parameters: Sequence[LogicalParameter],
    layout: Layout,
    *,
    stage: int,
    bucket_bytes: int | None,
    reshards: bool,
    kinds: Callable[[str], object] = lambda name: None,
) -> ZeroPlan:
    """The plan for the model of `workload`, of which a rank trains `parameters`, in its compute precision; the same on
    every rank that trains them. Those in one flat are alike in `kinds`, by name.

    A step holds up to three buckets beside what is sharded: without `bucket_bytes` they are a twelfth of what is
    trained, where they are as fast as larger ones. Stage 3 goes by blocks.
    """
    trained_bytes = sum(parameter.num_bytes for parameter in parameters if parameter.trainable)
    if bucket_bytes is None:
        share = _MOST_BUCKET_BYTES if stage == 3 else trained_bytes // _BUCKETS_OF_A_MODEL
        bucket_bytes = min(max(_LEAST_BUCKET_BYTES, share), _MOST_BUCKET_BYTES)
    if stage == 3:
        by_name = {parameter.name: parameter for parameter in parameters}
        units = plan_units(workload, layout.data)
        members = [(unit.module, [by_name[p.name] for p in unit.parameters]) for unit in units.units]
        if not members or members[0][0] is not None:
            members.insert(0, (None, []))  # the root unit is always there, be it empty
        plan = _sharded(members, layout.shard_degree, bucket_bytes, reshards, kinds)
        return replace(
            plan,
            untraced_because=units.untraced_because,
            of_norms=units.of_norms,
            transforms_functions=units.transforms_functions,
        )
    used = in_order_of_use(workload, layout.data, [parameter for parameter in parameters if parameter.trainable])
    return ZeroPlan(
        stage=stage,
        reshards=False,
        flats=_in_turns(
            PlannedFlat(
                plan=ShardedPlan(bucket=bucket, num_ranks=layout.shard_degree),
                unit=0,
                trainable=True,
                gradient_slot=index if stage == 1 else index % _NUM_GRADIENT_SLOTS,
                parameter_slot=index,
            )
            for index, bucket in enumerate(
                plan_buckets(used[::-1], bucket_bytes, kinds, least_bytes=_LEAST_BUCKET_BYTES)
            )
        ),
    )


def _sharded(
    units: Sequence[tuple[str | None, Sequence[LogicalParameter]]],
    num_ranks: int,
    bucket_bytes: int,
    reshards: bool,
    kinds: Callable[[str], object],
) -> ZeroPlan:
    backward_order = [*range(len(units) - 1, 0, -1), 0]
    slots: dict[object, int] = {}
    flats = []
    for trainable in (True, False):
        for unit in backward_order:
            members = [parameter for parameter in units[unit][1] if parameter.trainable is trainable]
            for position, bucket in enumerate(plan_buckets(members[::-1], bucket_bytes, kinds)):
                # Gradients of two blocks are under way at a time, whether parameters are freed in between or not.
                gradients = ("gradients", trainable, _slot_of_unit(unit, reshards=True), position)
                gathered = ("parameters", trainable, _slot_of_unit(unit, reshards=reshards), position)
                flats.append(
                    PlannedFlat(
                        plan=ShardedPlan(bucket=bucket, num_ranks=num_ranks),
                        unit=unit,
                        trainable=trainable,
                        gradient_slot=slots.setdefault(gradients, len(slots)),
                        parameter_slot=slots.setdefault(gathered, len(slots)),
                    )
                )
    return ZeroPlan(
        stage=3,
        reshards=reshards,
        flats=_in_turns(flats),
        modules=tuple(module for module, _ in units),
    )


def _in_turns(flats: Iterable[PlannedFlat]) -> tuple[PlannedFlat, ...]:
    last: dict[int, int] = {}
    ordered = []
    for index, flat in enumerate(flats):
        ordered.append(replace(flat, after_flat=last.get(flat.gradient_slot)))
        last[flat.gradient_slot] = index
    return tuple(ordered)


def _slot_of_unit(unit: int, *, reshards: bool) -> int:
    return unit if unit == 0 or not reshards else 1 + (unit - 1) % _NUM_BLOCK_SLOTS
