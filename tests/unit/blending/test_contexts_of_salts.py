# SPDX-License-Identifier: Apache-2.0
"""Which documents become the context of a salt, and what is found behind it."""

from __future__ import annotations

import pytest

from vllm_ascend_kvext.blending import segment_contexts
from vllm_ascend_kvext.blending.segment_contexts import (
    FEW_DOCUMENTS,
    MAX_DOCUMENT_TOKENS,
    NUM_DOCUMENTS,
    SegmentContexts,
    Sink,
)

FIRST = (1,)


def document(number: int, num_tokens: int = 3) -> tuple[int, ...]:
    return tuple(range(100 * number, 100 * number + num_tokens))


def fill(contexts: SegmentContexts, cache_salt: str | None = None, num_tokens: int = 3) -> None:
    for number in range(NUM_DOCUMENTS):
        contexts.add(document(number, num_tokens), cache_salt, number)


def longest(contexts: SegmentContexts, cache_salt: str | None = None) -> Sink:
    return contexts.sinks(cache_salt, ())[-1]


def joined(*numbers: int) -> tuple[int, ...]:
    return (*FIRST, *(token for number in numbers for token in document(number)))


def test_the_first_documents_become_the_contexts_and_stay_them() -> None:
    contexts = SegmentContexts(FIRST, 1000)
    documents = [document(number) for number in range(NUM_DOCUMENTS)]
    for each in (*documents[:-1], documents[0]):
        assert not contexts.add(each, None, each)
        assert contexts.sinks(None, ()) == [contexts.without_context(None)]
    assert contexts.add(documents[-1], None, documents[-1]) == tuple(documents)
    sinks = contexts.sinks(None, ())
    assert [each.token_ids for each in sinks] == [FIRST, joined(0, 1), joined(*range(8))]
    assert [each.num_documents for each in sinks] == [0, FEW_DOCUMENTS, NUM_DOCUMENTS]
    assert len({each.space for each in sinks}) == 3
    assert contexts.add(document(99), None, "later") == ("later",)
    assert contexts.sinks("", document(99)) == sinks


@pytest.mark.parametrize(
    ("num_before", "expected"),
    [
        (0, [0, 2, 8]),
        (1, [2, 8, 0]),
        (2, [2, 8, 0]),
        (3, [8, 2, 0]),
        (8, [8, 2, 0]),
        (9, [8, 2, 0]),
    ],
)
def test_the_best_has_as_many_documents_as_stand_before(
    num_before: int, expected: list[int]
) -> None:
    contexts = SegmentContexts(FIRST, 1000)
    fill(contexts)
    found = contexts.sinks(None, document(99), num_before)
    assert [each.num_documents for each in found] == expected


def test_each_salt_has_its_own() -> None:
    contexts = SegmentContexts(FIRST, 1000)
    fill(contexts, "a")
    assert longest(contexts, "b") == contexts.without_context("b") != contexts.without_context("a")
    fill(contexts, "b")
    assert longest(contexts, "a").token_ids == longest(contexts, "b").token_ids
    assert longest(contexts, "a").space != longest(contexts, "b").space


@pytest.mark.parametrize(
    ("max_request_tokens", "expected"),
    [(320, 10), (100_000, MAX_DOCUMENT_TOKENS), (0, 0)],
)
def test_of_long_documents_it_has_the_beginnings(max_request_tokens: int, expected: int) -> None:
    contexts = SegmentContexts(FIRST, max_request_tokens)
    fill(contexts, num_tokens=300)
    found = longest(contexts).token_ids
    assert len(found) == 1 + NUM_DOCUMENTS * expected
    assert found[1:][:expected] == document(0, 300)[:expected]


def test_a_document_stands_behind_what_leaves_room_for_it() -> None:
    contexts = SegmentContexts(FIRST, 100)
    fill(contexts)
    for num_tokens, expected in ((74, 3), (75, 2), (92, 2), (93, 1)):
        assert len(contexts.sinks(None, document(99, num_tokens))) == expected


def test_a_reset_chooses_anew() -> None:
    contexts = SegmentContexts(FIRST, 1000)
    fill(contexts)
    contexts.add(document(1), "other", 1)
    contexts.clear()
    assert longest(contexts) == contexts.without_context(None)
    fill(contexts, "other")
    assert len(longest(contexts, "other").token_ids) == 1 + 3 * NUM_DOCUMENTS


def test_the_salts_that_are_known_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_contexts, "MAX_SALTS", 2)
    contexts = SegmentContexts(FIRST, 1000)
    for salt in ("a", "b", "c"):
        contexts.sinks("full a", ())  # It is used all the time.
        contexts.add(document(1), salt, 1)
        fill(contexts, f"full {salt}")
    assert len(contexts._documents) <= 2 and len(contexts._contexts) == 2
    assert longest(contexts, "full b") == contexts.without_context("full b")
    assert longest(contexts, "full a") != contexts.without_context("full a")


def test_what_is_short_or_begins_like_another_is_no_document_of_a_context() -> None:
    contexts = SegmentContexts(FIRST, 4 * 8 * NUM_DOCUMENTS, min_tokens=4)
    fill(contexts, num_tokens=3)
    for number in range(NUM_DOCUMENTS):
        assert not contexts.add((*document(1, 8), number), None, number)
    fill(contexts, num_tokens=9)
    assert len(longest(contexts).token_ids) == 1 + 8 * NUM_DOCUMENTS


@pytest.mark.parametrize(("number", "few"), [(0, (1, 2)), (1, (0, 2)), (5, (0, 1))])
def test_a_document_of_the_context_stands_behind_others(number: int, few: tuple[int, ...]) -> None:
    contexts = SegmentContexts(FIRST, 1000)
    fill(contexts)
    others = [other for other in range(NUM_DOCUMENTS) if other != number]
    found = contexts.sinks(None, list(document(number)))
    assert [each.token_ids for each in found] == [FIRST, joined(*few), joined(*others)]
    assert contexts.sinks("salt", document(number)) == [contexts.without_context("salt")]
