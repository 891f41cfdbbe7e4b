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
    retention = tail_keeper(block_manager.coordinator)
    return None if retention is None else retention.tree


class CheckpointsAccountForCache:
    """Every cached block that no request holds belongs to a checkpoint, or is surplus.

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
        if checkpoint_tree(block_manager) is None:
            return
        check_books(block_manager)
        if not engine.scheduler.requests:
            self.num_idle += 1
            self.num_checkpoints += num_checkpoints(checkpoint_tree(block_manager))
            check_idle(block_manager)


def all_nodes(tree: Any) -> list[Any]:
    """Every boundary, the empty prefix first."""
    return [tree.root, *tree.nodes.values()]


def num_checkpoints(tree: Any) -> int:
    """Boundaries that can be resumed from."""
    return sum(node.has_tail for node in all_nodes(tree))


def check_books(block_manager: Any) -> None:
    """Structure, counts of needs and the surplus agree with each other and with the pool."""
    retention = tail_keeper(block_manager.coordinator)
    tree = retention.tree
    check_structure(tree)
    needs: Counter[int] = Counter()
    for node in all_nodes(tree):
        for ids in (*node.runs, node.tail):
            needs.update(ids.tolist())
    for progress in retention._progress.values():
        for of_group in progress.groups:
            needs.update(b.block_id for b, h in of_group.left.values() if b.block_hash is h)
    for block in block_manager.block_pool.blocks:
        assert tree.needs.count[block.block_id] == needs[block.block_id], f"{block} is miscounted"
    is_first_part = True
    for block in block_manager.block_pool.free_block_queue.get_all_free_blocks():
        if needs[block.block_id]:
            is_first_part, needed = False, block
            assert block.block_hash is not None, f"{block} is needed and not cached"
        else:
            assert is_first_part, f"{block}, which nothing needs, waits behind {needed}"


def check_structure(tree: Any) -> None:
    """Parents and children agree, blocks know their runs, and no boundary is there for nothing."""
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


def check_idle(block_manager: Any) -> None:
    """No request is left: nothing is remembered of any, and no two checkpoints need one content."""
    retention = tail_keeper(block_manager.coordinator)
    assert not retention._progress, "remembers requests that are gone"
