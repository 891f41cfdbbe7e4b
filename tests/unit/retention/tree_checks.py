# SPDX-License-Identifier: Apache-2.0
"""What has to hold of a tree of checkpoints and the pool below it, searched by brute force."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from unit.retention.manager_model import ModelCache
from unit.retention.pool_model import ModelRequest

from vllm_ascend_kvext.retention.checkpoint_tree import CheckpointTree
from vllm_ascend_kvext.retention.checkpoints import Checkpoint
from vllm_ascend_kvext.retention.protocols import CachedBlock


def check(cache: ModelCache, requests: Iterable[ModelRequest], is_exact: bool = True) -> None:
    """Check everything.

    Args:
        requests: All that have not finished.
        is_exact: Whether every prompt parts from others at a boundary, and nothing is read past
            one. Elsewhere a full-attention block can be part of two ways, and go with one of them.
    """
    _check_links(cache)
    _check_pins(cache, requests)
    _check_order(cache.tree)
    _check_queue(cache)
    assert cache.stats.checkpoints == sum(bool(node.tail) for node in nodes_of(cache.tree))
    if cache.pool.lost_unasked:
        return  # a block may be gone, and what it was part of be incomplete
    _check_tail_counts(cache.tree)
    _check_tails(cache)
    _check_owners(cache)
    if is_exact:
        _check_ways(cache)
        _check_hits(cache)


def nodes_of(tree: CheckpointTree) -> Iterator[Checkpoint]:
    """All boundaries but the empty one, found through the links."""
    stack = [tree.root]
    while stack:
        for child in stack.pop().children:
            yield child
            stack.append(child)


def _check_links(cache: ModelCache) -> None:
    tree, unit_tokens = cache.tree, cache.geometry.unit_tokens
    full_groups = [group for group in cache.geometry.groups if not group.is_sparse]
    nodes = list(nodes_of(tree))
    assert len(nodes) == len(tree.nodes), "a boundary is linked, or known, only"
    keys = {node.key for node in nodes}
    for node in nodes:
        parent = node.parent
        assert tree.nodes.get(node.key) is node
        assert node.is_needed, f"nobody needs {node}"
        assert node.boundary_tokens == len(node.key) > parent.boundary_tokens
        assert not node.boundary_tokens % unit_tokens
        assert node.key.startswith(parent.key)
        before = [key for key in keys if key != node.key and node.key.startswith(key)]
        nearest = max(before, key=len, default=b"")
        assert parent.key == nearest, f"{node} passes over {nearest!r}"
        span_tokens = node.boundary_tokens - parent.boundary_tokens
        lengths = [span_tokens // group.block_tokens for group in full_groups]
        assert [len(run) for run in node.runs] == lengths, f"runs of {node}"


def _check_pins(cache: ModelCache, requests: Iterable[ModelRequest]) -> None:
    passed = cache.journeys._passed
    assert set(passed) == {request.request_id for request in requests if request.running}
    pins = Counter(map(id, passed.values()))
    for node in (cache.tree.root, *nodes_of(cache.tree)):
        assert node.pins == pins.pop(id(node), 0), f"pins of {node}"
    assert not pins, "a running request is at a boundary that is gone"


def _check_order(tree: CheckpointTree) -> None:
    order = tree._order
    entries = {(entry, id(node)) for _, entry, node in (*order._heap, *order._held)}
    for node in nodes_of(tree):
        assert not node.tail or (node.entry, id(node)) in entries, f"{node} is never evicted"


def _check_queue(cache: ModelCache) -> None:
    idle = sorted(block.block_id for block in cache.pool.blocks if not block.ref_cnt)
    assert sorted(block.block_id for block in cache.pool.queue) == idle


def _check_tail_counts(tree: CheckpointTree) -> None:
    expected = Counter(
        (block.block_id, id(block_hash))
        for node in nodes_of(tree)
        for block, block_hash in node.tail
    )
    counts = tree._tail_counts._counts
    assert {(i, id(h)): number for i, (h, number) in counts.items()} == expected


def _check_ways(cache: ModelCache) -> None:
    """Full attention is cached up to every boundary, and every block counted by one of them."""
    in_runs = Counter(_alive(c for node in nodes_of(cache.tree) for c in _in_runs(node)))
    assert max(in_runs.values(), default=1) == 1, "two boundaries count the same block"
    for node in nodes_of(cache.tree):
        for _, block_hash in _in_runs(node):
            assert cache.pool.copies[block_hash], f"{block_hash!r} on the way to {node}"


def _check_tails(cache: ModelCache) -> None:
    for node in nodes_of(cache.tree):
        for block, block_hash in node.tail:
            assert block._block_hash is block_hash, f"{block_hash!r} of the tail of {node}"


def _check_hits(cache: ModelCache) -> None:
    """Whoever comes with the prompt of a checkpoint resumes there, or further on."""
    for node in nodes_of(cache.tree):
        if not node.tail:
            continue
        # The blocks behind the boundary tell how the prompt went on.
        hashes = [node.key, *(block_hash for _, block_hash in (*node.tail, *node.beyond))]
        text = max((block_hash.decode().partition("@")[0] for block_hash in hashes), key=len)
        limit_tokens = cache.geometry.opens_at_tokens(node.boundary_tokens)
        text += "?" * (limit_tokens - len(text))
        hit_tokens = cache.hit_tokens(text, limit_tokens)
        assert hit_tokens >= node.boundary_tokens, f"{text} hits {hit_tokens} of {node}"


def _check_owners(cache: ModelCache) -> None:
    """No idle block stays cached for nobody."""
    owned: set[int] = set()
    for node in nodes_of(cache.tree):
        owned.update(_alive((*_in_runs(node), *node.beyond, *node.tail)))
    for progress in cache.keeper._progress.values():
        for tails in progress.tails:
            owned.update(tails.rolling_block_ids())
    left_over = [b for b in cache.pool.idle_cached_blocks() if b.block_id not in owned]
    assert not left_over, f"cached for nobody: {left_over}"


def _in_runs(node: Checkpoint) -> Iterator[CachedBlock]:
    for run in node.runs:
        yield from run


def _alive(blocks: Iterable[CachedBlock]) -> Iterator[int]:
    return (block.block_id for block, block_hash in blocks if block._block_hash is block_hash)
