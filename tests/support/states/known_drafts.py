# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Drafts that are right with a given probability, in place of drafts by n-grams.

A model with random weights says nothing that could be guessed. A test therefore tells the proposer
the replies, for instance those of the same prompts before. Drafts for other sequences are random.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

RIGHT_SHARE = 0.8
"""The probability that a draft token is the right one."""


class KnownReplies:
    """Replies by their prompts, and the draft tokens that follow from them.

    Args:
        vocabulary_tokens: The number of tokens that random drafts are drawn from.
    """

    def __init__(self, vocabulary_tokens: int) -> None:
        self._vocabulary_tokens = vocabulary_tokens
        self._rng = random.Random("drafts")
        self._replies: dict[tuple[int, ...], Sequence[int]] = {}
        self._lengths: list[int] = []

    def learn(self, prompt: Sequence[int], reply: Sequence[int]) -> None:
        """Remember the longest reply to a prompt."""
        key = tuple(prompt)
        if len(reply) > len(self._replies.get(key, ())):
            self._replies[key] = reply
            self._lengths = sorted({*map(len, self._replies)}, reverse=True)

    def drafts(self, tokens: Sequence[int], num_drafts: int) -> list[int]:
        """The drafts behind a sequence."""
        found = []
        for known in self._rest(tokens)[:num_drafts]:
            found.append(known if self._rng.random() < RIGHT_SHARE else self._random())
        return found + [self._random() for _ in range(num_drafts - len(found))]

    def _random(self) -> int:
        return self._rng.randrange(self._vocabulary_tokens)

    def _rest(self, tokens: Sequence[int]) -> Sequence[int]:
        """What follows the sequence in a known reply. Empty if none is known."""
        for length in self._lengths:
            reply = self._replies.get(tuple(tokens[:length])) if length < len(tokens) else None
            begun = list(tokens[length:])
            if reply is not None and list(reply[: len(begun)]) == begun:
                return reply[len(begun) :]
        return ()


@contextmanager
def in_place(known: KnownReplies, is_on: bool = True) -> Iterator[None]:
    """Inside the block, engines that draft by n-grams get drafts from known replies.

    An engine that was made inside keeps them.
    """
    from vllm.v1.spec_decode import ngram_proposer

    own = ngram_proposer.NgramProposer

    class Proposer(own):  # type: ignore[misc, valid-type]
        """A proposer that the runner takes for vLLM's."""

        def __init__(self, vllm_config: Any) -> None:
            self._num_drafts = vllm_config.speculative_config.num_speculative_tokens

        def propose(self, *args: Any, **more: Any) -> list[list[int]]:
            # Release 0.30 passes the number of drafts first.
            sampled, num_tokens, token_ids = (args[1:] if isinstance(args[0], int) else args)[:3]
            found: list[list[int]] = []
            for row, new in enumerate(sampled):
                tokens = token_ids[row, : int(num_tokens[row])].tolist()
                found.append(known.drafts(tokens, self._num_drafts) if len(new) else [])
            return found

        def load_model(self, *args: Any, **more: Any) -> None:
            """There is no model."""

    ngram_proposer.NgramProposer = Proposer if is_on else own
    yield
    ngram_proposer.NgramProposer = own
