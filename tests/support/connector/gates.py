# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Lets work wait until a test releases it, and records the order of the work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

DEADLINE_S = 20.0
ResultT = TypeVar("ResultT")


class Gate:
    """A gate that is open at first. Threads wait at the gate while it is closed."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._is_open.set()
        self._arrivals = threading.Semaphore(0)

    def close(self) -> None:
        self._is_open.clear()

    def open(self) -> None:
        self._is_open.set()

    def wait_for_arrival(self) -> None:
        """Wait until the next thread has come to the gate."""
        assert self._arrivals.acquire(timeout=DEADLINE_S), "no thread came to the gate"

    def pass_through(self) -> None:
        self._arrivals.release()
        assert self._is_open.wait(DEADLINE_S), "the gate stayed closed"


def until(found: Callable[[], ResultT], what: str = "it") -> ResultT:
    """Wait until ``found`` returns a true value, and return this value."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        if result := found():
            return result
        time.sleep(0.001)
    raise AssertionError(f"{what} did not happen in time")
