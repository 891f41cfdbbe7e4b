# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Compares the scores of a first pass with plain torch, for prompts of ``scenarios.question``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from support.blending.oracle import Oracle, Reused
from support.blending.served import MIN_TOKENS
from support.scenarios.question import MISSING, ORDERS, PROMPTS, STEP_TOKENS

SCORE_TOLERANCE = 1e-3
MAX_TOKENS = max(len(prompt.token_ids) for prompt in PROMPTS)


def behind_heads(place: int, head_tokens: int) -> list[list[int]]:
    """The stored tokens of a prompt that the selector `heads` would reuse."""
    return [
        [first + head_tokens, end]
        for (first, end), number in zip(PROMPTS[place].segments, ORDERS[place], strict=True)
        if number != MISSING and end - first - head_tokens >= MIN_TOKENS
    ]


def score_errors(
    oracle: Oracle, probe: Mapping[str, Any], place: int, head_tokens: int, check_layer: int
) -> tuple[float, float]:
    """The largest differences of a probe's scores: from the oracle's, and from those of a control.

    Heads are not computed. If the text behind the reused segments is long, only its end is
    computed. The question is the text behind the last segment, stored or not. The control computes
    segments anew.
    """
    asked = PROMPTS[place]
    reuse_ends = behind_heads(place, head_tokens)[-1][1]
    stored = [
        [first, end]
        for (first, end), number in zip(asked.segments, ORDERS[place], strict=True)
        if number != MISSING and end <= reuse_ends
    ]
    assert probe["scored"] == stored
    num_behind = min(len(asked.token_ids) - reuse_ends, STEP_TOKENS // 2)
    num_asked = min(len(asked.token_ids) - asked.segments[-1][1], num_behind)
    prompt = [*asked.token_ids[:reuse_ends], *asked.token_ids[-num_behind:]]
    is_scored = torch.zeros(len(prompt), dtype=torch.bool)
    for first, end in stored:
        is_scored[first:end] = True
    reused = [Reused(first, end, (first, end)) for first, end in stored]
    expected, computed = (
        oracle.scores(prompt, each, num_asked, check_layer)[is_scored] for each in (reused, ())
    )
    scores = torch.tensor(probe["scores"])
    return float((scores - expected).abs().max()), float((scores - computed).abs().max())
