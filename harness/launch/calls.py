"""Calls: lines that ranks and pods open to this process, taken from whoever holds the key.

    accepting ---- a caller ----> a thread of its own: key, first words ----> take(words, line)

A caller that says nothing, a port scanner or a process that is stopped, holds nobody else up.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

_AGAIN_SECONDS = 0.1  # until the next try, where the system has no more files for a caller
_CLOSE_SECONDS = 5.0


class Calls:
    """`take` is called with the first words of each caller and the line to it, by one thread at a time, and not any
    more once `close` has returned."""

    def __init__(
        self, address: tuple[str, int] | None, key: str, take: Callable[[Any, Connection], None], *, backlog: int
    ) -> None:
        """`address` None is a socket of this machine. OSError where nobody can listen there."""
        self._key, self._take = key.encode(), take
        self._is_closed = False
        self._taking = threading.Lock()
        self._listener = Listener(address, backlog=backlog)
        self.address: Any = self._listener.address
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """From now on nobody is listening. Lines that were taken stay."""
        with self._taking:
            self._is_closed = True
        # The system lets go of an address when nobody waits there any more, and only a call ends the waiting.
        with contextlib.suppress(OSError):
            Client(self.address if isinstance(self.address, str) else ("127.0.0.1", self.address[1])).close()
        self._accepting.join(_CLOSE_SECONDS)

    def _accept(self) -> None:
        with self._listener:
            while not self._is_closed:
                try:
                    line = self._listener.accept()
                except OSError:
                    time.sleep(_AGAIN_SECONDS)
                    continue
                threading.Thread(target=self._admit, args=(line,), daemon=True).start()

    def _admit(self, line: Connection) -> None:
        try:
            deliver_challenge(line, self._key)
            answer_challenge(line, self._key)
            words = line.recv()
        except Exception:  # somebody without the key, or who hung up, or speaks of other things
            line.close()
            return
        with self._taking:
            if self._is_closed:
                line.close()
            else:
                self._take(words, line)
