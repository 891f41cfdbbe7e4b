# SPDX-License-Identifier: Apache-2.0
"""The module's threads: they leave the interpreter alone, survive a fork, serve many callers."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
from support.transfer.cases import TransferMemory, assert_same, uniform_case

from vllm_ascend_kvext.transfer.native import native

TESTS = Path(__file__).parents[1]
LARGE = uniform_case(row_bytes=2048, rows_per_page=16, pages=(5, 2, 8, 7), num_planes=16)


def run(memory: TransferMemory, num_threads: int) -> None:
    native().page_transfer(*memory.descriptors(LARGE), num_threads)


def test_other_threads_run_meanwhile() -> None:
    """No thread is ever preempted here, so another one runs only while this one gives way."""
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


IN_A_CHILD = f"""
import os, sys
sys.path.insert(0, {str(TESTS)!r})
from ops.test_threads import LARGE, TransferMemory, assert_same, run

memory = TransferMemory.random(LARGE)
expected = memory.after(LARGE)
run(memory, 3)
assert_same(memory.snapshot(), expected)
for generation in range(2):  # A child, and a child of that.
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status))
    assert len(os.listdir("/proc/self/task")) == 1
    memory.host.region[:] = 0
    for _ in range(20):
        run(memory, 3)
    assert_same(memory.snapshot(), expected)
    assert len(os.listdir("/proc/self/task")) == 3, "the child has no threads"
print("copied", flush=True)
os._exit(0)
"""


def test_a_forked_child_has_threads_of_its_own() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", IN_A_CHILD], capture_output=True, text=True, timeout=120, check=False
    )
    assert (finished.returncode, finished.stdout) == (0, "copied\n"), finished.stderr


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
    for num_bytes, first in ((0, 0), (1, 5), (64, 1), (1025, 3), (2 << 20, 7), (3 << 20, 0)):
        for num_threads in (1, 3):
            for streaming in (-1, 0, 1):
                destination = np.zeros(len(source) + 64, np.uint8)
                native().copy(
                    destination.ctypes.data + first,
                    source.ctypes.data,
                    num_bytes,
                    num_threads,
                    streaming,
                )
                assert np.array_equal(destination[first:][:num_bytes], source[:num_bytes])
                assert not destination[:first].any()
                assert not destination[first + num_bytes :].any()
