# SPDX-License-Identifier: Apache-2.0
"""What requests and engines are made of where an engine offloads."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from support.connector.paged_layouts import PagedLayout
from support.scheduler.layouts import Layout
from support.scheduler.token_stream import VOCAB_SIZE
from support.scheduler.workload import RequestPlan

_GIB = 1 << 30
_MAX_NEW_TOKENS = 32
_MAX_PROMPT_UNITS = 6
_MAX_PROMPT_TOKENS = 960


def chats(rng: random.Random, layout: Layout, num_requests: int) -> Iterator[RequestPlan]:
    """Requests by arrival, whose prompts extend each other, or share a beginning.

    Some are edited in the middle, or too short to be stored.
    """
    max_prompt_tokens = max(_MAX_PROMPT_UNITS * layout.unit_tokens, 96)
    max_prompt_tokens = min(max_prompt_tokens, _MAX_PROMPT_TOKENS)
    lengths = range(max_prompt_tokens // 6, max_prompt_tokens // 2)
    roots = [tokens(rng, rng.choice(lengths)) for _ in range(3)]
    answered: list[tuple[list[int], str | None, str | None]] = []
    step = 0
    for number in range(num_requests):
        kind = rng.random()
        salt = rng.choice((None, None, None, "salt"))
        adapter = rng.choice((None, None, None, "adapter-0"))
        if answered and kind < 0.55:
            prompt, salt, adapter = rng.choice(answered[-6:])
            prompt = prompt + tokens(rng, rng.randrange(1, 20))
        elif answered and kind < 0.65:
            prompt, salt, adapter = rng.choice(answered)
            place = rng.randrange(len(prompt))
            prompt = [*prompt[:place], *tokens(rng, 1), *prompt[place + 1 :]]
        elif kind < 0.7:
            prompt = tokens(rng, rng.randrange(1, 8))
        else:
            prompt = [*rng.choice(roots), *tokens(rng, rng.randrange(max_prompt_tokens // 3))]
        plan = RequestPlan(
            request_id=f"request-{number}",
            arrival_step=step,
            prompt=tuple(prompt[:max_prompt_tokens]),
            max_tokens=rng.randrange(1, rng.choice((3, _MAX_NEW_TOKENS))),
            stop_tokens=(rng.randrange(VOCAB_SIZE),),
            adapter=adapter,
            cache_salt=salt,
        )
        yield plan
        answered.append(([*plan.prompt, *plan.expected_output()], salt, adapter))
        step += rng.choice((0, 0, 0, 1, 2, 5))


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def offloading(layout: PagedLayout, **values: Any) -> dict[str, Any]:
    """A ``kv_connector_extra_config``: everything is stored, and every hit is loaded."""
    return {
        "host_memory_gib": layout.host_bytes[-1] / _GIB,
        "chunk_tokens": 2 * layout.unit_tokens,
        "store_policy": "all",
        "load_if_slower": True,
    } | values


def blocks_for_longest(
    layout: Layout, requests: tuple[RequestPlan, ...], max_num_batched_tokens: int
) -> int:
    """Blocks that the longest request needs when it runs alone."""
    longest_tokens = max(len(plan.prompt) + plan.max_tokens for plan in requests)
    num_blocks = 0
    for group in layout.groups:
        held_tokens = longest_tokens
        if group.span_tokens:
            held_tokens = min(held_tokens, group.span_tokens + max_num_batched_tokens)
        num_blocks += -(-held_tokens // group.block_tokens) + 2
    return num_blocks
