from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from harness import worker
from harness.case import Case
from harness.launch.local import LocalLaunch
from harness.measure.timing import time_metrics

FAULTY = Path(__file__).with_name("launch") / "faulty.py"


def toy(name: str, workload: str = "awkward:kind=unequal_tokens") -> Case:
    return Case(workload=workload, implementation=f"{FAULTY}:{name}")


def test_warm_up_takes_no_part_in_the_figures(tmp_path: Path) -> None:
    """Three steps of 5 s, then steps of 1 s, on the implementation's own clock."""
    case = toy("WarmsUp")
    with LocalLaunch(case.to_json(), 1, tmp_path) as ranks:
        ranks.command("build")
        assert ranks.command("warm_up", num_steps=3) == [3]
        (answer,) = ranks.command("time_steps", num_steps=7)
        assert answer["step_seconds"] == [1.0] * 7
        metrics = time_metrics([answer["step_seconds"]], [0.0], answer["global_num_tokens"], "tokens")
        assert (metrics["step.median_seconds"], metrics["step.num_samples"]) == (1.0, 7.0)

        # 5 5 5 1 1 1: it goes on until three steps in a row are alike.
        ranks.command("adopt", case=case.to_json())
        ranks.command("build")
        assert ranks.command("warm_up", num_steps=4) == [6]
        ranks.command("adopt", case=case.to_json())
        ranks.command("build")
        assert ranks.command("warm_up", num_steps=0) == [0]


def test_throughput_does_not_depend_on_how_the_batch_is_split(tmp_path: Path) -> None:
    fastest = []
    with LocalLaunch(toy("TimedOutside").to_json(), 1, tmp_path) as ranks:
        for num_micro_batches in (1, 2, 8):
            workload = f"gpt:size=tiny,global_batch_size=8,num_micro_batches={num_micro_batches}"
            ranks.command("adopt", case=toy("TimedOutside", workload).to_json())
            ranks.command("build")
            gaps, seconds = [], []
            for _ in range(3):  # a busy machine may come between the two clocks, but hardly every time
                (answer,) = ranks.command("time_steps", num_steps=5)
                assert answer["global_num_tokens"] == [8 * 16] * 5
                inside = sum(answer["step_seconds"])
                gaps.append(abs(inside / outside_seconds(tmp_path / "rank-0.log", 5) - 1))
                seconds += answer["step_seconds"]
            assert min(gaps) < 0.01
            fastest.append(min(seconds))
    assert min(fastest) >= 8 * 0.005
    assert max(fastest) < 1.5 * min(fastest)


def outside_seconds(log: Path, num_steps: int) -> float:
    """From the beginning to the end of the last steps, by the implementation's own clock."""
    steps = [line.split()[1:] for line in log.read_text().splitlines() if line.startswith("step ")][-num_steps:]
    return float(steps[-1][1]) - float(steps[0][0])


def test_a_collection_leaves_alone_what_the_fork_server_has_loaded(tmp_path: Path) -> None:
    with LocalLaunch(toy("TellsWhatIsFrozen").to_json(), 1, tmp_path) as ranks:
        (facts,) = ranks.command("build")
    assert int(facts["frozen"]) > 10 * int(facts["walked"])


def test_checksum_tells_bits_apart() -> None:
    one = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert worker.checksum([one]) == worker.checksum([one.clone()])
    assert worker.checksum([torch.tensor([0.0])]) != worker.checksum([torch.tensor([-0.0])])
    assert worker.checksum([one, one * 2]) != worker.checksum([one * 2, one])
    # Values count, not how they lie in memory; any dtype and shape will do.
    assert worker.checksum([one.view(2, 2).t()]) == worker.checksum([one.view(2, 2).t().contiguous()])
    for odd in (torch.ones((), dtype=torch.bfloat16), torch.empty(0), torch.tensor(True)):
        assert len(worker.checksum([odd])) == 40


@pytest.mark.parametrize(
    ("seconds", "stationary"),
    [([1.0, 1.0], False), ([1.0, 1.05, 1.1], True), ([1.0, 1.05, 1.11], False), ([5.0, 1.0, 1.0], False)],
)
def test_stationary(seconds: list[float], stationary: bool) -> None:
    assert worker._is_stationary(seconds) is stationary


@pytest.mark.parametrize(
    ("error", "out_of_memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("shapes differ"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: BaseException, out_of_memory: bool) -> None:
    assert worker._is_out_of_memory(error) is out_of_memory
