"""The recording backend under real processes: results, exact bytes, waiting, sub-groups, DDP, null twin and delays."""

from __future__ import annotations

import multiprocessing
import multiprocessing.pool
import pickle
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from harness.measure.communication import StepRecord, summarise
from harness.measure.communication_recorder import IGNORED, CommunicationRecorder
from harness.measure.recording_backend import BACKEND_NAME, install
from harness.wire_bytes import wire_bytes

LENGTH = 48  # divisible by every world size used here
S = LENGTH * 4  # bytes
PROCESS_IO = Path("/proc/self/io")

Body = Callable[[CommunicationRecorder, int, int], object]


def launch(body: Body, world_size: int, directory: Path, deadline_seconds: float = 60.0) -> list:
    """What `body(recorder, rank, world_size)` returned on each rank of a gloo group behind the recording backend."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    processes = [
        context.Process(target=_run_rank, args=(body, rank, world_size, directory)) for rank in range(world_size)
    ]
    try:
        for process in processes:
            process.start()
        end = time.monotonic() + deadline_seconds
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    reports = []
    for rank in range(world_size):
        path = directory / f"rank{rank}.pickle"
        assert path.exists(), f"rank {rank} did not finish"
        failed, report = pickle.loads(path.read_bytes())
        assert not failed, f"rank {rank}: {report}"
        reports.append(report)
    return reports


def _run_rank(body: Body, rank: int, world_size: int, directory: Path) -> None:
    torch.set_num_threads(1)
    recorder = CommunicationRecorder()
    install(recorder, "gloo")
    try:
        dist.init_process_group(
            BACKEND_NAME,
            init_method=f"file://{directory}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=30),
        )
        report = (False, body(recorder, rank, world_size))
        dist.destroy_process_group()
    except Exception:
        report = (True, traceback.format_exc())
    (directory / f"rank{rank}.pickle").write_bytes(pickle.dumps(report))


# Each of these runs one operation and checks its result; the expected events stand beside it in OPERATIONS.


def _mine(rank: int) -> Tensor:
    return torch.arange(LENGTH, dtype=torch.float32) + rank


def _sum(num_ranks: int) -> Tensor:
    return sum(_mine(rank) for rank in range(num_ranks))


def _share(tensor: Tensor, rank: int, num_ranks: int) -> Tensor:
    return tensor.chunk(num_ranks)[rank].clone()


def _all_reduce(rank: int, n: int) -> None:
    tensor = _mine(rank)
    dist.all_reduce(tensor)
    assert tensor.equal(_sum(n))


def _all_reduce_of_a_view(rank: int, n: int) -> None:
    storage = torch.zeros(1000)
    dist.all_reduce(storage[10:20].add_(1))
    assert storage.sum() == 10 * n


def _all_reduce_in_double(rank: int, n: int) -> None:
    tensor = _mine(rank).double()
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    assert tensor.equal(_mine(n - 1).double())


def _all_reduce_coalesced(rank: int, n: int) -> None:
    tensors = [_mine(rank), _mine(rank)[:8]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_reduce_coalesced(tensors)
    assert tensors[0].equal(_sum(n))
    assert tensors[1].equal(_sum(n)[:8])


def _all_gather_coalesced(rank: int, n: int) -> None:
    lists = [[torch.empty(LENGTH // n)] for _ in range(n)]  # lists[rank][tensor]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_gather_coalesced(lists, [_share(_mine(0), rank, n)])
    assert torch.cat([part for (part,) in lists]).equal(_mine(0))


def _broadcast(rank: int, n: int) -> None:
    tensor = _mine(rank)
    dist.broadcast(tensor, src=1)
    assert tensor.equal(_mine(1))


def _reduce(rank: int, n: int) -> None:
    tensor = _mine(rank)
    dist.reduce(tensor, dst=1)
    assert rank != 1 or tensor.equal(_sum(n))


def _all_gather(rank: int, n: int) -> None:
    parts = [torch.empty(LENGTH // n) for _ in range(n)]
    dist.all_gather(parts, _share(_mine(0), rank, n))
    assert torch.cat(parts).equal(_mine(0))


def _all_gather_into_tensor(rank: int, n: int) -> None:
    whole = torch.empty(LENGTH)
    dist.all_gather_into_tensor(whole, _share(_mine(0), rank, n))
    assert whole.equal(_mine(0))


def _all_gather_into_tensor_coalesced(rank: int, n: int) -> None:
    whole = [torch.empty(LENGTH), torch.empty(LENGTH)]
    shares = [_share(_mine(0), rank, n), _share(_mine(1), rank, n)]
    dist.group.WORLD.allgather_into_tensor_coalesced(whole, shares).wait()
    assert whole[0].equal(_mine(0))
    assert whole[1].equal(_mine(1))


def _reduce_scatter(rank: int, n: int) -> None:
    share = torch.empty(LENGTH // n)
    dist.reduce_scatter(share, [part.clone() for part in _mine(rank).chunk(n)])
    assert share.equal(_share(_sum(n), rank, n))


def _reduce_scatter_tensor(rank: int, n: int) -> None:
    share = torch.empty(LENGTH // n)
    dist.reduce_scatter_tensor(share, _mine(rank))
    assert share.equal(_share(_sum(n), rank, n))


def _all_to_all(rank: int, n: int) -> None:
    received = [torch.empty(LENGTH // n) for _ in range(n)]
    dist.all_to_all(received, [part.clone() for part in _mine(rank).chunk(n)])
    assert torch.cat(received).equal(torch.cat([_share(_mine(source), rank, n) for source in range(n)]))


def _all_to_all_single(rank: int, n: int) -> None:
    received = torch.empty(LENGTH)
    dist.all_to_all_single(received, _mine(rank))
    assert received.equal(torch.cat([_share(_mine(source), rank, n) for source in range(n)]))


def _uneven_all_to_all_single(rank: int, n: int) -> None:
    """Rank r sends each of the others r + 1 elements, and keeps none."""
    splits = [0 if other == rank else rank + 1 for other in range(n)]
    expected = [0 if source == rank else source + 1 for source in range(n)]
    received = torch.empty(sum(expected))
    dist.all_to_all_single(received, torch.full((sum(splits),), float(rank)), expected, splits)
    assert received.equal(torch.cat([torch.full((count,), float(source)) for source, count in enumerate(expected)]))


def _gather(rank: int, n: int) -> None:
    parts = [torch.empty(LENGTH // n) for _ in range(n)] if rank == 1 else None
    dist.gather(_share(_mine(0), rank, n), parts, dst=1)
    assert parts is None or torch.cat(parts).equal(_mine(0))


def _scatter(rank: int, n: int) -> None:
    share = torch.empty(LENGTH // n)
    dist.scatter(share, list(_mine(0).chunk(n)) if rank == 1 else None, src=1)
    assert share.equal(_share(_mine(0), rank, n))


def _send_and_receive(rank: int, n: int) -> None:
    """From rank 0 to rank 1, blocking; the others look on."""
    if rank == 0:
        dist.send(_mine(7), dst=1)
    elif rank == 1:
        tensor = torch.empty(LENGTH)
        dist.recv(tensor, src=0)
        assert tensor.equal(_mine(7))


def _ring_of_batched_exchanges(rank: int, n: int) -> None:
    tensor = torch.empty(LENGTH)
    exchanges = [
        dist.P2POp(dist.isend, _mine(rank), (rank + 1) % n),
        dist.P2POp(dist.irecv, tensor, (rank - 1) % n),
    ]
    for work in dist.batch_isend_irecv(exchanges):
        work.wait()
    assert tensor.equal(_mine((rank - 1) % n))


def _receive_from_anyone(rank: int, n: int) -> None:
    if rank == 0:
        dist.send(_mine(3), dst=1)
    elif rank == 1:
        tensor = torch.empty(LENGTH)
        assert dist.recv(tensor) == 0
        assert tensor.equal(_mine(3))


def _barrier(rank: int, n: int) -> None:
    dist.barrier()


def _monitored_barrier(rank: int, n: int) -> None:
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20))


def _functional_from_cpp(rank: int, n: int) -> None:
    """What DTensor calls: C++ finds the group by its name."""
    collectives, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    reduced = collectives.all_reduce(_mine(rank), "sum", name)
    assert collectives.wait_tensor(reduced).equal(_sum(n))
    gathered = collectives.all_gather_into_tensor(_share(_mine(0), rank, n), n, name)
    assert collectives.wait_tensor(gathered).equal(_mine(0))
    scattered = collectives.reduce_scatter_tensor(_mine(rank), "sum", n, name)
    assert collectives.wait_tensor(scattered).equal(_share(_sum(n), rank, n))


def _p2p(rank: int, n: int) -> list[tuple[str, int, int]]:
    return {0: [("send", S, S)], 1: [("recv", S, 0)]}.get(rank, [])


def _plain(operation: str, payload: int = S) -> Callable[[int, int], list[tuple[str, int, int]]]:
    """One event, with the wire bytes of gloo's algorithm when rank 1 is the root."""
    return lambda rank, n: [
        (operation, payload, wire_bytes(operation, payload, n, "gloo", group_rank=rank, root=1)),
    ]


OPERATIONS: list[tuple[Callable[[int, int], None], Callable[[int, int], list[tuple[str, int, int]]]]] = [
    # what to run, and its events (operation, payload bytes, wire bytes) on a rank
    (_all_reduce, lambda rank, n: [("all_reduce", S, 2 * (n - 1) * S // n)]),
    (_all_reduce_of_a_view, _plain("all_reduce", 40)),
    (_all_reduce_in_double, lambda rank, n: [("all_reduce", 2 * S, 4 * (n - 1) * S // n)]),
    (_all_reduce_coalesced, _plain("all_reduce_coalesced", S + 32)),
    (_broadcast, _plain("broadcast")),
    (_reduce, _plain("reduce")),
    (_all_gather, lambda rank, n: [("all_gather", S, (n - 1) * S // n)]),
    (_all_gather_coalesced, _plain("all_gather_coalesced")),
    (_all_gather_into_tensor, lambda rank, n: [("all_gather_into_tensor", S, (n - 1) * S // n)]),
    (_all_gather_into_tensor_coalesced, _plain("all_gather_into_tensor_coalesced", 2 * S)),
    (_reduce_scatter, _plain("reduce_scatter")),
    (_reduce_scatter_tensor, lambda rank, n: [("reduce_scatter_tensor", S, 2 * (n - 1) * S // n)]),
    (_all_to_all, lambda rank, n: [("all_to_all", S, (n - 1) * S // n)]),
    (_all_to_all_single, lambda rank, n: [("all_to_all_single", S, (n - 1) * S // n)]),
    (_uneven_all_to_all_single, lambda rank, n: [("all_to_all_single", *[(n - 1) * (rank + 1) * 4] * 2)]),
    (_gather, lambda rank, n: [("gather", S, 0 if rank == 1 else S // n)]),
    (_scatter, lambda rank, n: [("scatter", S, (n - 1) * S // n if rank == 1 else 0)]),
    (_send_and_receive, _p2p),
    (_ring_of_batched_exchanges, lambda rank, n: [("send", S, S), ("recv", S, 0)]),
    (_receive_from_anyone, _p2p),
    (_barrier, lambda rank, n: [("barrier", 0, 0)]),
    (_monitored_barrier, lambda rank, n: [("barrier", 0, 0)]),
    (
        _functional_from_cpp,
        lambda rank, n: [
            ("all_reduce", S, 2 * (n - 1) * S // n),
            ("all_gather_into_tensor_coalesced", S, (n - 1) * S // n),
            ("reduce_scatter_tensor_coalesced", S, 2 * (n - 1) * S // n),
        ],
    ),
]


def _recorded(recorder: CommunicationRecorder, run: Callable[[], object]) -> StepRecord:
    recorder.mode = "record"
    recorder.begin_step()
    run()
    record = recorder.end_step()
    recorder.mode = "pass"
    return record


def _every_operation(recorder: CommunicationRecorder, rank: int, n: int) -> dict[str, StepRecord]:
    for run, _ in OPERATIONS:  # passed through, with nothing recorded
        run(rank, n)
    records = {}
    for run, _ in OPERATIONS:
        records[run.__name__] = _recorded(recorder, lambda run=run: run(rank, n))
        dist.barrier()
    return records


def _objects(recorder: CommunicationRecorder, rank: int, n: int) -> StepRecord:
    def run() -> None:
        found = [None] * n
        dist.all_gather_object(found, {"rank": rank, "text": "x" * rank})
        assert found == [{"rank": other, "text": "x" * other} for other in range(n)]
        values = [rank, "mine"]
        dist.broadcast_object_list(values, src=1)
        assert values == [1, "mine"]

    return _recorded(recorder, run)


def _subgroup(recorder: CommunicationRecorder, rank: int, n: int) -> StepRecord:
    """An all-reduce and a send among the last two ranks only."""
    group = dist.new_group([n - 2, n - 1])

    def run() -> None:
        if rank < n - 2:
            return
        tensor = torch.ones(6)
        dist.all_reduce(tensor, group=group)
        assert tensor.equal(torch.full((6,), 2.0))
        if rank == n - 2:
            dist.send(tensor, dst=n - 1, group=group)
        else:
            dist.recv(tensor, src=n - 2, group=group)

    return _recorded(recorder, run)


def _late_partner(recorder: CommunicationRecorder, rank: int, n: int) -> StepRecord:
    """Rank 1 enters 0.3 s late; rank 0 computes for 0.1 s before it waits."""

    def run() -> None:
        if rank == 1:
            time.sleep(0.3)
        work = dist.all_reduce(torch.ones(4), async_op=True)
        time.sleep(0.1)
        work.wait()

    dist.barrier()
    return _recorded(recorder, run)


def _model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 7))


def _train(model: nn.Module, rank: int) -> None:
    torch.manual_seed(rank)
    model.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.grad)


def _ddp(recorder: CommunicationRecorder, rank: int, n: int) -> dict[str, object]:
    plain = DistributedDataParallel(_model(), process_group=dist.new_group(backend="gloo"), bucket_cap_mb=0.02)
    wrapped = DistributedDataParallel(_model(), bucket_cap_mb=0.02)
    for model in (plain, wrapped, plain, wrapped):
        _train(model, rank)  # DDP agrees on new buckets in its second step
    _train(plain, rank)
    record = _recorded(recorder, lambda: _train(wrapped, rank))
    _train(plain, rank)
    _train(wrapped, rank)
    return {
        "record": record,
        "bit_equal": all(map(torch.equal, plain.parameters(), wrapped.parameters())),
        "gradient_bytes": sum(parameter.numel() * 4 for parameter in _model().parameters()),
    }


def _null_ddp(recorder: CommunicationRecorder, rank: int, n: int) -> bool:
    """Rank 0 trains alone: it could not if anything were exchanged. Then all train together again."""
    model = DistributedDataParallel(_model(), bucket_cap_mb=0.02)
    for _ in range(2):  # DDP agrees on new buckets in its second step
        _train(model, rank)
    if rank == 0:
        recorder.mode = "null"
        for _ in range(3):
            recorder.begin_step()
            _train(model, rank)
            work = dist.all_reduce(torch.ones(3), async_op=True)
            assert work.wait()
            assert work.is_completed()
            assert work.get_future().done()
            assert not recorder.end_step().events
        recorder.mode = "pass"
    _train(model, rank)
    return all(parameter.isfinite().all() for parameter in model.parameters())


DELAY = 0.1  # seconds


def _seconds_delayed(recorder: CommunicationRecorder, run: Callable[[], object], delay_seconds: float = DELAY) -> float:
    """How long `run` takes on a longer link; whatever it leaves in flight has been launched when this returns."""
    dist.barrier()
    recorder.delay_seconds = delay_seconds
    recorder.mode = "delay"
    begin = time.perf_counter()
    run()
    seconds = time.perf_counter() - begin
    recorder.mode = "pass"
    assert recorder.delayed_all
    return seconds


def _all_at_once(num_operations: int, compute_seconds: float = 0.0) -> None:
    tensors = [torch.full((8,), float(number)) for number in range(num_operations)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    time.sleep(compute_seconds)
    for work in works:
        work.wait()
    assert [int(tensor[0]) for tensor in tensors] == [
        number * dist.get_world_size() for number in range(num_operations)
    ]


def _one_after_another(num_operations: int) -> None:
    for _ in range(num_operations):
        _all_at_once(1)


def _delayed(recorder: CommunicationRecorder, rank: int, n: int) -> dict[str, float]:
    def late() -> None:
        time.sleep(0.1 * rank)
        _all_at_once(1)

    scenes: dict[str, Callable[[], object]] = {
        "one after another": lambda: _one_after_another(3),
        "all at once": lambda: _all_at_once(6),
        "under compute": lambda: _all_at_once(6, compute_seconds=2 * DELAY),
        "a late partner": late,
        "exchange": lambda: _ring_of_batched_exchanges(rank, n),
        "reduce-scatter": lambda: _reduce_scatter_tensor(rank, n),
        "from C++": lambda: _functional_from_cpp(rank, n),
        "barrier": lambda: _monitored_barrier(rank, n),
    }
    return {name: _seconds_delayed(recorder, run) for name, run in scenes.items()}


def _every_operation_delayed(recorder: CommunicationRecorder, rank: int, n: int) -> None:
    _seconds_delayed(recorder, lambda: [run(rank, n) for run, _ in OPERATIONS], 0.002)


def _left_in_flight(recorder: CommunicationRecorder, rank: int, n: int) -> bool:
    """What a delayed step leaves over is not overtaken by the next one's operations: on other ranks they may differ."""
    first, second = torch.full((4,), 1.0), torch.full((9,), 10.0)
    works = []
    _seconds_delayed(recorder, lambda: works.append(dist.all_reduce(first, async_op=True)))
    dist.all_reduce(second)
    works[0].wait()
    return first.equal(torch.full((4,), float(n))) and second.equal(torch.full((9,), 10.0 * n))


def _delayed_ddp(recorder: CommunicationRecorder, rank: int, n: int) -> dict[str, object]:
    plain = DistributedDataParallel(_model(), process_group=dist.new_group(backend="gloo"), bucket_cap_mb=0.02)
    wrapped = DistributedDataParallel(_model(), bucket_cap_mb=0.02)
    for model in (plain, wrapped, plain, wrapped):
        _train(model, rank)
    _train(plain, rank)
    seconds = _seconds_delayed(recorder, lambda: _train(wrapped, rank))
    return {"seconds": seconds, "bit_equal": all(map(torch.equal, plain.parameters(), wrapped.parameters()))}


def _body_of_two(recorder: CommunicationRecorder, rank: int, n: int) -> dict[str, object]:
    parts = (_every_operation, _objects, _late_partner, _ddp, _null_ddp)
    parts += (_delayed, _every_operation_delayed, _left_in_flight, _delayed_ddp)
    return {part.__name__: part(recorder, rank, n) for part in parts}


def _body_of_three(recorder: CommunicationRecorder, rank: int, n: int) -> dict[str, object]:
    return {part.__name__: part(recorder, rank, n) for part in (_every_operation, _objects, _subgroup)}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return launch(_body_of_two, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return launch(_body_of_three, 3, tmp_path_factory.mktemp("three"))


@pytest.mark.parametrize("world", ["two", "three"])
@pytest.mark.parametrize(("run", "expected"), OPERATIONS, ids=[run.__name__.strip("_") for run, _ in OPERATIONS])
def test_each_operation_is_recorded_with_its_bytes(world, run, expected, request):
    reports = request.getfixturevalue(world)
    num_ranks = len(reports)
    for rank, report in enumerate(reports):
        record = report["_every_operation"][run.__name__]
        seen = [(event.operation, event.payload_bytes, event.wire_bytes) for event in record.events]
        assert seen == expected(rank, num_ranks)
        for event in record.events:
            assert event.transport == "gloo"
            assert event.dtype == {"barrier": "", "all_reduce": event.dtype}.get(event.operation, "float32")
            if event.operation not in ("send", "recv"):
                assert event.ranks == tuple(range(num_ranks))
            assert record.start <= event.launched <= event.returned <= record.end
            assert event.completed >= event.launched
            assert event.blocked[0] == (event.launched, event.returned)


def test_dtype_is_the_tensors_own(two):
    assert two[0]["_every_operation"]["_all_reduce_in_double"].events[0].dtype == "float64"
    assert two[0]["_every_operation"]["_all_reduce"].events[0].dtype == "float32"


@pytest.mark.parametrize("world", ["two", "three"])
def test_object_collectives_work_and_are_seen(world, request):
    for report in request.getfixturevalue(world):
        operations = Counter(event.operation for event in report["_objects"].events)
        assert operations == {"all_gather": 2, "broadcast": 2}  # sizes, then contents


def test_subgroups_carry_their_global_ranks(three):
    outside, first, second = (report["_subgroup"].events for report in three)
    assert outside == ()
    assert [(event.operation, event.ranks) for event in first] == [("all_reduce", (1, 2)), ("send", (1, 2))]
    assert [(event.operation, event.ranks) for event in second] == [("all_reduce", (1, 2)), ("recv", (1, 2))]
    assert first[0].wire_bytes == 24


def test_in_flight_and_blocked_are_told_apart(two):
    record = two[0]["_late_partner"]
    (event,) = record.events
    assert event.completed - event.launched > 0.15
    assert 0.05 < record.blocked_seconds() < record.busy_seconds() - 0.05
    call, wait = event.blocked
    assert wait[0] - call[1] > 0.09
    late = two[1]["_late_partner"]
    assert late.busy_seconds() < record.busy_seconds() - 0.1
    assert late.blocked_seconds() < 0.1


def test_ddp_moves_its_gradient_bytes_and_trains_the_same(two):
    for report in two:
        found = report["_ddp"]
        reductions = [event for event in found["record"].events if event.operation == "all_reduce"]
        assert len(reductions) > 1
        assert {event.operation for event in found["record"].events} == {"all_reduce"}
        assert sum(event.payload_bytes for event in reductions) == found["gradient_bytes"]
        assert found["bit_equal"]
    metrics = summarise([[report["_ddp"]["record"]] for report in two])
    assert metrics["communication.bytes_per_step"] == two[0]["_ddp"]["gradient_bytes"]  # 2(n-1)/n = 1
    assert 0 < metrics["communication.busy_ratio"] <= 1


def test_the_null_twin_trains_alone(two):
    assert all(report["_null_ddp"] for report in two)


@pytest.mark.parametrize(
    ("scene", "num_latencies", "other_seconds"),
    [
        ("one after another", 3, 0.0),
        ("all at once", 1, 0.0),
        ("under compute", 0, 2 * DELAY),
        ("a late partner", 1, 0.1),
        ("exchange", 1, 0.0),
        ("reduce-scatter", 1, 0.0),
        ("from C++", 3, 0.0),
        ("barrier", 1, 0.0),
    ],
)
def test_a_longer_link_costs_as_many_latencies_as_are_waited_for_one_after_another(
    scene, num_latencies, other_seconds, two
):
    least = num_latencies * DELAY + other_seconds
    for report in two:
        # A busy machine may come between; one latency for each of six operations would be five delays more.
        assert least <= report["_delayed"][scene] < least + 4.5 * DELAY


def test_what_is_left_in_flight_is_not_overtaken(two):
    assert all(report["_left_in_flight"] for report in two)


def test_ddp_on_a_longer_link_trains_the_same_and_waits_for_its_buckets_together(two):
    for report in two:
        assert report["_delayed_ddp"]["bit_equal"]
        assert DELAY <= report["_delayed_ddp"]["seconds"] < 4 * DELAY


# The formulas against the bytes each process really writes.


def _bytes_written() -> int:
    fields = dict(line.split(": ") for line in PROCESS_IO.read_text().splitlines())
    return int(fields["wchar"])


def _large_operations(rank: int, n: int) -> dict[str, Callable[[], object]]:
    whole = torch.ones(3 << 20)  # 12 MiB: many segments, divisible by 3 and 4
    share = torch.ones(whole.numel() // n)
    parts = [torch.empty_like(share) for _ in range(n)]
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, src=1),
        "reduce": lambda: dist.reduce(whole, dst=1),
        "all_gather": lambda: dist.all_gather(parts, share),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, share),
        "reduce_scatter": lambda: dist.reduce_scatter(share, [part.clone() for part in whole.chunk(n)]),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(share, whole),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "gather": lambda: dist.gather(share, parts if rank == 1 else None, dst=1),
        "scatter": lambda: dist.scatter(share, parts if rank == 1 else None, src=1),
    }


def _wire(recorder: CommunicationRecorder, rank: int, n: int) -> dict[str, tuple[int, int]]:
    """For each operation the bytes recorded and the bytes this process wrote meanwhile."""
    found = {}
    for operation, run in _large_operations(rank, n).items():
        before = _bytes_written()
        record = _recorded(recorder, run)
        dist.barrier()  # until it is over everywhere this process may still pass data on
        found[operation] = (sum(event.wire_bytes for event in record.events), _bytes_written() - before)
    return found


@pytest.mark.skipif(not PROCESS_IO.exists(), reason="needs /proc/self/io, the bytes a process has written")
@pytest.mark.parametrize("world_size", [3, 4])
def test_wire_bytes_are_what_each_process_writes(world_size, tmp_path):
    size = 12 << 20
    for rank, found in enumerate(launch(_wire, world_size, tmp_path)):
        assert len(found) == 10
        for operation, (recorded, written) in found.items():
            assert abs(written - recorded) < 0.003 * size, f"{operation} on rank {rank}: {recorded} against {written}"


# The recorder on its own.


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="expected gloo or nccl underneath, got 'mpi'"):
        install(CommunicationRecorder(), "mpi")
    recorder = CommunicationRecorder()
    with pytest.raises(ValueError, match="mode must be one of pass, record, null, delay, got 'off'"):
        recorder.mode = "off"
    with pytest.raises(ValueError, match="end_step needs a begin_step"):
        recorder.end_step()
    recorder.begin_step()
    with pytest.raises(ValueError, match="begin_step needs the previous step to have ended"):
        recorder.begin_step()


def test_a_transport_of_ones_own_reports_as_an_observer():
    recorder = CommunicationRecorder()
    ignored = recorder.launched("all_reduce", (0, 1), torch.zeros(4), 16, "shared_memory")
    assert ignored == IGNORED
    recorder.mode = "record"
    recorder.begin_step()
    ticket = recorder.launched("all_reduce", (0, 1), torch.zeros(100)[:10], 20, "shared_memory")
    with recorder.blocked(ticket):
        time.sleep(0.02)
    recorder.completed(ticket)
    time.sleep(0.02)
    with recorder.blocked(ignored):
        recorder.completed(ignored)
    record = recorder.end_step()
    (event,) = record.events
    assert (event.payload_bytes, event.wire_bytes, event.transport) == (40, 20, "shared_memory")
    assert (event.dtype, event.ranks) == ("float32", (0, 1))
    assert 0.02 <= record.blocked_seconds() <= record.busy_seconds() < record.seconds - 0.01
    recorder.mode = "null"
    assert recorder.null


def test_a_transport_of_ones_own_is_delayed_if_it_asks_and_told_of_if_it_does_not():
    recorder = CommunicationRecorder()
    recorder.delay_seconds = 0.05
    assert recorder.arrived(IGNORED)
    recorder.mode = "delay"
    tickets = [recorder.launched("all_reduce", (0, 1), torch.zeros(4), 16, "shared_memory") for _ in range(3)]
    assert not any(recorder.arrived(ticket) for ticket in tickets)
    time.sleep(0.06)
    assert all(recorder.arrived(ticket) for ticket in tickets)
    recorder.completed(tickets[0])
    assert recorder.delayed_all
    hasty = recorder.launched("all_reduce", (0, 1), torch.zeros(4), 16, "shared_memory")
    recorder.mode = "pass"
    recorder.completed(hasty)  # of a step that is over
    assert recorder.delayed_all
    recorder.mode = "delay"
    recorder.completed(recorder.launched("all_reduce", (0, 1), torch.zeros(4), 16, "shared_memory"))
    assert not recorder.delayed_all


def test_the_end_of_a_step_waits_for_completions_on_their_way():
    recorder = CommunicationRecorder()
    recorder.mode = "record"
    with multiprocessing.pool.ThreadPool(1) as pool:
        recorder.begin_step()
        ticket = recorder.launched("all_reduce", (0, 1), torch.zeros(4), 16, "shared_memory")
        later = pool.apply_async(lambda: (time.sleep(0.4), recorder.completed(ticket)))
        record = recorder.end_step()
        later.get(5)
    assert record.seconds < 0.2
    assert record.events[0].completed > record.end
    recorder.begin_step()
    recorder.completed(ticket)  # of the step before: forgotten
    assert recorder.end_step().events == ()
