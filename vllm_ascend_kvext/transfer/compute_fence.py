# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Keeps the order between the model's kernels and copies of the pages that these kernels use.

On an accelerator a step returns when its kernels are enqueued. A copy that began at once would read
pages that are not written yet, or write pages that kernels still read. So the thread that enqueues
kernels records an event, and the copying thread lets its own stream wait for that event::

    model's thread    kernels enqueued, record() ....................... next step enqueued
    compute stream    kernels kernels kernels [event] kernels of the next step
    copy stream                               [wait_event] copies
    copying thread                run(): enqueued .............. synchronize, returns
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class ComputeFence:
    """Lets copies wait for the kernels that have been enqueued so far.

    This base class is the fence of a model on CPUs, whose step has computed when it returns.
    """

    def record(self) -> Any:
        """Mark the work that this thread's current stream has so far, for `run` of any thread."""
        return None

    def run(self, recorded: Any, copy: Callable[[], None]) -> float:
        """Copy after the recorded work, and return when the bytes have arrived.

        Returns:
            The seconds that the copies took, without the wait for kernels.

        Raises:
            Exception: Any error of ``copy``. Copies that it enqueued before the error have ended.
        """
        begun_s = time.perf_counter()
        copy()
        return time.perf_counter() - begun_s

    def wait(self) -> None:
        """Return when all that this thread has enqueued on its current stream is done."""
