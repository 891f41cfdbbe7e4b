# SPDX-License-Identifier: Apache-2.0
"""Which documents become the context of a salt, and what is found behind it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from vllm_ascend_kvext.blending import segment_contexts
from vllm_ascend_kvext.blending.segment_contexts import (
    FEW_DOCUMENTS,
    MAX_DOCUMENT_TOKENS,
    MAX_WAITING_DOCUMENTS,
    NUM_DOCUMENTS,
    NUM_PROMPTS,
    SegmentContexts,
    Sink,
)

FIRST = (1,)


def document(number: int, num_tokens: int = 3) -> tuple[int, ...]:
    return tuple(range(100 * number, 100 * number + num_tokens))


def note_prompt(
    contexts: SegmentContexts, before: tuple[int, ...], cache_salt: str | None = None
) -> Sequence[object]:
    """Of a prompt with these tokens before its first segment, and others behind."""
    return contexts.note_prompt([*before, *before, *range(99)], len(before), cache_salt)


def ask(
    contexts: SegmentContexts, *beginnings: tuple[int, ...], cache_salt: str | None = None
) -> None:
    for each in beginnings or (FIRST,):
        for _ in range(NUM_PROMPTS // max(1, len(beginnings))):
            note_prompt(contexts, each, cache_salt)


def fill(contexts: SegmentContexts, cache_salt: str | None = None, num_tokens: int = 3) -> None:
    """All that the contexts of a salt need. Its prompts begin with nothing of their own."""
    ask(contexts, cache_salt=cache_salt)
    for number in range(NUM_DOCUMENTS):
        contexts.add(document(number, num_tokens), cache_salt, number)


def longest(contexts: SegmentContexts, cache_salt: str | None = None) -> Sink:
    return contexts.sinks(cache_salt, ())[-1]


def joined(*numbers: int) -> tuple[int, ...]:
    return (*FIRST, *(token for number in numbers for token in document(number)))


def test_the_first_documents_become_the_contexts_and_stay_them() -> None:
    contexts = SegmentContexts(FIRST, 1000)
    ask(contexts)
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
    [(320, 20), (100_000, MAX_DOCUMENT_TOKENS), (0, 0)],
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
    ask(contexts, (7, 7), cache_salt="other")
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
    assert len(contexts._waiting) <= 2 and len(contexts._contexts) == 2
    assert longest(contexts, "full b") == contexts.without_context("full b")
    assert longest(contexts, "full a") != contexts.without_context("full a")


def test_what_is_short_or_begins_like_another_is_no_document_of_a_context() -> None:
    contexts = SegmentContexts(FIRST, 2 * 8 * NUM_DOCUMENTS, min_tokens=4)
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


BEFORE = (*FIRST, 7, 8, 9)


@pytest.mark.parametrize("are_prompts_first", [True, False])
def test_contexts_begin_like_prompts(are_prompts_first: bool) -> None:
    contexts = SegmentContexts(FIRST, 1000)
    documents = [document(number) for number in range(NUM_DOCUMENTS + 5)]
    if are_prompts_first:
        ask(contexts, BEFORE)
        documents = documents[:NUM_DOCUMENTS]
    for each in documents[:-1]:
        assert not contexts.add(each, None, each)
    if are_prompts_first:
        found = contexts.add(documents[-1], None, documents[-1])
    else:
        assert not contexts.add(documents[-1], None, documents[-1])
        found = [note_prompt(contexts, BEFORE) for _ in range(NUM_PROMPTS)][-1]
    assert found == tuple(documents)
    sinks = contexts.sinks(None, ())
    assert [each.token_ids for each in sinks] == [
        BEFORE,
        FIRST,
        BEFORE + joined(0, 1)[1:],
        BEFORE + joined(*range(8))[1:],
    ]
    assert [each.has_context for each in sinks] == [True, False, True, True]
    assert contexts.sinks(None, (), num_before=1)[-2:] == sinks[:2]
    assert not note_prompt(contexts, FIRST), "they stay"
    assert contexts.sinks(None, ()) == sinks


@pytest.mark.parametrize(
    ("beginnings", "expected"),
    [
        ([(1, 7, 8), (1, 7, 8, 9)], (1, 7, 8)),
        ([(1, 7, 8), (1, 7, 9)], (1, 7)),
        ([(1, 7), (2, 7)], FIRST),
        ([(1, 7), ()], FIRST),
        ([(1,), (1,)], FIRST),
        ([(3, 4), (3, 4)], (3, 4)),
    ],
)
def test_a_beginning_is_what_all_prompts_have_in_common(
    beginnings: list[tuple[int, ...]], expected: tuple[int, ...]
) -> None:
    contexts = SegmentContexts(FIRST, 1000)
    ask(contexts, *beginnings)
    for number in range(NUM_DOCUMENTS):
        contexts.add(document(number), None, number)
    sinks = contexts.sinks(None, ())
    assert sinks[0].token_ids == expected
    assert len(sinks) == 3 + (expected != FIRST)


def test_one_prompt_says_nothing() -> None:
    contexts = SegmentContexts(FIRST, 1000)
    for number in range(NUM_DOCUMENTS):
        contexts.add(document(number), None, number)
    for _ in range(NUM_PROMPTS - 1):
        assert not note_prompt(contexts, BEFORE)
        assert not note_prompt(contexts, BEFORE, "other")
        assert len(contexts.sinks(None, ())) == 1


def test_of_long_beginnings_contexts_have_a_part() -> None:
    contexts = SegmentContexts(FIRST, 1000)
    ask(contexts, tuple(range(5000, 6000)))
    for number in range(NUM_DOCUMENTS):
        contexts.add(document(number, 100), None, number)
    assert contexts.sinks(None, ())[0].token_ids == tuple(range(5000, 5250))
    assert len(longest(contexts).token_ids) == 250 + 62 * NUM_DOCUMENTS


def test_a_sink_of_ones_own_stands_before_all_documents() -> None:
    contexts = SegmentContexts((5, 6), 1000, reads_prompts=False)
    for number in range(NUM_DOCUMENTS):
        note_prompt(contexts, BEFORE)
        contexts.add(document(number), None, number)
    assert [each.token_ids[:3] for each in contexts.sinks(None, ())[1:]] == [(5, 6, 0)] * 2


def test_the_documents_that_wait_are_bounded() -> None:
    contexts = SegmentContexts(FIRST, 1000)
    for number in range(MAX_WAITING_DOCUMENTS + 3):
        contexts.add(document(number), None, number)
    contexts.add(document(1), None, "again")
    *_, found = (note_prompt(contexts, FIRST) for _ in range(NUM_PROMPTS))
    assert len(found) == MAX_WAITING_DOCUMENTS and found[1] == "again"
