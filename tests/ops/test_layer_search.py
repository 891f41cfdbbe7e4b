# SPDX-License-Identifier: Apache-2.0
"""Which layer finds what a question asks for: from queries and keys."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_ascend_kvext.blending.errors import BlendingError
from vllm_ascend_kvext.blending.layer_search import (
    MARGIN_TOKENS,
    MIN_SHARE,
    CopyPrompt,
    LayerSearchWorker,
    best_layer,
    copy_prompt,
    found_share,
    mean_shares,
)

VOCABULARY_TOKENS = 300
NUM_TOKENS = 120
NUM_COPIED = 8
HEADS, KEY_HEADS, HEAD_ELEMENTS = 4, 2, 2 * VOCABULARY_TOKENS


class Attention(torch.nn.Module):
    """A layer's attention, of one head."""

    head_size = 16
    impl = SimpleNamespace(scale=1.0)

    def __init__(self, window_tokens: int | None) -> None:
        super().__init__()
        self.sliding_window = window_tokens

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query


class Worker(LayerSearchWorker):
    """Whose model has a layer with full attention between two with windows."""

    def __init__(self) -> None:
        model = torch.nn.Sequential(*(Attention(window) for window in (8, None, 8)))
        names = [f"layers.{index}" for index in range(len(model))]
        config = SimpleNamespace(static_forward_context=dict(zip(names, model, strict=True)))
        self.get_model = lambda: model
        self.model_runner = SimpleNamespace(
            vllm_config=SimpleNamespace(compilation_config=config),
            kv_cache_config=SimpleNamespace(
                kv_cache_groups=[
                    SimpleNamespace(layer_names=group) for group in (names[1:2], names[::2])
                ]
            ),
        )

    def compute(self, *steps_tokens: int) -> dict[str, float | None]:
        """A prompt, in steps of so many tokens."""
        prompt: Any = some_prompt(3)
        self.kvext_begin_copy(*prompt)
        for num_tokens in steps_tokens:
            tokens = torch.zeros(num_tokens, Attention.head_size)
            for layer in self.get_model():
                layer(tokens, key=tokens)
        return self.kvext_end_copy()


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
    assert best_layer({0: 0.5 * MIN_SHARE, 3: 0.9 * MIN_SHARE}) is None
    assert best_layer({0: 0.5 * MIN_SHARE, 3: 3 * MIN_SHARE, 5: 2 * MIN_SHARE}) == 3


def test_layers_are_named_in_the_order_of_the_model() -> None:
    found = Worker().compute(NUM_TOKENS)
    assert list(found) == ["layers.0", "layers.1", "layers.2"]
    assert [share is None for share in found.values()] == [True, False, True]


@pytest.mark.parametrize("steps_tokens", [(), (NUM_TOKENS // 2, NUM_TOKENS - NUM_TOKENS // 2)])
def test_what_was_not_looked_at_says_nothing_of_a_layer(steps_tokens: tuple[int, ...]) -> None:
    with pytest.raises(BlendingError, match=r"layer layers\.1: expected a step that computes all"):
        Worker().compute(*steps_tokens)


def test_layers_are_counted_over_all_stages_of_a_pipeline() -> None:
    stages = {"layers.0": [None, None], "layers.1": [0.25, 0.75]}, {"layers.2": [0.5, 0.0]}
    assert mean_shares(stages[0] | stages[1]) == {1: 0.5, 2: 0.25}
