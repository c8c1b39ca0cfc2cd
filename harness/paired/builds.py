"""Builds: what is compared, ready to run: a checkout of each revision, and a Python with what that revision asks for.

meshmark-compare-xxxx/
  lock              held while the comparison runs
  a-c0ffee12/       a git worktree of each revision
  environment-...   a virtual environment of each list of requirements that the Python at hand does not meet
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.paired.environments import Environment, requirements_of

_PREFIX = "meshmark-compare-"
_LOCK = "lock"
_MAKING_SECONDS = 24 * 3600
_WORTH_RUNNING = Path("harness/runner.py")

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Build:
    """`python` runs the code below `source`, and may write below `scratch`. `name` is what was asked for, `commit` what
    it stands for."""

    name: str
    commit: str
    source: Path
    python: Path
    scratch: Path


@contextmanager
def of_revisions(revisions: tuple[str, str], repository: Path, tell: Tell) -> Iterator[tuple[Build, Build]]:
    """Both revisions of the git repository around `repository`, checked out beside it; gone when the block is left.
    ValueError if one is no revision of it, or both are the same commit; or if what one needs cannot be
    installed."""
    root = repository_root(repository)
    commits = [commit_of(root, revision) for revision in revisions]
    if commits[0] == commits[1]:
        raise ValueError(f"{revisions[0]} and {revisions[1]} are the same commit, {commits[0][:12]}")
    with _building_site(root) as directory, ExitStack() as stack:
        sources = [
            stack.enter_context(_worktree(root, commit, directory / f"{letter}-{commit[:8]}"))
            for letter, commit in zip("ab", commits, strict=True)
        ]
        environments: dict[tuple[str, ...], Environment] = {}
        pythons = []
        for source in sources:
            wanted = requirements_of(source)
            if wanted not in environments:
                environments[wanted] = Environment.for_requirements(wanted, directory, tell)
            pythons.append(environments[wanted].python)
        first, second = (
            Build(name=revision, commit=commit, source=source, python=python, scratch=directory / letter)
            for revision, commit, source, python, letter in zip(revisions, commits, sources, pythons, "ab", strict=True)
        )
        yield first, second


@contextmanager
def of_peers(requirements: tuple[str, str], tell: Tell) -> Iterator[tuple[Build, Build]]:
    """This very code beside two versions of a library, `deepspeed==0.19.7` and `deepspeed==0.19.8`. ValueError unless
    they are two versions of one library; or if one cannot be installed."""
    names = [pinned(requirement)[0] for requirement in requirements]
    if names[0] != names[1] or requirements[0] == requirements[1]:
        raise ValueError(f"--peer: expected two versions of one library, got {requirements[0]} and {requirements[1]}")
    source = Path(__file__).resolve().parents[2]
    with _building_site(None) as directory:
        first, second = (
            Build(
                name=requirement,
                commit="",
                source=source,
                python=Environment.with_library(requirement, directory, source, tell).python,
                scratch=directory / letter,
            )
            for requirement, letter in zip(requirements, "ab", strict=True)
        )
        yield first, second


def pinned(requirement: str) -> tuple[str, str]:
    """`name==version` in its parts. ValueError for anything else."""
    name, pin, version = requirement.partition("==")
    if not (name and pin and version) or any(sign in version for sign in "=<>, "):
        raise ValueError(f"--peer: expected a library with its version, such as deepspeed==0.19.8, got {requirement!r}")
    return name.strip(), version.strip()


def repository_root(directory: Path) -> Path:
    """ValueError if `directory` lies in no git checkout."""
    answer = _git(directory, "rev-parse", "--show-toplevel")
    if answer.returncode:
        raise ValueError(f"{directory}: expected a git checkout to take revisions from, found none")
    return Path(answer.stdout.strip())


def commit_of(root: Path, revision: str) -> str:
    """The commit that a revision names. ValueError if there is none, or it holds no harness."""
    answer = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if answer.returncode:
        raise ValueError(f"{revision}: expected a revision of {root}, found none")
    commit = answer.stdout.strip()
    if _git(root, "cat-file", "-e", f"{commit}:{_WORTH_RUNNING}").returncode:
        raise ValueError(f"{revision}: expected a revision with {_WORTH_RUNNING}, {commit[:12]} has none")
    return commit


@contextmanager
def _building_site(root: Path | None) -> Iterator[Path]:
    """A directory that goes when the block is left, however; what one that was killed has left behind goes first."""
    _clear_abandoned(root)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with (directory / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Between the two lines above another comparison may have taken it for one that was left behind.
            directory.mkdir(exist_ok=True)
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if root is not None:
            _git(root, "worktree", "prune")


def _clear_abandoned(root: Path | None) -> None:
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            if not (directory / _LOCK).exists():  # just being made, or killed as it was
                if time.time() - directory.stat().st_mtime > _MAKING_SECONDS:
                    shutil.rmtree(directory, ignore_errors=True)
                continue
            with (directory / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
        except OSError:  # in use, or not ours
            continue
    if root is not None:
        _git(root, "worktree", "prune")


@contextmanager
def _worktree(root: Path, commit: str, path: Path) -> Iterator[Path]:
    added = _git(root, "worktree", "add", "--detach", "--quiet", str(path), commit)
    if added.returncode:
        raise ValueError(f"git worktree add {path} {commit[:12]}: {added.stderr.strip()}")
    try:
        yield path
    finally:
        _git(root, "worktree", "remove", "--force", str(path))


def _git(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # In a session of its own: the Ctrl-C that ends a comparison must not break off what cleans up after it.
    return subprocess.run(
        ["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=False, start_new_session=True
    )
