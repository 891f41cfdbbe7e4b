# SPDX-License-Identifier: Apache-2.0
"""``vllm/v1/core/kv_cache_manager.py``: retention begins with the manager, ends with a request."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patches.retention.kv_cache_coordinator import retain, retention_of
from vllm_ascend_kvext.patching.declaration import SINCE_0_30, Patch
from vllm_ascend_kvext.settings import Retention, parse_retention, parse_retention_interval

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


def start_retaining(
    wrapped: Callable[..., None], manager: KVCacheManager, *args: Any, **kwargs: Any
) -> None:
    """Read the interval when a block manager is built; refuse it here if it is wrong.

    Without the variable, a grid of adaptive retention is that of upstream's configuration.
    """
    wrapped(*args, **kwargs)
    interval = parse_retention_interval(os.environ)
    is_adaptive = parse_retention(os.environ) is Retention.ADAPTIVE
    if interval is not None or is_adaptive:
        configured = manager.coordinator.retention_interval
        retain(manager.coordinator, int(interval or configured or 0), is_adaptive)


def release_request(wrapped: Callable[..., Any], manager: KVCacheManager, request: Request) -> Any:
    """Settle what a finished or preempted request leaves in the prefix cache."""
    retention = retention_of(manager.coordinator)
    if retention is not None:
        retention.release(request)
    return wrapped(request)


PATCHES = (
    Patch(
        id="KVX-141",
        target="vllm.v1.core.kv_cache_manager:KVCacheManager.__init__",
        feature="retention",
        wrapper=start_retaining,
        why="The unit at which the prefix cache can hit is known once the coordinator exists; "
        "upstream validates the interval against another number on Ascend.",
        retire_when="upstream validates against the unit of its lookup",
    ),
    Patch(
        id="KVX-142",
        target="vllm.v1.core.kv_cache_manager:KVCacheManager.free",
        feature="retention",
        wrapper=release_request,
        why="Upstream's replay boundary is that of the prompt: a request that is preempted while "
        "decoding, or extended by a next turn, resumes far behind what it computed.",
        retire_when="upstream keeps the boundary of the last computed token",
    ),
    Patch(
        id="KVX-146",
        target="vllm.v1.core.kv_cache_manager:KVCacheManager.pop_blocks_for_free",
        feature="retention",
        vllm=SINCE_0_30,
        wrapper=release_request,
        why="With a connector, blocks that steps in flight write are freed once those have ended; "
        "the request ends before.",
        retire_when="KVX-142 is",
    ),
)
