# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Measures what a conversation can hit at each point of its life, and the cost of keeping it.

The layouts are those of the chosen family of managers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.v1.request import Request

from support.retention import inspection
from support.retention.started import retention_of
from support.scheduler.block_manager import BlockManager

Hits = dict[str, int]
"""The tokens that a lookup hits at each named point in the life of a request."""


class UnderPressure(BlockManager):
    """A cache in which other requests take all surplus blocks before each lookup."""

    def request(self, token_ids: Sequence[int], **arguments: object) -> Request:
        retained = retention_of(self.manager.coordinator).cache_state
        self.pool.evict_blocks(set(inspection.surplus(retained)))
        return super().request(token_ids, **arguments)

    def preempt(self, request: Request) -> None:
        super().preempt(request)
        retained = retention_of(self.manager.coordinator).cache_state
        self.pool.evict_blocks(set(inspection.surplus(retained)))


def serve_conversation(
    world: BlockManager,
    num_prompt_tokens: int,
    unit_tokens: int,
    preempt_every: int = 1,
) -> Hits:
    """Serve one request from its prompt to its end. Record what can be hit.

    The prompt is prefilled in chunks, with a preemption after the first chunk. Then tokens are
    decoded across two boundaries, with a preemption and a resumption every few tokens. Lengths,
    chunks and tokens depend only on the arguments.
    """
    rng = random.Random(num_prompt_tokens)
    chunk_tokens = rng.choice((3, unit_tokens, 2 * unit_tokens + 1, 1 << 20))
    prompt = [rng.randrange(1000) for _ in range(num_prompt_tokens)]
    answer = [rng.randrange(1000) for _ in range(2 * unit_tokens + 1)]
    request = world.request(prompt)
    hits: Hits = {}

    def resume(moment: str) -> None:
        world.preempt(request)
        hits[f"resume {moment}"] = world.admit(request, chunk_tokens)
        finish_prefill()

    def finish_prefill() -> None:
        while request.num_computed_tokens < request.num_tokens:
            world.step(request, chunk_tokens)

    world.admit(request, chunk_tokens)
    resume("in prefill")
    for i, token_id in enumerate(answer):
        world.decode(request, [token_id])
        if i % preempt_every == 0:
            hits[f"resend after {i} tokens"] = world.hit_tokens(world.request(prompt))
            resume(f"after {i} tokens")
    world.finish(request)
    hits["resend"] = world.hit_tokens(world.request(prompt))
    next_turn = [*request.all_token_ids, *prompt[:3], 0]
    hits["next turn"] = world.hit_tokens(world.request(next_turn))
    return hits


def serve_prompt_only(world: BlockManager, num_prompt_tokens: int) -> Hits:
    """Serve a request that ends with its first token. Then serve a request that extends it."""
    rng = random.Random(num_prompt_tokens)
    prompt = [rng.randrange(1000) for _ in range(num_prompt_tokens)]
    request = world.request(prompt)
    world.prefill(request, 1 << 20)
    world.decode(request, [rng.randrange(1000)])
    world.finish(request)
    return {
        "resend": world.hit_tokens(world.request(prompt)),
        "prompt extended": world.hit_tokens(world.request([*prompt, 1, 2, 3])),
    }


@dataclass
class Difference:
    """The number of differences between two caches, by point in the life of a request."""

    num_cases: int = 0
    num_different: int = 0
    examples: dict[str, str] = field(default_factory=dict)

    def compare(self, case: str, expected: Hits, found: Hits) -> None:
        self.num_cases += 1
        self.num_different += expected != found
        for moment in expected:
            if expected[moment] != found[moment]:
                kind = moment.split(" after ")[0]
                self.examples.setdefault(
                    kind, f"{case}, {moment}: dense {expected[moment]}, sparse {found[moment]}"
                )
