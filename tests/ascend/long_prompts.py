# SPDX-License-Identifier: Apache-2.0
"""Requests on the true layouts, whose hits are thousands of tokens apart.

`support.retention.reachability` walks through every token of a life. Here only the moments around
one length are visited, for which a few steps are enough.
"""

from __future__ import annotations

from collections.abc import Sequence

from support.retention.reachability import Hits
from support.scheduler.block_manager import BlockManager

NUM_BLOCKS = 16000
"""Room for three units of every group, cached densely."""

CHUNK_TOKENS = 2048
FIRST_OUTPUT = 1 << 24
"""Token ids of outputs; those of prompts lie below, so that no prefix repeats by accident."""


def prompt(num_tokens: int) -> list[int]:
    return list(range(num_tokens))


def outputs(num_tokens: int) -> range:
    return range(FIRST_OUTPUT, FIRST_OUTPUT + num_tokens)


def serve(world: BlockManager, token_ids: Sequence[int], num_output_tokens: int = 0) -> None:
    """Run a request from admission to its end."""
    request = world.request(token_ids)
    world.prefill(request, CHUNK_TOKENS)
    world.decode(request, outputs(num_output_tokens))
    world.finish(request)


def hits_around(world: BlockManager, num_tokens: int) -> Hits:
    """What lookups hit when a request has computed ``num_tokens`` tokens, in four situations."""
    return {
        **_finished(world, num_tokens),
        **_preempted_in_prefill(world, num_tokens),
        **_preempted_in_decode(world, num_tokens),
    }


def _finished(world: BlockManager, num_tokens: int) -> Hits:
    world.reset()
    serve(world, prompt(num_tokens))
    next_turn = [*prompt(num_tokens), *outputs(300)]
    return {
        "resend": world.hit_tokens(world.request(prompt(num_tokens))),
        "next turn": world.hit_tokens(world.request(next_turn)),
    }


def _preempted_in_prefill(world: BlockManager, num_tokens: int) -> Hits:
    world.reset()
    request = world.request(prompt(num_tokens + 300))
    world.admit(request, min(CHUNK_TOKENS, num_tokens))
    while request.num_computed_tokens < num_tokens:
        world.step(request, min(CHUNK_TOKENS, num_tokens - request.num_computed_tokens))
    return {"resume in prefill": _resume_and_finish(world, request)}


def _preempted_in_decode(world: BlockManager, num_tokens: int) -> Hits:
    """The boundaries next to ``num_tokens`` are crossed by decoding, one token at a time."""
    world.reset()
    num_prompt_tokens = max(1, num_tokens - 10)
    request = world.request(prompt(num_prompt_tokens))
    world.prefill(request, CHUNK_TOKENS)
    world.decode(request, outputs(num_tokens - num_prompt_tokens + 1))
    return {"resume after decoding": _resume_and_finish(world, request)}


def _resume_and_finish(world: BlockManager, request) -> int:
    world.preempt(request)
    hit_tokens = world.prefill(request, CHUNK_TOKENS)
    world.finish(request)
    return hit_tokens
