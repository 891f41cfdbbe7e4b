# SPDX-License-Identifier: Apache-2.0
"""Threads for calls of a shared tier, which may hang: nothing waits for their end."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger("vllm.ascend_kvext.shared_tier")

Call = Callable[[], object]


class TierThread:
    """Begins calls one after the other, in daemon threads; ``on_start`` is the first of each."""

    def __init__(self, name: str, on_start: Call = lambda: None, num_threads: int = 1) -> None:
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._num_threads = num_threads
        for _ in range(num_threads):
            threading.Thread(target=self._serve, args=[on_start], name=name, daemon=True).start()

    def submit(self, call: Call) -> None:
        """Make a call some time later."""
        self._calls.put(call)

    def close(self) -> None:
        """End the threads behind what was submitted; does not wait for them."""
        for _ in range(self._num_threads):
            self._calls.put(None)

    def _serve(self, call: Call | None) -> None:
        while call is not None:
            try:
                call()
            except Exception:
                logger.exception("A call of the shared tier failed")
            call = self._calls.get()
