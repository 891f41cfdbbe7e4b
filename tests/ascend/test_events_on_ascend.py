# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""KV events of host memory for the blocks of DeepSeek-V4, which are up to 4,096 tokens long."""

from __future__ import annotations

import math

from ascend_geometry import planned_config, planned_layout
from ascend_layouts import deepseek_v4
from support.connector.page_round_trip import PageRoundTrip
from support.connector.router_index import RouterIndex, each_block
from support.scheduler.block_manager import BlockManager

from vllm_ascend_kvext.connector.common.events import TierEvents
from vllm_ascend_kvext.connector.common.host_layout import HostLayout
from vllm_ascend_kvext.layout.model import StatePolicy
from vllm_ascend_kvext.store.entries import Entry
from vllm_ascend_kvext.store.prefix import HashedPrefix
from vllm_ascend_kvext.store.tier import HostTier

BLOCK_SIZE = 32
NUM_TOKENS = 9000
CHUNK_TOKENS = 1024


def test_blocks_are_told_as_the_local_cache_tells_them() -> None:
    planned = planned_layout(BLOCK_SIZE)
    hash_tokens = math.gcd(*(spec.block_size for spec in planned.specs))
    pages = PageRoundTrip(deepseek_v4(BLOCK_SIZE, 88), seed=3)
    try:
        layout = HostLayout(pages.layout, hash_tokens, lambda unit: CHUNK_TOKENS, StatePolicy.EXACT)
    finally:
        pages.shutdown()
    world = BlockManager(planned, num_blocks=16000, events=True)
    request = world.request(range(NUM_TOKENS))
    world.prefill(request, 2048)
    local = world.manager.take_events()

    events = TierEvents.of(planned_config(BLOCK_SIZE))
    events.begin(layout.tokens_per_row_page)
    tier = HostTier(1 << 30, layout.geometry, on_rows_lost=events.removed)
    prefix = HashedPrefix(request.block_hashes, hash_tokens)
    for piece in tier.lookup(prefix).missing_pieces(0, layout.geometry.floor(NUM_TOKENS)):
        entry = tier.begin_store(prefix, piece, layout.num_bytes(piece), tier.next_use())
        assert isinstance(entry, Entry)
        assert tier.finish_store(entry)
        events.stored(entry, prefix, request)
    told = events.take()
    groups = layout.tokens_per_row_page
    assert sorted(groups.values()) == [128, 4096]
    for group, tokens in groups.items():
        ours = each_block(event for event in told if event.group_idx == group)
        theirs = each_block(event for event in local if event.group_idx == group)
        assert ours[: len(theirs)] == theirs  # Since 0.30, the device ends at a hit.
        assert len(theirs) >= NUM_TOKENS // 4096 * 4096 // tokens
        assert len(ours) == NUM_TOKENS // tokens
    kinds = {event.group_idx: event.kv_cache_spec_kind for event in local if event.block_hashes}
    assert all(event.kv_cache_spec_kind == kinds[event.group_idx] for event in told)
    router = RouterIndex()
    router.read(told)
    tier.clear()
    router.read(events.take())
    assert not router.refusals("CPU")
    assert not any(router.hashes("CPU", group) for group in groups)
