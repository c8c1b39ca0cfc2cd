"""Links of GPUs and InfiniBand ports, from texts in the formats that real machines give; and their absence."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from harness import environment, interconnect

# As nvidia-smi prints it: tabs, an underlined head.
MATRIX = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tNV18\tPIX\tSYS\t0-47,96-143\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNV18\tNODE\tSYS\t0-47,96-143\t0\t\tN/A\n"
    "GPU2\tNV18\tNV18\t X \tSYS\tPXB\t48-95,144-191\t1\t\tN/A\n"
    "NIC0\tPIX\tNODE\tSYS\t X \tSYS\t\t\t\t\n"
    "NIC1\tSYS\tSYS\tPXB\tSYS\t X \t\t\t\t\n"
    "\n"
    "Legend:\n\n"
    "  X    = Self\n"
    "  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)\n"
    "  NV#  = Connection traversing a bonded set of # NVLinks\n\n"
    "NIC Legend:\n\n"
    "  NIC0: mlx5_0\n"
    "  NIC1: mlx5_1\n"
)
ONE_GPU = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\t0\t\tN/A\n\nLegend:\n\n  X    = Self\n"


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    interconnect.gpus.cache_clear()
    interconnect.matrix_text.cache_clear()


def test_the_matrix_of_nvidia_smi() -> None:
    matrix = interconnect.parse_matrix(MATRIX)
    assert list(matrix) == ["GPU0", "GPU1", "GPU2", "NIC0", "NIC1"]
    assert matrix["GPU0"] == {"GPU0": "X", "GPU1": "NV18", "GPU2": "NV18", "NIC0": "PIX", "NIC1": "SYS"}
    assert matrix["NIC1"] == {"GPU0": "SYS", "GPU1": "SYS", "GPU2": "PXB", "NIC0": "SYS", "NIC1": "X"}
    assert all(matrix[a][b] == matrix[b][a] for a in matrix for b in matrix)
    assert interconnect.parse_matrix(ONE_GPU) == {"GPU0": {"GPU0": "X"}}
    assert interconnect.parse_matrix("") == {}
    assert interconnect.parse_matrix("No devices were found\n") == {}


def test_nvidia_smi_is_asked_and_may_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for script, expected in (
        (f"cat <<'END'\n{MATRIX}END\n", MATRIX.replace("\x1b[4m", "").replace("\x1b[0m", "").strip("\n")),
        ("echo 'NVIDIA-SMI has failed'; exit 9\n", None),
    ):
        command.write_text(f"#!/bin/sh\n[ \"$*\" = 'topo -m' ] || exit 3\n{script}")
        command.chmod(0o755)
        interconnect.matrix_text.cache_clear()
        assert interconnect.matrix_text() == expected


def test_infiniband_ports(tmp_path: Path) -> None:
    for device, port, files in (
        ("mlx5_0", "1", {"rate": "400 Gb/sec (4X NDR)\n", "state": "4: ACTIVE\n", "link_layer": "InfiniBand\n"}),
        ("mlx5_1", "1", {"rate": "25 Gb/sec (1X EDR)\n", "state": "1: DOWN\n", "link_layer": "Ethernet\n"}),
        ("odd", "2", {"rate": "unknown\n"}),
    ):
        directory = tmp_path / device / "ports" / port
        directory.mkdir(parents=True)
        for name, text in files.items():
            (directory / name).write_text(text)
    assert interconnect.infiniband(tmp_path) == [
        {
            "device": "mlx5_0",
            "port": "1",
            "gbits": 400.0,
            "lanes": "4X NDR",
            "state": "ACTIVE",
            "link_layer": "InfiniBand",
        },
        {"device": "mlx5_1", "port": "1", "gbits": 25.0, "lanes": "1X EDR", "state": "DOWN", "link_layer": "Ethernet"},
        {"device": "odd", "port": "2"},
    ]
    assert interconnect.infiniband(tmp_path / "nowhere") == []


class NVMLError(Exception):
    pass


def nvml(num_gpus: int, **replaced: Any) -> types.ModuleType:
    """NVML's answers on two GPUs with 18 NVLinks of their 18, or fewer."""

    def state(handle: int, link: int) -> int:
        if link >= 12:
            raise NVMLError("not supported")
        return 1

    answers: dict[str, Any] = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: num_gpus,
        "nvmlDeviceGetHandleByIndex": lambda index: (index,),
        "nvmlDeviceGetName": lambda handle: b"NVIDIA A100-SXM4-80GB",
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda handle: 4,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda handle: 16,
        "nvmlDeviceGetNvLinkState": state,
        "nvmlDeviceGetNvLinkVersion": lambda handle, link: 3,
        "nvmlDeviceGetTopologyCommonAncestor": lambda a, b: 40,
    }
    module = types.ModuleType("pynvml")
    module.__dict__.update(answers | replaced)
    return module


def test_nvml_tells_of_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(2))
    first, second = interconnect.gpus()
    assert first == {
        "name": "NVIDIA A100-SXM4-80GB",
        "pcie_generation": 4,
        "pcie_width": 16,
        "num_nvlinks": 12,
        "nvlink_version": 3,
        "distances": ["X", "NODE"],
    }
    assert second["distances"] == ["NODE", "X"]


def _fails(*_: Any) -> Any:
    raise NVMLError("driver not loaded")


@pytest.mark.parametrize("module", [None, nvml(1, nvmlInit=_fails), nvml(1, nvmlDeviceGetCount=_fails)])
def test_without_nvml_there_is_nothing_and_no_error(
    monkeypatch: pytest.MonkeyPatch, module: types.ModuleType | None
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)  # None: not installed
    assert interconnect.gpus() == []


def test_the_environment_tells_what_is_there_and_no_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(interconnect, "_INFINIBAND", tmp_path)
    assert "interconnect" not in environment.describe("cpu")
    monkeypatch.setattr(interconnect, "describe", lambda kind: {"matrix": {"GPU0": {"GPU0": "X"}}})
    assert environment.describe("cpu")["interconnect"] == {"matrix": {"GPU0": {"GPU0": "X"}}}


def test_gpus_are_asked_of_only_where_ranks_train_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interconnect, "gpus", lambda: [{"name": "one"}])
    monkeypatch.setattr(interconnect, "matrix_text", lambda: ONE_GPU)
    monkeypatch.setattr(interconnect, "infiniband", list)
    assert interconnect.describe("cpu") == {}
    assert interconnect.describe("cuda") == {
        "gpus": [{"name": "one"}],
        "matrix_text": ONE_GPU,
        "matrix": {"GPU0": {"GPU0": "X"}},
    }
