# SPDX-License-Identifier: Apache-2.0
"""Whether LMCache's server has what it says it has stored.

A server of LMCache 0.5.6 answers a store for which it has no room as done
(``store`` in ``lmcache/v1/multiprocess/modules/lmcache_driven_transfer.py`` hands on that nothing
went wrong, and not what was kept). So what a request has stored is looked up once it is finished.

    engine loop  --submit-->  waiting, in order  --a thread-->  find  -->  counts, log

The engine loop puts a note down and goes on. All waiting for the server is done by a thread, which
rests nine times as long as it asks, and stops asking a server that does not answer.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SETTLE_S = 0.5
CONFIRM_S = 2.0
"""From the end of a store to the question, and from there to a second one where something is
missing: the server makes an object readable a moment after it has said that it is stored."""

SILENCE_S = 30.0
"""For which a server that did not answer is not asked again."""

BURST_END_S = 60.0
"""Without a loss, after which a burst is over."""

MOST_WAITING_TOKENS = 1 << 20
_REST_PER_ASKING_S = 9.0

KEPT, LOST, UNCHECKED = "kept", "lost", "unchecked"
OUTCOMES = (KEPT, LOST, UNCHECKED)
"""Of tokens that were reported as stored. Unchecked are those that the server was not asked for, or
gave no answer about."""

logger = logging.getLogger("vllm.ascend_kvext.lmcache")


@dataclass(frozen=True, slots=True)
class Stored:
    """What a request has stored, as its workers report it.

    Attributes:
        request_id: vLLM's.
        token_ids: Of the request, from its first token.
        begin_tokens: Where what it has stored begins; what is before was there already.
        end_tokens: Where it ends.
        cache_salt: Of the request.
        request_configs: LMCache's settings of the request.
    """

    request_id: str
    token_ids: list[int]
    begin_tokens: int
    end_tokens: int
    cache_salt: str = ""
    request_configs: dict[str, Any] | None = None

    @property
    def num_tokens(self) -> int:
        return self.end_tokens - self.begin_tokens


Find = Callable[[Stored], int]
"""Tokens that the server has of a request, from its first; raises ``TimeoutError``."""


class StoreChecks:
    """Looks up what was stored, and counts.

    Args:
        find: Asks the server; called by the thread alone.
        server: Its addresses, for the log.
    """

    def __init__(self, find: Find, server: str) -> None:
        self._find = find
        self._burst = LossBurst(server)
        self._waiting: queue.SimpleQueue[_Due | None] = queue.SimpleQueue()
        self._waiting_tokens = 0
        self._counts = dict.fromkeys(OUTCOMES, 0)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._not_before_s = 0.0
        self._thread: threading.Thread | None = None

    def submit(self, stored: Stored) -> None:
        """Note what is to be looked up. Takes microseconds, and never waits.

        What is too much to be looked up, or was stored while the server does not answer, counts as
        unchecked.
        """
        if stored.num_tokens <= 0:
            return
        now_s = time.monotonic()
        num_waiting = len(stored.token_ids)
        with self._lock:
            is_too_much = 0 < self._waiting_tokens > MOST_WAITING_TOKENS - num_waiting
            if self._stopped.is_set() or now_s < self._not_before_s or is_too_much:
                self._counts[UNCHECKED] += stored.num_tokens
                return
            self._waiting_tokens += num_waiting
        self._waiting.put(_Due(now_s + SETTLE_S, stored))
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="kvext-lmcache-stores", daemon=True
            )
            self._thread.start()

    def add_unchecked(self, num_tokens: int) -> None:
        """Count what cannot be looked up."""
        self._count(UNCHECKED, num_tokens)

    def take_counts(self) -> dict[str, int]:
        """Tokens by outcome since the last call; without those that are zero."""
        with self._lock:
            taken = {outcome: tokens for outcome, tokens in self._counts.items() if tokens}
            self._counts = dict.fromkeys(OUTCOMES, 0)
        return taken

    def stop(self) -> None:
        """Ask no more. Does not wait for a question that is on its way."""
        self._stopped.set()
        self._waiting.put(None)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                due = self._waiting.get(timeout=BURST_END_S)
            except queue.Empty:
                due = None
            self._burst.end_if_quiet(time.monotonic())
            if due is None:
                continue
            if self._stopped.wait(max(0.0, due.at_s - time.monotonic())):
                return
            began_s = time.monotonic()
            with self._lock:
                is_silent = began_s < self._not_before_s
            if is_silent:
                self._count(UNCHECKED, due.stored.num_tokens)
            elif self.check(due.stored, is_last=due.is_second):
                self._stopped.wait(_REST_PER_ASKING_S * (time.monotonic() - began_s))
            else:
                self._waiting.put(_Due(began_s + CONFIRM_S, due.stored, is_second=True))
                continue
            with self._lock:
                self._waiting_tokens -= len(due.stored.token_ids)

    def check(self, stored: Stored, *, is_last: bool) -> bool:
        """Look up what one request has stored, and count.

        Returns:
            Whether it was counted. If it is not the last question, nothing is, where something is
            missing.
        """
        try:
            found_tokens = self._find(stored)
        except TimeoutError:
            with self._lock:
                self._not_before_s = time.monotonic() + SILENCE_S
            self._count(UNCHECKED, stored.num_tokens)
            return True
        except Exception as error:
            self._count(UNCHECKED, stored.num_tokens)
            if self._stopped.is_set():
                return True  # The connections have been closed meanwhile.
            self._stopped.set()
            logger.warning(
                "LMCacheMPConnector: what LMCache has stored is not looked up any more, so that "
                "stores which fail are not seen: %s: %s. Expected LMCache 0.5.6.",
                type(error).__name__,
                error,
            )
            return True
        if found_tokens < stored.end_tokens and not is_last:
            return False
        if found_tokens < stored.begin_tokens:
            # Without what was there before, a lookup says nothing of what came behind it.
            self._count(UNCHECKED, stored.num_tokens)
            return True
        num_lost = max(0, stored.end_tokens - found_tokens)
        self._count(KEPT, stored.num_tokens - num_lost)
        self._count(LOST, num_lost)
        self._burst.add(num_lost, stored.num_tokens, time.monotonic())
        return True

    def _count(self, outcome: str, num_tokens: int) -> None:
        with self._lock:
            self._counts[outcome] += num_tokens


@dataclass(frozen=True, slots=True)
class _Due:
    """What is to be looked up.

    Attributes:
        at_s: Not before this time.
        stored: Of a request.
        is_second: Whether something was missing the first time.
    """

    at_s: float
    stored: Stored
    is_second: bool = False


@dataclass(slots=True)
class LossBurst:
    """Losses that follow each other: logged when the first is seen, and when they are over.

    Attributes:
        server: Its addresses, for the log.
    """

    server: str
    _began_s: float | None = field(default=None, init=False)
    _last_s: float = field(default=0.0, init=False)
    _lost_tokens: int = field(default=0, init=False)
    _reported_tokens: int = field(default=0, init=False)

    def add(self, lost_tokens: int, reported_tokens: int, now_s: float) -> None:
        """One request: what it lost, of what was reported to it as stored."""
        if lost_tokens and self._began_s is None:
            self._began_s = now_s
            self._lost_tokens = self._reported_tokens = 0
            logger.warning(
                "LMCacheMPConnector: LMCache's server at %s has reported %d tokens of a request as "
                "stored, and does not have %d of them. They are computed when they are asked for "
                "again. Most likely its memory is full: look for `Failed to batched allocate` in "
                "its log; start it with a larger --l1-size-gb, or let it make room earlier with a "
                "smaller --eviction-trigger-watermark. More of this is counted, and logged when it "
                "is over.",
                self.server,
                reported_tokens,
                lost_tokens,
            )
        if self._began_s is None:
            return
        if lost_tokens:
            self._last_s = now_s
        self._lost_tokens += lost_tokens
        self._reported_tokens += reported_tokens
        self.end_if_quiet(now_s)

    def end_if_quiet(self, now_s: float) -> None:
        """Say what a burst came to, once nothing has been lost for a while."""
        if self._began_s is None or now_s - self._last_s < BURST_END_S:
            return
        logger.warning(
            "LMCacheMPConnector: LMCache's server at %s has lost %d of %d tokens that it reported "
            "as stored in %.0f s; it has kept all since.",
            self.server,
            self._lost_tokens,
            self._reported_tokens,
            self._last_s - self._began_s,
        )
        self._began_s = None
