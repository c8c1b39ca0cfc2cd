"""The harness itself: killed and resumed, on a disk that is full, under a long temporary path."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.launch import emulated
from harness.topology import Topology
from tests.faults.conftest import holders, is_running, record, until, writers_to

pytestmark = pytest.mark.faults

ROOT = Path(__file__).resolve().parents[2]
HEAD = """
from harness.case import Case, Measurement, Suite
from harness.layout import Layout
from harness.topology import Topology

HELD = Measurement(parity_steps=3, timed_steps=0, communication_steps=0, memory_steps=0)
LONG = Measurement(parity_steps=3, timed_steps=400, communication_steps=0, memory_steps=0)
TINY = {"workload": "gpt:size=tiny", "implementation": "native.ddp", "layout": Layout(data=2)}
"""
TO_BE_KILLED = """
nodes = Topology(num_nodes=2, ranks_per_node=1, link_mbits=200.0) if EMULATED else None
suite = Suite(name="killed", cases=(Case(**TINY, measurement=HELD), Case(**TINY, topology=nodes, measurement=LONG,
                                                                        options={"reduction": "ring"})))
"""
ON_A_FULL_DISK = """
suite = Suite(name="full", cases=(Case(**TINY, measurement=HELD), Case(**TINY, measurement=LONG,
                                                                      options={"reduction": "ring"})))
"""


def environment(temporary: Path) -> dict[str, str]:
    temporary.mkdir(parents=True, exist_ok=True)
    return {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}


def lines_of(results: Path) -> list[dict[str, object]]:
    file = results / "results.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def left_in(temporary: Path) -> list[str]:
    """Besides torch's own cache."""
    return [path.name for path in temporary.iterdir() if "torchinductor" not in path.name]


def command(suite: Path, results: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "harness", "run", str(suite), "--results", str(results), "--no-upload", *more]


@pytest.mark.parametrize("engine", ["local", "torchrun"])
def test_a_harness_that_is_killed_leaves_nothing_and_is_resumed(engine: str, tmp_path: Path) -> None:
    two_nodes = Topology(num_nodes=2, ranks_per_node=1, link_mbits=200.0)
    is_emulated = engine == "local" and emulated.unavailable(two_nodes) is None
    more = [] if engine == "local" else ["--engine", engine, "--ranks-per-node", "1"]
    suite, results, temporary = tmp_path / "killed.py", tmp_path / "results", tmp_path / "temporary"
    suite.write_text(HEAD + f"EMULATED = {is_emulated}\n" + TO_BE_KILLED)
    harness = subprocess.Popen(
        command(suite, results, *more), cwd=tmp_path, env=environment(temporary), stdout=subprocess.PIPE, text=True
    )
    assert harness.stdout is not None
    until(lambda: len(lines_of(results)) == 1, 90.0, "the first result is there")
    second = {"timed/rank-0.log", "timed/rank-1.log"}
    until(lambda: set(writers_to(results).values()) >= second, 60.0, "the second case has started")
    time.sleep(1.0)
    held = holders(harness.pid)
    assert len(held) == (3 if is_emulated else 0), "a switch and two nodes"
    harness.send_signal(signal.SIGKILL)
    struck = time.monotonic()
    harness.wait()
    until(lambda: not writers_to(results), 10.0, "every rank is gone")
    until(lambda: not any(map(is_running, held)), 10.0, "every namespace is gone")
    seconds = time.monotonic() - struck
    harness.stdout.close()
    assert len(lines_of(results)) == 1

    again = subprocess.run(
        command(suite, results, *more, "--resume"),
        cwd=tmp_path, env=environment(temporary), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stdout + again.stderr
    assert [line["status"] for line in lines_of(results)] == ["ok", "ok"]
    assert left_in(temporary) == [], "what the killed one had left is swept away"
    assert not list(results.rglob("rendezvous-*"))
    record(
        f"the harness killed ({engine}), then --resume",
        "every rank and namespace gone; what was missing is run",
        seconds,
        10.0,
    )


def test_a_disk_that_is_full_loses_nothing(tmp_path: Path) -> None:
    suite, disk, temporary = tmp_path / "full.py", tmp_path / "disk", tmp_path / "temporary"
    suite.write_text(HEAD + ON_A_FULL_DISK)
    disk.mkdir()
    first, second = (" ".join(command(suite, disk / "results", *more)) for more in ((), ("--resume",)))
    # The disk is in a mount namespace of its own, and gone with it. It is filled up while the second case is timed.
    script = (
        f"mount -t tmpfs -o size=1m meshmark {disk} || exit 77\n"
        f"(until grep -q '2/2.*timing' first.out; do sleep 0.1; done; dd if=/dev/zero of={disk}/filler bs=4k) &\n"
        f"{first} > first.out 2> first.err; echo $? > first.code; cp {disk}/results/results.jsonl full.jsonl\n"
        f"wait; rm {disk}/filler\n"
        f"{second} > second.out 2> second.err; echo $? > second.code; cp {disk}/results/results.jsonl whole.jsonl\n"
    )
    namespace = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    done = subprocess.run(
        [*namespace, "sh", "-c", script], cwd=tmp_path, env=environment(temporary), timeout=280, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    told = (tmp_path / "first.err").read_text()
    assert (tmp_path / "first.code").read_text() == "1\n", told
    assert told.count("\n") == 1, told
    assert told.startswith("meshmark: cannot write a result: No space left on device: ")
    assert "what was finished before is kept; to go on: meshmark run" in told
    kept = Path(told.partition("the last result is in ")[2].partition(";")[0])
    assert [json.loads(line)["case"]["implementation"] for line in kept.read_text().splitlines()] == ["native.ddp"]
    # What stands there is whole, but for the line that the disk had no room for.
    (finished,) = (json.loads(line) for line in (tmp_path / "full.jsonl").read_text().split("\n")[:-1])
    assert finished["status"] == "ok"
    assert (tmp_path / "second.code").read_text() == "0\n", (tmp_path / "second.err").read_text()
    whole = [json.loads(line) for line in (tmp_path / "whole.jsonl").read_text().splitlines()]
    assert [line["status"] for line in whole] == ["ok", "ok"]
    assert whole[0] == finished
    record("the disk full", "one line; the results so far are kept, `--resume` runs the rest")


def test_a_long_temporary_path_is_no_obstacle(tmp_path: Path) -> None:
    temporary = tmp_path / ("a" * 60) / ("b" * 60)
    suite = tmp_path / "long.py"
    suite.write_text(HEAD + 'suite = Suite(name="long", cases=(Case(**TINY, measurement=HELD),))\n')
    for engine in ([], ["--engine", "torchrun", "--ranks-per-node", "2"]):
        done = subprocess.run(
            command(suite, tmp_path / f"results-{len(engine)}", *engine),
            cwd=tmp_path, env=environment(temporary), capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert left_in(temporary) == []
