"""Whether a mean of the ranks' own means is the mean over all tokens: where all their micro-batches count alike."""

from __future__ import annotations

from harness.workload import Workload

_NUM_STEPS = 8  # looked at: a batch is a function of its step, whose counts seldom wait so long to differ


def mean_of_means(workload: Workload, data_degree: int) -> str | None:
    """What is wrong with dividing each rank's loss by its own tokens, micro-batch by micro-batch: the first counts that
    differ, in words; None where none does in the first steps."""
    for step in range(_NUM_STEPS):
        shares = [workload.batch(step, data_rank=rank, data_degree=data_degree) for rank in range(data_degree)]
        counts = {micro_batch.num_tokens for share in shares for micro_batch in share.micro_batches}
        if len(counts) > 1:
            return (
                f"each rank divides by its own {workload.unit}, micro-batch by micro-batch, whose counts differ "
                f"({min(counts)} to {max(counts)} in step {step})"
            )
    return None
