# SPDX-License-Identifier: Apache-2.0
"""Which layer of a model finds what a question asks for.

Asked without any text: random tokens, some of which come a second time at the end. A layer that
retrieves attends from these to the tokens that followed them the first time, as induction heads do
(Olsson et al., arXiv 2209.11895)::

    ... 71 13 [52 88 40] 97 36 ............... [52 88 40]
                  '--'---'-- attended to by ----'--'--'

In SmolLM2-135M, the layer with the largest share, 18 of 30, is also the one that finds the sentence
with the answer to a question most often; so is the second, 17.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, NamedTuple

from vllm_ascend_kvext.blending.errors import BlendingError
from vllm_ascend_kvext.blending.question_scores import attention_scores

if TYPE_CHECKING:
    import torch

LEAST_SHARE = 0.1
"""Of the layer that is chosen. In SmolLM2-135M it is 0.4 to 0.5, and less than 0.03 in half of the
layers."""

MARGIN_TOKENS = 16
"""Copied tokens do not stand so near to the beginning, or to the copy. What goes to so many first
tokens is not counted: they are attended to whatever is asked for."""


class CopyPrompt(NamedTuple):
    """A prompt that ends with a copy.

    Attributes:
        token_ids: All of it.
        num_first: What it begins with, beside random tokens.
        copied: The index of the first token that is copied.
        num_copied: Tokens, which stand at the end once more.
    """

    token_ids: tuple[int, ...]
    num_first: int
    copied: int
    num_copied: int


def copy_prompt(
    rng: random.Random,
    first_ids: Sequence[int],
    vocabulary_tokens: int,
    num_tokens: int,
    num_copied_tokens: int,
) -> CopyPrompt:
    """Random tokens, and some of them once more.

    Args:
        rng: Draws.
        first_ids: What a prompt begins with, such as the token for the beginning of a sequence.
        vocabulary_tokens: Of the model.
        num_tokens: Of the prompt.
        num_copied_tokens: At its end.

    Raises:
        BlendingError: The prompt is too short.
    """
    num_random = num_tokens - len(first_ids) - num_copied_tokens
    num_places = num_random - 2 * MARGIN_TOKENS - num_copied_tokens
    if num_copied_tokens < 1 or num_places < 1:
        raise BlendingError(
            f"prompt: expected at least {2 * MARGIN_TOKENS + 2 * num_copied_tokens + 1} tokens "
            f"behind the first {len(first_ids)}, and a copy of at least one of them, found "
            f"{num_tokens} with a copy of {num_copied_tokens}. Ask for a longer prompt."
        )
    token_ids = [*first_ids, *(rng.randrange(vocabulary_tokens) for _ in range(num_random))]
    first = len(first_ids) + MARGIN_TOKENS + rng.randrange(num_places)
    copy = token_ids[first : first + num_copied_tokens]
    return CopyPrompt((*token_ids, *copy), len(first_ids), first, num_copied_tokens)


def found_share(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, prompt: CopyPrompt
) -> float:
    """How much of what a copy attends to are tokens that follow one of the original's.

    Args:
        queries: Of the whole prompt, rotated. shape: [num_tokens, num_query_heads, head_elements].
        keys: The same. shape: [num_tokens, num_key_heads, head_elements].
        scale: Of the products.
        prompt: That was computed.

    Returns:
        From 0 to 1, of the attention probabilities between the first tokens and the copy.
    """
    num_tokens = len(prompt.token_ids)
    first_of_copy = num_tokens - prompt.num_copied
    scores = attention_scores(queries[first_of_copy:num_tokens], keys[:num_tokens], scale)
    followers = slice(prompt.copied + 1, prompt.copied + prompt.num_copied + 1)
    between = slice(prompt.num_first + MARGIN_TOKENS, first_of_copy)
    total = float(scores[between].sum())
    return float(scores[followers].sum()) / total if total else 0.0


def mean_shares(of_layers: Mapping[str, Sequence[float | None]]) -> dict[int, float]:
    """What has been found, by the index of a layer among those of the model that have pages.

    Args:
        of_layers: By name, in the order of the model, whoever computes them: shares of prompts.
            None of a layer without full attention, which has an index all the same.
    """
    means = {}
    for index, shares in enumerate(of_layers.values()):
        found = [share for share in shares if share is not None]
        if found:
            means[index] = mean(found)
    return means


def best_layer(shares: Mapping[int, float]) -> int | None:
    """The layer that attends most to what is asked for; None if none of them does.

    Args:
        shares: Means over prompts, by the index of the layer.
    """
    if not shares:
        return None
    index = max(shares, key=shares.__getitem__)
    return index if shares[index] >= LEAST_SHARE else None
