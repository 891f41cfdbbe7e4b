# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/core/single_type_kv_cache_manager.py``: windows under context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patching.declaration import BEFORE_0_30, SINCE_0_30, Patch

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    Hits = tuple[list[KVCacheBlock], ...]


def miss_under_context_parallelism(
    wrapped: Callable[..., Hits],
    manager_class: type[SlidingWindowManager],
    *args: Any,
    **kwargs: Any,
) -> Hits:
    """Return no hit under context parallelism, where upstream's assertion would fail."""
    missed = _missed(kwargs)
    return wrapped(*args, **kwargs) if missed is None else missed


def miss_with_length(
    wrapped: Callable[..., tuple[Hits, int]],
    manager_class: type[SlidingWindowManager],
    *args: Any,
    **kwargs: Any,
) -> tuple[Hits, int]:
    """Return no hit and the length 0 under context parallelism, for lookups with a length."""
    missed = _missed(kwargs)
    return wrapped(*args, **kwargs) if missed is None else (missed, 0)


def _missed(arguments: Mapping[str, Any]) -> Hits | None:
    """A hit without blocks under context parallelism; None without context parallelism."""
    # Every coordinator passes these arguments by name. If they are missing, there is one rank.
    num_ranks = arguments.get("dcp_world_size", 1) * arguments.get("pcp_world_size", 1)
    if num_ranks == 1:
        return None
    _warn(num_ranks)
    return tuple([] for _ in arguments["kv_cache_group_ids"])


def _warn(num_ranks: int) -> None:
    from vllm.logger import init_logger

    init_logger("vllm.ascend_kvext.repairs").warning_once(
        "No local prefix-cache hits: vLLM cannot look up sliding-window groups under context "
        "parallelism (%d ranks). Prompts are computed in full, or loaded by the KV connector.",
        num_ranks,
    )


PATCHES = (
    Patch(
        id="KVX-302",
        target="vllm.v1.core.single_type_kv_cache_manager:"
        "SlidingWindowManager.find_longest_cache_hit",
        feature="context-parallel-windows",
        vllm=BEFORE_0_30,
        wrapper=miss_under_context_parallelism,
        why="vLLM-Ascend serves sliding-window groups with decode or prefill context parallelism, "
        "too. The first lookup then ends the engine with an assertion.",
        retire_when="upstream looks sliding windows up under context parallelism",
    ),
    Patch(
        id="KVX-310",
        target="vllm.v1.core.single_type_kv_cache_manager:"
        "SlidingWindowManager.find_longest_cache_hit",
        feature="context-parallel-windows",
        vllm=SINCE_0_30,
        wrapper=miss_with_length,
        why="vLLM's coordinators give the number of ranks to full attention only, or refuse the "
        "model. vLLM-Ascend's coordinator gives it to windows, too, and the first lookup ends the "
        "engine with an assertion.",
        retire_when="vLLM-Ascend looks windows up without context parallelism, as vLLM does",
        ascend=(
            "vllm_ascend.patch.platform.patch_kv_cache_coordinator:"
            "AscendHybridKVCacheCoordinator.find_longest_cache_hit",
        ),
    ),
)
