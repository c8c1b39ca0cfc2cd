"""The environment: what it holds, what its fingerprints tell apart, and that it never fails a benchmark."""

import json
import os
import subprocess
import time

import pytest
import torch

from harness import environment
from harness.environment import MALLOC_SETTINGS, checkout, describe, environment_fingerprint, machine_fingerprint

MACHINE = {"cpu_model": "A", "physical_cores": 2, "logical_cores": 4, "memory_bytes": 8 * 2**30}


def test_describes_this_process(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", MALLOC_SETTINGS["MALLOC_MMAP_THRESHOLD_"])
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    described = describe(torch.device("cpu"))
    assert json.loads(json.dumps(described)) == described
    assert described["device"]["kind"] == "cpu"
    assert described["device"]["name"] == described["cpu_model"]
    assert described["torch"] == torch.__version__
    assert described["logical_cores"] == os.cpu_count()
    assert described["threads_per_rank"] == torch.get_num_threads()
    assert described["memory_bytes"] > 2**28
    assert described["malloc"] == {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": None}
    assert described["variables"].items() >= {"OMP_NUM_THREADS": "3", "GLOO_SOCKET_IFNAME": "lo"}.items()
    assert "SECRET_TOKEN" not in described["variables"]


def test_is_fast():
    describe("cpu")
    times = []
    for _ in range(5):
        start = time.perf_counter()
        describe("cpu")
        times.append(time.perf_counter() - start)
    assert min(times) < 0.05


def test_machine_fingerprint_ignores_what_does_not_change_the_time():
    known = machine_fingerprint(MACHINE, [])
    assert machine_fingerprint({**MACHINE, "memory_bytes": 8 * 2**30 - 2**20}, []) == known
    for change in ({"cpu_model": "B"}, {"physical_cores": 4}, {"logical_cores": 8}, {"memory_bytes": 16 * 2**30}):
        assert machine_fingerprint({**MACHINE, **change}, []) != known
    assert machine_fingerprint(MACHINE, ["H200"]) != known


def test_environment_fingerprint_follows_versions_and_settings():
    software = {"torch": "2.13.0", "malloc": {"A": "1"}, "variables": {"OMP_NUM_THREADS": "1"}}
    known = environment_fingerprint(software)
    assert environment_fingerprint({**software, "torch": "2.14.0"}) != known
    assert environment_fingerprint({**software, "malloc": {"A": None}}) != known
    assert environment_fingerprint({**software, "variables": {"OMP_NUM_THREADS": "2"}}) != known
    on_another_gpu = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "3"}
    assert environment_fingerprint({**software, "variables": on_another_gpu}) == known


def test_checkout_names_the_commit_and_whether_it_is_dirty(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        answer = subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return answer.stdout.strip()

    assert checkout(tmp_path) is None
    git("init", "-q")
    assert checkout(tmp_path) is None  # nothing committed yet
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")
    assert checkout(tmp_path) == (commit, False)
    (tmp_path / "file").write_text("2")
    assert checkout(tmp_path) == (commit, True)
    git("checkout", "-q", "file")
    (tmp_path / "nightly.log").write_text("")
    (tmp_path / "accepted").mkdir()
    (tmp_path / "accepted/nightly.txt").write_text("")
    assert checkout(tmp_path) == (commit, False), "nobody runs a log"
    (tmp_path / "new directory").mkdir()
    (tmp_path / "new directory/new.py").write_text("")
    assert checkout(tmp_path) == (commit, True)
    (tmp_path / "new directory/new.py").unlink()
    git("mv", "file", "another")
    assert checkout(tmp_path) == (commit, True)
    (tmp_path / "installed").mkdir()
    assert checkout(tmp_path / "installed") is None


def test_never_raises(monkeypatch):
    def broken(*_arguments, **_options):
        raise OSError("no such thing here")

    for name in ("_cpu_information", "_memory_bytes", "_device_names", "checkout"):
        monkeypatch.setattr(environment, name, broken)
    monkeypatch.setattr(environment.importlib.metadata, "version", broken)
    described = describe("cuda")
    assert described["commit"] is None
    assert described["dirty"] is None
    assert described["memory_bytes"] is None
    assert described["physical_cores"] is None
    assert described["libraries"] == {}
    assert described["device"]["kind"] == "cuda"


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("processor: 0\nphysical id\t: 0\ncpu cores\t: 2\ncore id\t\t: 0\n\n" * 2, 1),
        ("physical id\t: 0\ncore id\t\t: 0\n\nphysical id\t: 1\ncore id\t\t: 0\n", 2),
        ("processor: 0\n\nprocessor: 1\n", None),
    ],
)
def test_physical_cores_counts_a_core_with_two_threads_once(monkeypatch, text, cores):
    monkeypatch.setattr(environment, "_cpu_information", lambda: text)
    assert environment._physical_cores() == cores


def test_only_libraries_in_use_are_told(monkeypatch):
    monkeypatch.setattr(environment.importlib.metadata, "version", lambda name: "1.2")
    monkeypatch.setitem(environment.sys.modules, "fairscale", environment)
    monkeypatch.delitem(environment.sys.modules, "deepspeed", raising=False)
    libraries = describe("cpu")["libraries"]
    assert libraries["fairscale"] == "1.2"
    assert "deepspeed" not in libraries
