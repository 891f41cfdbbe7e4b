# SPDX-License-Identifier: Apache-2.0
"""The documents, the questions about them, and their tokens."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from blending import steady
from blending.prompts import MISSING, Workload, make_workload
from blending.questions import Document, Kind, Role, ask, make_documents

NUM_ASKED = 60


class Words:
    """A tokenizer: a token per word, with the space before it."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        parts = text.replace(" ", "\0 ").split("\0")
        return [self._numbers.setdefault(part, len(self._numbers)) for part in parts if part]

    def decode(self, tokens: Sequence[int]) -> str:
        parts = list(self._numbers)
        return "".join(parts[token] for token in tokens)


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return make_documents()


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("num_missing", MISSING)
def test_the_documents_have_the_answer_once(
    documents: list[Document], kind: Kind, num_missing: int
) -> None:
    rng = random.Random(1)
    for _ in range(NUM_ASKED):
        asked = ask(rng, documents, kind, num_missing)
        chosen = [documents[number] for number in asked.documents]
        assert len(set(asked.documents)) == 8
        assert sum(not each.is_stored for each in chosen) == num_missing
        text = " ".join(each.text for each in chosen)
        if kind is Kind.REFERENCE:
            (thing,) = asked.question.begins.split()[1:2]
            whole = f"is the {thing}. It was bought in the year {asked.question.answer}."
        else:
            whole = f"{asked.question.begins} {asked.question.answer}"
        assert text.count(whole) == 1
        assert sum(whole in each.text for each in chosen) == (kind is Kind.FACT)


def test_no_thing_is_in_two_documents(documents: list[Document]) -> None:
    begins = [question.begins for each in documents for question in each.questions]
    things = [begin.split()[1] for begin in begins]
    things += [each.ends_with for each in documents if each.ends_with]
    assert len(things) == len(set(things))


def test_answers_depend_on_the_order(documents: list[Document]) -> None:
    rng = random.Random(1)
    for kind in (Kind.REFERENCE, Kind.CUT):
        asked = [ask(rng, documents, kind).question for _ in range(NUM_ASKED)]
        answers: dict[str, set[str]] = {}
        for question in asked:
            answers.setdefault(question.text, set()).add(question.answer)
        assert max(map(len, answers.values())) > 1


def test_a_sentence_is_cut_between_neighbours(documents: list[Document]) -> None:
    asked = ask(random.Random(2), documents, Kind.CUT)
    roles = [documents[number].role for number in asked.documents]
    assert (Role.OPEN, Role.CLOSING) in itertools.pairwise(roles)


def test_a_document_has_the_same_tokens_wherever_it_stands() -> None:
    tokenizer = Words()
    workload = make_workload(tokenizer, 3)
    stored = set(workload.stored)
    assert len(workload.prompts) == 3 * len(MISSING) * len(Kind)
    for prompt in workload.prompts:
        found = [prompt.tokens[start:end] for start, end in prompt.segments]
        assert sum(tokens not in stored for tokens in found) == prompt.num_missing
        assert all(a[1] == b[0] for a, b in itertools.pairwise(prompt.segments))
        assert tokenizer.decode(prompt.tokens).count("<|im_end|>") == 2


def test_every_prompt_has_an_order_of_its_own() -> None:
    workload = make_workload(Words(), 5)
    orders = [prompt.tokens[: prompt.segments[-1][1]] for prompt in workload.prompts]
    assert len(orders) == len(set(orders))


def test_a_workload_is_the_same_when_it_is_read(tmp_path: Path) -> None:
    workload = make_workload(Words(), 1)
    workload.write(tmp_path / "workload.json")
    assert Workload.read(tmp_path / "workload.json") == workload
    assert make_workload(Words(), 1) == workload


def test_joined_workloads_miss_the_documents_that_each_of_them_misses() -> None:
    one, other = (make_workload(Words(), 2, seed=seed) for seed in (0, 1))
    joined = Workload.join([one, other])
    assert joined.stored == one.stored + other.stored
    assert joined.prompts == one.prompts + other.prompts
    stored = set(joined.stored)
    for prompt in joined.prompts:
        found = [prompt.tokens[start:end] for start, end in prompt.segments]
        assert sum(tokens not in stored for tokens in found) == prompt.num_missing


def test_prompts_of_the_steady_state_never_repeat() -> None:
    workload = steady.make_workload(200, 128)
    assert len({prompt.tokens for prompt in workload.prompts}) == 200
    for prompt in workload.prompts:
        for start, end in prompt.segments:
            assert prompt.tokens[start:end] in workload.stored
        assert len(prompt.tokens) == prompt.segments[-1][1] + steady.QUESTION_TOKENS


def test_what_drifts_is_named() -> None:
    first = steady.Hundred(0, 0.8, 100.0, 0.010, 1000)
    last = steady.Hundred(900, 0.7, 120.0, 0.020, 2000)
    assert [line.split()[0] for line in steady.verdicts([first, first])] == ["met"] * 4
    assert [line[:7] for line in steady.verdicts([first, last])] == ["NOT MET"] * 4
