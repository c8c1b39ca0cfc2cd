"""Whether FairScale can be used here."""

from __future__ import annotations

import functools
import importlib.metadata

from harness.own_process import remembered_error

SUPPORTED = "0.4.13"
"""Its last release: what its wrappers do with buckets and hooks is known of this one."""
# The package imports all of them with any of them.
MODULES = ("optim.oss", "nn.data_parallel", "nn.pipe", "nn.model_parallel")

_FULLY_SHARDED_STEP = """
import tempfile, torch, torch.distributed as dist
from fairscale.nn.data_parallel import FullyShardedDataParallel
with tempfile.NamedTemporaryFile() as file:
    dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
    FullyShardedDataParallel(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
"""
_PROBE_SECONDS = 120.0
_IMPORT_SECONDS = 300.0


@functools.cache
def why_unavailable() -> str | None:
    """Why FairScale cannot be used by this Python, or None; asked once, of a process of its own: native extensions of
    another torch's abort. That it can is remembered, see harness.own_process."""
    try:
        version = importlib.metadata.version("fairscale")
    except importlib.metadata.PackageNotFoundError:
        return f"fairscale is not installed: pip install fairscale=={SUPPORTED}"
    except KeyError:  # half removed; the importlib_metadata of another package, where there is one, raises this
        version = None
    if version != SUPPORTED:
        return f"fairscale {SUPPORTED} is expected, {version or 'unknown'} is installed"
    program = "\n".join(f"import fairscale.{name}" for name in MODULES)
    reason = remembered_error(program, timeout_seconds=_IMPORT_SECONDS)
    return None if reason is None else f"fairscale {version} cannot be imported: {reason}"


@functools.cache
def why_not_fully_sharded_on_cpu() -> str | None:
    """What its fully sharded wrapper says to one step on a CPU, or None; asked once, of a process of its own."""
    without_gpus = {"CUDA_VISIBLE_DEVICES": ""}  # one of which it would take by itself
    return remembered_error(
        _FULLY_SHARDED_STEP, timeout_seconds=_PROBE_SECONDS, environment=without_gpus, remembers_errors=True
    )
