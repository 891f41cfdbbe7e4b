# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Learns segments: stores segments that no client has stored, because two requests have had them.

The life of a learned segment::

    seen       a request has it, then a second request has it, and it is still not stored
    queued     until the scheduler has nothing else to admit
    begun      a request of the engine's own computes it; `SegmentStores` treats it like a client's
    ended      it is stored, or counted as dropped: to be tried again, it has to be seen twice again

Segments are reused only after workers have compared keys of equal tokens. Short documents may have
too few equal tokens. Then a text with enough of them is computed first. This text is a *check*;
nothing of it is kept.

This module decides which segments are computed, and follows them. It knows nothing of the
scheduler: ``patches.segments.learned_requests`` makes the requests, and takes them back.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_ascend_kvext.segments.counters import SegmentCounters
from vllm_ascend_kvext.segments.keys.key_check import (
    MIN_PAIRS,
    find_pairs,
    has_enough_pairs,
    text_with_pairs,
)
from vllm_ascend_kvext.segments.scheduler.segment_store import SegmentPrefix, SegmentStore
from vllm_ascend_kvext.store.remembered_keys import RememberedKeys

logger = logging.getLogger("vllm.ascend_kvext.segments")

MAX_SEEN_SEGMENTS = 8192
"""The maximum number of remembered segments that one request had. A segment counts once for each
sink that is noted. Each takes 32 bytes and a place in a dictionary."""

MAX_QUEUED_SEGMENTS = 64
"""The maximum number of queued segments that two requests had."""

MAX_QUEUED_DOCUMENTS = 4096
"""The maximum number of queued documents that are stored, and are also to be stored behind a
context."""

MAX_TRIES = 3
"""The maximum number of repeated tries, of a check or of a segment behind a context."""

MAX_BEGUN_SEGMENTS = 2
"""The maximum number of segments that are computed or being stored at a time."""

_MAX_SKIPPED_CHECKS = 1024
"""After checks were given up, at most this many occasions for a check are skipped. Each check that
is given up doubles their number. A client's request is an occasion."""


class WantedSegment(NamedTuple):
    """A segment that is to be computed, with the salt of the requests that had it.

    The block hasher comes from ``vllm.v1.request.Request``; all requests of an engine have the same
    hasher. ``is_learned`` says that two requests have had the segment. Otherwise the segment
    follows from a segment that a client stored. ``is_check`` says that the segment is computed only
    to compare its keys.
    """

    prefix: SegmentPrefix
    cache_salt: str | None
    block_hasher: Callable[[Any], list[bytes]] | None
    num_tries: int = 0
    is_learned: bool = False
    is_check: bool = False


@dataclass(slots=True)
class _Begun:
    """A segment that a request of the engine's own computes.

    ``is_storing`` says that workers store it, and ``is_computed`` that its request has ended.
    """

    wanted: WantedSegment
    is_storing: bool = False
    is_computed: bool = False
    is_stored: bool = False


class SegmentLearning:
    """The segments that one engine learns. It begins no segment while ``is_held``.

    Without ``learns_new``, it computes only enqueued segments, and segments that were lost behind a
    context. ``on_queued`` is called when a segment begins to wait to be computed.
    """

    def __init__(
        self,
        store: SegmentStore,
        max_model_len: int,
        counters: SegmentCounters,
        learns_new: bool = True,
        on_queued: Callable[[], object] = lambda: None,
    ) -> None:
        self._store = store
        self._on_queued = on_queued
        self.learns_new = learns_new
        self._max_model_len = max_model_len
        self._counters = counters
        self._seen = RememberedKeys[int](MAX_SEEN_SEGMENTS)
        self._needed = RememberedKeys[int](MAX_SEEN_SEGMENTS)  # Requests needed, by segment.
        self._queue: deque[WantedSegment] = deque()
        self._behind_contexts: deque[WantedSegment] = (
            deque()
        )  # Computed when nothing else is queued.
        self._check: WantedSegment | None = None  # Computed before all others.
        self._are_keys_checked = False
        self._num_given_up = 0  # The number of checks.
        self._num_skipped_left = 0  # Occasions for another check.
        self._known: set[bytes] = set()  # Keys of queued and begun segments.
        self._begun: dict[str, _Begun] = {}
        self._has_stopped = False
        self.is_held = False

    @property
    def has_queue(self) -> bool:
        """Whether segments wait to be computed."""
        return bool(self._check or self._queue or self._behind_contexts)

    @property
    def request_ids(self) -> list[str]:
        """The engine's own requests that have not ended."""
        return [each for each, begun in self._begun.items() if not begun.is_computed]

    def note_seen(
        self,
        prefixes: Iterable[SegmentPrefix],
        cache_salt: str | None,
        block_hasher: Callable[[Any], list[bytes]] | None,
    ) -> None:
        """Note the segments of a request that has arrived, if they are worth storing."""
        if self._has_stopped:
            return
        of_request: set[bytes] = set()
        for prefix in prefixes:
            key = _key_of(prefix)
            if key in of_request:
                continue
            of_request.add(key)
            if not self._store.is_missing(prefix):
                self._seen.pop(key, None)
            elif key not in self._known and self._was_seen(key):
                wanted = WantedSegment(prefix, cache_salt, block_hasher, is_learned=True)
                self.enqueue(wanted, MAX_QUEUED_SEGMENTS)

    def _was_seen(self, key: bytes) -> bool:
        """Count a segment. Returns whether enough requests had it; then counting begins anew."""
        times = self._seen.pop(key, 0) + 1
        if times >= self._needed.get(key, 2):
            return True
        self._seen.put(key, times)
        return False

    def take(self, has_room: Callable[[int], bool]) -> WantedSegment | None:
        """Take a segment that is to be computed now. None if there is none, or enough are begun.

        ``has_room`` says whether a segment of this many tokens can be stored now, beside others.
        Until there is room, the next segment waits, because its request would be taken back
        otherwise.
        """
        if self._is_checking:
            return None  # The check may show that no segment can be reused.
        while not self.is_held and len(self._begun) < MAX_BEGUN_SEGMENTS:
            if self._check is not None:
                if not has_room(self._check.prefix.num_segment_tokens):
                    return None
                check = self._check
                self._check = None
                return check
            queue = self._queue or self._behind_contexts
            if not queue:
                return None
            wanted = queue[0]
            is_missing = self._store.is_missing(wanted.prefix)
            if is_missing and not has_room(wanted.prefix.num_segment_tokens):
                return None
            queue.popleft()
            self._known.discard(_key_of(wanted.prefix))
            if is_missing:
                return wanted
        return None

    def begin(self, request_id: str, wanted: WantedSegment) -> None:
        """Begin a segment. The engine's own request that computes it is about to be queued."""
        key = _key_of(wanted.prefix)
        self._known.add(key)
        self._begun[request_id] = _Begun(wanted)

    def wanted(self, request_id: str) -> WantedSegment | None:
        """The segment that a request of the engine's own computes."""
        begun = self._begun.get(request_id)
        return None if begun is None else begun.wanted

    def note_store(self, request_id: str, is_needed: bool) -> None:
        """Note that a whole segment is computed. Workers store it if ``is_needed``."""
        begun = self._begun.get(request_id)
        if begun is not None:
            begun.is_storing = is_needed
            begun.is_stored = not is_needed

    def note_refused(self, request_id: str) -> None:
        """Note that host memory has no room for a segment, so that it is not tried again soon."""
        begun = self._begun.get(request_id)
        if begun is not None:
            begun.wanted = begun.wanted._replace(num_tries=MAX_TRIES)
            self._note_again(begun.wanted)

    def end_store(self, request_id: str, has_failed: bool) -> None:
        """End a store that all workers have ended."""
        begun = self._begun.get(request_id)
        if begun is None:
            return
        begun.is_storing = False
        begun.is_stored = not has_failed
        if begun.is_stored and not begun.wanted.is_check:
            self._counters.learned_segments += 1
        if begun.is_stored:
            self._note_again(begun.wanted)
        self._settle(request_id, begun)

    def forget(self, request_id: str) -> None:
        """Note that a request has ended."""
        begun = self._begun.get(request_id)
        if begun is not None:
            begun.is_computed = True
            self._settle(request_id, begun)

    def clear(self) -> None:
        """Forget all seen and queued segments."""
        self._seen.clear()
        self._needed.clear()
        self._check = None
        self._num_skipped_left = 0
        self._drop_queued()

    def _drop_queued(self) -> None:
        for queue in (self._queue, self._behind_contexts):
            self._known.difference_update(_key_of(wanted.prefix) for wanted in queue)
            self._counters.learning_drops += len(queue)
            queue.clear()

    def stop(self) -> None:
        """Learn nothing from here on, because segments are not reused."""
        self._has_stopped = True
        self.clear()

    def enqueue(self, wanted: WantedSegment, max_queued: int) -> None:
        """Have a segment computed when there is time. It is dropped if too many segments wait."""
        prefix = wanted.prefix
        queue = self._behind_contexts if prefix.has_context else self._queue
        is_too_long = prefix.sink_tokens + prefix.num_segment_tokens >= self._max_model_len
        if self._has_stopped or is_too_long or len(queue) >= max_queued:
            if not self._has_stopped:
                self._counters.learning_drops += 1
        elif self._store.is_missing(prefix):
            key = _key_of(prefix)
            if key not in self._known:
                if not (self._are_keys_checked or has_enough_pairs(prefix.token_ids)):
                    self.check_keys(wanted)
                    if not self._has_check:  # The segment could not be reused.
                        self._counters.learning_drops += 1
                        return
                self._known.add(key)
                queue.append(wanted)
                self._on_queued()

    def check_keys(self, document: WantedSegment) -> None:
        """Have the engine compute a text in which keys are compared, before anything else.

        ``document`` has too few equal tokens, and keys have not been compared in another document.
        The text checks the model, and not the document, so it may have any document's tokens.
        """
        if self._has_stopped or self._are_keys_checked or self._has_check:
            return
        if self._num_skipped_left:
            self._num_skipped_left -= 1
            return
        sink = self._store.contexts.without_context(document.cache_salt)
        max_tokens = self._max_model_len - 1 - len(sink.token_ids)
        token_ids = document.prefix.token_ids
        text = text_with_pairs(token_ids, max_tokens)
        if not has_enough_pairs(text):
            return
        logger.info(
            "KvextConnector: segments are not reused yet: keys of equal tokens have to be compared "
            "once, and a document of %d tokens has %d pairs of equal tokens, %d are needed. The "
            "engine computes a text of %d tokens of its own for that.",
            len(token_ids),
            len(find_pairs(token_ids)),
            MIN_PAIRS,
            len(text),
        )
        self._check = document._replace(
            prefix=self._store.prefix(text, sink), num_tries=0, is_learned=False, is_check=True
        )
        self._on_queued()

    @property
    def _has_check(self) -> bool:
        """Whether a check waits or is begun."""
        return self._check is not None or self._is_checking

    @property
    def _is_checking(self) -> bool:
        return any(begun.wanted.is_check for begun in self._begun.values())

    def note_keys_checked(self) -> None:
        """Note that keys have passed the check, so that stored segments may be reused."""
        self._are_keys_checked = True
        self._check = None

    def _note_again(self, wanted: WantedSegment) -> None:
        """Double the number of requests after which a segment behind a context is learned again."""
        if wanted.is_learned and wanted.prefix.has_context:
            key = _key_of(wanted.prefix)
            self._needed.put(key, 2 * self._needed.get(key, 2))

    def _settle(self, request_id: str, begun: _Begun) -> None:
        if begun.is_storing or not begun.is_computed:
            return
        del self._begun[request_id]
        wanted = begun.wanted
        self._known.discard(_key_of(wanted.prefix))
        if begun.is_stored:
            return
        if wanted.is_check:
            self._try_again(wanted)
            return
        # A segment behind a context is tried again, because two requests may not want it again.
        if wanted.prefix.has_context and wanted.num_tries < MAX_TRIES:
            self.enqueue(wanted._replace(num_tries=wanted.num_tries + 1), MAX_QUEUED_DOCUMENTS)
        else:
            self._counters.learning_drops += 1

    def _try_again(self, check: WantedSegment) -> None:
        """Try a check again, or give it up, with all segments that wait for it."""
        if self._has_stopped or self._are_keys_checked:
            return
        if check.num_tries < MAX_TRIES:
            self._check = check._replace(num_tries=check.num_tries + 1)
            self._on_queued()
            return
        self._num_given_up += 1
        self._num_skipped_left = min(2 ** (self._num_given_up - 1), _MAX_SKIPPED_CHECKS) - 1
        logger.warning(
            "KvextConnector: segments are not reused yet: the text of %d tokens by which keys are "
            "compared was not stored: clients' requests waited for it, the pool or host memory is "
            "too small, or a store has failed. Two requests have to have %d segments again.",
            check.prefix.num_segment_tokens,
            len(self._queue) + len(self._behind_contexts),
        )
        self._drop_queued()


def _key_of(prefix: SegmentPrefix) -> bytes:
    """The key of a whole segment."""
    return prefix.key_at(prefix.num_tokens)
