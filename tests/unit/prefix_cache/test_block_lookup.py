# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The longest hit of all groups, compared with a lookup that searches block by block."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from unit.retention.lookup_model import hit_and_longest

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.prefix_cache.keys import GroupKeys
from vllm_ascend_kvext.prefix_cache.lookup import Lookup, LookupGroups
from vllm_ascend_kvext.retention.geometry import GroupGeometry

FULL, WINDOW, STATE = GroupKind.FULL, GroupKind.WINDOW, GroupKind.STATE
HASHES = [index.to_bytes(2, "big") for index in range(64)]
UNIT_TOKENS = 4


@st.composite
def caches(draw: st.DrawFn) -> list[tuple[GroupGeometry, list[set[int]]]]:
    """Groups in upstream's order. Each has one or two columns of cached blocks.

    A column has nearly all blocks, or some.
    """
    kinds = [FULL] * draw(st.integers(0, 1)) + draw(
        st.lists(st.sampled_from([WINDOW, WINDOW, STATE]), min_size=1, max_size=2)
    )
    found = []
    for kind in kinds:
        block_tokens = draw(st.sampled_from([1, 2, 4]))
        window_tokens = draw(st.integers(2, 9)) if kind is WINDOW else 0
        use_eagle = kind is not STATE and draw(st.booleans())
        group = GroupGeometry(kind, block_tokens, window_tokens, use_eagle, block_tokens)
        everything = set(range(len(HASHES) // block_tokens))
        some = st.sets(st.sampled_from(sorted(everything)), max_size=3)
        cached = some.map(everything.__sub__) | st.sets(st.sampled_from(sorted(everything)))
        found.append((group, draw(st.lists(cached, min_size=1, max_size=2))))
    return found


def described(group: GroupGeometry, group_ids: tuple[int, ...]) -> LookupGroups:
    return LookupGroups(
        kind=group.kind,
        block_tokens=group.block_tokens,
        unit_blocks=UNIT_TOKENS // group.block_tokens,
        window_blocks=-(-(group.window_tokens - 1) // group.block_tokens),
        use_eagle=group.use_eagle,
        margin_tokens=group.margin_tokens,
        group_ids=group_ids,
        keys=tuple(GroupKeys.of_group(id, group.block_tokens) for id in group_ids),
    )


@settings(max_examples=400)
@given(caches(), st.integers(0, len(HASHES)) | st.integers(0, 2 * UNIT_TOKENS), st.booleans())
def test_the_longest_hit_is_that_of_a_search_block_by_block(
    cache: list[tuple[GroupGeometry, list[set[int]]]], limit_tokens: int, finds_junctions: bool
) -> None:
    groups: list[LookupGroups] = []
    table: dict[bytes, Any] = {}
    num_ids = 1  # The group with id 0 is never cached.
    for geometry, columns in cache:
        group = described(geometry, tuple(range(num_ids, num_ids + len(columns))))
        for id, keys, column in zip(group.group_ids, group.keys, columns, strict=True):
            # If several blocks have the same content, the lookup takes the first.
            table |= {keys.at(HASHES, n): {7: (id, n), 8: 0} if n % 5 else (id, n) for n in column}
        groups.append(group)
        num_ids += len(columns)
    lookup = Lookup(groups, num_ids, "null", finds_junctions)
    blocks, hit_tokens, *junction = lookup.longest_hit(table.get, HASHES, limit_tokens)
    geometries = tuple(geometry for geometry, _ in cache)
    cached = [set.intersection(*columns) for _, columns in cache]
    expected = hit_and_longest(geometries, cached, limit_tokens, UNIT_TOKENS)
    assert (hit_tokens, *(hit_tokens + tokens for tokens in junction)) == (
        expected if finds_junctions else expected[:1]
    )
    assert blocks[0] == [] and len(blocks) == num_ids
    for geometry, group in zip(geometries, groups, strict=True):
        first = 0
        if geometry.is_sparse and hit_tokens:
            first = geometry.tail(hit_tokens, UNIT_TOKENS).start
        for id in group.group_ids:
            read = [(id, n) for n in range(first, hit_tokens // geometry.block_tokens)]
            assert blocks[id] == ["null"] * first + read
