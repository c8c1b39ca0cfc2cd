"""torch.zero as it is, with eyes in it, and a model too small to shard: a rank fails where it is not as it must be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from harness.implementation import StepOutput
from harness.models.awkward.samples import feature_samples, squared_error_sum
from harness.workload import Batch, Training, Workload
from impls.torch.zero import TorchZero


class Stepping(TorchZero):
    """Each rank's own optimizer follows the recipe, and has states of what it owns and no more.

    `expected_rates` are the learning rates by step, `decays` the weight decays of the groups, `late` the beginning of
    some parameters' names with the steps that reach them: no other step counts for them.
    """

    def __init__(
        self,
        *arguments: Any,
        expected_rates: list[float],
        decays: list[float],
        late: tuple[str, list[int]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.expected_rates, self.decays = expected_rates, decays
        self.late_prefix, self.late_steps = late or ("none", [])

    def train_step(self, batch: Batch) -> StepOutput:
        output = super().train_step(batch)
        sharded = self.optimizer.optimizer
        assert isinstance(sharded, ZeroRedundancyOptimizer)
        local, names = sharded.optim, dict(zip(self.optimizer.masters, self.optimizer.names, strict=True))
        rates = [group["lr"] for group in local.param_groups]
        expected = self.expected_rates[batch.step]
        assert rates == [expected] * len(self.decays), f"step {batch.step}: expected a rate of {expected}, got {rates}"
        assert [group["weight_decay"] for group in local.param_groups] == self.decays
        own = {names[tensor] for group in local.param_groups for tensor in group["params"]}
        assert {names[tensor] for tensor in local.state} <= own, "states of parameters that another rank owns"
        assert not sharded.state
        if "step" in next(iter(local.state.values()), {}):
            for tensor, state in local.state.items():
                self._check_count(names[tensor], state["step"], batch.step)
        else:
            assert all(state["momentum_buffer"].shape == tensor.shape for tensor, state in local.state.items())
        self._check_owners(own)
        return output

    def _check_count(self, name: str, count: Tensor, step: int) -> None:
        is_late = name.startswith(self.late_prefix)
        expected = sum(reached <= step for reached in self.late_steps) if is_late else step + 1
        assert int(count) == expected, f"{name}: {int(count)} updates after step {step}, expected {expected}"

    def _check_owners(self, own: set[str]) -> None:
        """Every parameter has one owner."""
        owners = torch.tensor([name in own for name in self.optimizer.names], dtype=torch.int32)
        torch.distributed.all_reduce(owners, group=self.wrapped.process_group)
        assert owners.tolist() == [1] * len(self.optimizer.names)


def one_weight() -> Workload:
    """A single weight: one rank owns it, the others own nothing."""
    return Workload(
        name="one_weight",
        model=lambda: nn.Linear(6, 3, bias=False),
        dataset=feature_samples(6, 3),
        training=Training(global_batch_size=8, num_micro_batches=1),
        loss=squared_error_sum,
        unit="samples",
    )
