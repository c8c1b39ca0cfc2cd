"""The fork server: a process with torch loaded, of which every rank is a fork.

A rank starts in a fraction of a second and inherits nothing of the parent's state. The server ends when the parent
does, and a rank, see `tie_to_server`, when the server does: however the harness ends, no rank outlives it.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from typing import Any

from harness import scratch
from harness.environment import MALLOC_SETTINGS

# torch's optimizers import torch._dynamo when the first of them is made, which takes a rank a second or two.
_PRELOADED = ["harness.worker", "torch._dynamo"]
RANK_ENVIRONMENT = {**MALLOC_SETTINGS, "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6"}
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)

_starting = threading.Lock()  # starting a process changes what belongs to this whole process: environment, __main__


class Fork:
    """One process of the server's, with the parent's end of a channel to it."""

    def __init__(self, target: Callable[..., None], argument: Any, name: str) -> None:
        context = multiprocessing.get_context("forkserver")
        self.channel, there = context.Pipe()
        self.process = context.Process(target=target, args=(there, argument), name=name, daemon=True)
        with there, _starting, _without_main_module():
            scratch.place_sockets()
            context.set_forkserver_preload(_PRELOADED)
            with _environment(RANK_ENVIRONMENT):
                forkserver.ensure_running()
            self.process.start()

    @property
    def is_here(self) -> bool:
        return True

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def kill(self) -> None:
        """Ends the process, and what it started once it led a group of its own, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if self.process.is_alive():
            self.process.kill()

    @property
    def exit_code(self) -> int | None:
        return self.process.exitcode

    @property
    def ends(self) -> Any:
        return self.process.sentinel

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def join(self, timeout_seconds: float) -> None:
        self.process.join(timeout_seconds)

    def is_stopped(self) -> bool:
        return is_stopped(self.pid)

    def ask_for_stack(self) -> None:
        os.kill(self.pid, signal.SIGUSR1)


def is_stopped(pid: int) -> bool:
    """By the letter of proc(5); False where the system does not tell."""
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123  not a path on a disk
            return file.read().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def tie_to_server() -> None:
    """Called by a rank: it ends with the server, whatever it is doing then. Only Linux can promise that; elsewhere a
    rank that hangs outlives a parent that was killed."""
    # The server lives on while anyone holds this end of its pipe: the ranks must not keep alive what they depend on.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    end_with_parent()
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():
        os._exit(1)


def end_with_parent() -> None:
    """From now on the system kills this process when the one that started it has ended; only Linux can promise that.
    Who calls it finds out by himself whether that one is there still."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


@contextlib.contextmanager
def _without_main_module() -> Iterator[None]:
    """Ranks import what they need by name. Left to itself multiprocessing would run the parent's script again in the
    server and in every rank, which costs its imports and fails for a script without a file."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
