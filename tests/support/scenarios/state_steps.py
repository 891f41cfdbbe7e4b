# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Prompts whose beginnings are cached up to each block. Steps end inside blocks."""

from __future__ import annotations

import random
from unittest import mock

from support.scenarios import engine, scenario
from support.scenarios.engine import CHUNK_TOKENS, random_tokens

PROMPT_TOKENS = 7 * CHUNK_TOKENS + 5

Engine = engine.Engine


@scenario
def branches(engine: Engine) -> None:
    """A prompt, and then prompts that share it up to each of its blocks."""
    rng = random.Random(0)
    prompt = random_tokens(rng, PROMPT_TOKENS)
    engine.ask("first", [prompt])
    for shared_tokens in range(CHUNK_TOKENS, PROMPT_TOKENS, CHUNK_TOKENS):
        engine.ask("branches", [prompt[:shared_tokens] + random_tokens(rng, 40)])


@scenario
def branches_past_blocks(engine: Engine) -> None:
    """The same prompts. Steps go beyond the end of the block in which they begin."""
    from vllm_ascend_kvext.patches.repairs import aligned_steps

    with mock.patch.object(aligned_steps, "within_block", lambda *arguments: arguments[-1]):
        branches(engine)
