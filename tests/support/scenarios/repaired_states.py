# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What repairs of models with states are for: hits, and requests that join and leave.

Prompts do not depend on replies, so every engine is asked the same.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from support.scenarios import scenario, states
from support.scenarios.engine import Prompt, answer_of, random_tokens, sampling_of
from support.scenarios.hits_inside_blocks import REPLY_TOKENS, random_prompts, seen_twice

__all__ = ["Engine", "behind_whole_blocks", "joining", "seen_twice"]

NUM_AT_ONCE = 6
STEPS_BETWEEN_JOINS = 2


class Engine(states.Engine):
    """An engine whose plan may give full attention smaller blocks than states have."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        if plan["attention_block_tokens"]:
            _let_attention_have_blocks_of(plan["attention_block_tokens"])
        super().__init__(plan)


def _let_attention_have_blocks_of(block_tokens: int) -> None:
    """Some models have a further layer with such blocks. vLLM plans them by the layers' specs."""
    from vllm.model_executor.layers.attention.attention import Attention

    own: Callable[..., Any] = Attention.get_kv_cache_spec

    def get_kv_cache_spec(self: Any, config: Any) -> Any:
        spec = own(self, config)
        return replace(spec, block_size=block_tokens, page_size_padded=spec.page_size_bytes)

    Attention.get_kv_cache_spec = get_kv_cache_spec


@scenario
def behind_whole_blocks(engine: Engine) -> None:
    """Prompts whose beginnings, up to the end of a block of states, have been asked before."""
    block = engine.unit_tokens
    for prompt in random_prompts(engine):
        engine.ask("beginning", [prompt[: (len(prompt) - 1) // block * block + 1]], 1)
        engine.ask("again", [prompt], REPLY_TOKENS)


@scenario
def joining(engine: Engine) -> None:
    """Requests that join a running batch and leave it, so that the rows of the others move."""
    rng = random.Random(8)
    block = engine.unit_tokens
    shared = [random_tokens(rng, length) for length in (block, 2 * block, 3 * block + 7)]
    waiting: list[tuple[Prompt, int]] = []
    for _ in range(engine.plan["num_requests"]):
        begun = rng.choice(shared) if rng.random() < 0.4 else []
        length = rng.choice((block - 1, block, block + 1, 2 * block - 2, 40))
        reply_tokens = rng.choice((3, 9, 20, 33, block // 2))
        waiting.append((Prompt(begun + random_tokens(rng, length)), reply_tokens))
    own = engine.llm.llm_engine
    prompts = {f"joining-{number}": prompt for number, (prompt, _) in enumerate(waiting)}
    replies = {f"joining-{number}": tokens for number, (_, tokens) in enumerate(waiting)}
    to_send = list(prompts)
    answers: dict[str, dict[str, Any]] = {}
    step = num_live = 0
    while len(answers) < len(prompts):
        if to_send and num_live < NUM_AT_ONCE and step % STEPS_BETWEEN_JOINS == 0:
            name = to_send.pop(0)
            own.add_request(name, prompts[name].inputs, sampling_of(replies[name]))
            num_live += 1
        step += 1
        for output in own.step():
            if output.finished:
                answers[output.request_id] = answer_of(prompts[output.request_id], output)
                num_live -= 1
    engine.note_answers("joining", [answers[name] for name in prompts], Counter(engine.counted))
