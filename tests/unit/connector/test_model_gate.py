# SPDX-License-Identifier: Apache-2.0
"""What is asked of a model, and what follows from the answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from vllm_ascend_kvext.blending.blend_plan import behind_head
from vllm_ascend_kvext.blending.errors import BlendingError
from vllm_ascend_kvext.blending.gate_prompts import NUM_MOVED, NUM_SEGMENTS
from vllm_ascend_kvext.blending.gate_verdict import Answer, GateVerdict
from vllm_ascend_kvext.blending.segments import Segment
from vllm_ascend_kvext.connector.blended_requests import BlendOptions
from vllm_ascend_kvext.connector.model_gate import GateQuestion, GateReply, ModelGate
from vllm_ascend_kvext.holes.span_plan import Run

SINK = (1,)
PAGE_TOKENS = 16
SAME = {5: -0.5, 6: -1.5}
FAR = {5: -2.5, 6: -3.5}


class FakeRequests:
    """Takes the place of ``BlendedRequests``."""

    def __init__(self, head_tokens: int = 16, window_tokens: int = 0) -> None:
        self.options = BlendOptions(head_tokens, window_tokens, 32, ())
        self.keys_are_checked = False

    def reusable(self, segment: Segment, stored_tokens: int) -> Run | None:
        options = self.options
        return behind_head(segment, stored_tokens, options.head_tokens, options.least_head_tokens)


class FakeEngine:
    """Answers the same, whatever is asked, unless it is told otherwise.

    Attributes:
        asked: What was computed together, in order; None where the prefix cache was emptied.
    """

    def __init__(self, requests: FakeRequests) -> None:
        self.requests = requests
        self.asked: list[list[GateQuestion] | None] = []
        self.answer: Callable[[GateQuestion], Answer] = lambda question: SAME
        self.stored_share = 1.0
        self.reused_share = 1.0
        self.checks_keys = True

    def ask(self, questions: Sequence[GateQuestion]) -> list[GateReply]:
        self.asked.append(list(questions))
        return [self._reply(question) for question in questions]

    def forget_cached(self) -> None:
        self.asked.append(None)

    def _reply(self, question: GateQuestion) -> GateReply:
        params: dict[str, Any] = {}
        if question.stores:
            self.requests.keys_are_checked = self.checks_keys
            num_tokens = len(question.token_ids) - len(SINK)
            params["kvext_stored_tokens"] = int(num_tokens * self.stored_share)
        if question.reused:
            num_tokens = sum(run.num_tokens for run in question.reused)
            params["kvext_reused_tokens"] = int(num_tokens * self.reused_share)
        return GateReply(self.answer(question), params)

    @property
    def questions(self) -> list[GateQuestion]:
        return [question for questions in self.asked for question in questions or ()]


@pytest.fixture
def requests() -> FakeRequests:
    return FakeRequests()


@pytest.fixture
def engine(requests: FakeRequests) -> FakeEngine:
    return FakeEngine(requests)


def check(engine: FakeEngine, **changes: Any) -> GateVerdict:
    parts = {
        "page_tokens": PAGE_TOKENS,
        "num_blocks": 1000,
        "most_request_tokens": 4096,
        "has_windows": False,
        "why_wrong_keys": lambda: "",
    } | changes
    gate = ModelGate(
        engine.requests,  # type: ignore[arg-type]
        SINK,
        lambda tokens: -(-tokens // PAGE_TOKENS),
        **parts,
    )
    return gate.check(engine, 1000, "float32")


def test_segments_are_stored_first_and_then_asked_for(engine: FakeEngine) -> None:
    assert check(engine).passed
    stores = [question.stores for question in engine.questions]
    assert stores == [True] * NUM_SEGMENTS + [False] * 4 * NUM_SEGMENTS
    stored = {question.token_ids for question in engine.questions if question.stores}
    for question in engine.questions:
        for segment in question.segments:
            assert SINK + question.token_ids[slice(*segment)] in stored


def test_segments_lie_in_several_pages(engine: FakeEngine) -> None:
    """In one page, whatever goes wrong with tables of pages is not seen."""
    check(engine, page_tokens=128)
    for question in engine.questions:
        places = {run.first_tokens // 128 for run in question.reused}
        assert len(places) > 1 or not question.reused


def test_prompts_are_asked_alone_and_beside_others_before_anything_is_reused(
    engine: FakeEngine,
) -> None:
    check(engine)
    sizes = [len(questions) for questions in engine.asked if questions is not None]
    # Stores, alone, beside others, with other tokens, reused.
    assert sizes == [1] * NUM_SEGMENTS + [1] * NUM_SEGMENTS + [NUM_SEGMENTS] * 3
    assert [bool(question.reused) for question in engine.questions[-NUM_SEGMENTS:]] == [True] * 3
    assert not any(question.reused for question in engine.questions[:-NUM_SEGMENTS])


def test_nothing_that_is_asked_is_found_in_the_prefix_cache(engine: FakeEngine) -> None:
    check(engine, has_windows=True)
    computed: set[tuple[str, tuple[int, ...]]] = set()
    for questions in engine.asked:
        if questions is None:
            computed.clear()
            continue
        of_batch = {(each.cache_salt, each.token_ids[:PAGE_TOKENS]) for each in questions}
        reused = any(each.reused for each in questions)
        assert reused or not (computed & of_batch)
        computed |= of_batch
    salts = {question.cache_salt for question in engine.questions if question.reused}
    assert salts == {question.cache_salt for question in engine.questions if question.stores}
    assert salts.isdisjoint(
        question.cache_salt
        for question in engine.questions
        if not question.reused and not question.stores
    )


def test_other_answers_in_place_are_refused(engine: FakeEngine) -> None:
    engine.answer = lambda question: FAR if question.reused else SAME
    assert not check(engine).passed


def test_models_with_windows_are_asked_whether_repair_helps(engine: FakeEngine) -> None:
    engine.requests.options = BlendOptions(16, 63, 32, ())

    def answer(question: GateQuestion) -> Answer:
        is_whole = question.reused == tuple(Run(*segment) for segment in question.segments)
        is_moved = question.segments and question.segments[0].first_tokens > len(SINK)
        return FAR if is_moved and is_whole == repaired_is_near else SAME

    engine.answer = answer
    repaired_is_near = True
    assert check(engine, has_windows=True).passed
    assert len([q for q in engine.questions if len(q.segments) > 1]) == 2 * NUM_MOVED
    repaired_is_near = False
    assert not check(engine, has_windows=True).passed


def test_with_nothing_to_repair_it_is_not_asked(engine: FakeEngine) -> None:
    engine.requests.options = BlendOptions(0, 0, 32, ())
    assert check(engine, has_windows=True).passed
    assert not [question for question in engine.questions if len(question.segments) > 1]


def test_wrong_keys_end_it(engine: FakeEngine) -> None:
    found = check(engine, why_wrong_keys=lambda: "keys differ")
    assert found == GateVerdict(False, "keys differ")
    assert all(question.stores for question in engine.questions)


@pytest.mark.parametrize(
    ("attribute", "value", "expected"),
    [
        ("stored_share", 0.5, "to be stored, found no room"),
        ("reused_share", 0.5, "to be reused, found"),
        ("checks_keys", False, "keys of stored segments to be compared"),
    ],
)
def test_what_cannot_be_asked_is_said(
    engine: FakeEngine, attribute: str, value: Any, expected: str
) -> None:
    setattr(engine, attribute, value)
    with pytest.raises(BlendingError, match=expected):
        check(engine)


@pytest.mark.parametrize(
    ("num_blocks", "most_request_tokens", "found"), [(1000, 100, 99), (20, 4096, 80)]
)
def test_a_small_context_or_pool_is_said(
    engine: FakeEngine, num_blocks: int, most_request_tokens: int, found: int
) -> None:
    with pytest.raises(BlendingError, match=f"found room for {found}\\."):
        check(engine, num_blocks=num_blocks, most_request_tokens=most_request_tokens)
