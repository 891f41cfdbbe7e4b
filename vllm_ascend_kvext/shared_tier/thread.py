# SPDX-License-Identifier: Apache-2.0
"""A thread for calls of a shared tier, which may hang: nothing waits for its end."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger("vllm.ascend_kvext.shared_tier")


class TierThread:
    """Calls functions one after the other, in a daemon thread that starts with the first.

    Args:
        on_start: Called in the thread before the first.
    """

    def __init__(self, name: str, on_start: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._on_start = on_start
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], None]) -> None:
        """Call a function some time later."""
        self._calls.put(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread behind what was submitted; does not wait for it."""
        self._calls.put(None)

    def _serve(self) -> None:
        call: Callable[[], None] | None = self._on_start
        while call is not None:
            try:
                call()
            except Exception:
                logger.exception("A call of the shared tier failed")
            call = self._calls.get()
