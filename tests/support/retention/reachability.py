# SPDX-License-Identifier: Apache-2.0
"""What a conversation can hit at each point of its life, and what keeping that costs.

Used on plain geometries (tests/engine) and on those of vllm-ascend (tests/ascend).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from support.scheduler.block_manager import BlockManager
from vllm_ascend_kvext.patches.retention.kv_cache_coordinator import retention_of

Hits = dict[str, int]
"""Name of a point in the life of a request -> tokens that a lookup hits there."""


def eagle_sets(num_groups: int) -> Iterator[frozenset[int]]:
    """Every choice of groups that look ahead."""
    for size in range(num_groups + 1):
        for group_ids in itertools.combinations(range(num_groups), size):
            yield frozenset(group_ids)


def serve_conversation(
    world: BlockManager,
    num_prompt_tokens: int,
    unit_tokens: int,
    preempt_every: int = 1,
    observe: Callable[[str], None] = lambda moment: None,
) -> Hits:
    """Serve one request from its prompt to its end and record what can be hit.

    The prompt is prefilled in chunks, once preempted after its first chunk; then tokens are
    decoded across two boundaries, with a preemption and a resumption every few tokens. Lengths,
    chunks and tokens depend on the arguments only.

    Args:
        world: A manager with an empty cache and room for everything.
        unit_tokens: The granularity of hits.
        preempt_every: Decoded tokens between two preemptions.
        observe: Called with "running" after each step, with "released" when the request holds no
            blocks.
    """
    rng = random.Random(num_prompt_tokens)
    chunk_tokens = rng.choice((3, unit_tokens, 2 * unit_tokens + 1, 1 << 20))
    prompt = [rng.randrange(1000) for _ in range(num_prompt_tokens)]
    answer = [rng.randrange(1000) for _ in range(2 * unit_tokens + 1)]
    request = world.request(prompt)
    hits: Hits = {}

    def resume(moment: str) -> None:
        world.preempt(request)
        observe("released")
        hits[f"resume {moment}"] = world.admit(request, chunk_tokens)
        observe("running")
        finish_prefill()

    def finish_prefill() -> None:
        while request.num_computed_tokens < request.num_tokens:
            world.step(request, chunk_tokens)
            observe("running")

    world.admit(request, chunk_tokens)
    observe("running")
    resume("in prefill")
    for i, token_id in enumerate(answer):
        world.decode(request, [token_id])
        observe("running")
        if i % preempt_every == 0:
            hits[f"resend after {i} tokens"] = world.hit_tokens(world.request(prompt))
            resume(f"after {i} tokens")
    world.finish(request)
    observe("released")
    hits["resend"] = world.hit_tokens(world.request(prompt))
    next_turn = [*request.all_token_ids, *prompt[:3], 0]
    hits["next turn"] = world.hit_tokens(world.request(next_turn))
    return hits


def serve_prompt_only(world: BlockManager, num_prompt_tokens: int) -> Hits:
    """Serve a request that ends with its first token, and extend it."""
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
    """Where two worlds differ, counted per point in the life of a request."""

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


class Price:
    """Cached blocks of each sliding-window group against the price of two tails."""

    def __init__(self, world: BlockManager) -> None:
        retention = retention_of(world.manager.coordinator)
        geometry = retention.policy.geometry
        groups = {
            group.manager.kv_cache_group_id: geometry.groups[group.geometry_index]
            for group in retention.sparse_groups
        }
        self._world = world
        self._tail_blocks = {
            group_id: group.window_blocks + group.looks_ahead for group_id, group in groups.items()
        }
        self.excess_tails = {"running": 0.0, "released": 0.0}

    def observe(self, moment: str) -> None:
        cached = self._world.cached_blocks()
        for group_id, tail_blocks in self._tail_blocks.items():
            excess = cached[group_id] / tail_blocks - 2
            self.excess_tails[moment] = max(self.excess_tails[moment], excess)
