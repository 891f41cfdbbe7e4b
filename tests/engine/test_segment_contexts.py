# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Segments that are stored behind others of their salt. The scheduler and the pages are real.

Every step compares the stored KV, and what requests read of it: see `LearningEngine`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.connector.learning_engine import HEAD_TOKENS, LearningEngine, learning_engine
from support.connector.offload_workloads import tokens
from support.connector.paged_layouts import FULL, GPT_OSS, PagedLayout
from support.connector.shared_objects import objects
from support.connector.simulated_segments import SimulatedMover
from support.scheduler.workload import RequestPlan
from test_shared_tier import _equal_seeds, _patience, weights

from vllm_ascend_kvext.segments.scheduler.segment_contexts import (
    FEW_DOCUMENTS,
    NUM_DOCUMENTS,
    NUM_PROMPTS,
)
from vllm_ascend_kvext.segments.scheduler.segment_store import SegmentPrefix

__all__ = ["_equal_seeds", "_patience", "weights"]

pytestmark = [
    pytest.mark.usefixtures("offloading_in_effect", "weights"),
    pytest.mark.main_version,
]

DOCUMENTS = [tuple(tokens(random.Random(number), 40)) for number in range(NUM_DOCUMENTS + 3)]
FIRST, LATER = DOCUMENTS[:NUM_DOCUMENTS], DOCUMENTS[NUM_DOCUMENTS:]
CONTEXT = tuple(token for each in FIRST for token in each)
MANY = [tuple(tokens(random.Random(f"many {number}"), 40)) for number in range(33)]


@contextmanager
def choosing(
    layout: PagedLayout = FULL, segments: dict[str, Any] | None = None, **options: Any
) -> Iterator[LearningEngine]:
    """An engine that chooses the contexts of its segments."""
    segments = {"context": True, "learn": False, **(segments or {})}
    with learning_engine(layout, segments=segments, **options) as engine:
        engine.choose(min_head_tokens=0)
        yield engine


def store(engine: LearningEngine, *documents: tuple[int, ...], **more: Any) -> None:
    for document in documents:
        engine.store(document, **more)
        engine.serve()


def learn(engine: LearningEngine, *documents: tuple[int, ...]) -> None:
    """Send two requests with each of these segments."""
    for document in documents:
        for _ in range(2):
            engine.answer(document)


def lose(engine: LearningEngine, prefix: SegmentPrefix) -> None:
    """Let host memory lose a document that is stored behind a sink."""
    keys = {prefix.key_at(end) for end in range(1, prefix.num_tokens + 1)}
    engine.tier.evict(lambda entry: entry.key in keys)


def context_of(engine: LearningEngine, cache_salt: str | None = None) -> tuple[int, ...]:
    *_, longest = engine.segments.store.contexts.sinks(cache_salt, ())
    return longest.token_ids[len(engine.sink_ids) :]


def is_stored_everywhere(engine: LearningEngine, *documents: tuple[int, ...]) -> bool:
    """Whether the documents are stored alone, and behind both contexts."""
    store = engine.segments.store
    prefixes = [prefix for each in documents for prefix in store.prefixes(each, None)]
    return len(prefixes) == 3 * len(documents) and not any(map(store.is_missing, prefixes))


@pytest.mark.parametrize("is_async", [False, True], ids=["", "async"])
@pytest.mark.parametrize("layout", [FULL, GPT_OSS], ids=["full", "windows"])
def test_segments_are_stored_behind_the_first_documents(
    layout: PagedLayout, is_async: bool
) -> None:
    with choosing(layout, is_async=is_async) as engine:
        store(engine, *FIRST)
        assert context_of(engine) == CONTEXT
        store(engine, *LATER)
        assert context_of(engine) == CONTEXT, "the context has changed"
        engine.answer(*LATER)
        assert engine.counts.reused_tokens == 3 * (40 - HEAD_TOKENS)


BEGINNING = tuple(tokens(random.Random("beginning"), 21))
PROMPTS = [tuple(tokens(random.Random(f"prompt {n}"), 40)) for n in range(NUM_PROMPTS)]


def begin(engine: LearningEngine) -> None:
    """Send prompts that begin alike, and differ then."""
    for number, segment in enumerate(PROMPTS):
        engine.answer(segment, beginning=(*BEGINNING, number))


@pytest.mark.parametrize("layout", [FULL, GPT_OSS], ids=["full", "windows"])
def test_contexts_begin_like_prompts(layout: PagedLayout) -> None:
    with choosing(layout, {"sink": None}) as engine:
        begin(engine)
        store(engine, *FIRST, *LATER[:2])
        assert len(engine.learned) == 3 * (len(FIRST) + 2)
        segments = engine.segments.store
        sinks = [each.token_ids for each in segments.contexts.sinks(None, LATER[0])]
        assert sinks[:2] == [BEGINNING, segments.contexts.sink_ids]
        assert sinks[-1] == (*BEGINNING, *CONTEXT)
        prefixes = segments.prefixes(LATER[0], None)
        assert len(prefixes) == 4 and not any(map(segments.is_missing, prefixes))
        assert reused_tokens(engine, *LATER[:2], FIRST[0]) == 3 * (40 - HEAD_TOKENS)


def test_documents_are_learned_once_more_when_it_is_known_what_prompts_begin_with() -> None:
    """Documents are learned once two requests have them. Until then, stored segments are reused."""
    with choosing(segments={"sink": None}) as engine:
        store(engine, *FIRST, *LATER[:2])
        num_learned = len(engine.learned)
        assert num_learned == 2 * (len(FIRST) + 2)
        begin(engine)
        asked = (FIRST[3], *LATER[:2])
        for already in (False, True, True):
            assert reused_tokens(engine, *asked) == 3 * (40 - HEAD_TOKENS)
            assert sorted(engine.learned[num_learned:]) == sorted(asked * already)
        store(engine, LATER[2])
        assert engine.learned[num_learned + 3 :] == [LATER[2]] * 3, (
            "it is learned behind a former context"
        )


def reused_tokens(engine: LearningEngine, *documents: tuple[int, ...], **more: Any) -> int:
    """The tokens that a request reuses."""
    before = engine.counts.reused_tokens
    engine.answer(*documents, **more)
    return engine.counts.reused_tokens - before


def test_what_was_computed_behind_all_that_stands_before_it_has_no_head() -> None:
    with choosing(segments={"sink": None}) as engine:
        begin(engine)
        store(engine, *FIRST, *LATER[:2])
        two = 2 * (40 - HEAD_TOKENS)
        assert reused_tokens(engine, *LATER[:2], beginning=BEGINNING) == two + HEAD_TOKENS
        others = (*BEGINNING[:-1], 0), BEGINNING[:-1], (*BEGINNING, 0), (0, *BEGINNING)
        for other in others:
            assert reused_tokens(engine, *LATER[:2], beginning=other) == two


def test_contexts_are_computed_once() -> None:
    with choosing() as engine:
        store(engine, *FIRST)
        num_first = len(engine.sink_ids)
        sinks_tokens = [num_first + 40 * FEW_DOCUMENTS, num_first + len(CONTEXT)]
        for number, document in enumerate(LATER):
            engine.store(document)
            computed_tokens = sum(engine.step_tokens() for _ in iter(engine.has_work, False))
            if number:  # The document is stored alone, and behind both contexts.
                behind = [tokens % FULL.unit_tokens + len(document) for tokens in sinks_tokens]
                assert computed_tokens == num_first + len(document) + sum(behind)


def test_nothing_of_a_context_is_answered_to_a_client() -> None:
    with choosing() as engine:
        store(engine, *FIRST)
        engine.store(LATER[0])
        plan = engine.plans[f"request-{engine.num_asked}"]
        request = engine.requests[plan.request_id]
        assert tuple(request.prompt_token_ids) == (*engine.sink_ids, *LATER[0])
        engine.serve()
        assert engine.learned[-1] == LATER[0]


def test_documents_of_the_context_are_stored_once_more() -> None:
    """The engine's own requests store them. Until then, requests reuse what was stored first."""
    with choosing() as engine:
        store(engine, *FIRST[:-1])
        engine.segments.learning.is_held = True
        store(engine, FIRST[-1])
        engine.answer(FIRST[3])
        assert engine.counts.reused_tokens == 40 - HEAD_TOKENS
        assert not engine.learned
        engine.segments.learning.is_held = False
        engine.answer(LATER[0])
        assert engine.learned == [each for each in FIRST for _ in range(2)]
        engine.answer(*FIRST)
        assert engine.counts.reused_tokens == (1 + len(FIRST)) * (40 - HEAD_TOKENS)
        assert is_stored_everywhere(engine, *FIRST)


def test_behind_a_context_that_host_memory_has_lost_documents_are_stored_once_more() -> None:
    """The documents are stored again once two requests would have reused them there."""
    with choosing() as engine:
        store(engine, *FIRST, *LATER)
        segments = engine.segments.store
        best = segments.prefixes(LATER[0], None, num_before=2)[0]
        lose(engine, best)
        assert segments.is_missing(best)
        num_learned = len(engine.learned)
        for asked in range(3):
            engine.answer(LATER[1], LATER[2], LATER[0])
            engine.serve()
            assert len(engine.learned) == num_learned + (asked > 0)
        assert is_stored_everywhere(engine, LATER[0])


def test_what_two_requests_had_is_learned_alone_and_behind_what_both_would_have_reused() -> None:
    with choosing(segments={"learn": True}) as engine:
        store(engine, *FIRST)
        num_learned = len(engine.learned)
        for before, num_asked, times in ((FIRST[:3], 3, 2), (FIRST[:1], 1, 2), (FIRST[:1], 2, 3)):
            for _ in range(num_asked):
                engine.answer(*before, LATER[0])
            assert engine.learned[num_learned:] == [LATER[0]] * times
        assert is_stored_everywhere(engine, LATER[0])


def test_what_two_requests_had_in_different_places_is_learned_alone() -> None:
    with choosing(segments={"learn": True}) as engine:
        store(engine, *FIRST)
        num_learned = len(engine.learned)
        engine.answer(FIRST[0], LATER[0])
        engine.answer(*FIRST[:3], LATER[0])
        assert engine.learned[num_learned:] == [LATER[0]]
        before = engine.counts.reused_tokens
        engine.answer(*FIRST[:3], LATER[0])
        assert engine.counts.reused_tokens - before == 4 * (40 - HEAD_TOKENS)
        assert engine.learned[num_learned:] == [LATER[0]] * 2, (
            "two requests wanted it there, but it was not learned"
        )


@pytest.mark.parametrize("last_is_learned", [False, True])
def test_what_clients_stored_is_computed_behind_the_context_whoever_completes_it(
    last_is_learned: bool,
) -> None:
    with choosing(segments={"learn": True}) as engine:
        first, last = (store, learn) if last_is_learned else (learn, store)
        first(engine, *FIRST[:-1])
        last(engine, FIRST[-1])
        engine.answer(LATER[0])
        assert context_of(engine) == CONTEXT
        learned, stored = FIRST[-1:], FIRST[:-1]
        if not last_is_learned:
            learned, stored = stored, learned
        assert engine.learned == [*learned, *(each for each in stored for _ in range(2))]


def test_what_found_no_place_in_the_queue_is_learned_when_two_more_requests_want_it() -> None:
    with choosing(segments={"learn": True}) as engine:
        store(engine, *FIRST)
        engine.segments.learning.is_held = True
        store(engine, *MANY)
        for _ in range(8):
            engine.answer(*FIRST[:3], LATER[0])
        assert engine.drops
        engine.segments.learning.is_held = False
        for times in (1, 2, 2):
            engine.answer(*FIRST[:3], LATER[0])
            assert engine.learned.count(LATER[0]) == times


def test_after_a_reset_two_requests_are_enough_again() -> None:
    with choosing(segments={"learn": True}) as engine:
        for _ in range(2):
            store(engine, *FIRST)
            num_learned = len(engine.learned)
            for _ in range(2):
                engine.answer(*FIRST[:3], LATER[0])
            assert engine.learned[num_learned:] == [LATER[0]] * 2
            engine.reset(reset_connector=True)


def test_nothing_is_learned_behind_what_is_past() -> None:
    """Documents that are too long, and the prompt that made the latest context, learn nothing."""
    options = {"learn": True, "sink": None}
    with choosing(segments=options, max_model_len=384) as engine:
        store(engine, *FIRST)
        segments = engine.segments.store
        for number, segment in enumerate(PROMPTS):
            seen = (FIRST[0], LATER[0]) if number >= len(PROMPTS) - 2 else ()
            engine.answer(segment, *seen, beginning=(*BEGINNING, number))
        past_tokens = [len(s.token_ids) for s in segments.contexts.sinks(None, ()) if s.is_past]
        long = tuple(tokens(random.Random("long"), 384 - max(past_tokens) - 2))
        assert segments.prefixes(long, None, num_before=3)[0].sink.is_past
        for _ in range(3):
            engine.answer(*(each[:20] for each in LATER), long)
        for document in (LATER[0], long):
            prefixes = segments.prefixes(document, None)
            assert all(segments.is_missing(each) for each in prefixes if each.sink.is_past)
            assert not all(map(segments.is_missing, prefixes))


def test_other_engines_are_asked_for_what_is_stored_behind_no_context_either() -> None:
    with choosing() as engine:
        store(engine, *FIRST, LATER[0])
        segments = engine.segments.store
        prefixes = segments.prefixes(LATER[0], None, num_before=3)
        for missing, is_asked in ((prefixes[-1:], False), (prefixes[:-1], True)):
            for prefix in missing:
                lose(engine, prefix)
            assert [*map(segments.is_missing, prefixes)] == [is_asked, is_asked, True]
            asked = {prefix for prefix, _ in segments.lacking(prefixes)}
            assert asked == ({prefixes[-1]} if is_asked else set())


def test_what_no_client_has_stored_is_not_learned_where_that_is_left_to_clients() -> None:
    with choosing(segments={"learn": False}) as engine:
        store(engine, *FIRST)
        num_learned = len(engine.learned)
        for _ in range(3):
            engine.answer(*FIRST[:3], LATER[0])
        assert engine.learned[num_learned:] == []


def test_what_is_stored_behind_a_context_is_not_learned_alone_once_more() -> None:
    with choosing(segments={"learn": True}) as engine:
        store(engine, *FIRST, LATER[0])
        alone = engine.segments.store.prefixes(LATER[0], None)[0]
        assert not alone.has_context
        lose(engine, alone)
        num_learned = len(engine.learned)
        for _ in range(3):
            engine.answer(*FIRST[:3], LATER[0])
        assert engine.learned[num_learned:] == []


def test_what_was_seen_before_there_was_a_context_is_learned_alone_at_first() -> None:
    with choosing(segments={"learn": True}) as engine:
        engine.answer(*LATER[1:3], LATER[0])
        store(engine, *FIRST)
        for times in (1, 2, 2):
            engine.answer(*LATER[1:3], LATER[0])
            assert engine.learned.count(LATER[0]) == times


def test_a_part_behind_a_context_does_not_hide_what_is_stored_whole() -> None:
    with choosing() as engine:
        store(engine, *FIRST, *LATER)
        segments = engine.segments.store
        best = segments.prefixes(LATER[0], None, num_before=2)[0]
        end_key = best.key_at(best.num_tokens)  # The ends of segments are evicted first.
        engine.tier.evict(lambda entry: entry.key == end_key)
        assert segments.is_missing(best)
        engine.answer(LATER[1], LATER[2], LATER[0])
        assert engine.counts.reused_tokens == 3 * (40 - HEAD_TOKENS)


@pytest.mark.parametrize("learns", [False, True])
def test_contexts_take_no_host_memory_from_documents(learns: bool) -> None:
    """Host memory has room for each document once.

    Lost ones must not be learned again and again.
    """
    documents = [tuple(tokens(random.Random(f"document {n}"), 60)) for n in range(32)]
    connector = {"host_memory_gib": 70 / (1 << 20), "store_policy": "second_touch"}
    rng = random.Random(1)
    with choosing(segments={"learn": learns}, connector=connector, num_blocks=900) as engine:
        store(engine, *documents)
        for round_number in range(16):
            before, num_own = engine.counts.reused_tokens, len(engine.own_plans)
            for _ in range(8):
                engine.answer(*rng.sample(documents, 4))
            if round_number > 7:
                assert engine.counts.reused_tokens - before == 8 * 4 * (60 - HEAD_TOKENS)
                assert len(engine.own_plans) - num_own < 12


def test_what_host_memory_has_no_room_for_is_not_tried_again() -> None:
    with choosing(connector={"host_memory_gib": 12 / (1 << 20)}) as engine:
        store(engine, *FIRST)
        store(engine, LATER[0])
        assert engine.drops and len(engine.own_plans) == 2 * (len(FIRST) + 1)


def test_documents_behind_contexts_wait_for_what_nobody_has_stored() -> None:
    with choosing(segments={"learn": True}) as engine:
        store(engine, *FIRST)
        engine.segments.learning.is_held = True
        store(engine, *MANY)
        num_learned = len(engine.learned)
        new = tuple(tokens(random.Random("new"), 40))
        for _ in range(2):
            engine.answer(new)
        engine.segments.learning.is_held = False
        engine.answer(LATER[0])
        assert engine.learned[num_learned] == new and not engine.drops


def test_a_salt_whose_contexts_were_forgotten_gets_some_again() -> None:
    """Contexts are made from documents that are stored already."""
    with choosing() as engine:
        store(engine, *FIRST)
        engine.segments.store.contexts.clear()
        store(engine, *FIRST)
        assert context_of(engine) == CONTEXT


def test_each_salt_has_a_context_of_its_own() -> None:
    with choosing() as engine:
        store(engine, *FIRST)
        engine.store(LATER[0], cache_salt="x")
        engine.serve()
        assert context_of(engine, "x") == ()
        engine.answer(LATER[0], cache_salt="x")
        assert engine.counts.reused_tokens == 40 - HEAD_TOKENS


def test_what_does_not_fit_behind_the_context_is_stored_without_it() -> None:
    long = tuple(tokens(random.Random("long"), 800))
    with choosing(num_blocks=600) as engine:
        store(engine, *FIRST)
        engine.store(long)
        engine.serve()
        engine.answer(long)
        assert engine.counts.reused_tokens == len(long) - HEAD_TOKENS


def test_a_reset_chooses_another_context() -> None:
    with choosing() as engine:
        store(engine, *FIRST)
        engine.reset(reset_connector=True)
        assert context_of(engine) == ()
        engine.answer(*FIRST)
        assert engine.counts.reused_tokens == 0


def test_nobody_has_a_context_who_does_not_ask_for_one() -> None:
    with choosing(segments={"context": False}) as engine:
        store(engine, *FIRST, *LATER)
        assert context_of(engine) == () and not engine.own_plans


def test_what_is_too_long_behind_a_context_is_learned_without_it() -> None:
    long = tuple(tokens(random.Random("long"), 350))
    with choosing(segments={"learn": True}, max_model_len=448) as engine:
        engine.answer(long)
        engine.segments.learning.is_held = True
        engine.answer(long)
        store(engine, *FIRST)
        engine.segments.learning.is_held = False
        engine.answer(LATER[1])
        assert long in engine.learned
        assert max(len(plan.prompt) for plan in engine.own_plans) < 448


def test_nothing_is_stored_once_more_when_segments_are_not_reused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SimulatedMover, "check_keys", lambda *_: "wrong")
    with choosing() as engine:
        store(engine, *FIRST)
        assert engine.segments.checks.failure and not engine.own_plans


def test_what_was_taken_back_is_tried_again() -> None:
    with choosing(max_num_batched_tokens=32, max_num_seqs=2) as engine:
        store(engine, *FIRST[:-1])
        engine.store(FIRST[-1])
        engine.step_until(lambda: engine.own_ids)
        for _ in range(2):  # These requests have to wait for the learning request.
            engine.ask(LATER[0], max_tokens=20)
        engine.step()
        assert not engine.own_ids
        engine.serve()
        engine.answer(LATER[1])
        assert is_stored_everywhere(engine, *FIRST)


def test_engines_share_what_has_no_context(tmp_path: Path) -> None:
    """Each salt has a context of its own. Engines share segments that have none."""
    connector = {"shared_tier": f"file://{tmp_path}"}
    with choosing(connector=connector) as engine:
        store(engine, *FIRST, *LATER)
        names = {path.name for path in objects(tmp_path) if path.name.startswith("S")}
        assert len(names) == 3 * len(DOCUMENTS)
    with choosing(connector=connector) as engine:
        store(engine, *FIRST)
        for document in LATER:
            plan = RequestPlan(request_id="", arrival_step=0, prompt=document, max_tokens=1)
            engine.contents.expect_segment(document, plan)
        engine.answer(*LATER)
        assert engine.counts.reused_tokens == 3 * (40 - HEAD_TOKENS)
