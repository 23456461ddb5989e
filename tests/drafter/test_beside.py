"""Work in a thread of its own: its processor threads are its own, and so are its faults until somebody asks."""

from __future__ import annotations

import threading

import pytest
import torch

from respec.drafter.beside import Beside
from respec.errors import NonFiniteError

CPU = torch.device("cpu")


def test_its_threads_are_its_own_and_nobody_elses():
    before = torch.get_num_threads()
    beside = Beside(before + 2, CPU)
    assert beside.start(torch.get_num_threads).result() == before + 2
    beside.share()
    assert torch.get_num_threads() == before
    later = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [before]


def test_it_does_not_keep_the_caller_waiting():
    gate = threading.Event()
    work = Beside(1, CPU).start(gate.wait)
    assert not work.done()
    gate.set()
    assert work.result() is True


def test_work_under_way_has_its_threads_from_who_began_it():
    own = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        beside, gate = Beside(1, CPU), threading.Event()
        work = beside.start(gate.wait)
        assert torch.get_num_threads() == 2
        beside.share()
        assert torch.get_num_threads() == 2
        gate.set()
        work.result()
        beside.share()
        assert torch.get_num_threads() == 3
        greedy, gate = Beside(4, CPU), threading.Event()
        work = greedy.start(gate.wait)
        assert torch.get_num_threads() == 1, "whatever it wants, one is left"
        gate.set()
        work.result()
    finally:
        torch.set_num_threads(own)


def test_its_gradients_are_the_callers_and_no_mode_of_the_callers_is_taken_over():
    weight = torch.nn.Parameter(torch.arange(4.0))

    def work() -> bool:
        (weight**2).sum().backward()
        return torch.is_grad_enabled()

    with torch.no_grad(), torch.inference_mode():
        assert Beside(1, CPU).start(work).result()
    assert weight.grad is not None and weight.grad.tolist() == [0.0, 2.0, 4.0, 6.0]


def test_a_fault_comes_out_where_the_result_is_asked_for():
    def fails() -> None:
        raise NonFiniteError("the loss is nan")

    beside = Beside(1, CPU)
    work = beside.start(fails)
    with pytest.raises(NonFiniteError, match="the loss is nan"):
        work.result()
    assert beside.start(lambda: 3).result() == 3
