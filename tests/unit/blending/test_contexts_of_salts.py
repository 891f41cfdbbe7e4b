# SPDX-License-Identifier: Apache-2.0
"""Which documents become the context of a salt, and what is found behind it."""

from __future__ import annotations

import pytest

from vllm_ascend_kvext.blending import segment_contexts
from vllm_ascend_kvext.blending.segment_contexts import (
    MAX_DOCUMENT_TOKENS,
    NUM_DOCUMENTS,
    SegmentContexts,
)

FIRST = (1,)


def document(number: int, num_tokens: int = 3) -> tuple[int, ...]:
    return tuple(range(100 * number, 100 * number + num_tokens))


def fill(contexts: SegmentContexts, cache_salt: str | None = None, num_tokens: int = 3) -> None:
    for number in range(NUM_DOCUMENTS):
        contexts.add(document(number, num_tokens), cache_salt, number)


def test_the_first_documents_become_the_context_and_stay_it() -> None:
    contexts = SegmentContexts(FIRST, 1000)
    documents = [document(number) for number in range(NUM_DOCUMENTS)]
    for each in (*documents[:-1], documents[0]):
        assert not contexts.add(each, None, each)
        assert contexts.of(None, ()) == contexts.without_context(None)
    assert contexts.add(documents[-1], None, documents[-1]) == tuple(documents)
    sink = contexts.of(None, ())
    assert sink.token_ids == (*FIRST, *(token for each in documents for token in each))
    assert sink.space != contexts.without_context(None).space
    assert contexts.add(document(99), None, "later") == ("later",)
    assert contexts.of(None, document(99)) == sink
    assert contexts.of("", ()) == sink


def test_each_salt_has_its_own() -> None:
    contexts = SegmentContexts(FIRST, 1000)
    fill(contexts, "a")
    assert contexts.of("b", ()) == contexts.without_context("b") != contexts.without_context("a")
    fill(contexts, "b")
    assert contexts.of("a", ()).token_ids == contexts.of("b", ()).token_ids
    assert contexts.of("a", ()).space != contexts.of("b", ()).space


@pytest.mark.parametrize(
    ("max_context_tokens", "expected"),
    [(80, 10), (100_000, MAX_DOCUMENT_TOKENS), (0, 0)],
)
def test_of_long_documents_it_has_the_beginnings(max_context_tokens: int, expected: int) -> None:
    contexts = SegmentContexts(FIRST, max_context_tokens)
    fill(contexts, num_tokens=300)
    assert len(contexts.of(None, ()).token_ids) == 1 + NUM_DOCUMENTS * expected
    assert contexts.of(None, ()).token_ids[1:][:expected] == document(0, 300)[:expected]


def test_a_reset_chooses_anew() -> None:
    contexts = SegmentContexts(FIRST, 1000)
    fill(contexts)
    contexts.add(document(1), "other", 1)
    contexts.clear()
    assert contexts.of(None, ()) == contexts.without_context(None)
    fill(contexts, "other")
    assert len(contexts.of("other", ()).token_ids) == 1 + 3 * NUM_DOCUMENTS


def test_the_salts_that_are_known_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_contexts, "MAX_SALTS", 2)
    monkeypatch.setattr(segment_contexts, "MAX_UNFINISHED", 2)
    contexts = SegmentContexts(FIRST, 1000)
    for salt in ("a", "b", "c"):
        contexts.of("full a", ())  # It is used all the time.
        contexts.add(document(1), salt, 1)
        fill(contexts, f"full {salt}")
    assert len(contexts._documents) <= 2 and len(contexts._contexts) == 2
    assert contexts.of("full b", ()) == contexts.without_context("full b")
    assert contexts.of("full a", ()) != contexts.without_context("full a")


def test_what_is_short_or_begins_like_another_is_no_document_of_a_context() -> None:
    contexts = SegmentContexts(FIRST, 8 * NUM_DOCUMENTS, min_tokens=4)
    fill(contexts, num_tokens=3)
    for number in range(NUM_DOCUMENTS):
        assert not contexts.add((*document(1, 8), number), None, number)
    fill(contexts, num_tokens=9)
    assert len(contexts.of(None, ()).token_ids) == 1 + 8 * NUM_DOCUMENTS


def test_a_document_of_the_context_stands_behind_the_others() -> None:
    contexts = SegmentContexts(FIRST, 1000)
    fill(contexts)
    sink = contexts.of(None, list(document(2)))
    others = [document(number) for number in range(NUM_DOCUMENTS) if number != 2]
    assert sink.token_ids == (*FIRST, *(token for each in others for token in each))
    assert contexts.of("salt", document(2)) == contexts.without_context("salt")
