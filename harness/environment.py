"""The environment of a measurement: device, machine, versions, commit and settings, with fingerprints to compare by.

`machine_fingerprint` covers what makes two timings comparable; `environment_fingerprint` covers the software and its
settings, but not the commit, so that commits can be compared within one environment.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from harness import interconnect

MALLOC_SETTINGS: Mapping[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": str(4 * 2**30),
    "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
}
"""glibc's thresholds in every rank, whatever it runs: freed memory stays with the process. Left at their defaults, an
implementation that allocates much loses a tenth or more of its time to page faults, and one that does not, nothing."""

OPTIONAL_LIBRARIES = ("deepspeed", "fairscale", "transformers")
_VARIABLES = re.compile(r"OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES|(MKL|NCCL|GLOO)_\w+")
# It says which of the machine's devices were free, and so changes from job to job.
_NOT_COMPARED = "CUDA_VISIBLE_DEVICES"

T = TypeVar("T")


def describe(device: torch.device | str) -> dict[str, Any]:
    """Everything about this process that a result depends on, as JSON-able values; what cannot be found out is None.

    Never raises. On a GPU it names the devices, which initialises CUDA in this process.
    """
    kind = str(device).partition(":")[0]
    devices = _or_none(_device_names, kind) or []
    machine = {
        "cpu_model": _or_none(_cpu_model),
        "physical_cores": _or_none(_physical_cores),
        "logical_cores": os.cpu_count(),
        "memory_bytes": _or_none(_memory_bytes),
    }
    software = {
        "os": _or_none(platform.platform),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": _or_none(importlib.metadata.version, "numpy"),
        "libraries": _libraries(),
        "threads_per_rank": torch.get_num_threads(),
        "malloc": {name: os.environ.get(name) for name in MALLOC_SETTINGS},
        "variables": {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)},
    }
    links = _or_none(interconnect.describe, kind)
    commit, dirty = _or_none(checkout, Path(__file__).resolve().parent.parent) or (None, None)
    return {
        "device": {"kind": kind, "name": devices[0] if devices else machine["cpu_model"], "count": len(devices)},
        **machine,
        **software,
        **({"interconnect": links} if links else {}),
        "commit": commit,
        "dirty": dirty,
        "machine_fingerprint": machine_fingerprint(machine, devices),
        "environment_fingerprint": environment_fingerprint(software),
    }


def machine_fingerprint(machine: Mapping[str, Any], devices: list[str]) -> str:
    """A short hash of CPU model, cores, memory rounded to GiB and device names."""
    memory = machine["memory_bytes"]
    memory_gib = None if memory is None else round(memory / 2**30)
    return _hash([machine["cpu_model"], machine["physical_cores"], machine["logical_cores"], memory_gib, devices])


def environment_fingerprint(software: Mapping[str, Any]) -> str:
    """A short hash of the versions and settings."""
    variables = {name: value for name, value in software["variables"].items() if name != _NOT_COMPARED}
    return _hash({**software, "variables": variables})


def checkout(root: Path) -> tuple[str, bool] | None:
    """The commit checked out at `root` and whether the code there differs from it: a file that git follows, or Python
    that it does not (a log or a page that lies about changes nothing). None if `root` is no checkout."""
    # An installed copy may lie inside somebody else's checkout, which says nothing about it.
    if not (root / ".git").exists():
        return None
    answer = subprocess.run(
        [*("git", "--no-optional-locks", "-C", str(root)), *("status", "--porcelain=v2", "--branch", "-z", "-uall")],
        capture_output=True,
        text=True,
        timeout=5,
        check=True,
    )
    lines = answer.stdout.split("\0")
    commit = next(line.split()[-1] for line in lines if line.startswith("# branch.oid "))
    if commit == "(initial)":
        return None
    return commit, any(line.endswith(".py") if line.startswith("? ") else line[:1] not in ("", "#") for line in lines)


def _or_none(probe: Callable[..., T], *arguments: Any) -> T | None:
    """What `probe` finds, or None: an odd machine must not fail a benchmark."""
    try:
        return probe(*arguments)
    except Exception:
        return None


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def _device_names(kind: str) -> list[str]:
    if kind != "cuda":
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _libraries() -> dict[str, str]:
    """Those that this process has imported, with their versions: another one that is installed changes nothing here."""
    imported = (name for name in OPTIONAL_LIBRARIES if name in sys.modules)
    versions = {name: _or_none(importlib.metadata.version, name) for name in imported}
    return {name: version for name, version in versions.items() if version is not None}


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@functools.cache
def _cpu_information() -> str:
    # Cached: on a machine of many cores the kernel takes its time over this file.
    return Path("/proc/cpuinfo").read_text()


def _cpu_model() -> str:
    try:
        model = re.search(r"^model name\s*: (.+)$", _cpu_information(), re.MULTILINE)
    except OSError:
        model = None
    return model[1].strip() if model else platform.processor() or platform.machine()


def _physical_cores() -> int | None:
    """Distinct (package, core) pairs; a virtual machine may tell of none."""
    cores = set(re.findall(r"^physical id\s*: (\d+)$(?:\n.+)*?\ncore id\s*: (\d+)$", _cpu_information(), re.MULTILINE))
    return len(cores) or None
