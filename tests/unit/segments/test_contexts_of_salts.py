# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Which documents become the context of a salt, and what is found behind the context."""

from __future__ import annotations

import pytest

from vllm_ascend_kvext.segments.scheduler import segment_contexts
from vllm_ascend_kvext.segments.scheduler.segment_contexts import (
    FEW_DOCUMENTS,
    MAX_DOCUMENT_TOKENS,
    MIN_BEGINNING_TOKENS,
    NUM_DOCUMENTS,
    NUM_PROMPTS,
    SegmentContexts,
    Sink,
)
from vllm_ascend_kvext.token_range import TokenRange

FIRST = (1,)


def document(number: int, num_tokens: int = 3) -> tuple[int, ...]:
    return tuple(range(100 * number, 100 * number + num_tokens))


def note_prompts(
    contexts: SegmentContexts, *beginnings: tuple[int, ...], cache_salt: str | None = None
) -> None:
    """Note prompts with these tokens before their first segments. The segments differ."""
    for number, before in enumerate(beginnings):
        segment = TokenRange(len(before), len(before) + 3)
        prompt = [*before, *document(1000 + number), *range(99)]
        contexts.note_prompt(prompt, segment, cache_salt)


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
    contexts.clear()
    assert longest(contexts) == contexts.without_context(None)
    fill(contexts, "other")
    assert len(longest(contexts, "other").token_ids) == 1 + 3 * NUM_DOCUMENTS


def test_the_salts_that_are_known_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_contexts, "MAX_SALTS", 2)
    contexts = SegmentContexts(FIRST, 1000)
    for salt in ("a", "b", "c"):
        contexts.sinks("full a", ())  # The context is used all the time.
        contexts.add(document(1), salt, 1)
        fill(contexts, f"full {salt}")
    assert len(contexts._documents) <= 2 and len(contexts._contexts) == 2
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


BEFORE = (*FIRST, *range(7000, 7000 + MIN_BEGINNING_TOKENS))
BEGUN = (BEFORE,) * NUM_PROMPTS


def token_ids_of(contexts: SegmentContexts, **place: int) -> list[tuple[int, ...]]:
    return [each.token_ids for each in contexts.sinks(None, document(99), **place)]


def behind(beginning: tuple[int, ...], *numbers: int) -> tuple[int, ...]:
    return beginning + joined(*numbers)[len(FIRST) :]


def test_contexts_begin_like_the_prompts_before_them() -> None:
    contexts = SegmentContexts(FIRST, 1000)
    note_prompts(contexts, *BEGUN)
    fill(contexts)
    sinks = contexts.sinks(None, document(99))
    assert [each.token_ids for each in sinks] == [
        BEFORE,
        FIRST,
        behind(BEFORE, 0, 1),
        behind(BEFORE, *range(8)),
    ]
    assert [each.has_context for each in sinks] == [True, False, True, True]
    assert not any(each.is_past for each in sinks)
    assert token_ids_of(contexts, num_before=1)[-2:] == [BEFORE, FIRST]
    assert contexts.sinks(None, document(1), num_before=8)[0].token_ids == (
        behind(BEFORE, 0, *range(2, 8))
    )


def test_contexts_get_a_beginning_once_it_is_known_and_keep_it() -> None:
    """Segments that were stored behind the earlier sinks are still found."""
    contexts = SegmentContexts(FIRST, 1000)
    fill(contexts)
    note_prompts(contexts, *BEGUN)
    few, many = (0, 1), range(8)
    for _ in range(2):
        assert token_ids_of(contexts) == [
            *(BEFORE, FIRST, behind(BEFORE, *few), joined(*few)),
            *(behind(BEFORE, *many), joined(*many)),
        ]
        past = [each.is_past for each in contexts.sinks(None, document(99))]
        assert past == [False, False, False, True, False, True]
        best = [token_ids_of(contexts, num_before=number)[0] for number in (0, 1, 3)]
        assert best == [BEFORE, behind(BEFORE, *few), behind(BEFORE, *many)]
        note_prompts(contexts, *[FIRST] * 9)
    assert contexts.add(document(99), None, "later") == ("later",)


@pytest.mark.parametrize(
    ("beginnings", "num_common"),
    [
        ([BEFORE, BEFORE, (*BEFORE, 5), (*BEFORE, 6)], len(BEFORE)),
        ([(*BEFORE, 5, 6), (*BEFORE, 5, 7)] * 2, len(BEFORE) + 1),
        ([BEFORE, BEFORE, BEFORE, BEFORE[:-1]], None),
        ([BEFORE, BEFORE, BEFORE, BEFORE[1:]], None),
        ([BEFORE, BEFORE, BEFORE, ()], None),
        ([BEFORE] * 3, None),
        ([(*BEFORE[1:], 1)] * 4, len(BEFORE)),
    ],
)
def test_a_beginning_is_what_prompts_have_in_common(
    beginnings: list[tuple[int, ...]], num_common: int | None
) -> None:
    contexts = SegmentContexts(FIRST, 1000)
    note_prompts(contexts, *beginnings)
    fill(contexts)
    sinks = token_ids_of(contexts)
    assert sinks[0] == (FIRST if num_common is None else beginnings[0][:num_common])
    assert len(sinks) == 3 + (num_common is not None)


def test_the_turns_of_a_chat_are_one_prompt() -> None:
    contexts = SegmentContexts(FIRST, 1000)
    fill(contexts)
    segment = TokenRange(len(BEFORE), len(BEFORE) + 30)
    for _ in range(3 * NUM_PROMPTS):
        contexts.note_prompt([*BEFORE, *range(99)], segment, None)
    note_prompts(contexts, *[BEFORE] * (NUM_PROMPTS - 2))
    assert BEFORE not in token_ids_of(contexts)
    note_prompts(contexts, *[BEFORE] * (NUM_PROMPTS - 1))
    assert BEFORE in token_ids_of(contexts)


def test_of_long_beginnings_contexts_have_a_part() -> None:
    contexts = SegmentContexts(FIRST, 1000)
    long = tuple(range(5000, 6000))
    note_prompts(contexts, *[long] * NUM_PROMPTS)
    fill(contexts, num_tokens=100)
    assert token_ids_of(contexts)[0] == long[:250]
    assert len(longest(contexts).token_ids) == 250 + 62 * NUM_DOCUMENTS


def test_a_sink_of_ones_own_stands_before_all_documents() -> None:
    contexts = SegmentContexts((5, 6), 1000, reads_prompts=False)
    note_prompts(contexts, *BEGUN)
    fill(contexts)
    assert [each[:3] for each in token_ids_of(contexts)[1:]] == [(5, 6, 0)] * 2
    assert not contexts._prompts


def test_prompts_of_other_salts_take_nothing_from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_contexts, "MAX_SALTS", 2)
    contexts = SegmentContexts(FIRST, 1000)
    fill(contexts)
    for number in range(NUM_DOCUMENTS - 1):
        contexts.add(document(number), "few", number)
    for number in range(9):
        note_prompts(contexts, *BEGUN, cache_salt=f"salt {number}")
    assert len(contexts._prompts) == 2
    note_prompts(contexts, *BEGUN)
    begun = token_ids_of(contexts)
    assert len(begun) == 6
    for number in range(9):  # The salt's prompts are forgotten. Its contexts stay.
        note_prompts(contexts, *BEGUN, cache_salt=f"salt {number}")
    note_prompts(contexts, *[(*BEFORE[::-1], 1)] * NUM_PROMPTS)
    assert token_ids_of(contexts) == begun
    assert len(contexts.add(document(77), "few", 77)) == NUM_DOCUMENTS
