# SPDX-License-Identifier: Apache-2.0
"""Segments that are stored behind others of their salt, on vLLM's real scheduler, in real pages.

What is stored, and what is read of it, is compared in every step: see `LearningEngine`.
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

from vllm_ascend_kvext.blending.segment_contexts import NUM_DOCUMENTS

__all__ = ["_equal_seeds", "_patience", "weights"]

pytestmark = pytest.mark.usefixtures("offloading_in_effect", "weights")

DOCUMENTS = [tuple(tokens(random.Random(number), 40)) for number in range(NUM_DOCUMENTS + 3)]
FIRST, LATER = DOCUMENTS[:NUM_DOCUMENTS], DOCUMENTS[NUM_DOCUMENTS:]
CONTEXT = tuple(token for each in FIRST for token in each[:32])
"""In an engine whose requests have at most 1,024 tokens."""


@contextmanager
def choosing(
    layout: PagedLayout = FULL, connector: dict[str, Any] | None = None, **options: Any
) -> Iterator[LearningEngine]:
    """An engine that chooses the contexts of its segments."""
    connector = {"segment_context": True, "learn_segments": False, **(connector or {})}
    with learning_engine(layout, connector=connector, **options) as engine:
        engine.choose(min_head_tokens=0)
        yield engine


def store(engine: LearningEngine, *documents: tuple[int, ...], **more: Any) -> None:
    for document in documents:
        engine.store(document, **more)
        engine.serve()


def context_of(engine: LearningEngine, cache_salt: str | None = None) -> tuple[int, ...]:
    sink = engine.side.segments.store.contexts.of(cache_salt, ())
    return sink.token_ids[len(engine.sink_ids) :]


@pytest.mark.parametrize("is_async", [False, True], ids=["", "async"])
@pytest.mark.parametrize("layout", [FULL, GPT_OSS], ids=["full", "windows"])
def test_segments_are_stored_behind_the_first_documents(
    layout: PagedLayout, is_async: bool
) -> None:
    with choosing(layout, is_async=is_async) as engine:
        store(engine, *FIRST)
        assert context_of(engine) == CONTEXT
        store(engine, *LATER)
        assert context_of(engine) == CONTEXT, "it stays"
        engine.answer(*LATER)
        assert engine.counts.reused_tokens == 3 * (40 - HEAD_TOKENS)


def test_the_context_is_computed_once() -> None:
    with choosing() as engine:
        store(engine, *FIRST)
        sink_tokens = len(engine.sink_ids) + len(CONTEXT)
        for number, document in enumerate(LATER):
            engine.store(document)
            computed_tokens = sum(engine.step_tokens() for _ in iter(engine.has_work, False))
            if number:  # Alone, and behind the context.
                alone = len(engine.sink_ids) + len(document)
                behind = sink_tokens % FULL.unit_tokens + len(document)
                assert computed_tokens == alone + behind


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
    """By requests of the engine's own; until then they are reused as they were stored."""
    with choosing() as engine:
        store(engine, *FIRST[:-1])
        engine.side.segments.learning.is_held = True
        store(engine, FIRST[-1])
        engine.answer(FIRST[3])
        assert engine.counts.reused_tokens == 40 - HEAD_TOKENS
        assert not engine.learned
        engine.side.segments.learning.is_held = False
        engine.answer(LATER[0])
        assert engine.learned == FIRST
        engine.answer(*FIRST)
        assert engine.counts.reused_tokens == (1 + len(FIRST)) * (40 - HEAD_TOKENS)
        segments = engine.side.segments.store
        assert not any(segments.is_missing(segments.prefix(each, None)) for each in FIRST)


def test_what_was_seen_once_is_learned_behind_the_context_that_came_meanwhile() -> None:
    with choosing(connector={"learn_segments": True}) as engine:
        engine.answer(LATER[0])
        engine.side.segments.learning.is_held = True
        engine.answer(LATER[0])
        store(engine, *FIRST)
        engine.side.segments.learning.is_held = False
        engine.answer(LATER[1])
        assert LATER[0] in engine.learned
        segments = engine.side.segments.store
        assert not segments.is_missing(segments.prefix(LATER[0], None))


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
    with choosing(connector={"segment_context": False}) as engine:
        store(engine, *FIRST, *LATER)
        assert context_of(engine) == () and not engine.own_plans


def test_what_became_too_long_while_it_waited_is_learned_without_a_context() -> None:
    """The context came meanwhile: behind it, the request would be longer than any may be."""
    long = tuple(tokens(random.Random("long"), 350))
    with choosing(connector={"learn_segments": True}, max_model_len=448) as engine:
        engine.answer(long)
        engine.side.segments.learning.is_held = True
        engine.answer(long)
        store(engine, *FIRST)
        engine.side.segments.learning.is_held = False
        engine.answer(LATER[1])
        assert long in engine.learned
        assert max(len(plan.prompt) for plan in engine.own_plans) < 448


def test_nothing_is_stored_once_more_when_segments_are_not_reused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SimulatedMover, "check_keys", lambda *_: "wrong")
    with choosing() as engine:
        store(engine, *FIRST)
        assert engine.side.segments.why_no_reuse and not engine.own_plans


def test_what_was_taken_back_is_tried_again() -> None:
    with choosing(max_num_batched_tokens=32, max_num_seqs=2) as engine:
        store(engine, *FIRST[:-1])
        engine.store(FIRST[-1])
        engine.step_until(lambda: engine.own_ids)
        for _ in range(2):  # They have to wait for it.
            engine.ask(LATER[0], max_tokens=20)
        engine.step()
        assert not engine.own_ids
        engine.serve()
        engine.answer(LATER[1])
        segments = engine.side.segments.store
        assert not any(segments.is_missing(segments.prefix(each, None)) for each in FIRST)


def test_engines_share_what_has_no_context(tmp_path: Path) -> None:
    """Each has one of its own."""
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
