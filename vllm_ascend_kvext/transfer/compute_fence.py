# SPDX-License-Identifier: Apache-2.0
"""The order between the kernels of the model and copies of the pages that they use.

On an NPU a step returns when its kernels are enqueued. A copy that began at once would read pages
that are not written yet, or write pages that are still read. So the thread that enqueues kernels
records an event, and whoever copies lets a stream of its own wait for it::

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

    As it is, for a model that runs on CPUs: a step has computed when it returns.
    """

    def record(self) -> Any:
        """Mark what this thread's current stream has been given so far, for `run` of any thread."""
        return None

    def run(self, recorded: Any, copy: Callable[[], None]) -> float:
        """Copy after what was recorded, and return when the bytes have arrived.

        Returns:
            Seconds that the copies took, without waiting for kernels.

        Raises:
            Exception: What ``copy`` raises; nothing that it has enqueued is under way any more.
        """
        begun_s = time.perf_counter()
        copy()
        return time.perf_counter() - begun_s
