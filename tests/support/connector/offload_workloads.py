# SPDX-License-Identifier: Apache-2.0
"""Random workloads for an engine that offloads, each determined by a layout and a seed.

Chats whose turns extend each other, prompts that share a beginning, that are edited in the middle or
too short to be stored, in pools that are too small, with host memory that may be, too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from support.connector.paged_layouts import PagedLayout
from support.connector.scripted_transfers import TransferScript
from support.scheduler.layouts import Layout
from support.scheduler.options import Drafter, EngineOptions
from support.scheduler.token_stream import VOCAB_SIZE
from support.scheduler.workload import RequestPlan

_GIB = 1 << 30
_MAX_NEW_TOKENS = 32
_MAX_PROMPT_UNITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadWorkload:
    """Everything that determines a run.

    Attributes:
        name: Of the layout and the seed.
        seed: Of what is drawn while it runs.
        layout: Of the pages.
        options: Of the engine, with ``offloading``.
        script: How transfers go.
        requests: By arrival.
        abort_share: Before so many of all steps, a request is aborted; one that loads first.
        reset_share: Before so many of all steps, the prefix cache is reset.
        is_adaptive: Whether the device's prefix cache retains what adaptive retention chooses.
    """

    name: str
    seed: int
    layout: PagedLayout
    options: EngineOptions
    script: TransferScript
    requests: tuple[RequestPlan, ...]
    abort_share: float = 0.0
    reset_share: float = 0.0
    is_adaptive: bool = False


def random_offload(layout: PagedLayout, seed: int, num_requests: int) -> OffloadWorkload:
    """The workload of one layout and one seed."""
    rng = random.Random(f"offload/{layout.name}/{seed}")
    requests = tuple(chats(rng, layout, num_requests))
    return OffloadWorkload(
        name=f"{layout.name}-{seed}",
        seed=seed,
        layout=layout,
        options=_options(rng, layout, requests),
        script=TransferScript(
            seed=seed,
            failing_stores=rng.choice((0, 0, 0.1, 0.5)),
            failing_loads=rng.choice((0, 0, 0.1, 0.5)),
            most_per_step=rng.choice((None, 1, 2, 4)),
        ),
        requests=requests,
        abort_share=rng.choice((0, 0.02, 0.1)),
        reset_share=rng.choice((0, 0, 0.02)),
        is_adaptive=rng.random() < 0.4,
    )


def chats(rng: random.Random, layout: Layout, num_requests: int) -> Iterator[RequestPlan]:
    """Requests by arrival."""
    max_prompt_tokens = max(_MAX_PROMPT_UNITS * layout.unit_tokens, 96)
    roots = [tokens(rng, rng.randrange(8, max_prompt_tokens // 2)) for _ in range(3)]
    answered: list[tuple[list[int], str | None]] = []
    step = 0
    for number in range(num_requests):
        kind = rng.random()
        salt = rng.choice((None, None, None, "salt"))
        if answered and kind < 0.45:
            prompt, salt = rng.choice(answered[-6:])
            prompt = prompt + tokens(rng, rng.randrange(1, 20))
        elif answered and kind < 0.55:
            prompt, salt = rng.choice(answered)
            place = rng.randrange(len(prompt))
            prompt = [*prompt[:place], *tokens(rng, 1), *prompt[place + 1 :]]
        elif kind < 0.65:
            prompt = tokens(rng, rng.randrange(1, 8))
        else:
            prompt = [*rng.choice(roots), *tokens(rng, rng.randrange(max_prompt_tokens // 3))]
        plan = RequestPlan(
            request_id=f"request-{number}",
            arrival_step=step,
            prompt=tuple(prompt[:max_prompt_tokens]),
            max_tokens=rng.randrange(1, rng.choice((3, _MAX_NEW_TOKENS))),
            stop_tokens=(rng.randrange(VOCAB_SIZE),),
            adapter=rng.choice((None, None, None, "adapter-0")),
            cache_salt=salt,
        )
        yield plan
        answered.append(([*plan.prompt, *plan.expected_output()], salt))
        step += rng.choice((0, 0, 1, 2, 5))


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def offloading(layout: Layout, **values: Any) -> dict[str, Any]:
    """A ``kv_connector_extra_config``: everything is stored, and every hit is loaded."""
    return {
        "host_memory_gib": (1 << 22) / _GIB,
        "chunk_tokens": 2 * layout.unit_tokens,
        "store_policy": "all",
        "load_if_slower": True,
        "copy_threads": 1,
    } | values


def _options(
    rng: random.Random, layout: PagedLayout, requests: tuple[RequestPlan, ...]
) -> EngineOptions:
    drafter = rng.choice((None, None, Drafter.NGRAM)) if layout.supports_drafts else None
    max_num_batched_tokens = rng.choice((layout.unit_tokens + 16, 64, 256))
    num_blocks = blocks_for_longest(layout, requests, max_num_batched_tokens)
    return EngineOptions(
        # Loads hold their blocks while they wait for each other.
        num_blocks=int(num_blocks * rng.choice((1.5, 2, 3, 6))) + 1,
        max_num_seqs=rng.choice((2, 4, 16)),
        max_num_batched_tokens=max_num_batched_tokens,
        long_prefill_tokens=rng.choice((0, 0, layout.unit_tokens + 1)),
        reserve_full_prompt=rng.random() < 0.5,
        is_async=drafter is None and rng.random() < 0.5,
        drafter=drafter,
        num_draft_tokens=rng.choice((1, 3)),
        caching=rng.random() < 0.7,
        events=rng.random() < 0.5,
        num_workers=rng.choice((1, 1, 2)),
        offloading=offloading(
            layout,
            host_memory_gib=rng.choice((1 << 14, 1 << 16, 1 << 22)) / _GIB,
            chunk_tokens=layout.unit_tokens * rng.choice((1, 2, 4)),
            store_policy=rng.choice(("all", "all", "second_touch", "second_touch", "never")),
            swap_on_preemption=rng.random() < 0.5,
            load_if_slower=rng.random() < 0.8,
        ),
    )


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
