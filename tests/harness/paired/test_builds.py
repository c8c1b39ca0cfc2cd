"""Builds of real revisions: what is checked out, what is shared, and that nothing is left of them."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from harness.paired import builds
from tests.harness.paired.projects import commit, git


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three commits of something like this project, in a place where temporary files can be counted."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    made = tmp_path / "repository"
    (made / "harness").mkdir(parents=True)
    git(made, "init", "--quiet", "--initial-branch", "main")
    commit(made, "empty")
    (made / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1"\ndependencies = ["numpy>=1"]\n')
    for name in ("first", "second"):
        (made / "harness/runner.py").write_text(f"NAME = {name!r}\n")
        commit(made, name)
    return made


def left_over(repository: Path) -> tuple[list[Path], int]:
    """Temporary files, and the number of worktrees beside the repository's own."""
    worktrees = git(repository, "worktree", "list", "--porcelain").count("worktree ")
    return list(Path(tempfile.gettempdir()).iterdir()), worktrees - 1


def untold(text: str) -> None:
    raise AssertionError(f"nothing was to be installed: {text}")


def test_both_revisions_lie_side_by_side_and_go_again(repository: Path) -> None:
    with builds.of_revisions(("first", "second"), repository / "harness", untold) as (a, b):
        assert [(build.source / "harness/runner.py").read_text() for build in (a, b)] == [
            "NAME = 'first'\n",
            "NAME = 'second'\n",
        ]
        assert {a.python, b.python} == {Path(sys.executable)}, "it has what both ask for"
        assert [a.commit, b.commit] == [git(repository, "rev-parse", name) for name in ("first", "second")]
        assert len(left_over(repository)[0]) == 1
    assert left_over(repository) == ([], 0)


def test_an_interrupted_comparison_leaves_nothing(repository: Path) -> None:
    with pytest.raises(KeyboardInterrupt), builds.of_revisions(("first", "second"), repository, untold):
        raise KeyboardInterrupt
    assert left_over(repository) == ([], 0)


def test_what_a_killed_one_has_left_goes_with_the_next_and_what_is_in_use_stays(repository: Path) -> None:
    killed_early, being_made = (Path(tempfile.gettempdir()) / f"meshmark-compare-{name}" for name in ("early", "new"))
    for directory in (killed_early, being_made):
        directory.mkdir()
    os.utime(killed_early, (0, 0))
    abandoned = Path(tempfile.gettempdir()) / "meshmark-compare-killed"
    abandoned.mkdir()
    (abandoned / "lock").touch()
    git(repository, "worktree", "add", "--detach", "--quiet", str(abandoned / "a"), "first")
    with builds.of_revisions(("first", "second"), repository, untold) as (outer, _):
        assert not abandoned.exists()
        assert not killed_early.exists()
        being_made.rmdir()
        with builds.of_revisions(("second", "first"), repository, untold):
            assert outer.source.is_dir()
        assert outer.source.is_dir()
    assert left_over(repository) == ([], 0)


@pytest.mark.parametrize(
    ("revisions", "expected"),
    [
        (("first", "third"), "third: expected a revision of .*repository, found none"),
        (("--all", "first"), "--all: expected a revision"),
        (("first", "first~0"), "first and first~0 are the same commit"),
        (("empty", "first"), "empty: expected a revision with harness/runner.py, [0-9a-f]{12} has none"),
    ],
)
def test_what_is_no_pair_of_revisions_is_refused(repository: Path, revisions: tuple[str, str], expected: str) -> None:
    with pytest.raises(ValueError, match=expected), builds.of_revisions(revisions, repository, untold):
        pass
    assert left_over(repository) == ([], 0)


def test_a_directory_without_git_has_no_revisions(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="expected a git checkout to take revisions from, found none"),
        builds.of_revisions(("a", "b"), tmp_path, untold),
    ):
        pass


@pytest.mark.parametrize(
    ("peers", "expected"),
    [
        (("deepspeed", "deepspeed==0.19.8"), "expected a library with its version, such as deepspeed==0.19.8"),
        (("deepspeed>=1", "deepspeed==1"), "expected a library with its version"),
        (("deepspeed==1", "fairscale==1"), "expected two versions of one library, got deepspeed==1 and fairscale==1"),
        (("deepspeed==1", "deepspeed==1"), "expected two versions of one library"),
    ],
)
def test_what_is_no_pair_of_versions_is_refused(peers: tuple[str, str], expected: str) -> None:
    with pytest.raises(ValueError, match=expected), builds.of_peers(peers, untold):
        pass
