# SPDX-License-Identifier: Apache-2.0
"""How much some queries attend to some keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MOST_LOGITS = 1 << 24
"""That are in memory at a time: 64 MiB of them."""


def attention_scores(queries: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """The attention probabilities of each key, summed over queries and their heads.

    That other keys compete, those of the question itself included, matters: in SmolLM2-135M the
    run with the answer was among the best tenth of 40 questions' runs in 85 %, and without them in
    72 %.

    Args:
        queries: Of consecutive tokens. shape: [num_queries, num_query_heads, head_elements].
        keys: Of all tokens up to the last of these; each query sees those up to its own. Query
            heads share key heads in groups of consecutive ones. shape: [num_keys, num_key_heads,
            head_elements].
        scale: Of the products.

    Returns:
        dtype: float32, as all of the computation. shape: [num_keys].
    """
    import torch

    num_queries, num_query_heads, _ = queries.shape
    num_keys, num_key_heads, _ = keys.shape
    heads_of_key = num_query_heads // num_key_heads
    scores = torch.zeros(num_keys, dtype=torch.float32)
    places = torch.arange(num_keys)
    own_places = places[num_keys - num_queries :]
    most_queries = max(1, MOST_LOGITS // max(1, num_keys * heads_of_key))
    for key_head in range(num_key_heads):
        first = key_head * heads_of_key
        # shape: [heads_of_key, num_queries, head_elements].
        of_head = queries[:, first : first + heads_of_key].float().transpose(0, 1) * scale
        transposed = keys[:, key_head].float().T
        for some, own in zip(
            of_head.split(most_queries, dim=1), own_places.split(most_queries), strict=True
        ):
            logits = some @ transposed
            logits.masked_fill_(places > own[:, None], float("-inf"))
            scores += torch.softmax(logits, dim=-1).sum(dim=(0, 1))
    return scores
