# SPDX-License-Identifier: Apache-2.0
"""Which layer finds what a question asks for: from queries and keys."""

from __future__ import annotations

import random

import pytest
import torch

from vllm_ascend_kvext.blending.errors import BlendingError
from vllm_ascend_kvext.blending.layer_search import (
    LEAST_SHARE,
    MARGIN_TOKENS,
    CopyPrompt,
    best_layer,
    copy_prompt,
    found_share,
)

VOCABULARY_TOKENS = 300
NUM_TOKENS = 120
NUM_COPIED = 8
HEADS, KEY_HEADS, HEAD_ELEMENTS = 4, 2, 2 * VOCABULARY_TOKENS


def some_prompt(seed: int) -> CopyPrompt:
    return copy_prompt(random.Random(seed), [1], VOCABULARY_TOKENS, NUM_TOKENS, NUM_COPIED)


@pytest.mark.parametrize("seed", range(20))
def test_prompts_end_with_a_copy(seed: int) -> None:
    prompt = some_prompt(seed)
    assert len(prompt.token_ids) == NUM_TOKENS and prompt.token_ids[0] == 1
    end = prompt.copied + NUM_COPIED
    assert prompt.token_ids[prompt.copied : end] == prompt.token_ids[-NUM_COPIED:]
    assert prompt.copied > MARGIN_TOKENS and end + MARGIN_TOKENS <= NUM_TOKENS - NUM_COPIED


def test_prompts_are_long_enough() -> None:
    with pytest.raises(BlendingError, match="expected at least 49 tokens behind the first 1"):
        copy_prompt(random.Random(0), [1], VOCABULARY_TOKENS, 49, NUM_COPIED)
    copy_prompt(random.Random(0), [1], VOCABULARY_TOKENS, 50, NUM_COPIED)


def retrieving(prompt: CopyPrompt, distance: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A query asks for the token some places behind the one that is its own."""
    one_hot = torch.nn.functional.one_hot(torch.tensor(prompt.token_ids), HEAD_ELEMENTS).float()
    keys = one_hot.roll(distance, 0)[:, None].expand(-1, KEY_HEADS, -1)
    return 20 * one_hot[:, None].expand(-1, HEADS, -1), keys


def test_a_layer_that_attends_to_what_followed_has_all_of_it() -> None:
    prompt = some_prompt(3)
    assert found_share(*retrieving(prompt, 1), 1.0, prompt) > 0.9
    assert found_share(*retrieving(prompt, 20), 1.0, prompt) < 0.05


def test_a_layer_that_attends_to_all_alike_has_its_share() -> None:
    prompt = some_prompt(3)
    queries = torch.zeros(NUM_TOKENS, HEADS, 16)
    keys = torch.zeros(NUM_TOKENS, KEY_HEADS, 16)
    expected = NUM_COPIED / (NUM_TOKENS - NUM_COPIED - 1 - MARGIN_TOKENS)
    assert found_share(queries, keys, 1.0, prompt) == pytest.approx(expected)


def test_what_goes_to_the_first_tokens_is_not_counted() -> None:
    prompt = some_prompt(3)
    queries, keys = retrieving(prompt, 1)
    keys = keys.clone()
    keys[0] = 2 / HEAD_ELEMENTS**0.5  # An attention sink.
    assert found_share(queries, keys, 1.0, prompt) > 0.9


def test_the_best_layer_has_to_be_good() -> None:
    assert best_layer({}) is None
    assert best_layer({0: 0.5 * LEAST_SHARE, 3: 0.9 * LEAST_SHARE}) is None
    assert best_layer({0: 0.5 * LEAST_SHARE, 3: 3 * LEAST_SHARE, 5: 2 * LEAST_SHARE}) == 3
