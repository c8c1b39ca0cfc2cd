"""The protocol of the flags, played by several ranks in one process, one move at a time; then real ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from harness.case import Case
from harness.launch.failure import LaunchFailed
from harness.launch.local import LocalLaunch
from harness.layout import Layout
from harness.mesh import Mesh
from harness.topology import Topology
from impls.native.parts import shared_memory
from impls.native.parts.shared_memory import SharedBuffers
from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Worlds
    from tests.impls.native.parts.conftest import PlayedGroups, ReportedCollectives

PROBES = Path(__file__).parents[1] / "probes.py"
Play = Callable[..., list[SharedBuffers]]


@pytest.fixture
def play(played_groups: PlayedGroups) -> Play:
    """Makes the buffers of `num_ranks` ranks over the same memory."""

    def make(num_ranks: int, *shapes: tuple[int, torch.dtype], **others: Any) -> list[SharedBuffers]:
        return [
            SharedBuffers(
                shapes, group, timeout_seconds=others.get("timeout_seconds", 0.05), observer=others.get("observer")
            )
            for group in played_groups(num_ranks)
        ]

    return make


def fill(ranks: list[SharedBuffers], index: int, step: int) -> torch.Tensor:
    """Every rank's buffer with values of its own; their sum."""
    for number, rank in enumerate(ranks):
        own = rank.own(index)
        own.copy_((torch.arange(own.numel()) % 7 + 1) * (number + 1) + step)  # sums that bf16 holds
    return sum((rank.own(index).clone() for rank in ranks), torch.zeros_like(ranks[0].own(index)))


def read(rank: SharedBuffers, index: int) -> torch.Tensor:
    pieces = rank.sums(index)
    whole = torch.cat([rank.own(index)[:0], *(values for _, _, values in pieces)])
    bounds = [(start, stop) for start, stop, _ in pieces]
    assert bounds == sorted(bounds)
    return whole


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_elements", [0, 1, 7, 16, 17, 33, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_sums_whatever_the_size(play: Play, num_ranks: int, num_elements: int, dtype: torch.dtype) -> None:
    ranks = play(num_ranks, (3, torch.float64), (num_elements, dtype))
    for step in range(3):
        for rank in ranks:
            rank.reclaim(1)
        expected = fill(ranks, 1, step)
        for rank in ranks:
            rank.publish(1)
        for rank in ranks[::-1]:
            rank.progress()
        for rank in ranks:
            rank.wait(1)
            assert torch.equal(read(rank, 1), expected)
            rank.release(1)


def test_a_chunk_is_summed_once_all_have_published(play: Play) -> None:
    first, second = play(2, (32, torch.float32))
    first.own(0).fill_(1.0)
    second.own(0).fill_(2.0)
    first.publish(0)
    assert first.own(0).tolist() == [1.0] * 32
    second.publish(0)  # reduces its own chunk at once
    assert second.own(0).tolist() == [2.0] * 16 + [3.0] * 16
    assert first.own(0).tolist() == [1.0] * 32
    first.progress()
    assert first.own(0).tolist() == [3.0] * 16 + [1.0] * 16
    first.wait(0)
    assert read(first, 0).tolist() == [3.0] * 32


def test_a_fast_rank_may_not_fill_what_a_slow_one_still_reads(play: Play) -> None:
    fast, slow = play(2, (32, torch.float32))
    fill([fast, slow], 0, 0)
    fast.publish(0)
    slow.publish(0)
    fast.wait(0)
    fast.release(0)
    with pytest.raises(TimeoutError, match=r"rank 10 waited 0\.05 s for rank 11 to have released buffer 0"):
        fast.reclaim(0)
    slow.wait(0)
    slow.release(0)
    fast.reclaim(0)


def test_a_fast_rank_may_publish_the_next_step_while_a_slow_one_has_not_begun_it(play: Play) -> None:
    ranks = fast, slow = play(2, (32, torch.float32))
    fill(ranks, 0, 0)
    fast.publish(0)
    slow.publish(0)
    fast.progress()
    for rank in ranks:
        rank.wait(0)
        rank.release(0)
    fast.reclaim(0)
    fast.own(0).fill_(5.0)
    fast.publish(0)
    fast.progress()
    assert fast.own(0).tolist() == [5.0] * 32
    slow.reclaim(0)
    slow.own(0).fill_(6.0)
    slow.publish(0)
    fast.wait(0)
    assert read(slow, 0).tolist() == [11.0] * 32


@pytest.mark.parametrize("silent", [1, 2])
def test_a_peer_that_never_publishes_is_named_in_time(play: Play, silent: int) -> None:
    ranks = play(3, (4, torch.float32), (4, torch.float32), timeout_seconds=0.2)
    for number, rank in enumerate(ranks):
        if number != silent:
            rank.publish(1)
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=rf"rank 10 waited 0\.2 s for rank {10 + silent} to have published buffer 1"):
        ranks[0].wait(1)
    assert 0.2 <= time.monotonic() - begin < 5.0


def test_a_peer_that_published_and_stopped_is_named_too(play: Play) -> None:
    ranks = play(3, (64, torch.float32))
    for rank in ranks:
        rank.publish(0)
    ranks[0].progress()
    with pytest.raises(TimeoutError, match="for rank 11 to have reduced buffer 0"):
        ranks[0].wait(0)


def test_collecting_brings_the_whole_sum_home_and_can_be_repeated(play: Play) -> None:
    ranks = play(3, (100, torch.float64))
    expected = fill(ranks, 0, 0)
    for rank in ranks:
        rank.publish(0)
    for rank in ranks:
        rank.progress()
    for _ in range(2):
        for rank in ranks:
            rank.wait(0)
            rank.collect(0)
            assert torch.equal(rank.own(0), expected)
    for rank in ranks:
        rank.reclaim(0)


def test_buffers_are_summed_in_whatever_order_peers_publish_them(play: Play) -> None:
    ranks = play(2, *[(40, torch.float64)] * 3)
    expected = [fill(ranks, index, index) for index in range(3)]
    for index in (0, 1, 2):
        ranks[0].publish(index)
    for index in (2, 0, 1):
        ranks[1].publish(index)
    for index in range(3):
        ranks[0].wait(index)
        assert torch.equal(read(ranks[1], index), expected[index])


def test_a_null_step_moves_nothing_and_real_steps_go_on_after_it(play: Play, reported: ReportedCollectives) -> None:
    ranks = play(2, (32, torch.float32), observer=reported)

    def step() -> torch.Tensor:
        for rank in ranks:
            rank.reclaim(0)
        expected = fill(ranks, 0, 1)
        for rank in ranks:
            rank.publish(0)
        for rank in ranks:
            rank.progress()
        for rank in ranks:
            rank.wait(0)
            rank.release(0)
        return expected

    for null in (False, True, False, True, True, False):
        reported.null = null
        expected = step()
        if null:
            assert [rank.own(0)[0].item() for rank in ranks] == [2.0, 3.0]
        else:
            assert torch.equal(read(ranks[0], 0), expected)
    assert reported.launches == [("all_reduce", (10, 11), 128, 128)] * 2 * 3
    assert sorted(reported.completions) == list(range(6))


@pytest.mark.parametrize(("num_ranks", "wire_bytes"), [(1, 0), (2, 40), (3, 54), (4, 60)])
def test_reports_what_a_ring_would_send_rounded_up(
    play: Play, reported: ReportedCollectives, num_ranks: int, wire_bytes: int
) -> None:
    for rank in play(num_ranks, (10, torch.float32), observer=reported):
        rank.publish(0)
    assert reported.wire_bytes == [wire_bytes] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_elements", [0, 1, 15, 16, 17, 1000, 1003])
def test_chunks_cover_all_elements_once_and_meet_on_cache_lines(num_ranks: int, num_elements: int) -> None:
    bounds = shared_memory._chunk_bounds(num_elements, 4, num_ranks)
    assert len(bounds) == num_ranks
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_elements
    for (_, stop), (start, _) in pairwise(bounds):
        assert stop == start
        assert start % 16 == 0 or start == num_elements


@pytest.mark.parametrize(
    ("device", "topology", "machine", "reason"),
    [
        ("cpu", Topology(ranks_per_node=2), "x86_64", None),
        ("cuda", Topology(ranks_per_node=2), "x86_64", "tensors on cuda are reduced by its own library"),
        ("cpu", Topology(num_nodes=2, ranks_per_node=1), "x86_64", "the group spans several nodes"),
        ("cpu", Topology(ranks_per_node=2), "aarch64", "aarch64 does not order its stores"),
    ],
)
def test_says_why_memory_cannot_be_shared(
    monkeypatch: pytest.MonkeyPatch, device: str, topology: Topology, machine: str, reason: str | None
) -> None:
    monkeypatch.setattr(shared_memory.platform, "machine", lambda: machine)
    mesh = Mesh(Layout(data=2), topology, 0, torch.device("cpu"))
    assert shared_memory.why_not(mesh, torch.device(device)) == reason


def test_a_group_within_each_node_can_share_memory_where_the_whole_axis_cannot() -> None:
    mesh = Mesh(Layout(data=4, shard=2), Topology(num_nodes=2, ranks_per_node=2), 0, torch.device("cpu"))
    assert shared_memory.why_not(mesh, torch.device("cpu")) == "the group spans several nodes"
    assert shared_memory.why_not(mesh, torch.device("cpu"), "shard") is None


def test_real_ranks_of_unlike_speed_get_the_sums(worlds: Worlds) -> None:
    worlds.adopt(parity_case("awkward", f"{PROBES}:Probe", 3, options={"scenario": "shared_memory_stress"}))


def test_a_lack_of_memory_on_one_rank_is_told_by_all(worlds: Worlds) -> None:
    worlds.adopt(parity_case("awkward", f"{PROBES}:Probe", 2, options={"scenario": "shared_memory_lack"}))


def test_ranks_on_two_nodes_use_the_process_group_and_say_why(worlds: Worlds) -> None:
    case = parity_case(
        "awkward:kind=unequal_tokens",
        "native.ddp",
        2,
        topology=Topology(num_nodes=2, ranks_per_node=1),
        options={"transport": "shared_memory"},
        precision="fp64",
    )
    for facts in worlds.adopt(case).command("build"):
        assert facts["transport"] == "process_group"
        assert facts["transport_fallback"] == "the group spans several nodes"
    assert worlds.parity(case).ok


def test_the_memory_ends_with_ranks_that_are_killed(tmp_path: Path) -> None:
    case = Case(
        workload="awkward", implementation="native.ddp", layout=Layout(data=2), options={"transport": "shared_memory"}
    )
    shared_before = set(os.listdir("/dev/shm"))  # noqa: PTH208  names are all that is wanted
    with pytest.raises(LaunchFailed) as failed, LocalLaunch(case.to_json(), 2, tmp_path / "logs") as launch:
        launch.command("build")
        pids = launch.pids
        for pid in pids:
            mapped = {line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
            assert "/memfd:meshmark (deleted)" in mapped  # a file without a name: nothing to clean up
        os.kill(pids[1], 9)
        launch.command("time_steps", num_steps=1)
    assert failed.value.culprit == 1
    assert "SIGKILL" in failed.value.reason
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not [name for name in set(os.listdir("/dev/shm")) - shared_before if "meshmark" in name]  # noqa: PTH208
