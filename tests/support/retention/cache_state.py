# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Compares retention's state with a pool of blocks. The module does not import vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from support.retention import inspection


def num_checkpoints(cache_state: Any) -> int:
    """The number of boundaries at which a request can resume."""
    return sum(bool(node["tail"]) for node in inspection.describe(cache_state))


def check_cache_state(
    retention: Any, blocks: Iterable[Any], free_blocks: Iterable[Any], is_exact: bool = True
) -> None:
    """Check that the structure, the counts of needs and the order of free blocks fit together.

    ``free_blocks`` are in the order in which they will be reallocated. If ``is_exact`` is false,
    blocks were uncached that the checkpoints did not give up. Then the order is not checked.
    """
    cache_state = retention.cache_state
    nodes = inspection.describe(cache_state)
    check_structure(nodes, [group.block_tokens for group in retention.full_groups])
    assert cache_state.counts()[0] == sum(bool(node["tail"]) for node in nodes)
    needs: Counter[int] = Counter()
    for node in nodes:
        for ids in (*node["runs"], node["tail"]):
            needs.update(ids)
    for request in retention._request_states.values():
        needs.update(inspection.held_blocks(request))
    for block in blocks:
        counted = inspection.num_needs(cache_state, block.block_id)
        assert counted == needs[block.block_id], (
            f"{block} is needed {needs[block.block_id]} times, but counted {counted} times"
        )
    if not is_exact:
        return
    needed = None
    for block in free_blocks:
        if needs[block.block_id]:
            needed = block
            assert block._block_hash is not None, f"{block} is needed, but not cached"
        else:
            assert needed is None, f"{block}, which nothing needs, waits behind {needed}"


def check_structure(nodes: list[dict[str, Any]], block_tokens: list[int]) -> None:
    """Check that parents and children fit together, and that every boundary is needed."""
    by_key = {node["key"]: node for node in nodes}
    num_children = Counter(node["parent_key"] for node in nodes)
    for node in nodes:
        tokens = node["boundary_tokens"]
        parent_tokens = node["parent_tokens"]
        assert parent_tokens < tokens
        assert node["is_in_order"] == bool(node["tail"]), f"{node} can never be evicted"
        assert len(set(node["tail"])) == len(node["tail"]), f"{node} has a block twice"
        if not block_tokens:
            assert node["tail"], f"{node} is kept, although nothing needs it"
            continue
        parent_key = node["parent_key"]
        assert not parent_key or by_key[parent_key]["boundary_tokens"] == parent_tokens
        assert node["num_children"] == num_children[node["key"]]
        assert node["tail"] or node["num_children"] > 1, (
            f"{node} is kept, although nothing needs it"
        )
        for run, of_group in zip(node["runs"], block_tokens, strict=True):
            assert len(run) == (tokens - parent_tokens) // of_group, (
                f"{node}has a run of the wrong length"
            )
