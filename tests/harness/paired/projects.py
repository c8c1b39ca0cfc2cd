"""Copies of this project as git repositories of their own, with a revision that is slower."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_TRAIN_STEP = "        self._next_to_reduce = 0\n"
_RETURN = "        return StepOutput(\n"

SUITE = """
from harness.case import Case, Measurement, Suite
from harness.layout import Layout

MEASUREMENT = Measurement(warm_up_steps=5, timed_steps={timed_steps})
suite = Suite(
    name="ab",
    cases=tuple(
        Case(
            workload="gpt:size=tiny,sequence_length=128,global_batch_size=8",
            implementation=implementation,
            layout=Layout(data=2),
            measurement=MEASUREMENT,
        )
        for implementation in {implementations!r}
    ),
)
"""


def git(repository: Path, *arguments: str) -> str:
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
    answer = subprocess.run(
        ["git", *who, "-C", str(repository), *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    return answer.stdout.strip()


def copy_of_project(directory: Path) -> Path:
    """A repository with one commit, `base`: the package as it is now."""
    directory.mkdir()
    for package in ("harness", "impls", "suites"):
        shutil.copytree(ROOT / package, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "constraints.txt", ".gitignore"):
        shutil.copy(ROOT / name, directory / name)
    git(directory, "init", "--quiet", "--initial-branch", "main")
    commit(directory, "base")
    return directory


def commit(repository: Path, name: str) -> None:
    """Everything as it is, under a tag as well."""
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--allow-empty", "--message", name)
    git(repository, "tag", name)


def slow_down(repository: Path, by: float, name: str) -> None:
    """A commit in which each step of native.ddp takes `by` longer (0.15: 15 %), computing nothing."""
    path = repository / "impls/native/ddp.py"
    before, train_step = path.read_text().split("    def train_step(", maxsplit=1)
    assert train_step.count(_TRAIN_STEP) == 1
    train_step = train_step.replace(
        _TRAIN_STEP, "        import time\n\n        began = time.perf_counter()\n" + _TRAIN_STEP
    )
    spin = f"""        until = time.perf_counter() + {by} * (time.perf_counter() - began)
        while time.perf_counter() < until:
            pass
"""
    path.write_text(before + "    def train_step(" + train_step.replace(_RETURN, spin + _RETURN, 1))
    commit(repository, name)
