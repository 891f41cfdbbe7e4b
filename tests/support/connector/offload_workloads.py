# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Random workloads for an engine that offloads. A layout and a seed determine each.

The requests are chats whose turns extend each other, and prompts that share a beginning. Some are
edited in the middle, or are too short to be stored. Pools and host memory may be too small.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from support.connector.paged_layouts import PagedLayout
from support.connector.scripted_transfers import TransferScript
from support.scheduler.layouts import Layout
from support.scheduler.options import Drafter, EngineOptions
from support.scheduler.releases import tokens_in_flight
from support.scheduler.token_stream import VOCAB_SIZE
from support.scheduler.workload import RequestPlan

_GIB = 1 << 30
_MAX_NEW_TOKENS = 32
_MAX_PROMPT_UNITS = 6
_MAX_PROMPT_TOKENS = 960


class EngineKind(enum.Enum):
    """The kinds of engines of the workloads."""

    SYNC = "sync"
    ASYNC = "async"
    TWO_WORKERS = "two-workers"


class OffloadWorkload(NamedTuple):
    """What determines a run. Further events happen before a share of its steps."""

    name: str
    layout: PagedLayout
    options: EngineOptions
    script: TransferScript
    requests: tuple[RequestPlan, ...]
    abort_share: float
    """The share of steps before which a request is aborted, usually a request that loads."""
    reset_share: float
    eviction_share: float
    """The share of steps before which an entry is removed from the tier."""
    is_adaptive: bool
    """Whether the device has adaptive retention."""


def random_offload(
    layout: PagedLayout, seed: int, num_requests: int, kind: EngineKind = EngineKind.SYNC
) -> OffloadWorkload:
    """The workload of one layout, one kind of engine and one seed."""
    rng = random.Random(f"offload/{layout.name}/{kind.value}/{seed}")
    requests = tuple(chats(rng, layout, num_requests))
    return OffloadWorkload(
        name=f"{layout.name}-{kind.value}-{seed}",
        layout=layout,
        options=_options(rng, layout, requests, kind),
        script=TransferScript(
            seed=seed,
            failing_stores=rng.choice((0, 0, 0.1, 0.5)),
            failing_loads=rng.choice((0, 0, 0.1, 0.5)),
            max_per_step=rng.choice((None, 1, 2, 4)),
        ),
        requests=requests,
        abort_share=rng.choice((0, 0.02, 0.1)),
        reset_share=rng.choice((0, 0, 0.1)),
        eviction_share=rng.choice((0, 0.5)),
        is_adaptive=rng.random() < 0.4,
    )


def chats(rng: random.Random, layout: Layout, num_requests: int) -> Iterator[RequestPlan]:
    """The requests, in the order in which they arrive."""
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
    """A ``kv_connector_extra_config`` that stores everything, and loads every hit."""
    return {
        "host_memory_gib": layout.host_bytes[-1] / _GIB,
        "chunk_tokens": 2 * layout.unit_tokens,
        "store_policy": "all",
        "load_if_slower": True,
    } | values


def _options(
    rng: random.Random, layout: PagedLayout, requests: tuple[RequestPlan, ...], kind: EngineKind
) -> EngineOptions:
    is_async = kind is EngineKind.ASYNC or (kind is EngineKind.TWO_WORKERS and rng.random() < 0.5)
    drafter = None
    if any(group.is_eagle for group in layout.groups):
        drafter = Drafter.EAGLE
    elif layout.supports_drafts and not is_async:
        drafter = rng.choice((None, None, Drafter.NGRAM))
    max_num_batched_tokens = rng.choice((layout.unit_tokens + 16, 64, 256))
    held_tokens = tokens_in_flight(max_num_batched_tokens, is_async)
    num_blocks = blocks_for_longest(layout, requests, held_tokens)
    return EngineOptions(
        # Requests hold their blocks while they load and wait for each other.
        num_blocks=int(num_blocks * rng.choice((1, 1.2, 1.5, 3))) + 1,
        max_num_seqs=rng.choice((3, 8, 16)),
        max_num_batched_tokens=max_num_batched_tokens,
        long_prefill_tokens=rng.choice((0, 0, layout.unit_tokens + 1)),
        reserve_full_prompt=rng.random() < 0.5,
        is_async=is_async,
        drafter=drafter,
        num_draft_tokens=rng.choice((1, 3)),
        caching=rng.random() < 0.5,
        events=rng.random() < 0.5,
        num_workers=2 if kind is EngineKind.TWO_WORKERS else 1,
        offloading=offloading(
            layout,
            host_memory_gib=rng.choice(layout.host_bytes) / _GIB,
            chunk_tokens=layout.unit_tokens * rng.choice((1, 2, 4)),
            store_policy=rng.choice(("all",) * 4 + ("second_touch",) * 4 + ("never",)),
            load_if_slower=rng.random() < 0.8,
        ),
    )


def blocks_for_longest(
    layout: Layout, requests: tuple[RequestPlan, ...], max_tokens_in_flight: int
) -> int:
    """The blocks that the longest request needs if it runs alone."""
    longest_tokens = max(len(plan.prompt) + plan.max_tokens for plan in requests)
    num_blocks = 0
    for group in layout.groups:
        held_tokens = longest_tokens
        if group.span_tokens:
            held_tokens = min(held_tokens, group.span_tokens + max_tokens_in_flight)
        num_blocks += -(-held_tokens // group.block_tokens) + 2
    return num_blocks
