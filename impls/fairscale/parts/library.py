"""Whether FairScale can be used here."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import io
import subprocess
import sys
import warnings
from collections.abc import Iterator

SUPPORTED = "0.4.13"
"""Its last release: what its wrappers do with buckets and hooks is known of this one."""
MODULES = ("optim.oss", "nn.data_parallel", "nn.pipe", "nn.model_parallel")

_FULLY_SHARDED_STEP = """
import tempfile, torch, torch.distributed as dist
from fairscale.nn.data_parallel import FullyShardedDataParallel
with tempfile.NamedTemporaryFile() as file:
    dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
    FullyShardedDataParallel(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
"""
_PROBE_SECONDS = 120


@functools.cache
def why_unavailable() -> str | None:
    """Why FairScale cannot be used by this Python, or None; asked once."""
    try:
        version = importlib.metadata.version("fairscale")
    except importlib.metadata.PackageNotFoundError:
        return f"fairscale is not installed: pip install fairscale=={SUPPORTED}"
    except KeyError:  # half removed; the importlib_metadata of another package, where there is one, raises this
        version = None
    if version != SUPPORTED:
        return f"fairscale {SUPPORTED} is expected, {version or 'unknown'} is installed"
    try:
        with _silenced():
            for name in MODULES:
                importlib.import_module(f"fairscale.{name}")
    except (Exception, SystemExit) as error:  # whatever breaks it on this torch
        return f"fairscale {version} cannot be imported: {type(error).__name__}: {error}".splitlines()[0]
    return None


@functools.cache
def why_not_fully_sharded_on_cpu() -> str | None:
    """What its fully sharded wrapper says to one step on a CPU, or None; asked once, of a process of its own."""
    command = [sys.executable, "-c", _FULLY_SHARDED_STEP]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"one step on a CPU does not end within {_PROBE_SECONDS} s"
    return None if done.returncode == 0 else done.stderr.strip().splitlines()[-1].removeprefix("[rank0]: ")


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield
