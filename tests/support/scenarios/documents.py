# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Prompts of documents in some order, made of random tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

from support.scenarios.engine import VOCABULARY_TOKENS, Prompt, Tokens

SEPARATOR = [3, 2]
"""Token ids that occur nowhere else. Random tokens are larger."""

STORED_LENGTHS = (137, 203, 90, 300, 171, 171)
"""The lengths of documents. All end inside blocks and chunks. The last two are equal."""
MISSING = len(STORED_LENGTHS)
"""The number of the document that is not stored."""


def random_tokens(rng: random.Random, num_tokens: int) -> Tokens:
    return rng.choices(range(4, VOCABULARY_TOKENS), k=num_tokens)


def documents(rng: random.Random) -> list[Tokens]:
    """The stored documents, and the missing one."""
    return [random_tokens(rng, length) for length in (*STORED_LENGTHS, 155)]


def in_order(
    rng: random.Random,
    texts: Sequence[Tokens],
    order: Sequence[int],
    instructions: Tokens | None = None,
    question_tokens: int | None = None,
) -> Prompt:
    """Instructions, documents with a few tokens behind each, and a question."""
    token_ids = list(instructions or random_tokens(rng, rng.randrange(5, 70)))
    segments = []
    for index in order:
        segments.append([len(token_ids), len(token_ids) + len(texts[index])])
        token_ids += texts[index] + random_tokens(rng, rng.randrange(4))
    question = random_tokens(rng, question_tokens or rng.randrange(10, 40))
    return Prompt(token_ids + question, segments)


def separated(rng: random.Random, texts: Sequence[Tokens], order: Sequence[int]) -> Prompt:
    """Instructions, documents with a separator around each, and a question."""
    token_ids = random_tokens(rng, 23) + SEPARATOR
    segments = []
    for index in order:
        segments.append([len(token_ids), len(token_ids) + len(texts[index])])
        token_ids += texts[index] + SEPARATOR
    return Prompt(token_ids + random_tokens(rng, 30), segments, is_named=False)
