# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Documents of facts, of which some refer to a fact in an earlier document, and questions.

A document is 15 tokens: a mark, three facts of four tokens, and two tokens of noise between them.

    <document> <is> key value <end>  noise  <same> key other key <end> ...

``<same> key other key`` says that ``key`` has the same value as ``other key``, a plain fact in an
earlier document. A document that is computed alone cannot know that value. What its KV says of the
value comes from the context. A prompt is the beginning-of-sequence token, documents, and ``<ask>
key``; the answer is the one token that comes next.

The module knows neither a model nor an engine. Its functions take and return arrays of numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BOS, EOS, DOCUMENT, IS, SAME, END, ASK = range(7)
NUM_NOISE = 9
NUM_KEYS = 56
NUM_VALUES = 56
FIRST_NOISE = 7
FIRST_KEY = FIRST_NOISE + NUM_NOISE
FIRST_VALUE = FIRST_KEY + NUM_KEYS
VOCABULARY_TOKENS = FIRST_VALUE + NUM_VALUES

FACTS_PER_DOCUMENT = 3
FACT_TOKENS = 4
NOISE_PER_DOCUMENT = 2
DOCUMENT_TOKENS = 1 + FACTS_PER_DOCUMENT * FACT_TOKENS + NOISE_PER_DOCUMENT
NUM_DOCUMENTS = 8
"""The number of documents in a prompt."""

SHARE_OF_REFERENCES = 0.4
"""The share of references among the facts that have a document before them."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Prompts with one question each, about a fact that refers to an earlier document.

    Attributes:
        tokens: The beginning of sequence, documents and question. shape: [prompts, tokens].
        answers: The tokens of the answers. shape: [prompts].
    """

    tokens: np.ndarray
    answers: np.ndarray


def ask_references(rng: np.random.Generator, num_prompts: int) -> Asked:
    """Make random prompts. Prompts without a reference are left out.

    No key occurs in two facts of a prompt.
    """
    num_facts = NUM_DOCUMENTS * FACTS_PER_DOCUMENT
    keys = _distinct(rng, num_prompts, NUM_KEYS)[:, :num_facts] + FIRST_KEY
    values = rng.integers(FIRST_VALUE, FIRST_VALUE + NUM_VALUES, (num_prompts, num_facts))
    document_of = np.arange(num_facts) // FACTS_PER_DOCUMENT
    is_reference = (document_of > 0) & (rng.random(keys.shape) < SHARE_OF_REFERENCES)
    # Each reference refers to a random plain fact of an earlier document.
    is_target = ~is_reference[:, None, :] & (document_of[None, :] < document_of[:, None])
    draws = np.where(is_target, rng.random(is_target.shape), -1.0)
    targets = draws.argmax(axis=2)
    is_reference &= is_target.any(axis=2)
    answers = np.where(is_reference, np.take_along_axis(values, targets, 1), values)
    said = np.where(is_reference, np.take_along_axis(keys, targets, 1), values)
    relation = np.where(is_reference, SAME, IS)
    documents = _documents(rng, np.stack([relation, keys, said, np.full_like(keys, END)], axis=2))
    chosen = np.where(is_reference, rng.random(keys.shape), -1.0).argmax(axis=1)[:, None]
    start, ask = (np.full((num_prompts, 1), token) for token in (BOS, ASK))
    asked_keys = np.take_along_axis(keys, chosen, 1)
    tokens = np.concatenate([start, documents.reshape(num_prompts, -1), ask, asked_keys], axis=1)
    has_reference = is_reference.any(axis=1)
    return Asked(tokens[has_reference], np.take_along_axis(answers, chosen, 1)[has_reference, 0])


def _documents(rng: np.random.Generator, facts: np.ndarray) -> np.ndarray:
    """Documents of facts with noise between them. facts: shape: [prompts, facts, FACT_TOKENS]."""
    num_documents = facts.shape[1] // FACTS_PER_DOCUMENT
    shape = (len(facts) * num_documents, DOCUMENT_TOKENS)
    # The pieces of a document are its facts and its noise in random order; facts ascend.
    num_pieces = FACTS_PER_DOCUMENT + NOISE_PER_DOCUMENT
    is_fact = _distinct(rng, shape[0], num_pieces) < FACTS_PER_DOCUMENT
    lengths = np.where(is_fact, FACT_TOKENS, 1)
    first = 1 + np.cumsum(lengths, axis=1) - lengths
    documents = np.empty(shape, dtype=np.int64)
    documents[:, 0] = DOCUMENT
    rows = np.arange(shape[0])[:, None]
    noise = rng.integers(FIRST_NOISE, FIRST_NOISE + NUM_NOISE, (shape[0], NOISE_PER_DOCUMENT))
    documents[rows, first[~is_fact].reshape(shape[0], -1)] = noise
    places = first[is_fact].reshape(shape[0], FACTS_PER_DOCUMENT, 1) + np.arange(FACT_TOKENS)
    documents[rows, places.reshape(shape[0], -1)] = facts.reshape(shape[0], -1)
    return documents.reshape(len(facts), num_documents, DOCUMENT_TOKENS)


def _distinct(rng: np.random.Generator, num_rows: int, num_choices: int) -> np.ndarray:
    """A permutation per row."""
    return rng.random((num_rows, num_choices)).argsort(axis=1)
