# SPDX-License-Identifier: Apache-2.0
"""What has to hold between adaptive retention's books and a pool of blocks. Imports no vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any


def all_nodes(tree: Any) -> list[Any]:
    """Every boundary, the empty prefix first."""
    return [tree.root, *tree.nodes.values()]


def num_checkpoints(tree: Any) -> int:
    """Boundaries that can be resumed from."""
    return sum(node.has_tail for node in all_nodes(tree))


def check_books(
    retention: Any, blocks: Iterable[Any], free_blocks: Iterable[Any], is_exact: bool = True
) -> None:
    """Structure, counts of needs and the order of free blocks agree with each other.

    Args:
        retention: An `AdaptiveRetention`.
        blocks: All blocks of the pool.
        free_blocks: The free ones, in the order in which they will be reallocated.
        is_exact: False where blocks were uncached that the checkpoints did not give up.
    """
    tree = retention.tree
    check_structure(tree)
    needs: Counter[int] = Counter()
    for node in all_nodes(tree):
        for ids in (*node.runs, node.tail):
            needs.update(ids.tolist())
    for progress in retention._progress.values():
        for of_group in progress.groups:
            needs.update(b.block_id for b, h in of_group.left.values() if b._block_hash is h)
    if not is_exact:
        return
    for block in blocks:
        assert tree.needs.count[block.block_id] == needs[block.block_id], f"{block} is miscounted"
    needed = None
    for block in free_blocks:
        if needs[block.block_id]:
            needed = block
            assert block._block_hash is not None, f"{block} is needed and not cached"
        else:
            assert needed is None, f"{block}, which nothing needs, waits behind {needed}"


def check_structure(tree: Any) -> None:
    """Parents and children agree, and no boundary is there for nothing."""
    nodes = all_nodes(tree)
    for node in nodes[1:]:
        assert tree.nodes[node.key] is node
        assert node.parent.boundary_tokens < node.boundary_tokens
        if not tree._block_tokens:
            assert node.has_tail, f"{node} is kept for nothing"
            continue
        assert node in node.parent.children
        assert node.parent.is_root or tree.nodes[node.parent.key] is node.parent
        assert node.has_tail or len(node.children) > 1, f"{node} is kept for nothing"
        for run, block_tokens in zip(node.runs, tree._block_tokens, strict=True):
            spanned = node.boundary_tokens - node.parent.boundary_tokens
            assert len(run) == spanned // block_tokens, f"{node} has a run of {len(run)} blocks"
        assert len(set(node.tail.tolist())) == len(node.tail), f"{node} has a block twice"
    for node in nodes:
        assert all(child.parent is node for child in node.children)
    assert tree._stats.checkpoints == num_checkpoints(tree)
    order = tree._order
    entries = {(entry, id(node)) for _, entry, node in order._heap}
    entries |= {(entry, id(node)) for entry, node in order._in_use}
    for node in nodes:
        assert not node.has_tail or (node.entry, id(node)) in entries, f"{node} is never evicted"
