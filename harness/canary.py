"""The canary: fixed work, timed before the first case of every session, that tells a slow machine from slow code.

A matrix multiplication and an all-reduce, on two ranks (one, where there is a single GPU), the same whatever is under
test. A history of times is divided by it: what slows both down is the machine's.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from harness import scratch
from harness.case import Case
from harness.launch.local import LocalLaunch
from harness.layout import Layout

NUM_ROUNDS = 50
NUM_WARM_UP_ROUNDS = 10
DEADLINE_SECONDS = 60.0

Rounds = Sequence[Sequence[tuple[float, float]]]  # (ranks, rounds) of seconds to multiply, seconds to all-reduce


def measure(device: str = "cpu") -> dict[str, float]:
    """The figures of `figures`, measured here and now, in about a second. LaunchFailed if the ranks fail."""
    world_size = 2 if device == "cpu" else min(2, torch.cuda.device_count())
    # The ranks want a case; its work is never built.
    case = Case(workload="gpt", implementation="reference", layout=Layout(data=world_size))
    with (
        scratch.directory() as directory,
        LocalLaunch(case.to_json(), world_size, directory, device=device, deadline_seconds=DEADLINE_SECONDS) as launch,
    ):
        return figures(launch.command("measure_canary", num_rounds=NUM_WARM_UP_ROUNDS + NUM_ROUNDS))


def figures(rounds: Rounds) -> dict[str, float]:
    """`seconds` of a round (the slowest rank is the round), and of its two parts, where the all-reduce is the fastest
    rank's: the others wait in it for their peers. Medians over the rounds after the warm-up."""
    warm = [of_rank[NUM_WARM_UP_ROUNDS:] for of_rank in rounds]
    by_round = list(zip(*warm, strict=True))
    return {
        "seconds": statistics.median(max(multiply + reduce for multiply, reduce in ranks) for ranks in by_round),
        "matmul_seconds": statistics.median(max(multiply for multiply, _ in ranks) for ranks in by_round),
        "all_reduce_seconds": statistics.median(min(reduce for _, reduce in ranks) for ranks in by_round),
        "world_size": float(len(rounds)),
    }
