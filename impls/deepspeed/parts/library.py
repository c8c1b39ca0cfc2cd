"""The library itself: whether it can be used here, what it compiles, and how a rank comes to it.

DeepSpeed reads its place from the environment, prints much, and compiles C++ at its first use. All of that is here.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer

from harness.own_process import first_error, remembered_error
from harness.workload import Training
from impls.deepspeed.parts.build_locks import abandoned_lock

SUPPORTED = (0, 19)
"""The release whose attributes and closed forms are known here: it has no interface for either."""
_IMPORT_SECONDS = 300.0
_COMPILE_SECONDS = 3600.0  # of a minute or two, on a machine that has nothing else to do


@functools.cache
def why_not_usable() -> str | None:
    """Why DeepSpeed cannot be imported here, or None; found out in a process of its own, once, and
    remembered where it can, see harness.own_process."""
    try:
        # Not by its module, for which any folder of that name would pass.
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return f"deepspeed is not installed: pip install 'deepspeed=={'.'.join(map(str, SUPPORTED))}.*'"
    except KeyError:
        version = None  # half removed; the importlib_metadata of another package, where there is one, raises this
    release = tuple(int(number) for number in re.findall(r"\d+", str(version))[:2])
    if release != SUPPORTED:
        return f"DeepSpeed {version or 'unknown'} is installed, expected {'.'.join(map(str, SUPPORTED))}"
    reason = remembered_error("import deepspeed", timeout_seconds=_IMPORT_SECONDS, environment=_here())
    return None if reason is None else f"DeepSpeed {version} with torch {torch.__version__}: {reason}"


def compile_for_ranks(*, cpu_adam: bool = False) -> None:
    """Has DeepSpeed compile what every rank of it loads on this machine, and its optimizer for CPUs where asked for.
    RuntimeError with the first line of what went wrong, or with the lock for which all of them would wait."""
    builders = ("ShareMemCommBuilder", *(["CPUAdamBuilder"] if cpu_adam else []))
    lock = abandoned_lock([_EXTENSIONS[builder] for builder in builders])
    reason = f"nobody holds {lock} any more: remove it" if lock else _error_of_compiling(*builders)
    if reason is not None:
        raise RuntimeError(f"DeepSpeed cannot compile {', '.join(builders)}: {reason}")


_EXTENSIONS = {"ShareMemCommBuilder": "deepspeed_shm_comm", "CPUAdamBuilder": "cpu_adam"}
"""What torch calls that which they build."""


@functools.cache
def _error_of_compiling(*builders: str) -> str | None:
    """Has DeepSpeed compile its operators of these names, once, in a process of its own; torch keeps them in its
    directory of extensions. What went wrong, or None."""
    program = (
        "from deepspeed.accelerator import get_accelerator\n"
        f"for name in {builders!r}:\n"
        "    builder = get_accelerator().create_op_builder(name)\n"
        "    if builder is not None:  # there is none for memory shared by ranks whose device is a GPU\n"
        "        builder.load(verbose=False)\n"
    )
    return first_error(program, timeout_seconds=_COMPILE_SECONDS, environment=_here())


def cpu_adam(training: Training, groups: list[dict[str, object]]) -> Optimizer:
    """DeepSpeed's own AdamW for CPUs, by the recipe."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    betas = (training.beta1, training.beta2)
    optimizer: Optimizer = DeepSpeedCPUAdam(
        groups, lr=training.learning_rate, betas=betas, eps=training.epsilon, adamw_mode=True
    )
    return optimizer


class Session:
    """An engine in a rank that is part of torch's default process group already. DeepSpeed makes its groups of that
    one's kind, and so below the instrument where there is one. What it makes inside `with` goes with `close`:

        with Session(device, rank, world_size) as session:
            engine = session.engine(model, optimizer, config)
    """

    def __init__(self, device: torch.device, rank: int, world_size: int) -> None:
        self._before = {name: os.environ.get(name) for name in _PLACE}
        self._linear = functional.linear
        os.environ.update(_environment(device.type))
        # A size of the node would have it exchange tensors in memory that no instrument sees.
        os.environ.pop("LOCAL_SIZE", None)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(device.index or 0), WORLD_SIZE=str(world_size))
        self._engine: Any = None
        self._groups: set[dist.ProcessGroup] = set()

    def __enter__(self) -> Session:
        import deepspeed

        self._groups = _process_groups()
        deepspeed.init_distributed(verbose=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._groups = _process_groups() - self._groups

    def engine(self, model: nn.Module, optimizer: Optimizer, config: dict[str, Any]) -> Any:
        """DeepSpeed's engine, which replaces what `optimizer` steps. Collective.

        Parameters are made contiguous first, since it broadcasts them as bytes in memory. In bf16 without ZeRO it takes
        a step with gradients of zero to have the moments made; nothing of that stays, neither decay nor a step count.
        """
        import deepspeed

        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        if hasattr(self._engine.optimizer, "fp32_groups"):
            optimizer.state.clear()
        return self._engine

    def close(self) -> None:
        """Ends the engine and the groups that it has made, and has DeepSpeed forget them: it keeps some for the life of
        a process, where another layout would find them. Collective."""
        from deepspeed.utils import groups

        self._engine.destroy()
        for name in _KEPT:
            setattr(groups, name, None)
        for group in sorted(self._groups & _process_groups(), key=lambda group: str(group.group_name)):
            dist.destroy_process_group(group)
        functional.linear = self._linear  # stage 3 puts its own there, for whatever the process does from then on
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_PLACE = ("DS_ACCELERATOR", "PATH", "LOCAL_SIZE", "RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Where it looks for its place."""
_KEPT = (
    *("_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP"),
    *("_DATA_PARALLEL_GROUP", "mesh_device", "mpu"),
)
"""Where it keeps them."""


def _process_groups() -> set[dist.ProcessGroup]:
    return set(dist.distributed_c10d._world.pg_map)


def _environment(device_type: str) -> dict[str, str]:
    """It finds ninja by the path, which an environment that was not activated is not on."""
    commands = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath)
    if shutil.which("ninja") is None:
        path = os.pathsep.join([commands, path])
    return {"DS_ACCELERATOR": device_type, "PATH": path}


def _here() -> dict[str, str]:
    return _environment("cuda" if torch.cuda.is_available() else "cpu")
