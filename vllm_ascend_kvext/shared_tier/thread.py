# SPDX-License-Identifier: Apache-2.0
"""A thread for calls of a shared tier, which may hang: nothing waits for its end."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger("vllm.ascend_kvext.shared_tier")

Call = Callable[[], object]


class TierThread:
    """Makes calls one after the other, in a daemon thread; ``on_start`` is the first."""

    def __init__(self, name: str, on_start: Call = lambda: None) -> None:
        self._thread = threading.Thread(target=self._serve, args=[on_start], name=name, daemon=True)
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()

    def submit(self, call: Call) -> None:
        """Make a call some time later. The first one starts the thread."""
        self._calls.put(call)
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """End the thread behind what was submitted; does not wait for it."""
        self._calls.put(None)

    def _serve(self, call: Call | None) -> None:
        while call is not None:
            try:
                call()
            except Exception:
                logger.exception("A call of the shared tier failed")
            call = self._calls.get()
