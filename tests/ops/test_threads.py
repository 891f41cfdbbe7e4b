# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The module's threads: where they run, and that they survive a fork and serve many callers."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.emulator import not_emulated
from support.transfer.cases import TransferMemory, assert_same, uniform_case

from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.transfer.errors import PlacementError
from vllm_ascend_kvext.transfer.page_transfer import page_transfer
from vllm_ascend_kvext.transfer.placement import CopyPlacement
from vllm_ascend_kvext.transfer.pools import Pools
from vllm_ascend_kvext.transfer.schema import Direction

TESTS = Path(__file__).parents[1]
LARGE = uniform_case(row_bytes=2048, rows_per_page=16, pages=(5, 2, 8, 7), num_planes=16)


def run(memory: TransferMemory, num_threads: int) -> None:
    native().page_transfer(*memory.descriptors(LARGE), num_threads)


def test_other_threads_run_meanwhile() -> None:
    """The interpreter preempts no thread here, so another one runs only while this one waits."""
    source = np.ones(32 << 20, np.uint8)
    destination = np.zeros_like(source)
    num_ticks = 0
    is_done = False

    def tick() -> None:
        nonlocal num_ticks
        while not is_done:
            num_ticks += 1
            pause.wait(0.0001)

    pause = threading.Event()
    interval_s = sys.getswitchinterval()
    ticker = threading.Thread(target=tick)
    ticker.start()
    sys.setswitchinterval(1000)
    try:
        before = num_ticks
        for _ in range(500):
            native().copy(destination.ctypes.data, source.ctypes.data, source.size)
            if num_ticks > before:
                break
        assert num_ticks > before
    finally:
        is_done = True
        sys.setswitchinterval(interval_s)
        ticker.join()
    assert destination.all()


def test_many_callers_at_once() -> None:
    memories = [TransferMemory.random(LARGE, seed) for seed in range(4)]
    expected = [memory.after(LARGE) for memory in memories]

    def work(memory: TransferMemory) -> None:
        for _ in range(25):
            memory.host.region[:] = 0
            run(memory, 3)

    callers = [threading.Thread(target=work, args=(memory,)) for memory in memories]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for memory, result in zip(memories, expected, strict=True):
        assert_same(memory.snapshot(), result)


def test_a_copy_is_whole() -> None:
    random = np.random.default_rng(0)
    source = random.integers(0, 256, 3 << 20, np.uint8)
    parts = ((0, 0), (1, 5), (64, 1), (1025, 3), (2 << 20, 7), (3 << 20, 0))
    for (num_bytes, first), *options in itertools.product(parts, (1, 3), (-1, 0, 1)):
        destination = np.zeros(len(source) + 64, np.uint8)
        native().copy(destination.ctypes.data + first, source.ctypes.data, num_bytes, *options)
        assert np.array_equal(destination[first:][:num_bytes], source[:num_bytes])
        assert not destination[:first].any()
        assert not destination[first + num_bytes :].any()


FIRST_TRANSFERS = f"""
import multiprocessing, sys, threading
sys.path.insert(0, {str(TESTS)!r})
from ops.test_threads import LARGE, TransferMemory, assert_same, native, run

native()  # As whoever registers pools: Python's own imports do not survive a fork.
memory = TransferMemory.random(LARGE)
expected = memory.after(LARGE)


def started(target):
    process = multiprocessing.get_context("fork").Process(target=target)
    process.start()
    return process


def has_ended_well(process, most_s):
    process.join(most_s)
    process.kill()
    return process.exitcode == 0


def transfer():
    run(memory, 3)
    assert_same(memory.snapshot(), expected)


def fork_during_the_first_transfer():
    is_started = threading.Event()
    first = threading.Thread(target=lambda: (is_started.set(), transfer()))
    first.start()
    is_started.wait()
    children = [started(transfer) for _ in range(4)]
    are_fine = [has_ended_well(child, 60) for child in children]
    first.join()
    transfer()
    sys.exit(not all(are_fine))


# Each of these processes has never copied before.
parents = (started(fork_during_the_first_transfer) for _ in range(30))
print(sum(has_ended_well(parent, 300) for parent in parents))
"""


@not_emulated("does not survive a fork beside a thread")
def test_children_of_a_first_transfer_do_not_hang() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", FIRST_TRANSFERS],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert (finished.returncode, finished.stdout) == (0, "30\n"), finished.stderr[-2000:]


CPUS = sorted(os.sched_getaffinity(0))
needs_two_cpus = pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")


def copy_threads() -> dict[int, tuple[set[int], int]]:
    """CPUs and niceness of each of the module's threads, by its number in this process."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "kvext-copy":
            number = int(task.name)
            found[number] = (
                os.sched_getaffinity(number),
                os.getpriority(os.PRIO_PROCESS, number),
            )
    return found


@pytest.fixture
def pinned() -> Iterator[int]:
    """Binds this thread to the first CPU, as OpenMP does with a worker's main thread."""
    os.sched_setaffinity(0, CPUS[:1])
    yield CPUS[0]
    os.sched_setaffinity(0, CPUS)


def run_on(memory: TransferMemory, placement: CopyPlacement) -> None:
    pools = Pools([torch.from_numpy(pool.region) for pool in memory.pools])
    host = torch.from_numpy(memory.host.region)
    page_transfer(
        pools, host, LARGE.planes, LARGE.runs, Direction.PAGES_TO_HOST, placement=placement
    )


@needs_two_cpus
@pytest.mark.parametrize("num_threads", [1, 2])
def test_copies_run_on_the_named_cpus(pinned: int, num_threads: int) -> None:
    """Copies do not run on the CPU that the caller is bound to."""
    before = set(copy_threads())
    # A niceness of its own makes these threads new ones.
    placement = CopyPlacement.on(CPUS[1:], num_threads=num_threads, niceness=10 + num_threads)
    memory = TransferMemory.random(LARGE)
    expected = memory.after(LARGE)
    run_on(memory, placement)
    assert_same(memory.snapshot(), expected)
    expected_places = [(set(CPUS[1:]), 10 + num_threads)] * num_threads
    # A copy does not wait for threads that it can do without, and that are still starting.
    for _ in range(1000):
        places = [place for number, place in copy_threads().items() if number not in before]
        if places == expected_places:
            break
        time.sleep(0.01)
    assert places == expected_places
    assert os.sched_getaffinity(0) == {pinned}


@needs_two_cpus
def test_a_caller_on_the_named_cpus_copies_too() -> None:
    before = set(copy_threads())
    placement = CopyPlacement.on(CPUS, num_threads=2)
    started = set(copy_threads()) - before
    run_on(TransferMemory.random(LARGE), placement)
    # The thread that has asked the kernel for the CPUs is enough beside the caller.
    assert set(copy_threads()) - before == started and len(started) <= 1


@needs_two_cpus
@pytest.mark.parametrize("num_threads", [1, 2])
def test_copies_return_to_the_named_cpus_after_all_threads_were_bound(num_threads: int) -> None:
    """vLLM-Ascend binds all threads of a worker on ARM hosts, after copies may have begun."""
    before = set(copy_threads())
    placement = CopyPlacement.on(CPUS[1:2], num_threads=num_threads, niceness=5 + num_threads)
    memory = TransferMemory.random(LARGE)
    expected = memory.after(LARGE)
    run_on(memory, placement)
    until_started(before, num_threads)
    try:
        bind_all_threads(CPUS[:1])
        assert new_places(before) == [({CPUS[0]}, 5 + num_threads)] * num_threads
        memory.host.region[:] = 0
        # A thread that finds no task left notes its CPUs all the same, at one of the next copies.
        for _ in range(1000):
            run_on(memory, placement)
            if new_places(before) == [({CPUS[1]}, 5 + num_threads)] * num_threads:
                break
        assert new_places(before) == [({CPUS[1]}, 5 + num_threads)] * num_threads
        assert os.sched_getaffinity(0) == {CPUS[0]}, "the caller has been bound, too"
        assert_same(memory.snapshot(), expected)
    finally:
        bind_all_threads(CPUS)


def bind_all_threads(cpus: list[int]) -> None:
    """Do what ``taskset --all-tasks`` does."""
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), cpus)


def new_places(before: set[int]) -> list[tuple[set[int], int]]:
    return [place for number, place in copy_threads().items() if number not in before]


def until_started(before: set[int], num_threads: int) -> None:
    """Wait until so many further threads copy: a copy waits for none that it can do without."""
    for _ in range(1000):
        if len(new_places(before)) == num_threads:
            return
        time.sleep(0.01)
    raise AssertionError(copy_threads())


@pytest.mark.parametrize(
    ("cpus", "message"),
    [
        ([], "cpus: expected at least one CPU for copies, found none"),
        ([1021, 1022], "this process, found 1021, 1022, which it does not"),
        ([*CPUS[:1], 1021], "this process, found 1021, which it does not"),
        ([-1], "found -1"),
        ([1024], "found 1024"),
        ([10**12], "incompatible function arguments"),
        ([2**70], "incompatible function arguments"),
    ],
)
def test_cpus_that_cannot_be_had_are_refused(cpus: list[int], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        CopyPlacement.on(cpus)


def test_a_refused_cpu_moves_nothing() -> None:
    memory = TransferMemory.random(LARGE)
    before = memory.snapshot()
    with pytest.raises(ValueError, match="cpus: expected CPUs that the kernel gives"):
        native().page_transfer(*memory.descriptors(LARGE), 2, -1, (1022,))
    with pytest.raises(ValueError, match="cpus: expected ascending numbers, found 0 behind 1"):
        native().page_transfer(*memory.descriptors(LARGE), 2, -1, (1, 0))
    assert_same(memory.snapshot(), before)
