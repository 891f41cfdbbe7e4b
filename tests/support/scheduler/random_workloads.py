# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Random workloads. A layout and a seed determine each workload.

They are small (dozens of requests of at most some hundred tokens) and nasty: pools in which
requests preempt each other, prompts that end next to block boundaries, conversations that come
back, and everything that changes the key of a block.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from support import family
from support.upstream_version import IS_SINCE_0_30

from .layouts import EAGLE_LAYOUTS, LAYOUTS, Layout
from .options import Drafter, EngineOptions, ExternalLoad
from .token_stream import VOCAB_SIZE, Image
from .workload import Abort, RequestPlan, ResetPrefixCache, Workload

_ADAPTERS = (None, None, None, "adapter-0", "adapter-1")
_SALTS = (None, None, None, "salt")
_MAX_UNITS = 6
_MAX_NEW_TOKENS = 40


def random_workloads(seeds: range) -> Iterator[Workload]:
    """One workload for every layout and seed."""
    for layout in LAYOUTS + EAGLE_LAYOUTS:
        for seed in seeds:
            yield random_workload(layout, seed)


def random_workload(layout: Layout, seed: int) -> Workload:
    """The workload of one layout and one seed."""
    rng = random.Random(f"{layout.name}/{seed}")
    name = f"{layout.name}-{seed}"
    requests = tuple(_requests(rng, layout))
    hints = random.Random(f"hints/{name}")
    options = _options(rng, layout, requests)
    last_step = max(plan.arrival_step for plan in requests) + 40
    aborted = rng.sample(requests, k=rng.choice((0, 1, 3)))
    return Workload(
        name=name,
        layout=layout,
        options=options,
        requests=tuple(_with_hints(plan, hints) for plan in requests),
        aborts=tuple(
            Abort(plan.arrival_step + rng.randrange(1, 30), plan.request_id) for plan in aborted
        ),
        resets=tuple(
            # Upstream cannot preempt for a reset while a connector holds blocks.
            ResetPrefixCache(
                rng.randrange(last_step), options.external_load is None and rng.random() < 0.7
            )
            for _ in range(rng.choice((0, 0, 1, 3)))
        ),
    )


def with_options(workload: Workload, **options: Any) -> Workload:
    """The same requests with other options. There is enough room for their loads."""
    changed = replace(workload.options, **options)
    num_blocks = changed.num_blocks * _room_for(changed.external_load)
    num_blocks //= _room_for(workload.options.external_load)
    return replace(workload, options=replace(changed, num_blocks=num_blocks))


def _room_for(external_load: ExternalLoad | None) -> int:
    """The minimum size of the pool. 1 means the blocks that the longest request needs.

    Loads between steps hold blocks without progress. If the pool had room for only one request,
    they could block each other for ever.
    """
    return 3 if external_load is ExternalLoad.BETWEEN_STEPS else 1


def without_upstream_defects(
    workload: Workload, repaired: frozenset[str] = frozenset()
) -> Workload:
    """The same workload without the events to which stock vLLM reacts with wrong tokens or KV.

    Args:
        repaired: The repairs in effect. Without ``two-phase-allocation``, a connector that extends
            a local hit gets a block handed out twice. Without ``discarded-frames``, a reset loses
            tokens of requests that it preempts with drafts in flight. Without
            ``preempted-in-step``, a request that is preempted by priority leaves blocks cached
            that it did not compute.
    """
    options = workload.options
    loses_tokens = (
        options.is_async and options.drafter is not None and "discarded-frames" not in repaired
    )
    resets = tuple(
        replace(reset, reset_running_requests=reset.reset_running_requests and not loses_tokens)
        for reset in workload.resets
    )
    options = replace(
        options,
        extends_local_hits=options.extends_local_hits and "two-phase-allocation" in repaired,
        by_priority=options.by_priority and "preempted-in-step" in repaired,
    )
    return replace(workload, options=options, resets=resets)


def _requests(rng: random.Random, layout: Layout) -> Iterator[RequestPlan]:
    """Conversations whose turns extend each other, and others that share a beginning."""
    max_prompt_tokens = max(_MAX_UNITS * layout.unit_tokens, 64)
    roots = [_tokens(rng, _prompt_length(rng, layout, max_prompt_tokens // 2)) for _ in range(3)]
    step = number = 0
    for _ in range(rng.randrange(4, 9)):
        prompt = rng.choice(roots)[: _prompt_length(rng, layout, max_prompt_tokens // 2)]
        prompt += _tokens(rng, _prompt_length(rng, layout, max_prompt_tokens // 3))
        adapter = rng.choice(_ADAPTERS)
        salt = rng.choice(_SALTS)
        images = _images(rng, prompt)
        for _ in range(rng.randrange(1, 4)):
            plan = RequestPlan(
                request_id=f"request-{number}",
                arrival_step=step,
                prompt=tuple(prompt),
                max_tokens=rng.randrange(1, _MAX_NEW_TOKENS),
                stop_tokens=(rng.randrange(VOCAB_SIZE),),
                priority=rng.randrange(3),
                adapter=adapter,
                cache_salt=salt,
                images=images,
            )
            yield plan
            number += 1
            step += rng.choice((0, 0, 1, 2, 10, 30))
            if rng.random() < 0.3:
                continue
            prompt = prompt + plan.expected_output() + _tokens(rng, rng.randrange(1, 20))
            prompt = prompt[:max_prompt_tokens]


def _with_hints(plan: RequestPlan, rng: random.Random) -> RequestPlan:
    """Let some requests name boundaries. Adaptive retention reads them."""
    if rng.random() < 0.7:
        return plan
    hints = [rng.randrange(1, len(plan.prompt) + 1) for _ in range(rng.choice((1, 3)))]
    return replace(plan, checkpoint_tokens=tuple(hints))


def _options(
    rng: random.Random, layout: Layout, requests: tuple[RequestPlan, ...]
) -> EngineOptions:
    drafter = None
    if layout.supports_drafts:
        drafter = rng.choice((None, Drafter.NGRAM, Drafter.EAGLE, Drafter.EAGLE))
    if any(group.is_eagle for group in layout.groups):
        drafter = Drafter.EAGLE
    is_async = rng.random() < 0.5 and drafter is not Drafter.NGRAM
    external_load = None
    if not layout.has_mamba:
        external_load = rng.choice((None, None, *ExternalLoad))
    max_num_batched_tokens = rng.choice((layout.unit_tokens + 16, 64, 256))
    num_blocks = _blocks_for_longest(layout, requests, max_num_batched_tokens)
    room = _room_for(external_load) + rng.choice((0, 0.3, 1.5))
    return EngineOptions(
        num_blocks=int(num_blocks * room) + 1,
        max_num_seqs=rng.choice((2, 4, 16)),
        max_num_batched_tokens=max_num_batched_tokens,
        long_prefill_tokens=rng.choice((0, 0, layout.unit_tokens + 1)),
        reserve_full_prompt=rng.random() < 0.5,
        by_priority=rng.random() < 0.3,
        is_async=is_async,
        drafter=drafter,
        num_draft_tokens=rng.choice((1, 2, 3)),
        external_load=external_load,
    )


def _blocks_for_longest(
    layout: Layout, requests: tuple[RequestPlan, ...], max_num_batched_tokens: int
) -> int:
    """The blocks that the longest request needs if it runs alone."""
    longest_tokens = max(len(plan.prompt) + plan.max_tokens for plan in requests)
    # On vLLM-Ascend, and since vLLM 0.30, windows keep blocks until the steps in flight end.
    num_steps = 2 if family.IS_ASCEND or IS_SINCE_0_30 else 1
    num_blocks = 0
    for group in layout.groups:
        held_tokens = longest_tokens
        if group.span_tokens:
            held_tokens = min(held_tokens, group.span_tokens + num_steps * max_num_batched_tokens)
        num_blocks += -(-held_tokens // group.block_tokens) + 2
    return num_blocks


def _prompt_length(rng: random.Random, layout: Layout, max_tokens: int) -> int:
    """A length that is often a block boundary, or one token beside it."""
    if rng.random() < 0.5:
        return rng.randrange(1, max_tokens)
    step = rng.choice((layout.min_block_tokens, layout.unit_tokens))
    boundary = rng.randrange(1, max(2, max_tokens // step + 1)) * step
    return max(1, boundary + rng.choice((-1, 0, 1)))


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def _images(rng: random.Random, prompt: list[int]) -> tuple[Image, ...]:
    if len(prompt) < 16 or rng.random() < 0.7:
        return ()
    length = rng.randrange(2, 9)
    offset = rng.randrange(len(prompt) - length)
    return (Image(f"image-{rng.randrange(3)}", offset, length),)
