"""What torchrun's agents start: a rank that calls the harness and does what it is told. `-m
harness.launch.torchrun_rank ADDRESS`, with the key to it in the environment."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from multiprocessing.connection import Client, Connection

from harness import worker
from harness.launch.fork_server import end_with_parent
from harness.launch.torchrun import KEY_VARIABLE, Hello


def main(address: str) -> None:
    """Until the harness has no more commands."""
    _end_with_agent()
    commands, control = (_call(address, line) for line in ("commands", "control"))
    job = commands.recv()
    threading.Thread(target=_listen, args=(control,), daemon=True).start()
    worker.main(commands, job, tie=lambda: None)


def _call(address: str, line: str) -> Connection:
    key = os.environ[KEY_VARIABLE].encode()
    host, colon, port = address.rpartition(":")
    made: Connection = Client((host, int(port)) if colon else address, authkey=key)
    made.send(
        Hello(
            line=line,
            node=int(os.environ["GROUP_RANK"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            worker=int(os.environ["RANK"]),
            pid=os.getpid(),
            host=socket.gethostname(),
        )
    )
    return made


def _listen(control: Connection) -> None:
    """Answers the harness while the rank works; ends the rank when the harness is gone, whatever it is doing then."""
    while True:
        try:
            request = control.recv()
            if request == "ping":
                control.send("pong")
            elif request == "stack":
                os.kill(os.getpid(), signal.SIGUSR1)
        except (EOFError, OSError):
            os._exit(1)


def _end_with_agent() -> None:
    """An agent that is killed would leave its workers training."""
    parent = os.getppid()
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
