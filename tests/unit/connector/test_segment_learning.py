# SPDX-License-Identifier: Apache-2.0
"""Which segments are computed without a client, and what is counted of those that are not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from vllm_ascend_kvext.blending.segment_prefix import SegmentPrefix
from vllm_ascend_kvext.blending.segment_rows import SegmentLayout
from vllm_ascend_kvext.blending.segment_store import SegmentStore
from vllm_ascend_kvext.connector import segment_learning
from vllm_ascend_kvext.connector.blend_counters import BlendCounters, LearningDrop
from vllm_ascend_kvext.connector.segment_learning import (
    MOST_BEGUN_SEGMENTS,
    SegmentLearning,
    WantedSegment,
)
from vllm_ascend_kvext.store.counters import Refusal
from vllm_ascend_kvext.store.prefix import TierGeometry
from vllm_ascend_kvext.store.tier import HostTier

SINK = (1, 2, 3)
MOST_REQUEST_TOKENS = 100


class Learner:
    """An engine's learning, and what requests do with it in one line."""

    def __init__(self) -> None:
        tier = HostTier(1 << 20, TierGeometry(16, 4, needs_tails=False))
        self.store = SegmentStore(tier, SegmentLayout((64,), "one"), "one", SINK)
        self.counters = BlendCounters()
        self.learning = SegmentLearning(self.store, MOST_REQUEST_TOKENS, self.counters)
        self.most_tokens = MOST_REQUEST_TOKENS  # that can be stored beside what is being stored
        self._num_requests = 0

    def take(self) -> WantedSegment | None:
        return self.learning.take(lambda num_tokens: num_tokens <= self.most_tokens)

    def prefix(self, segment: Sequence[int], cache_salt: str | None = None) -> SegmentPrefix:
        return self.store.prefix(segment, cache_salt)

    def see(self, *segments: Sequence[int], cache_salt: str | None = None) -> None:
        """A request has segments."""
        prefixes = [self.prefix(segment, cache_salt) for segment in segments]
        self.learning.note_seen(prefixes, cache_salt, None)

    def keep(self, segment: Sequence[int]) -> None:
        """A client has a segment stored."""
        prefix = self.prefix(segment)
        entries = self.store.begin_store(prefix)
        assert not isinstance(entries, Refusal)
        for entry in entries:
            self.store.finish_store(prefix, entry)

    def taken(self) -> list[list[int]]:
        """Token ids of what is computed now; nothing comes of it."""
        found = []
        while (wanted := self.take()) is not None:
            found.append(wanted.prefix.token_ids)
        return found

    def begin(self) -> str:
        """A request begins that computes the next segment."""
        wanted = self.take()
        assert wanted is not None
        self._num_requests += 1
        request_id = f"own-{self._num_requests}"
        self.learning.begin(request_id, wanted)
        return request_id

    @property
    def drops(self) -> dict[LearningDrop, int]:
        return {drop: number for drop, number in self.counters.learning_drops.items() if number}


ONE, OTHER = list(range(10, 50)), list(range(60, 85))


def test_a_segment_is_computed_when_a_second_request_has_it() -> None:
    learner = Learner()
    learner.see(ONE)
    assert learner.taken() == []
    learner.see(OTHER, ONE)
    assert learner.taken() == [ONE]
    learner.see(OTHER)
    assert learner.taken() == [OTHER]


def test_a_request_that_has_a_segment_twice_is_one_request() -> None:
    learner = Learner()
    learner.see(ONE, ONE)
    assert learner.taken() == []


def test_requests_of_different_salts_have_different_segments() -> None:
    learner = Learner()
    learner.see(ONE, cache_salt="salt")
    learner.see(ONE)
    assert learner.taken() == []
    learner.see(ONE, cache_salt="salt")
    wanted = learner.take()
    assert wanted is not None and wanted.cache_salt == "salt"


def test_what_is_stored_is_not_computed_and_counts_as_never_seen() -> None:
    learner = Learner()
    learner.see(ONE)
    learner.keep(ONE)
    learner.see(ONE)
    assert learner.taken() == []
    learner.store._tier.clear()
    learner.see(ONE)
    assert learner.taken() == [], "it was seen once since it has left host memory"
    learner.see(ONE)
    assert learner.taken() == [ONE]


def test_what_a_client_stores_while_it_is_queued_is_not_computed() -> None:
    learner = Learner()
    learner.see(ONE)
    learner.see(ONE)
    learner.keep(ONE)
    assert learner.taken() == []
    assert not learner.drops


def test_what_is_queued_or_begun_is_not_queued_once_more() -> None:
    learner = Learner()
    for _ in range(5):
        learner.see(ONE)
    learner.begin()
    for _ in range(5):
        learner.see(ONE)
    assert learner.taken() == []


def test_no_more_are_begun_at_once_than_the_limit() -> None:
    learner = Learner()
    segments = [list(range(first, first + 20)) for first in range(4, 4 + MOST_BEGUN_SEGMENTS + 1)]
    learner.see(*segments)
    learner.see(*segments)
    began = [learner.begin() for _ in range(MOST_BEGUN_SEGMENTS)]
    assert learner.take() is None
    learner.learning.note_store(began[0], is_needed=True)
    learner.learning.forget(began[0])
    assert learner.take() is None, "its store is under way"
    learner.learning.end_store(began[0], has_failed=False)
    assert learner.taken() == [segments[-1]]


def test_a_stored_segment_is_counted() -> None:
    learner = Learner()
    learner.see(ONE)
    learner.see(ONE)
    request_id = learner.begin()
    assert learner.learning.request_ids == [request_id]
    learner.learning.note_store(request_id, is_needed=True)
    learner.learning.end_store(request_id, has_failed=False)
    learner.learning.forget(request_id)
    assert learner.counters.learned_segments == 1
    assert not learner.drops and not learner.learning.request_ids


@pytest.mark.parametrize("ends_first", [False, True])
def test_a_failed_store_is_counted_and_the_segment_has_to_be_seen_twice_again(
    ends_first: bool,
) -> None:
    learner = Learner()
    learner.see(ONE)
    learner.see(ONE)
    request_id = learner.begin()
    learner.learning.note_store(request_id, is_needed=True)
    if ends_first:
        learner.learning.forget(request_id)
    learner.learning.end_store(request_id, has_failed=True)
    learner.learning.forget(request_id)
    assert learner.drops == {LearningDrop.FAILED: 1}
    learner.see(ONE)
    assert learner.taken() == []
    learner.see(ONE)
    assert learner.taken() == [ONE]


def test_what_does_not_end_well_is_counted_by_reason() -> None:
    learner = Learner()
    for reason in ("busy", "room", "cancelled", None):
        learner.see(ONE)
        learner.see(ONE)
        request_id = learner.begin()
        if reason == "busy":
            learner.learning.note_busy(request_id)
        elif reason == "room":
            assert learner.learning.note_no_room(request_id)
        elif reason is None:
            learner.learning.note_store(request_id, is_needed=False)
        learner.learning.forget(request_id)
    assert learner.drops == {
        LearningDrop.BUSY: 1,
        LearningDrop.ROOM: 1,
        LearningDrop.CANCELLED: 1,
    }
    assert learner.counters.learned_segments == 0


def test_requests_of_clients_are_nothing_to_it() -> None:
    learner = Learner()
    assert not learner.learning.note_no_room("client")
    learner.learning.note_store("client", is_needed=True)
    learner.learning.end_store("client", has_failed=True)
    learner.learning.forget("client")
    assert not learner.drops


def test_what_does_not_fit_behind_the_sink_is_not_computed() -> None:
    learner = Learner()
    fits = list(range(MOST_REQUEST_TOKENS - len(SINK) - 1))
    for _ in range(2):
        learner.see(fits, [*fits, 99])
    assert learner.taken() == [fits]
    assert learner.drops == {LearningDrop.TOO_LONG: 1}


def test_the_queue_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_learning, "MOST_QUEUED_SEGMENTS", 1)
    learner = Learner()
    for _ in range(2):
        learner.see(ONE, OTHER)
    assert learner.drops == {LearningDrop.QUEUE: 1}
    assert learner.taken() == [ONE]


def test_when_caches_are_reset_all_is_forgotten() -> None:
    learner = Learner()
    learner.see(ONE, OTHER)
    learner.see(ONE)
    learner.learning.clear()
    assert learner.drops == {LearningDrop.CANCELLED: 1}
    learner.see(ONE, OTHER)
    assert learner.taken() == []
    learner.see(ONE)
    assert learner.taken() == [ONE]


def test_while_it_is_held_nothing_is_begun() -> None:
    learner = Learner()
    learner.see(ONE)
    learner.see(ONE)
    learner.learning.is_held = True
    assert learner.taken() == []
    learner.learning.is_held = False
    assert learner.taken() == [ONE]


def test_where_stores_have_no_room_for_it_a_segment_stays_queued() -> None:
    learner = Learner()
    for _ in range(2):
        learner.see(ONE, OTHER)
    learner.most_tokens = len(OTHER)
    assert learner.taken() == [], "the first one is not passed over"
    learner.keep(ONE)
    assert learner.taken() == [OTHER]
    assert not learner.drops


def test_when_it_has_stopped_nothing_is_learned() -> None:
    learner = Learner()
    learner.see(ONE, OTHER)
    learner.see(ONE)
    learner.learning.stop()
    for _ in range(3):
        learner.see(ONE, OTHER)
    assert learner.taken() == []
