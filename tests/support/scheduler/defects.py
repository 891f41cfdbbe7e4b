# SPDX-License-Identifier: Apache-2.0
"""Watches stock vLLM run into the defects that this project repairs; changes no decision.

A repair may change what is decided only from where its defect has shown on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import RequestStatus

Defects = set[str]
"""Names of the repairs that were needed."""


@contextmanager
def observed_defects() -> Iterator[Defects]:
    """Collects the defects that any manager of this process runs into."""
    defects: Defects = set()
    observers = (
        (KVCacheManager, "get_computed_blocks", _observe_hit),
        (KVCacheManager, "allocate_slots", _observe_windows),
        (KVCacheCoordinator, "allocate_new_computed_blocks", _observe_owners),
        (KVCacheManager, "free", _observe_preemption),
        (Scheduler, "reset_prefix_cache", _observe_reset),
    )
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in observers]
    for owner, name, observe in observers:
        setattr(owner, name, observe(getattr(owner, name), defects))
    try:
        yield defects
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _observe_hit(original: Any, defects: Defects) -> Any:
    def get_computed_blocks(self: KVCacheManager, request: Any) -> Any:
        blocks, hit_tokens = original(self, request)
        for manager, group in zip(
            self.coordinator.single_type_managers, blocks.blocks, strict=True
        ):
            is_full = isinstance(manager.kv_cache_spec, FullAttentionSpec)
            if is_full and len(group) * manager.block_size > hit_tokens:
                defects.add("trim-full-groups")
        return blocks, hit_tokens

    return get_computed_blocks


def _observe_owners(original: Any, defects: Defects) -> Any:
    def allocate_new_computed_blocks(
        self: KVCacheCoordinator, request_id: str, *args: Any, **kwargs: Any
    ) -> None:
        original(self, request_id, *args, **kwargs)
        held = [b.block_id for group in self.get_blocks(request_id) for b in group if not b.is_null]
        if len(held) != len(set(held)):
            defects.add("two-phase-allocation")

    return allocate_new_computed_blocks


def _observe_windows(original: Any, defects: Defects) -> Any:
    def allocate_slots(self: KVCacheManager, request: Any, *args: Any, **kwargs: Any) -> Any:
        # The harness has at most one step in flight, which yields one token besides its drafts.
        drafts = request.num_output_placeholders - 1
        if drafts > 0:
            for manager in self.coordinator.single_type_managers:
                spec = manager.kv_cache_spec
                if isinstance(spec, (ChunkedLocalAttentionSpec, SlidingWindowSpec)):
                    computed = request.num_computed_tokens
                    blocks = [
                        manager.get_num_skipped_tokens(tokens) // manager.block_size
                        for tokens in (computed - drafts, computed)
                    ]
                    if blocks[0] != blocks[1]:
                        defects.add("drafts-in-flight")
        return original(self, request, *args, **kwargs)

    return allocate_slots


def _observe_preemption(original: Any, defects: Defects) -> Any:
    def free(self: KVCacheManager, request: Any) -> None:
        if request.status == RequestStatus.RUNNING:
            for manager in self.coordinator.single_type_managers:
                computed_blocks = request.num_computed_tokens // manager.block_size
                blocks = manager.req_to_blocks.get(request.request_id, [])
                if any(block.block_hash for block in blocks[computed_blocks:]):
                    defects.add("preempted-in-step")
        original(self, request)

    return free


def _observe_reset(original: Any, defects: Defects) -> Any:
    def reset_prefix_cache(
        self: Scheduler, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        # At most one step is in flight: one placeholder is one frame.
        placeholders = (request.num_output_placeholders for request in self.running)
        if reset_running_requests and max(placeholders, default=0) > 1:
            defects.add("discarded-frames")
        return original(self, reset_running_requests, reset_connector)

    return reset_prefix_cache
