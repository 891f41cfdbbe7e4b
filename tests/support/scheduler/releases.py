# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Hides the differences of the supported releases of vLLM from the harness.

Each function works for all releases. It checks which attributes upstream's objects have.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Iterable
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

INTERVAL_VARIABLE = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"

CONFIGURES_RETENTION = "prefix_cache_retention_interval" in {
    field.name for field in dataclasses.fields(KVCacheConfig)
}
"""Whether vLLM reads the retention interval from its configuration, not from a variable."""


def retention_fields() -> dict[str, Any]:
    """The interval of the environment, as fields of ``KVCacheConfig``. Unset means dense."""
    if not CONFIGURES_RETENTION:
        return {}
    text = os.environ.get(INTERVAL_VARIABLE, "")
    return {"prefix_cache_retention_interval": int(text) if text.strip() else None}


def in_flight_argument(max_tokens: int) -> dict[str, int]:
    """The most tokens that are computed at once, as the argument that ``KVCacheManager`` takes."""
    name = "max_num_batched_tokens"
    if name not in inspect.signature(KVCacheManager).parameters:
        name = "max_in_flight_tokens"
    return {name: max_tokens}


def look_up(manager: Any, request: Request) -> tuple[Any, int]:
    """The blocks and tokens that a request hits. The lookup is the same as the scheduler's.

    Since vLLM 0.30, a lookup also finds the token at which requests part. The request remembers it.
    """
    blocks, hit_tokens, *junction_tokens = manager.get_computed_blocks(request)
    for request.shared_prefix_boundary in junction_tokens:
        pass
    return blocks, hit_tokens


def block_copies(scheduler_output: Any) -> Iterable[tuple[int, int]]:
    """The block copies that workers make before a step. Hits that end inside a state need them."""
    return getattr(scheduler_output, "kv_cache_block_copies", None) or ()


def deferred_blocks(scheduler: Any) -> Iterable[Any]:
    """The blocks of ended requests that are freed when the steps in flight have ended."""
    for _, blocks in getattr(scheduler, "deferred_frees", ()):
        yield from (block for block in blocks if not block.is_null)


def tokens_in_flight(max_num_batched_tokens: int, is_async: bool) -> int:
    """The most tokens that a window holds beyond its length.

    Since vLLM 0.30, these are the tokens of all steps in flight.
    """
    waits = hasattr(VllmConfig, "max_in_flight_tokens")
    return max_num_batched_tokens * (2 if waits and is_async else 1)
