# SPDX-License-Identifier: Apache-2.0
"""Traces and the texts they are made of."""

from __future__ import annotations

import hashlib
from array import array

import pytest
from retention.texts import Library, Text
from retention.traces import WRITERS, TracedRequest, write_trace

SCALE = 0.1


def signature(request: TracedRequest) -> tuple[object, ...]:
    tokens = request.answered.tokens()
    return (tokens, request.num_prompt_tokens, request.delay_steps, request.after)


def common_tokens(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def naive_hashes(text: Text, block_tokens: int) -> list[bytes]:
    tokens, previous, hashes = array("I", text.tokens()), b"", []
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        block = tokens[end - block_tokens : end].tobytes()
        previous = hashlib.sha256(previous + block).digest()
        hashes.append(previous)
    return hashes


@pytest.fixture
def texts() -> list[Text]:
    """Passages that begin and end anywhere in a block, one of them within a block."""
    library = Library("texts")
    first = library.write(37)
    second = library.write(2, first)
    third = library.write(50, second)
    branch = library.write(20, third.cut(61))
    return [first, second, third, branch, third.cut(38), branch.cut(30)]


class TestTexts:
    def test_a_text_is_its_passages(self, texts):
        first, second, third, branch, *_ = (text.tokens() for text in texts)
        assert [len(text) for text in texts] == [len(text.tokens()) for text in texts]
        assert third[:39] == second and second[:37] == first
        assert branch[:61] == third[:61] and branch[61] != third[61]

    def test_a_cut_is_a_prefix(self, texts):
        branch = texts[3]
        for num_tokens in range(1, len(branch) + 1):
            assert branch.cut(num_tokens).tokens() == branch.tokens()[:num_tokens]

    def test_nothing_is_left_of_a_cut_to_nothing(self, texts):
        with pytest.raises(ValueError, match="asked for 0"):
            texts[0].cut(0)

    @pytest.mark.parametrize("block_tokens", [1, 4, 16, 64])
    def test_hashes_are_chained_over_passages(self, texts, block_tokens):
        for text in texts:
            assert text.block_hashes(block_tokens) == naive_hashes(text, block_tokens)

    def test_an_empty_passage_is_refused(self):
        with pytest.raises(ValueError, match="asked for 0"):
            Library("empty").write(0)


@pytest.mark.parametrize("name", WRITERS)
class TestTraces:
    def test_is_the_same_every_time(self, name):
        one, other = (write_trace(name, SCALE) for _ in range(2))
        assert [signature(r) for r in one.requests] == [signature(r) for r in other.requests]

    def test_asks_with_prompts_and_waits_for_answers(self, name):
        requests = write_trace(name, SCALE).requests
        for number, request in enumerate(requests):
            assert request.num_prompt_tokens > 0 and request.num_output_tokens > 0
            assert request.delay_steps >= 0
            assert request.after is None or request.after < number

    def test_shares_prefixes(self, name):
        """Enough for a cache to matter: in the mean a fifth of a prompt was there before."""
        requests = write_trace(name, 0.2).requests
        seen: list[list[int]] = []
        shared_tokens = 0
        for request in requests:
            prompt = request.prompt.tokens()
            shared_tokens += max((common_tokens(prompt, earlier) for earlier in seen), default=0)
            seen.append(request.answered.tokens())
        assert shared_tokens > 0.2 * sum(request.num_prompt_tokens for request in requests)

    def test_stretches(self, name):
        one, longer = (write_trace(name, SCALE, stretch) for stretch in (1, 3))
        assert longer.num_prompt_tokens > 2 * one.num_prompt_tokens


def test_a_chat_repeats_itself():
    requests = write_trace("chat", SCALE).requests
    for request in requests:
        if request.after is not None:
            earlier = requests[request.after].answered.tokens()
            assert request.prompt.tokens()[: len(earlier)] == earlier


def test_an_edited_chat_does_not_always():
    requests = write_trace("edited", 0.3).requests
    lost = []
    for request in requests:
        if request.after is not None:
            earlier = requests[request.after]
            prompt, said = request.prompt.tokens(), earlier.answered.tokens()
            lost.append(earlier.num_prompt_tokens - common_tokens(prompt, said))
    assert any(tokens > 0 for tokens in lost)  # the message was edited
    assert any(tokens == 0 for tokens in lost)  # the answer was replaced
    assert any(tokens < 0 for tokens in lost)  # the conversation went on
