# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""How much a trace needs: the blocks of a small device pool, and the bytes of its footprint."""

from __future__ import annotations

import math

from retention.layouts import BenchLayout
from retention.traces import Trace

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.model import KVLayout, LayoutGroup

POOL_SHARE = 0.04
"""The share of a trace's tokens, each counted once, that the device pool holds."""

MIN_REQUESTS = 1.5
"""The device pool holds at least this many of the trace's longest requests, with answers."""

NUM_WINDOWS = 2
"""The requests whose windows a tight pool holds, each with the tokens of a whole step."""


def different_tokens(trace: Trace) -> int:
    """The tokens of prompts and answers, where a shared prefix counts once."""
    used: dict[int, int] = {}
    for request in trace.requests:
        for part in request.answered.backwards():
            index = part.passage.index
            used[index] = max(part.used_tokens, used.get(index, 0))
    return sum(used.values())


def small_pool(layout: BenchLayout, trace: Trace, share: float = POOL_SHARE) -> int:
    """The number of blocks of a device pool that holds a share of a trace's tokens."""
    max_tokens = max(len(request.answered) for request in trace.requests)
    num_tokens = max(share * different_tokens(trace), MIN_REQUESTS * max_tokens)
    return 1 + layout.blocks_without_hits(math.ceil(num_tokens))


def tight_pool(layout: BenchLayout, trace: Trace, share: float) -> int:
    """The number of blocks of a pool that holds a share of a trace, and windows for some requests.

    A pool for whole texts in groups with windows would hold the windows of most requests.
    """
    max_tokens = max(len(request.answered) for request in trace.requests)
    num_tokens = max(share * different_tokens(trace), MIN_REQUESTS * max_tokens)
    num_blocks = 1
    for group, need in zip(layout.groups, layout.needs, strict=True):
        if need.tail_tokens is None:
            num_blocks += math.ceil(num_tokens / group.block_tokens)
        else:
            window_tokens = need.tail_tokens + layout.max_num_batched_tokens
            num_blocks += NUM_WINDOWS * (1 + math.ceil(window_tokens / group.block_tokens))
    return num_blocks


def row_bytes_per_token(pages: KVLayout) -> float:
    """The bytes of a token in all groups with full attention."""
    return sum(
        _page_bytes(group) / group.tokens_per_page
        for group in pages.groups
        if group.kind is GroupKind.FULL
    )


def tail_bytes(pages: KVLayout) -> int:
    """The bytes that a hit reads of windows and states."""
    return sum(_tail_bytes(group) for group in pages.groups if group.kind is not GroupKind.FULL)


def page_bytes(pages: KVLayout) -> list[int]:
    """By KV cache group, the bytes of a page."""
    sizes = [0] * pages.num_scheduler_groups
    for group in pages.groups:
        sizes[group.kv_cache_group_id] += _page_bytes(group)
    return sizes


def footprint_bytes(trace: Trace, pages: KVLayout) -> int:
    """What a tier needs to hit everything that a trace asks for again.

    These are the rows of each different token in the groups with full attention, once, and one
    tail per request. Dense caching of all groups takes more: 6 times the rows for Gemma-3, 56 times
    for DeepSeek-V4.
    """
    rows = math.ceil(row_bytes_per_token(pages) * different_tokens(trace))
    return rows + tail_bytes(pages) * len(trace.requests)


def _page_bytes(group: LayoutGroup) -> int:
    return group.rows_per_page * sum(plane.row_bytes for plane in group.planes)


def _tail_bytes(group: LayoutGroup) -> int:
    if group.is_snapshot:
        return _page_bytes(group)
    num_rows = math.ceil((group.window_tokens - 1) / group.tokens_per_row)
    return num_rows * sum(plane.row_bytes for plane in group.planes)
