"""The team of threads of the C library: forks, several callers, any number of threads."""

from __future__ import annotations

import multiprocessing
import threading
import time
import warnings

import pytest
import torch

from foretell.native import library
from foretell.native.packing import Packed
from foretell.native.rounding import quantize_matrix
from tests.native.machines import built

pytestmark = built
OUTPUTS, INPUTS = 200, 96


def question() -> tuple[Packed, torch.Tensor]:
    torch.manual_seed(0)
    return quantize_matrix(torch.randn(OUTPUTS, INPUTS), "int8"), torch.randn(5, INPUTS)


def product(packed: Packed, x: torch.Tensor, threads: int) -> torch.Tensor:
    return library.multiply_rows(library.describe_matrix(packed), x, threads)


@pytest.mark.parametrize("threads", [-1, 0, 1, 2, 3])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    packed, x = question()
    assert torch.equal(product(packed, x, threads), product(packed, x, 1))


def test_a_team_that_sleeps_is_woken() -> None:
    packed, x = question()
    wanted = product(packed, x, 1)
    for _ in range(3):
        assert torch.equal(product(packed, x, 2), wanted)
        time.sleep(0.01)  # longer than it stays awake


def test_several_python_threads_may_ask_at_once() -> None:
    packed, x = question()
    wanted = product(packed, x, 1)
    wrong = []

    def ask(threads: int) -> None:
        for _ in range(100):
            if not torch.equal(product(packed, x, threads), wanted):
                wrong.append(threads)

    callers = [threading.Thread(target=ask, args=(n,)) for n in (1, 2, 3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def _answer(packed: Packed, x: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.set_num_threads(1)
    right = torch.equal(product(packed, x, 2), wanted)
    raise SystemExit(0 if right else 1)


def test_a_forked_child_has_a_team_of_its_own() -> None:
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("this system has no forks")
    packed, x = question()
    wanted = product(packed, x, 2)  # the parent's team has threads, which the child lacks
    child = multiprocessing.get_context("fork").Process(target=_answer, args=(packed, x, wanted))
    with warnings.catch_warnings():
        # Python 3.12 warns of forks beside threads, which this test is about.
        warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
        child.start()
    child.join(20)
    hangs = child.is_alive()
    if hangs:
        child.kill()
    assert not hangs and child.exitcode == 0
    assert torch.equal(product(packed, x, 2), wanted)
