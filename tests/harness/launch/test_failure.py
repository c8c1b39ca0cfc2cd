import signal

import pytest

from harness.launch.failure import Ending, Report, first_failure, missed, nobody_came, too_late, waits_for_peers


def raised(rank: int, at: float, error: str, *, out_of_memory: bool = False) -> Ending:
    report = Report(at=at, error=error, traceback=f"traceback of {rank}", out_of_memory=out_of_memory)
    return Ending(rank=rank, doing="timing 0/1", report=report)


def died(rank: int, at: float, exit_code: int) -> Ending:
    return Ending(rank=rank, doing="timing 0/1", died_at=at, exit_code=exit_code, log_tail=f"log of {rank}")


ALIVE = Ending(rank=0, doing="timing 0/1")
CLOSED = "RuntimeError: [..]/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:9"


@pytest.mark.parametrize(
    ("endings", "culprit", "reason"),
    [
        # The first of two that raised, whatever the order of ranks.
        ([raised(0, 2.0, "ValueError: b"), raised(1, 1.0, "ValueError: a")], 1, "rank 1: ValueError: a"),
        # An echo is told sooner than its cause.
        ([raised(0, 1.0, CLOSED), raised(1, 3.0, "ValueError: a")], 1, "rank 1: ValueError: a"),
        ([raised(0, 1.0, "TimeoutError: shared memory: rank 0 waited 60 s for rank 1"), raised(1, 3.0, "KeyError: 1")],
         1, "rank 1: KeyError: 1"),
        # Nothing but echoes: the first of them.
        ([ALIVE, raised(1, 2.0, CLOSED), raised(2, 1.0, CLOSED)], 2, f"rank 2: {CLOSED}"),
        # A death is noticed a little after its peers have raised.
        ([raised(0, 1.0, "Error: odd words"), died(1, 1.2, 3)],
         1, "rank 1 left with exit code 3 and no record during step (timing 0/1)"),
        # A rank that dies long after another has raised is not the cause.
        ([raised(0, 1.0, "ValueError: a"), died(1, 4.0, -9)], 0, "rank 0: ValueError: a"),
        # A backend aborts its process when it loses a peer.
        ([died(0, 1.0, -signal.SIGABRT), died(1, 1.1, 3)],
         1, "rank 1 left with exit code 3 and no record during step (timing 0/1)"),
        ([ALIVE, died(1, 1.0, -signal.SIGKILL)], 1, "rank 1 was killed by SIGKILL during step (timing 0/1)"),
        ([died(0, 1.0, -200)], 0, "rank 0 was killed by signal 200 during step (timing 0/1)"),
    ],
)  # fmt: skip
def test_first_failure(endings: list[Ending], culprit: int, reason: str) -> None:
    failure = first_failure(endings, "step")
    assert (failure.status, failure.culprit, failure.reason) == ("failed", culprit, reason)
    assert failure.traceback in (f"traceback of {culprit}", f"log of {culprit}")


def test_running_out_of_memory_is_a_status_of_its_own() -> None:
    assert first_failure([raised(0, 1.0, "MemoryError: ", out_of_memory=True)], "step").status == "out of memory"
    killed = Ending(rank=1, doing="timing 0/1", died_at=1.0, exit_code=-signal.SIGKILL, out_of_memory=True)
    failure = first_failure([ALIVE, killed], "step")
    assert (failure.status, failure.culprit) == ("out of memory", 1)
    assert failure.reason == "rank 1 was killed by the system, which ran out of memory, during step (timing 0/1)"


@pytest.mark.parametrize(
    ("endings", "culprit"),
    [
        # Whoever was killed, when another one has told of an error before.
        ([raised(0, 1.0, "Error: odd words"), died(1, 4.0, -signal.SIGKILL)], 1),
        ([died(0, 1.0, 1), died(1, 2.0, -signal.SIGSEGV), died(2, 3.0, -signal.SIGKILL)], 1),
        # Agents end the others of a failed worker by SIGTERM, backends abort.
        ([died(0, 1.0, -signal.SIGTERM), died(1, 2.0, 3), died(2, 1.0, -signal.SIGABRT)], 1),
        # Nobody was: the earliest.
        ([raised(0, 2.0, "ValueError: b"), raised(1, 1.0, "ValueError: a")], 1),
    ],
)
def test_across_agents_a_signal_counts_before_the_time(endings: list[Ending], culprit: int) -> None:
    assert first_failure(endings, "step", signals_first=True).culprit == culprit


def stack(*frames: str) -> str:
    lines = [f'  File "{path}", line 1 in {function}' for path, _, function in (f.rpartition(":") for f in frames)]
    return "\n".join(["Current thread 0x00007f (most recent call first):", *lines])


IN_COLLECTIVE = stack("/lib/torch/distributed/distributed_c10d.py:all_reduce", "/impl.py:train_step")


@pytest.mark.parametrize(
    ("frames", "waits"),
    [
        (["/lib/torch/distributed/distributed_c10d.py:all_reduce", "/impl.py:train_step"], True),
        (["/parts/flags.py:<genexpr>", "/parts/flags.py:_until_all", "/parts/flags.py:wait"], True),
        (["/lib/torch/autograd/graph.py:_engine_run_backward"], True),
        (["/impl.py:hook", "/lib/torch/autograd/graph.py:_engine_run_backward"], False),
        (["/impl.py:train_step", "/harness/worker.py:main"], False),
        ([], False),
    ],
)
def test_who_waits_for_peers(frames: list[str], waits: bool) -> None:
    assert waits_for_peers(stack(*frames)) is waits


def silent(rank: int, where: str, *, stopped: bool = False) -> Ending:
    return Ending(rank=rank, doing="timing 1/3", stack=where, stopped=stopped, log_tail="log")


def test_too_late() -> None:
    busy = stack("/impl.py:spin")
    hangs = too_late([silent(0, IN_COLLECTIVE), silent(1, busy)], "step", 2.5)
    assert (hangs.status, hangs.culprit, hangs.traceback) == ("timed out", 1, busy)
    assert hangs.reason == (
        "rank 1 hangs: no answer to step within the deadline of 2.5 s (rank 0 timing 1/3; rank 1 timing 1/3)"
    )
    stopped = too_late([silent(0, busy), silent(1, "", stopped=True)], "step", 2.5)
    assert (stopped.culprit, stopped.traceback) == (1, "log")
    assert stopped.reason.startswith("rank 1 is stopped: ")
    answered = Ending(rank=0, doing="timing 1/3", answered=True, stack=busy)
    assert too_late([answered, silent(1, IN_COLLECTIVE)], "step", 2.5).culprit == 1
    nobody = too_late([silent(0, IN_COLLECTIVE), silent(1, IN_COLLECTIVE)], "step", 2.5)
    assert nobody.culprit is None
    assert nobody.traceback == f"rank 0:\n{IN_COLLECTIVE}\nrank 1:\n{IN_COLLECTIVE}"


LATE = "RuntimeError: [..]/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 20000ms for recv operation"


def late(rank: int, at: float = 1.0, error: str = LATE, missing: tuple[int, ...] = ()) -> Ending:
    report = Report(at=at, error=error, traceback=f"traceback of {rank}", missing=missing)
    return Ending(rank=rank, doing="timing 0/1", report=report)


def test_only_timeouts_and_their_echoes_mean_that_nobody_came() -> None:
    assert nobody_came([late(0), ALIVE])
    assert nobody_came([late(0), late(1, error=CLOSED)])
    assert not nobody_came([late(0, error=CLOSED), ALIVE])
    assert not nobody_came([late(0), raised(1, 1.0, "ValueError: a")])
    assert not nobody_came([late(0), died(1, 1.0, -signal.SIGKILL)])


@pytest.mark.parametrize(
    ("error", "is_timeout", "is_echo"),
    [
        (LATE, True, True),
        ("TimeoutError: shared memory: rank 0 waited 120 s for rank 1 to have published bucket 0", True, True),
        ("DistStoreError: wait timeout after 60000ms, keys: /default_pg/0//cpu//0", True, True),
        ("DistBackendError: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)", True, True),
        ("OSError: the download timed out", False, True),
        (CLOSED, False, True),
        ("ValueError: the third bucket is empty", False, False),
    ],
)
def test_what_tells_of_a_peer_that_did_not_come(error: str, is_timeout: bool, is_echo: bool) -> None:
    report = Report(at=1.0, error=error, traceback="")
    assert (report.is_timeout, report.is_echo) == (is_timeout, is_echo)


def test_who_was_missed_after_a_collective_timed_out() -> None:
    gave_up = f"in step (timing 0/1) rank 0 gave up: {LATE}"
    stopped = silent(1, "", stopped=True)
    failure = missed([late(0, missing=(1,)), stopped, late(2, error=CLOSED)], "step")
    assert (failure.status, failure.culprit, failure.traceback) == ("timed out", 1, "log")
    assert failure.reason == f"rank 1 is stopped: {gave_up}"
    # The first rank itself is stopped: nobody learns anything in the barrier.
    assert missed([silent(0, "", stopped=True), late(1), late(2)], "step").culprit == 0
    busy = stack("/impl.py:spin")
    failure = missed([late(0, missing=(1, 2)), silent(1, IN_COLLECTIVE), silent(2, busy)], "step")
    assert (failure.culprit, failure.traceback) == (2, busy)
    assert failure.reason == f"rank 2 hangs: {gave_up}"
    failure = missed([late(0, missing=(2, 3)), late(1, error=CLOSED), late(2), late(3)], "step")
    assert failure.culprit == 2
    assert failure.reason.startswith("rank 0 cannot reach rank 2 and rank 3, though all are alive: is the link between")
    # Each waits for a collective of its own.
    failure = missed([late(0), silent(1, IN_COLLECTIVE)], "step")
    assert failure.culprit is None
    assert failure.reason == f"every rank waits for another: {gave_up}"
    assert failure.traceback == f"rank 0:\ntraceback of 0\nrank 1:\n{IN_COLLECTIVE}"


def test_who_is_stopped_is_to_blame_when_the_others_abort_as_nccl_has_them_do() -> None:
    aborted = [died(0, 1.0, -signal.SIGABRT), died(2, 1.1, -signal.SIGABRT)]
    failure = first_failure([*aborted, silent(1, "", stopped=True)], "step")
    assert (failure.status, failure.culprit) == ("timed out", 1)
    assert failure.reason == "rank 1 is stopped: in step (timing 0/1) rank 0 aborted"
    assert first_failure([*aborted, silent(1, IN_COLLECTIVE)], "step").culprit == 0
    assert first_failure(aborted, "step").culprit == 0
