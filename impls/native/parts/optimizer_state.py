"""What the optimizer remembers, by logical parameter: see Implementation.full_optimizer_state.

Moments and step counts become whole as parameters do, each element with its own count, and only then is one count kept
of each parameter.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from harness.workload import Training


def state_names(training: Training) -> tuple[str, ...]:
    """The keys of `FlatOptimizer.flat_states`, the same on all ranks, whatever they hold."""
    return (*training.moment_names, "step") if training.optimizer == "adamw" else training.moment_names


def by_parameter(whole: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """From whole tensors by kind and parameter to the states of each parameter that has elements."""
    states: dict[str, dict[str, Tensor]] = {}
    for kind, of_parameters in whole.items():
        for name, value in of_parameters.items():
            if value.numel():
                states.setdefault(name, {})[kind] = value.flatten()[0].clone() if kind == "step" else value
    return states
