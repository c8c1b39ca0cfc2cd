"""What joins this machine's GPUs, and the machine to others: NVLink and PCIe as NVML tells of them, the matrix of
`nvidia-smi topo -m`, the rates of InfiniBand ports in sysfs. What is not there is left out; nothing here raises.

    nvidia-smi topo -m       GPU0  GPU1  NIC0
                     GPU0     X    NV18  PIX       NV#   # bonded NVLinks          NODE  across PCIe host bridges
                     GPU1    NV18   X    SYS       PIX   one PCIe bridge           PHB   a PCIe host bridge, the CPU
                     NIC0    PIX   SYS    X        PXB   several PCIe bridges      SYS   between NUMA nodes
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_INFINIBAND = Path("/sys/class/infiniband")
_COMMAND_SECONDS = 20.0
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_DEVICE = re.compile(r"(?:GPU|NIC)\d+|mlx\d_\d+")
_RATE = re.compile(r"([\d.]+) Gb/sec(?: \((.*)\))?")
_LEVELS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # nvmlGpuTopologyLevel_t
_MOST_NVLINKS = 18


def describe(kind: str) -> dict[str, Any]:
    """Of a machine whose ranks train on `kind`, as JSON-able values: of GPUs only where they do."""
    found: dict[str, Any] = {}
    if kind == "cuda":
        found |= {"gpus": gpus(), "matrix_text": matrix_text()}
        found["matrix"] = parse_matrix(found["matrix_text"] or "")
    found["infiniband"] = infiniband()
    return {name: value for name, value in found.items() if value}


@functools.cache
def gpus() -> list[dict[str, Any]]:
    """Each GPU with its PCIe link, its NVLinks and how far the others are, as NVML tells; none without nvidia-ml-py or
    a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [_gpu(pynvml, handle, handles) for handle in handles]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any, others: list[Any]) -> dict[str, Any]:
    name = nvml.nvmlDeviceGetName(handle)
    told: dict[str, Any] = {
        "name": name.decode() if isinstance(name, bytes) else name,
        "pcie_generation": _asked(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        "pcie_width": _asked(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        "num_nvlinks": sum(_asked(nvml, nvml.nvmlDeviceGetNvLinkState, handle, n) == 1 for n in range(_MOST_NVLINKS)),
        "nvlink_version": _asked(nvml, nvml.nvmlDeviceGetNvLinkVersion, handle, 0),
        "distances": ["X" if other is handle else _distance(nvml, handle, other) for other in others],
    }
    return {key: value for key, value in told.items() if value is not None}


def _distance(nvml: Any, handle: Any, other: Any) -> str | None:
    level: int | None = _asked(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, handle, other)
    return None if level is None else _LEVELS.get(level)


def _asked(nvml: Any, question: Any, *arguments: Any) -> Any:
    """None where this device has no such thing."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


@functools.cache
def matrix_text() -> str | None:
    """What `nvidia-smi topo -m` prints, without colours; None where it cannot."""
    if (command := shutil.which("nvidia-smi")) is None:
        return None
    try:
        done = subprocess.run(
            [command, "topo", "-m"], capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return _COLOURS.sub("", done.stdout).strip("\n")


def parse_matrix(text: str) -> dict[str, dict[str, str]]:
    """From `nvidia-smi topo -m`: by device, then by other device, the connection; affinities are left out."""
    lines = [_COLOURS.sub("", line).rstrip() for line in text.splitlines()]
    head = next((line.split() for line in lines if line.split()[:1] and _is_device(line.split()[0])), [])
    names = [word for word in head if _is_device(word)]
    matrix: dict[str, dict[str, str]] = {}
    for line in lines[1:]:
        first, *cells = line.split() or [""]
        if first in names and len(cells) >= len(names) and first not in matrix:
            matrix[first] = dict(zip(names, cells, strict=False))
    return matrix


def _is_device(word: str) -> bool:
    return _DEVICE.fullmatch(word) is not None


def infiniband(root: Path | None = None) -> list[dict[str, Any]]:
    """Every port: device, number, rate in Gbit/s, how many lanes of which kind, state, what layer runs on it."""
    ports = []
    for port in sorted((root or _INFINIBAND).glob("*/ports/*")):
        told: Mapping[str, str | None] = {name: _line(port / name) for name in ("rate", "state", "link_layer")}
        rate = _RATE.match(told["rate"] or "")
        known: dict[str, Any] = {"device": port.parent.parent.name, "port": port.name}
        if rate:
            known |= {"gbits": float(rate[1]), "lanes": rate[2]}
        if state := told["state"]:
            known["state"] = state.partition(": ")[2] or state
        known["link_layer"] = told["link_layer"]
        ports.append({name: value for name, value in known.items() if value is not None})
    return ports


def _line(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return None
