# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Facts that patches read from a coordinator, compared with what its managers do."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from support import family
from support.scheduler import block_manager, layouts
from support.scheduler.block_manager import BlockManager
from support.scheduler.layouts import Attention, Group, Layout

from vllm_ascend_kvext.groups.kinds import kind_of
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.patches.upstream import (
    cache_unit_tokens,
    hit_unit_tokens,
    lookup_groups,
    tokens_per_block,
)

# In this layout, hits end within blocks of states, since vLLM 0.30.
FINE_HASHES = Layout("fine-hashes", (Group(Attention.FULL, 4), Group(Attention.MAMBA, 16)))
LAYOUTS = (
    layouts.FULL,
    layouts.WINDOW,
    layouts.FULL_WINDOW,
    layouts.MIXED_BLOCKS,
    layouts.TWO_FULL,
    layouts.MAMBA,
    FINE_HASHES,
    *([layouts.COMPRESSED] if family.IS_ASCEND else [layouts.DEEPSEEK_V4]),
)
WITH_DRAFTS = tuple(layout for layout in LAYOUTS if layout.supports_drafts)


def manager_of(layout: Layout, eagle_group_ids: Iterable[int] = ()) -> BlockManager:
    specs = tuple(group.to_spec() for group in layout.groups)
    return BlockManager(block_manager.Layout(specs, frozenset(eagle_group_ids)))


by_name = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)


@by_name
def test_hits_are_multiples_of_the_unit(layout: Layout) -> None:
    managed = manager_of(layout)
    unit = hit_unit_tokens(managed.manager.coordinator)
    hits = set()
    for num_tokens in range(1, 3 * layout.unit_tokens + 2):
        tokens = range(1000 * num_tokens, 1001 * num_tokens)
        first = managed.request(tokens)
        managed.prefill(first, unit)
        managed.finish(first)
        hits.add(managed.hit_tokens(managed.request([*tokens, 0])))
    assert math.gcd(*hits) == unit
    assert max(hits) == 3 * layout.unit_tokens


@by_name
def test_a_block_stands_for_so_many_tokens(layout: Layout) -> None:
    managed = manager_of(layout)
    coordinator = managed.manager.coordinator
    sizes = [tokens_per_block(coordinator, each) for each in coordinator.single_type_managers]
    assert sizes == [group.block_tokens for group in layout.groups]
    request = managed.request(range(3 * layout.unit_tokens))
    managed.prefill(request, layout.unit_tokens)
    for manager, block_tokens in zip(coordinator.single_type_managers, sizes, strict=True):
        if kind_of(manager.kv_cache_spec) is not GroupKind.STATE:
            table = manager.req_to_blocks[request.request_id]
            assert len(table) == 3 * layout.unit_tokens // block_tokens


@by_name
def test_blocks_are_cached_up_to_the_unit(layout: Layout) -> None:
    managed = manager_of(layout)
    coordinator = managed.manager.coordinator
    unit = cache_unit_tokens(coordinator) or 1
    for num_tokens in range(1, 3 * layout.unit_tokens):
        request = managed.request(range(1000 * num_tokens, 1001 * num_tokens))
        managed.prefill(request, num_tokens)
        for manager in coordinator.single_type_managers:
            block_tokens = tokens_per_block(coordinator, manager)
            found = manager.num_cached_block.get(request.request_id, 0)
            assert found == num_tokens // unit * unit // block_tokens, (num_tokens, block_tokens)
        managed.finish(request)


@pytest.mark.parametrize("layout", WITH_DRAFTS, ids=lambda layout: layout.name)
def test_a_hit_drops_a_block_where_it_says_so(layout: Layout) -> None:
    managed = manager_of(layout, range(len(layout.groups)))
    coordinator = managed.manager.coordinator
    drops = {group.use_eagle for group in lookup_groups(coordinator)}
    assert len(drops) == 1
    tokens = range(3 * layout.unit_tokens + 1)
    managed.prefill(managed.request(tokens), layout.unit_tokens)
    hit_tokens = managed.hit_tokens(managed.request(tokens))
    assert (hit_tokens < 3 * layout.unit_tokens) is drops.pop()


def test_groups_are_looked_up_in_the_coordinators_order() -> None:
    coordinator = manager_of(layouts.MIXED_BLOCKS).manager.coordinator
    groups = lookup_groups(coordinator)
    assert [kind_of(group.spec) for group in groups] == [GroupKind.FULL, GroupKind.WINDOW]
    for group in groups:
        assert group.manager is coordinator.single_type_managers[group.group_ids[0]]
