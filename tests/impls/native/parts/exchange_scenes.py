"""The exchanges of sharded training on real ranks: an implementation that trains nothing and checks something while it
is built. What it finds wrong fails the launch, with the rank's traceback."""

from __future__ import annotations

import random
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from harness.mesh import Mesh
from impls.native.parts.gradient_shards import Flat, GradientShards, ProcessGroupShards
from impls.native.parts.hierarchical_exchange import HierarchicalShards
from impls.native.parts.hierarchy import levels
from impls.native.parts.parameter_gathers import ParameterGathers, ProcessGroupGathers
from impls.native.parts.shared_gradients import SharedMemoryShards
from impls.native.parts.shared_parameters import ParametersInPlace, SharedMemoryGathers
from tests.impls.native.probes import Probe

CPU = torch.device("cpu")
FLATS = [
    Flat(num_shard_elements=num_shard_elements, dtype=dtype, slot=slot)
    for num_shard_elements, dtype, slot in [
        (7, torch.float64, 0),
        (65_601, torch.float32, 1),  # a sum of two blocks
        (0, torch.float32, 0),
        (33, torch.bfloat16, 0),
        (501, torch.float32, 1),
        (1, torch.float32, 0),
    ]
]


class Exchange(Probe):
    """Plays the function of this file named `scenario`."""


def gradient_shards(mesh: Mesh) -> None:
    group = mesh.group("data")
    by_library = ProcessGroupShards(FLATS, group, CPU)
    by_library._library_sums = True  # as on a GPU
    ways: list[GradientShards] = [
        ProcessGroupShards(FLATS, group, CPU),
        by_library,
        SharedMemoryShards(FLATS, group, timeout_seconds=60.0),
    ]
    for shards in ways:
        _sum_step_after_step(shards, group)
        shards.close()


def gradient_shards_in_two_levels(mesh: Mesh) -> None:
    shards = HierarchicalShards(FLATS, mesh.group("data"), levels(mesh, "data"), CPU)
    _sum_step_after_step(shards, mesh.group("data"))
    shards.close()


def parameter_gathers(mesh: Mesh) -> None:
    group = mesh.group("data")
    kept = [Flat(num_shard_elements=f.num_shard_elements, dtype=f.dtype, slot=i) for i, f in enumerate(FLATS)]
    for keeps_full, flats in ((True, kept), (False, FLATS)):
        by_library = ProcessGroupGathers(flats, group, CPU, keeps_full=keeps_full)
        by_library._library_gathers = True  # as on a GPU
        ways: list[ParameterGathers] = [
            ProcessGroupGathers(flats, group, CPU, keeps_full=keeps_full),
            by_library,
            (SharedMemoryGathers if keeps_full else ParametersInPlace)(flats, group, timeout_seconds=60.0),
        ]
        for gathers in ways:
            for step in range(3):
                gathers.begin_update(lambda: None)
                _publish_all(gathers, flats, group, step)
                _gather_all(gathers, flats, group, step)
                if keeps_full:
                    dist.barrier(group=group)  # stands for the gradients, which all publish before the next update
            gathers.close()


def one_step_of_two_groups(mesh: Mesh) -> None:
    """Two replicas of two shards each: the second group's ranks are 2 and 3, and still its first and its second."""
    group, rank = mesh.group("shard"), mesh.rank
    flat = Flat(num_shard_elements=5, dtype=torch.float64, slot=0)
    ways: list[tuple[GradientShards, ParameterGathers]] = [
        (ProcessGroupShards([flat], group, CPU), ProcessGroupGathers([flat], group, CPU, keeps_full=True)),
        (
            SharedMemoryShards([flat], group, timeout_seconds=60.0),
            SharedMemoryGathers([flat], group, timeout_seconds=60.0),
        ),
    ]
    first = rank - rank % 2
    for shards, gathers in ways:
        shards.own(0).copy_(torch.arange(10.0) + 100.0 * rank)
        shards.start(0, gathers.shard(0), add=False)
        shards.wait(0)
        gathers.publish(0)
        gathers.start(0)
        gathers.wait(0)
        assert torch.equal(gathers.full(0), 2 * torch.arange(10.0, dtype=torch.float64) + 100.0 * (2 * first + 1))
        shards.close()
        gathers.close()


def _sum_step_after_step(shards: GradientShards, group: dist.ProcessGroup) -> None:
    """Each rank held up at moments of its own. The second sum of a step is added to the first. What comes after sums
    finds them there, flat by flat: in the later steps."""
    rank, num_ranks = group.rank(), group.size()
    moments = random.Random(rank)
    owned = [torch.full((flat.num_shard_elements,), torch.nan, dtype=flat.dtype) for flat in FLATS]
    for step in range(4):
        added = step % 2 == 1
        found: list[tuple[int, Tensor]] = []
        for index, flat in enumerate(FLATS):
            if moments.random() < 0.2:
                time.sleep(moments.random() * 0.004)
            shards.reclaim(index)
            shards.own(index).copy_(_of_rank(rank, flat, num_ranks, step))
            lands_in_place = step == 2 and index == 1 and not added
            if lands_in_place:
                owned[index] = flat.shard(shards.own(index), rank)
            then = partial(_note, found, index, owned[index]) if step >= 2 else None
            shards.start(index, owned[index], add=added, then=then)
            shards.progress()
            if lands_in_place:
                shards.wait(index)
                owned[index] = owned[index].clone()
        for index, flat in enumerate(FLATS):
            shards.wait(index)
            expected = _sum(flat, rank, num_ranks, step)
            if added:
                expected = _sum(flat, rank, num_ranks, step - 1) + expected
            assert torch.equal(owned[index], expected), f"{type(shards).__name__}: flat {index} at step {step}"
            assert torch.equal(owned[index].signbit(), expected.signbit()), f"{type(shards).__name__}: lost a -0.0"
        in_order = list(range(len(FLATS))) if step >= 2 else []
        assert [index for index, _ in found] == in_order, f"{type(shards).__name__}: out of order"
        for index, total in found:
            assert torch.equal(total, owned[index]), f"{type(shards).__name__}: went on before the sum was there"


def _note(found: list[tuple[int, Tensor]], index: int, total: Tensor) -> None:
    found.append((index, total.clone()))


def _of_rank(rank: int, flat: Flat, num_ranks: int, step: int, *, shard: int | None = None) -> Tensor:
    """Whole numbers that bf16 holds and whose sums it holds too; every third is -0.0. All, or those of one shard."""
    size = flat.num_shard_elements
    numbers = torch.arange(num_ranks * size) if shard is None else torch.arange(shard * size, (shard + 1) * size)
    values = ((numbers * 7 + 5 * rank + step) % 31 - 15).to(flat.dtype)
    return values.masked_fill_(numbers % 3 == 0, -0.0)


def _sum(flat: Flat, owner: int, num_ranks: int, step: int) -> Tensor:
    total = _of_rank(0, flat, num_ranks, step, shard=owner)
    for rank in range(1, num_ranks):
        total += _of_rank(rank, flat, num_ranks, step, shard=owner)
    return total


def _publish_all(gathers: ParameterGathers, flats: list[Flat], group: dist.ProcessGroup, step: int) -> None:
    moments = random.Random(group.rank() + step)
    for index, flat in enumerate(flats):
        time.sleep(moments.random() * 0.002)
        gathers.shard(index).copy_(_of_rank(0, flat, group.size(), step, shard=group.rank()))
        gathers.publish(index)


def _gather_all(gathers: ParameterGathers, flats: list[Flat], group: dist.ProcessGroup, step: int) -> None:
    """The next flat's gather is in flight while one is looked at, as in a forward, if it does not take its place."""
    gathers.start(0)
    for index, flat in enumerate(flats):
        has_room = index + 1 < len(flats) and flats[index + 1].slot != flat.slot
        if has_room:
            gathers.start(index + 1)
        gathers.wait(index)
        expected = _of_rank(0, flat, group.size(), step)
        assert torch.equal(gathers.full(index), expected), f"{type(gathers).__name__}: flat {index} at step {step}"
        assert torch.equal(gathers.shard(index), flat.shard(expected, group.rank()))
        if index + 1 < len(flats) and not has_room:
            gathers.start(index + 1)
