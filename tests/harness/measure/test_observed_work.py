"""Works without process groups: what a delayed one shows before and after its launch, and where its errors come out."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

from harness.measure.observed_work import DelayedWork, NullWork


class Done(Work):
    """Work that is complete, with a future or, like gloo's point-to-point, without."""

    def __init__(self, tensors: list[Tensor], *, has_future: bool = True) -> None:
        super().__init__()
        self.tensors = tensors
        self.has_future = has_future

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def get_future(self) -> Future[list[Tensor]]:
        if not self.has_future:
            raise RuntimeError("no future here")
        future: Future[list[Tensor]] = Future()
        future.set_result(self.tensors)
        return future

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return self.tensors

    def source_rank(self) -> int:
        return 3


def test_a_delayed_work_is_in_flight_until_it_is_launched_and_then_the_real_one() -> None:
    tensor = torch.ones(2)
    work = DelayedWork(lambda: Done([tensor]))
    future = work.get_future()
    assert not work.is_completed()
    assert not work.is_success()
    assert not future.done()
    waiter = threading.Thread(target=work.wait)
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive(), "nobody gets past it before its launch"
    work.launch()
    waiter.join(5)
    assert not waiter.is_alive()
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert future.wait()[0] is tensor
    assert work.result()[0] is tensor
    assert work.source_rank() == 3


def test_a_call_that_has_done_all_by_the_time_it_returns_is_complete_after_its_launch() -> None:
    work = DelayedWork(lambda: None)
    work.launch()
    assert work.wait()
    assert work.is_completed()
    assert work.get_future().wait() == []
    assert work.result() == []


def test_a_work_without_a_future_can_be_waited_for_all_the_same() -> None:
    work = DelayedWork(lambda: Done([], has_future=False))
    work.launch()
    assert work.wait()
    with pytest.raises(RuntimeError, match="no future here"):
        work.get_future().wait()


def test_what_goes_wrong_in_the_launch_is_raised_where_it_is_waited_for() -> None:
    def fail() -> None:
        raise ValueError("sizes differ")

    work = DelayedWork(fail)
    work.launch()
    for wait in (work.wait, work.get_future().wait, work.result):
        with pytest.raises(ValueError, match="sizes differ"):
            wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), ValueError)


def test_autograd_takes_no_note_of_a_launch() -> None:
    modes: list[bool] = []
    DelayedWork(lambda: modes.append(torch.is_grad_enabled())).launch()
    assert modes == [False]
    assert torch.is_grad_enabled()


def test_null_work_is_done_and_holds_its_tensors() -> None:
    tensors = [torch.ones(1), torch.zeros(2)]
    work = NullWork(tensors)
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.result() == work.get_future().wait() == tensors
