"""Has torch's profiler hear what other Python threads do: by itself it hears the one that started it, and autograd's.

The profiler's state is local to a thread. torch has a function that joins a thread to the profile of another one, in
C++ alone (`enableProfilerInChildThread`, torch/csrc/autograd/profiler_kineto.h), and only the thread itself can call
it. Python has each new thread call one of our choice before anything else: `threading.setprofile`.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.profiler import profile

_LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
_JOIN = "_ZN5torch8autograd8profiler27enableProfilerInChildThreadEv"


@contextmanager
def with_new_threads(profiler: profile) -> Iterator[None]:
    """Runs `profiler`, with every Python thread that starts inside. RuntimeError if one could not join, when all is
    over: what it did is missing.

    Such a thread goes on recording for nobody when the profile has ended: it should end soon, too.
    """
    newcomers = _Newcomers()
    before = threading.getprofile()
    try:
        with profiler:
            threading.setprofile(newcomers.meet)
            try:
                yield
            finally:
                threading.setprofile(before)
                newcomers.close()
    finally:
        if newcomers.have_joined:
            # For each of them torch has forgotten the callback of the one before, so that this thread's own has
            # outlived the profile: the next one would hear everything twice.
            torch._C._autograd._clear_callbacks()  # type: ignore[attr-defined]
    if newcomers.unheard:
        raise RuntimeError(f"memory: torch {torch.__version__} does not profile other threads: {newcomers.unheard}")


class _Newcomers:
    """Each thread that comes joins, until `close`: torch ends the process where there is no profile to join."""

    def __init__(self) -> None:
        self.have_joined = False
        self.unheard: str | None = None
        self._are_welcome = True
        self._lock = threading.Lock()

    def meet(self, frame: FrameType, event: str, argument: Any) -> None:
        sys.setprofile(None)
        with self._lock:
            if not self._are_welcome:
                return
            try:
                ctypes.PyDLL(str(_LIBRARY))[_JOIN]()
                self.have_joined = True
            except (OSError, AttributeError) as error:
                self.unheard = f"{type(error).__name__}: {error}"

    def close(self) -> None:
        with self._lock:
            self._are_welcome = False
