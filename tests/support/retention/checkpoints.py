# SPDX-License-Identifier: Apache-2.0
"""Adaptive retention in a test process, and what has to hold between its tree and the block pool.

The tree says which cached blocks are worth something; a block that it does not know would stay in
the cache for ever, and one that it knows twice would be given up twice.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.kv_cache_utils import get_group_id

from support.installed import installed, retention_installed
from support.scheduler.engine import SchedulerEngine
from support.scheduler.transcript import Step
from vllm_ascend_kvext.patches.retention.kv_cache_coordinator import tail_keeper
from vllm_ascend_kvext.settings import RETENTION_VARIABLE, Retention


@contextmanager
def adaptive_chosen() -> Iterator[None]:
    """The environment as a block manager finds it where retention is adaptive."""
    before = os.environ.get(RETENTION_VARIABLE)
    os.environ[RETENTION_VARIABLE] = Retention.ADAPTIVE.value
    try:
        yield
    finally:
        if before is None:
            del os.environ[RETENTION_VARIABLE]
        else:
            os.environ[RETENTION_VARIABLE] = before


@contextmanager
def adaptive_retention(is_fast: bool = True) -> Iterator[None]:
    """Adaptive retention as a user gets it: with the repairs and the faster prefix cache.

    Args:
        is_fast: Whether the latter is in effect.
    """
    with installed(*["fast-prefix-cache"] * is_fast), retention_installed(), adaptive_chosen():
        yield


def checkpoint_tree(block_manager: Any) -> Any:
    """The tree of a ``KVCacheManager``; None where nothing is retained."""
    keeper = tail_keeper(block_manager.coordinator)
    return None if keeper is None else keeper.journeys.tree


class CheckpointsAccountForCache:
    """Every cached block that no request holds belongs to a checkpoint, and to what it needs.

    A `support.scheduler.run.Check`; it looks closer whenever no request is left.

    Attributes:
        num_idle: How often no request was left.
        num_checkpoints: How many checkpoints there were at these times, in total.
    """

    def __init__(self) -> None:
        self.num_idle = 0
        self.num_checkpoints = 0

    def __call__(self, engine: SchedulerEngine, step: Step) -> None:
        block_manager = engine.scheduler.kv_cache_manager
        tree = checkpoint_tree(block_manager)
        if tree is None:
            return
        check_structure(tree)
        if not engine.scheduler.requests:
            self.num_idle += 1
            self.num_checkpoints += num_checkpoints(tree)
            check_idle(block_manager)


def all_nodes(tree: Any) -> list[Any]:
    nodes = []
    pending = [tree.root]
    while pending:
        node = pending.pop()
        nodes.append(node)
        pending += node.children
    return nodes


def num_checkpoints(tree: Any) -> int:
    """Boundaries that can be resumed from."""
    return sum(bool(node.tail) for node in all_nodes(tree))


def check_structure(tree: Any) -> None:
    """Parents and children agree, the table knows every node, and nothing useless is left."""
    nodes = all_nodes(tree)
    assert nodes[0] is tree.root and len(tree.nodes) == len(nodes) - 1
    for node in nodes[1:]:
        assert tree.nodes.get(node.key) is node, f"{node} is not the one in the table"
        assert node in node.parent.children
        assert node.parent.boundary_tokens < node.boundary_tokens
        assert node.is_needed, f"{node} is kept for nothing"
        assert node.pins >= 0
        assert len(node.runs) == len(node.parent.runs) or node.parent is tree.root
        for run, block_tokens in zip(node.runs, tree._block_tokens, strict=True):
            spanned = node.boundary_tokens - node.parent.boundary_tokens
            assert len(run) == spanned // block_tokens, f"{node} has a run of {len(run)} blocks"
    assert tree._stats.checkpoints == num_checkpoints(tree)
    counts = Counter(block.block_id for node in nodes for block, _ in node.tail)
    for node in nodes:
        for cached in node.tail:
            block, block_hash = cached
            if block.block_hash is block_hash:
                assert tree._tail_counts.count(cached) >= 1
                assert tree._tail_counts.count(cached) <= counts[block.block_id]


def check_idle(block_manager: Any) -> None:
    """No request is left: the cache holds what the checkpoints need and nothing else."""
    tree = checkpoint_tree(block_manager)
    keeper = tail_keeper(block_manager.coordinator)
    assert not keeper._progress, "remembers requests that are gone"
    nodes = all_nodes(tree)
    assert all(not node.pins for node in nodes), "pinned although no request is left"
    known = {
        (block.block_id, block_hash)
        for node in nodes
        for run in (*node.runs, node.beyond, node.tail)
        for block, block_hash in run
    }
    managed = {
        group.manager.kv_cache_group_id for group in (*keeper.full_groups, *keeper.sparse_groups)
    }
    for block in block_manager.block_pool.blocks:
        if block.block_hash is not None and get_group_id(block.block_hash) in managed:
            assert (block.block_id, block.block_hash) in known, f"{block} is cached for nobody"
    check_duplicates(nodes)


def check_duplicates(nodes: list[Any]) -> None:
    """No full-attention block leads to two boundaries, but where prompts part ways between some.

    Requests that run at the same time part ways where there is no boundary yet; the next one that
    comes by makes one there, and their copies become one.
    """
    parents: dict[bytes, Any] = {}
    for node in nodes:
        for block, block_hash in (cached for run in node.runs for cached in run):
            if block.block_hash is block_hash:
                parent = parents.setdefault(block_hash, node.parent)
                assert parent is node.parent, f"{block} on the way to {node} is a copy"
