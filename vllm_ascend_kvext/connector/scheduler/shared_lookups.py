# SPDX-License-Identifier: Apache-2.0
"""Questions to the shared tier, on a thread of their own: the scheduler never waits for one.

One question at a time. How long it takes counts from where it begins, so that many at once are
not taken for a slow tier; while one takes too long, none behind it is waited for.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from vllm_ascend_kvext.shared_tier.protocol import SharedTier
from vllm_ascend_kvext.shared_tier.search import FoundObject, Question, search

logger = logging.getLogger("vllm.ascend_kvext.shared_tier")

MAX_LOOKUP_S = 0.05
"""A request goes on without an answer that takes longer."""


@dataclass(slots=True, eq=False)
class Asked:
    """A question, and its answer: None before it is there."""

    question: Question
    began_s: float | None = None
    found: list[FoundObject] | None = None
    seconds: float = 0.0


class SharedLookups:
    """Asks one tier, in a daemon thread that starts with the first question.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(self, tier: SharedTier, clock: Callable[[], float]) -> None:
        self._tier = tier
        self._clock = clock
        self._changed = threading.Condition()  # Guards the rest, but for the answers.
        self._waiting: deque[Asked] = deque()
        self._running: Asked | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def ask(self, question: Question) -> Asked:
        """Have a question answered some time later."""
        asked = Asked(question)
        with self._changed:
            self._waiting.append(asked)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="kvext-shared-lookups", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
        return asked

    def is_late(self, asked: Asked | None = None) -> bool:
        """Whether an answer, or the one before it, takes too long; by default any."""
        running = self._running
        if asked is not None and asked.found is not None:
            return False
        since_s = None if running is None else running.began_s
        return since_s is not None and self._clock() - since_s > MAX_LOOKUP_S

    def wait(self, timeout_s: float) -> None:
        """Return when nothing is asked any more, or in time."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._running, timeout_s)

    def shutdown(self) -> None:
        """No further question is begun. Does not wait: the tier may hang."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                asked = self._waiting.popleft()
                asked.began_s = began_s = self._clock()
                self._running = asked
            found: list[FoundObject] = []
            try:
                found = search(asked.question, self._tier.exist)
            except Exception:
                logger.exception("A lookup in the shared tier failed")
            with self._changed:
                asked.seconds = self._clock() - began_s
                asked.found = found
                self._running = None
                self._changed.notify_all()
