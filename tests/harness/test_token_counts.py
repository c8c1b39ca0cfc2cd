from dataclasses import replace

from harness import models
from harness.token_counts import mean_of_means
from tests.harness.toy_training import gpt_workload


def test_a_mean_of_means_is_right_where_all_counts_are_alike() -> None:
    equal = models.load("gpt:size=tiny,text=stdlib,global_batch_size=8")
    assert mean_of_means(equal, 2) is None
    assert mean_of_means(equal, 1) is None


def test_the_first_counts_that_differ_are_told() -> None:
    # Two samples a share, of 5 + 0 to 8 + 8 targets: 6 shares a step, in a shuffled order.
    reason = mean_of_means(gpt_workload(), 2)
    assert reason is not None
    assert reason.startswith("each rank divides by its own tokens, micro-batch by micro-batch, whose counts differ (")
    assert reason.endswith(" in step 0)")


def test_shares_of_another_size_differ_though_samples_do_not() -> None:
    workload = models.load("gpt:size=tiny,text=stdlib,global_batch_size=8")
    uneven = replace(workload, training=replace(workload.training, global_batch_size=5))
    length = uneven.count(uneven.dataset.sample(0)[1].unsqueeze(0))
    assert f"({2 * length} to {3 * length} in step 0)" in (mean_of_means(uneven, 2) or "")
