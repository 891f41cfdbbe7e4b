# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Prompts that are answered three times. Before the last time, the values of a layer are lost.

The first answers are greedy. The answers after them use ``top_k``, which takes the path of sampled
tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

from support.scenarios import engine, scenario
from support.scenarios.engine import random_tokens, sampling_of

PROMPTS_TOKENS = (37, 300, 1100, 700)
"""Lengths of prompts: below a block, over some blocks, over a step, and beside another."""
LONGER_THAN_A_STEP_TOKENS = (710, 1300, 1153)
LONG_PROMPT_TOKENS = 20_000
STEP_TOKENS = 500
BEST_OF_ONE = {"temperature": 1, "top_k": 1, "top_p": 0.9}


class Engine(engine.Engine):
    """An engine that computes prompts in chunks, beside decoding requests."""

    def report(self) -> dict[str, Any]:
        return super().report() | {
            "is_async": self.scheduler.vllm_config.scheduler_config.async_scheduling,
            "runner": f"{type(self.runner).__module__}.{type(self.runner).__name__}",
        }


@scenario
def three_times(engine: Engine) -> None:
    rng = random.Random(0)
    prompts = [random_tokens(rng, length) for length in PROMPTS_TOKENS]
    engine.ask("first", prompts)
    engine.ask("cached", prompts, **BEST_OF_ONE)
    forget_values(engine.runner.kv_caches[1])
    engine.ask("spoiled", prompts, **BEST_OF_ONE)


@scenario
def longer_than_a_step(engine: Engine) -> None:
    """Prompts, one at a time: new, sent again, continued, and with a shared beginning."""
    rng = random.Random(3)
    prompts = [random_tokens(rng, length) for length in LONGER_THAN_A_STEP_TOKENS]
    more = [random_tokens(rng, 150) for _ in prompts]
    asked = {
        "first": prompts,
        "again": prompts,
        "next turn": [prompt + end for prompt, end in zip(prompts, more, strict=True)],
        "sibling": [prompt[:-100] + end for prompt, end in zip(prompts, more, strict=True)],
    }
    for label, of_label in asked.items():
        for prompt in of_label:
            engine.ask(label, [prompt], 8)


@scenario
def window_blocks(engine: Engine) -> None:
    """The blocks of a long prompt that stay cached. The prompt is scheduled, but not computed."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_group_id
    from vllm.v1.request import Request

    scheduler = engine.scheduler
    config = replace(scheduler.kv_cache_config, num_blocks=LONG_PROMPT_TOKENS)
    own = scheduler.kv_cache_manager.coordinator
    tokens = random_tokens(random.Random(0), LONG_PROMPT_TOKENS)
    for label in ("as it is", "by the configuration"):
        manager = KVCacheManager(
            config,
            max_model_len=LONG_PROMPT_TOKENS,
            max_in_flight_tokens=STEP_TOKENS,
            scheduler_block_size=own.scheduler_block_size,
            hash_block_size=own.hash_block_size,
        )
        if label == "by the configuration":
            manager.coordinator.retention_interval = config.prefix_cache_retention_interval
        hasher = engine.core.request_block_hasher
        request = Request(label, tokens, sampling_of(1), None, block_hasher=hasher)
        manager.get_computed_blocks(request)
        for first in range(0, LONG_PROMPT_TOKENS, STEP_TOKENS):
            manager.allocate_slots(request, STEP_TOKENS)
            request.num_computed_tokens = first + STEP_TOKENS
        manager.free(request)
        hashes = (block.block_hash for block in manager.block_pool.blocks)
        cached = Counter(get_group_id(key) for key in hashes if key is not None)
        groups = enumerate(config.kv_cache_groups)
        engine.note(
            f"cached blocks, {label}",
            [
                [type(one.kv_cache_spec).__name__, one.kv_cache_spec.block_size, cached[group]]
                for group, one in groups
            ],
        )


def forget_values(cached: Any) -> None:
    """Set the cached values of a layer to zero.

    Latent attention has its latents first, and they hold the values. Other attention has its values
    last. Linear attention has the tokens of its convolution first, and its states last.
    """
    is_latent = cached[0].dim() == 4 and cached[0].shape[-1] != cached[1].shape[-1]
    cached[0 if is_latent else 1].zero_()
