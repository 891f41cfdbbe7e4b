# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The questions to the shared tier for requests that arrive, and the wait for its answers.

A thread asks, because the tier may take a long time. The tier is asked once for each request. The
request waits while its question is open, and then for the gets that the answer leads to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from vllm_ascend_kvext.connector.common.scheduler_view import Request
from vllm_ascend_kvext.connector.scheduler.request_state import RequestOffloadState
from vllm_ascend_kvext.shared_tier.backend import TierThread
from vllm_ascend_kvext.shared_tier.scheduler import limits
from vllm_ascend_kvext.shared_tier.scheduler.gets import Gets
from vllm_ascend_kvext.shared_tier.scheduler.shared_parts import SharedParts
from vllm_ascend_kvext.shared_tier.search import FoundObject, Question, search
from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind, WantedPiece
from vllm_ascend_kvext.token_range import TokenRange


@dataclass(slots=True, eq=False)
class SharedRequest:
    """The question for one request, and the entries that the request waits for.

    Attributes:
        question: The open question; None if the request waits for no answer.
        namespace: The name space for which it was asked.
        found: The answer, once ``is_answered`` is set. The thread writes it.
        gets: The entries that are got for the request.
    """

    question: Question | None = None
    namespace: str = ""
    asked_s: float = 0.0
    found: Sequence[FoundObject] = ()
    is_answered: threading.Event = field(default_factory=threading.Event)
    gets: list[Entry] = field(default_factory=list)


class Questions:
    """The questions of one engine."""

    def __init__(self, shared: SharedParts, gets: Gets) -> None:
        self._shared = shared
        self._core = shared.core
        self._tier = shared.core.tier
        self._counters = shared.core.counters
        self._clock = shared.core.clock
        self._gets = gets
        self._thread = TierThread("kvext-shared-lookups")
        self._last_asked: SharedRequest | None = None
        self._num_asked = 0  # Requests of this step, including requests that were not asked for.

    def has_to_wait(
        self,
        request: Request,
        state: RequestOffloadState,
        num_computed_tokens: int,
        further_pieces: Callable[[], Sequence[WantedPiece]],
    ) -> bool:
        """See ``SecondaryTierScheduler.has_to_wait``."""
        known: SharedRequest | None = state.secondary
        if known is None:
            if self._num_asked >= limits.MAX_ASKED:
                self._num_asked += 1
                return self._num_asked <= limits.MAX_ASKED + limits.MAX_BEHIND
            known = state.secondary = SharedRequest()
            question = self._question(request, known, num_computed_tokens, further_pieces())
            if question:
                self._ask(known, question)
        if known.question is not None:
            if known.is_answered.is_set():
                # Objects of another name space may have other sizes.
                is_current = known.namespace == self._shared.namespace
                found = known.found if is_current else ()
                self._gets.begin(request, known.gets, known.question, found)
            elif self._is_late():
                self._counters.shared_requests["late"] += 1
                self._gets.pause("an answer takes too long")
            elif self._clock() - known.asked_s > limits.MAX_QUEUED_S:
                self._counters.shared_requests["late"] += 1
            else:
                return True
            known.question = None
            known.found = ()
        return self._gets.are_awaited(known.gets)

    def got_tokens(self, state: RequestOffloadState) -> int:
        """See ``SecondaryTierScheduler.got_tokens``."""
        known: SharedRequest | None = state.secondary
        got = (
            entry.piece.end_tokens - entry.piece.first_tokens
            for entry in (known.gets if known is not None else ())
            if entry.state is EntryState.STORED
        )
        return sum(got)

    def _ask(self, known: SharedRequest, question: Question) -> None:
        is_paused = self._gets.is_paused
        if not is_paused and (why := self._why_not_now()):
            self._gets.pause(why)
            is_paused = True
        if is_paused:
            self._counters.shared_requests["paused"] += 1
            return
        known.question = question
        known.namespace = self._shared.namespace
        known.asked_s = self._clock()
        self._last_asked = known
        self._num_asked += 1
        self._thread.submit(partial(self._answer, known))

    def _question(
        self,
        request: Request,
        known: SharedRequest,
        after: int,
        further: Sequence[WantedPiece],
    ) -> Question:
        """The question for a request. The request also waits for useful gets of other requests."""
        geometry = self._tier.geometry
        prefix = self._core.view.prefix(request)
        limit = max(after, geometry.floor(min(request.num_tokens - 1, prefix.num_tokens)))
        index = self._tier.lookup(prefix).index
        missing: list[TokenRange] = []
        tails_tokens = limit
        if geometry.needs_rows and limit > after:
            between = range(geometry.chunk_end(after), limit, geometry.chunk_tokens)
            for chunk in map(TokenRange, (after, *between), (*between, limit)):
                entry = index.present(Kind.ROWS, prefix.key_at(chunk.end_tokens))
                self._gets.join(known.gets, entry)
                if entry is None:
                    missing.append(chunk)
        if geometry.needs_tails and limit > after:
            unit_tokens = geometry.unit_tokens
            boundaries = range(geometry.floor(after) + unit_tokens, limit + 1, unit_tokens)
            num_before = index.upto_present(Kind.TAILS, prefix.keys_at(boundaries))
            tails_tokens = boundaries[num_before - 1] if num_before else 0
            if num_before:
                present = index.present(Kind.TAILS, prefix.key_at(tails_tokens))
                self._gets.join(known.gets, present)
        # The thread gets a copy of the hashes, because the request's own list grows meanwhile.
        prefix = replace(prefix, hashes=tuple(prefix.hashes[: limit // prefix.tokens_per_hash]))
        wanted = TokenRange(after, limit)
        holes = self._core.computes_holes
        return Question(prefix, geometry, wanted, tuple(missing), tails_tokens, holes, further)

    def _answer(self, known: SharedRequest) -> None:
        """Answer a question, on the thread. Only the time from here on is measured.

        The wait in the queue is left out, so that many questions at once do not look like a slow
        tier.
        """
        began_s = self._clock()
        try:
            if (question := known.question) is not None:  # The request still waits for it.
                known.found = search(question, self._exist)
        finally:
            self._counters.shared_lookup_seconds += self._clock() - began_s
            known.is_answered.set()

    def _exist(self, asked: Sequence[str]) -> list[str]:
        return self._shared.backend.exist([self._shared.full_name(name) for name in asked])

    def _is_late(self) -> bool:
        """Whether one question takes the thread too long. All others behind it would wait, too."""
        return self._thread.busy_s() > limits.MAX_LOOKUP_S

    def _why_not_now(self) -> str:
        """Why the tier is not asked now, although there is no pause; empty if it may be asked."""
        self._thread.leave_behind()
        self._gets.abandon_hanging()
        if self._is_late():
            return "an answer takes too long"
        return self._gets.why_no_more()

    def wait_for_answer(self) -> None:
        """Wait a little for the answer to the last question, if it has not come."""
        if self._last_asked is not None:
            self._last_asked.is_answered.wait(limits.IDLE_WAIT_S)

    def end_step(self) -> None:
        """The step is planned. The next step may ask for `limits.MAX_ASKED` requests again."""
        self._num_asked = 0

    def close(self) -> bool:
        """End the thread. No question is asked any more.

        Returns:
            Whether no call of the tier is under way.
        """
        self._thread.close()
        is_answered = self._last_asked is None or self._last_asked.is_answered.is_set()
        return is_answered and not self._thread.has_left_behind
