# SPDX-License-Identifier: Apache-2.0
"""``vllm/v1/core/kv_cache_coordinator.py``: no block is given away that is still needed.

What one group hits, no other group is given while a request is admitted. And windows wait for
drafts: an asynchronous scheduler plans a step before it knows how many draft tokens of the previous
one were accepted, and counts them as computed. If they are rejected, the request still needs what
the window holds before them.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from vllm_ascend_kvext.patches.retention.kv_cache_coordinator import tail_keeper
from vllm_ascend_kvext.patching.declaration import Kind, Patch

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

_REQUESTS = "_kvext_requests"


def hold_hits_while_allocating(
    wrapped: Callable[..., None],
    coordinator: KVCacheCoordinator,
    request_id: str,
    new_computed_blocks: Sequence[Sequence[KVCacheBlock]],
    num_local_computed_tokens: int,
    num_external_computed_tokens: int,
) -> None:
    """Take the hits of all groups off the free queue before any group allocates from it."""
    held: list[KVCacheBlock] = []
    if num_external_computed_tokens > 0:  # only then is anything allocated
        num_tokens = num_local_computed_tokens + num_external_computed_tokens
        for manager, blocks in zip(
            coordinator.single_type_managers, new_computed_blocks, strict=True
        ):
            # What lies before the window is not taken, and may be given to any group.
            first = manager.get_num_skipped_tokens(num_tokens) // manager.block_size
            held += [b for b in blocks[first:] if b.ref_cnt == 0 and not b.is_null]
    # Not BlockPool.touch, which would count as an access in the metrics.
    for block in held:
        coordinator.block_pool.free_block_queue.remove(block)
        block.ref_cnt += 1
    try:
        wrapped(
            request_id,
            new_computed_blocks,
            num_local_computed_tokens,
            num_external_computed_tokens,
        )
    finally:
        coordinator.block_pool.free_blocks(held)


def introduce(coordinator: KVCacheCoordinator, request: Request) -> None:
    """Have `wait_for_drafts` find a request by its id, for as long as the scheduler knows it."""
    requests: MutableMapping[str, Request] | None = getattr(coordinator, _REQUESTS, None)
    if requests is None:
        requests = WeakValueDictionary()
        setattr(coordinator, _REQUESTS, requests)
    requests[request.request_id] = request


def wait_for_drafts(
    wrapped: Callable[..., None],
    coordinator: KVCacheCoordinator,
    request_id: str,
    total_computed_tokens: int,
) -> None:
    """Free what has left the windows, should all drafts in flight be rejected."""
    requests: MutableMapping[str, Request] = getattr(coordinator, _REQUESTS, {})
    request = requests.get(request_id)
    # A step in flight that has no drafts leaves one placeholder. Retention makes an allowance of
    # its own, which covers the tails that it saves.
    if (
        request is None
        or request.num_output_placeholders <= 1
        or tail_keeper(coordinator) is not None
    ):
        return wrapped(request_id, total_computed_tokens)
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec

    num_drafts = drafts_in_flight(request)
    for manager in coordinator.single_type_managers:
        # A Mamba manager makes allowance for drafts itself.
        has_window = isinstance(
            manager.kv_cache_spec, (ChunkedLocalAttentionSpec, SlidingWindowSpec)
        )
        manager.remove_skipped_blocks(
            request_id, total_computed_tokens - (num_drafts if has_window else 0)
        )
    return None


def drafts_in_flight(request: Request) -> int:
    """How many tokens that are counted as computed may be rejected drafts; never too few."""
    if hasattr(request, "num_in_flight_tokens"):
        return 0  # vLLM-Ascend >= 0.23.0 counts these itself, and has its managers wait for them
    # A step in flight stands for one token, and one more for each of its drafts. The next step
    # has as many drafts as any in flight; none if the request was preempted, and counts anew.
    num_placeholders = request.num_output_placeholders
    num_steps = -(-num_placeholders // (1 + len(request.spec_token_ids)))
    return num_placeholders - num_steps


_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"

PATCHES = (
    Patch(
        id="KVX-301",
        target="vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.allocate_new_computed_blocks",
        kind=Kind.WRAP,
        feature="two-phase-allocation",
        vllm=("==0.20.2.*", "==0.23.0.*"),
        wrapper=hold_hits_while_allocating,
        why="Group by group, upstream takes the local hits and allocates blocks for what a KV "
        "connector loads: a block that a later group hits can be given to an earlier one, and "
        "then belongs to both.",
        retire_when="vLLM >= 0.32, which takes the hits of all groups first",
        relies_on=(
            "vllm.v1.core.single_type_kv_cache_manager:"
            "SingleTypeKVCacheManager.allocate_new_computed_blocks",
            "vllm.v1.core.block_pool:BlockPool.touch",
            "vllm.v1.core.block_pool:BlockPool.free_blocks",
            "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.remove",
        ),
        ascend=(
            "vllm_ascend.core.single_type_kv_cache_manager:"
            "CompressAttentionManager.allocate_new_computed_blocks",
            "vllm_ascend.patch.platform.patch_kv_cache_utils:_ascend_free_blocks",
        ),
    ),
    Patch(
        id="KVX-303",
        target="vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.remove_skipped_blocks",
        kind=Kind.WRAP,
        feature="drafts-in-flight",
        vllm=("==0.20.2.*", "==0.23.0.*"),
        wrapper=wait_for_drafts,
        why="With asynchronous scheduling and speculative decoding, upstream frees window blocks "
        "as if all drafts in flight had been accepted; after a rejection the request reads what "
        "others have written there (vLLM issue 47728).",
        retire_when="upstream waits for drafts in flight",
        relies_on=(
            "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
            f"{_MANAGERS}:SingleTypeKVCacheManager.remove_skipped_blocks",
        ),
        ascend=(
            "vllm_ascend.patch.platform.patch_async_swa_kv_lifetime:_patched_allocate_slots",
            "vllm_ascend.patch.platform.patch_async_swa_kv_lifetime:_patched_remove_skipped_blocks",
        ),
    ),
)
