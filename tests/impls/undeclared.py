"""Workloads that say nothing of the parameters that they leave unused: `undeclared.py:everywhere` and so on."""

from __future__ import annotations

from dataclasses import replace

from harness.models import awkward
from harness.workload import Workload


def everywhere() -> Workload:
    return replace(awkward.workload("unused"), leaves_parameters_unused=False)


def on_some_ranks() -> Workload:
    return replace(awkward.workload("rank_dependent"), leaves_parameters_unused=False)
