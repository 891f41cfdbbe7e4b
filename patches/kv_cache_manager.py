# SPDX-License-Identifier: Apache-2.0
"""``vllm/v1/core/kv_cache_manager.py``: retention begins with the manager, ends with a request."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patches.kv_cache_coordinator import retain, tail_keeper
from vllm_ascend_kvext.patching.declaration import Kind, Patch
from vllm_ascend_kvext.settings import RETENTION_INTERVAL_VARIABLE

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager


def start_retaining(
    wrapped: Callable[..., None],
    instance: KVCacheManager,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Read the interval when a block manager is built; refuse it here if it is wrong."""
    wrapped(*args, **kwargs)
    interval = os.environ.get(RETENTION_INTERVAL_VARIABLE)
    if interval:
        retain(instance.coordinator, interval)


def release_request(
    wrapped: Callable[..., None],
    instance: KVCacheManager,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Settle what a finished or preempted request leaves in the prefix cache."""
    keeper = tail_keeper(instance.coordinator)
    if keeper is not None:
        keeper.release(*args, **kwargs)
    return wrapped(*args, **kwargs)


def trim_full_groups(
    wrapped: Callable[..., tuple[KVCacheBlocks, int]],
    instance: KVCacheManager,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[KVCacheBlocks, int]:
    """Hand out no block past the hit, in any full-attention group."""
    blocks, hit_tokens = wrapped(*args, **kwargs)
    keeper = tail_keeper(instance.coordinator)
    if keeper is not None:
        for group in keeper.full_groups:
            group_blocks = blocks.blocks[group.manager.kv_cache_group_id]
            if len(group_blocks) * group.block_tokens > hit_tokens:
                del group_blocks[hit_tokens // group.block_tokens :]
    return blocks, hit_tokens


PATCHES = (
    Patch(
        id="KVX-141",
        target="vllm.v1.core.kv_cache_manager:KVCacheManager.__init__",
        kind=Kind.WRAP,
        feature="retention",
        vllm=("==0.20.2.*", "==0.23.0.*"),
        wrapper=start_retaining,
        why="The unit at which the prefix cache can hit is known once the coordinator exists; "
        "upstream validates the interval against another number on Ascend.",
        retire_when="upstream validates against the unit of its lookup",
    ),
    Patch(
        id="KVX-142",
        target="vllm.v1.core.kv_cache_manager:KVCacheManager.free",
        kind=Kind.WRAP,
        feature="retention",
        vllm=("==0.20.2.*", "==0.23.0.*"),
        wrapper=release_request,
        why="Upstream's replay boundary is that of the prompt: a request that is preempted while "
        "decoding, or extended by a next turn, resumes far behind what it computed.",
        retire_when="upstream keeps the boundary of the last computed token",
    ),
    Patch(
        id="KVX-143",
        target="vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
        kind=Kind.WRAP,
        feature="retention",
        vllm=("==0.20.2.*", "==0.23.0.*"),
        wrapper=trim_full_groups,
        why="Upstream trims the first full-attention group to the hit; the others hand out cached "
        "blocks past it, which the request then writes into.",
        retire_when="vLLM >= 0.32, which trims every full-attention group",
    ),
)
