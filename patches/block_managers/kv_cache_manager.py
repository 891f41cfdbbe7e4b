# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/core/kv_cache_manager.py``: methods of a new manager, and of the objects it is made of.

Each function below is called in place of an object's method of the same name. If the fast path and
retention both have a function, retention's is called, and calls the fast path's::

    manager        allocate_slots, cache_blocks       FastSteps
                   free, pop_blocks_for_free          RetainingManager
    coordinator    find_longest_cache_hit             FastLookup
                   cache_blocks                       RetainingCoordinator
                   remove_skipped_blocks              RetainingCoordinator
                   get_num_blocks_to_allocate         RetainingCoordinatorInsideBlocks
                   allocate_new_computed_blocks       RetainingCoordinatorInsideBlocks
                   new_step_starts                    RetainingCoordinatorInsideBlocks
    block pool     get_new_blocks                     FastPool <- RetainingPool
                   cache_full_blocks                  FastPool, or with retention RetainingPool
                   free_blocks, reset_prefix_cache    RetainingPool
    group manager  cache_blocks                       FastTails, or with retention upstream's
                   remove_skipped_blocks              FastWindow (vLLM 0.23)
                   _remove_blocks_in_range            FastWindow (since vLLM 0.30)
                   free                               FastWindow <- RetainingGroup (vLLM 0.23)
                   pop_blocks_for_free                RetainingGroup (since vLLM 0.30)

A manager that neither the fast path nor retention understands runs upstream's own functions.
Coordinators and pools without a manager always run upstream's functions. vLLM's connectors that
offload to the host have such coordinators and pools.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.features import FAST_PREFIX_CACHE
from vllm_ascend_kvext.patches.block_managers.start_retention import retain
from vllm_ascend_kvext.patches.fast_prefix_cache import block_pool as fast_block_pool
from vllm_ascend_kvext.patches.fast_prefix_cache import kv_cache_coordinator as fast_coordinator
from vllm_ascend_kvext.patches.fast_prefix_cache import kv_cache_manager as fast_manager
from vllm_ascend_kvext.patches.fast_prefix_cache import single_type_kv_cache_manager as fast_group
from vllm_ascend_kvext.patches.retention import block_pool as retained_block_pool
from vllm_ascend_kvext.patches.retention import kv_cache_coordinator as retained_coordinator
from vllm_ascend_kvext.patches.retention import kv_cache_manager as retained_manager
from vllm_ascend_kvext.patches.retention import single_type_kv_cache_manager as retained_group
from vllm_ascend_kvext.patching.declaration import BEFORE_0_30, SINCE_0_30, Patch
from vllm_ascend_kvext.patching.instance_methods import InstanceMethods
from vllm_ascend_kvext.settings import Retention, parse_retention, parse_retention_interval
from vllm_ascend_kvext.upstream_state import BlockManagerState

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from vllm_ascend_kvext.retention.checkpoint_retention import CheckpointRetention

RETENTION = "retention"
"""The name of the feature."""


def make_manager(
    feature: str,
    wrapped: Callable[..., None],
    manager: KVCacheManager,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Bind methods of a new block manager, once, for all features that are installed.

    Each feature wraps upstream's constructor. The outermost wrapper is called first, and ends last.
    At its end all features are known, and the manager is complete.
    """
    features = BlockManagerState.of(manager).features
    is_outermost = not features
    features.add(feature)
    wrapped(*args, **kwargs)
    if is_outermost:
        bind(manager, features)


def bind(manager: KVCacheManager, features: set[str]) -> None:
    """Replace methods of a manager, and of the objects it is made of, for some features.

    Raises:
        SettingsError: If the retention interval cannot be read.
        ValueError: If the interval is not valid for this model.
    """
    retention = _start_retention(manager) if RETENTION in features else None
    if FAST_PREFIX_CACHE.name in features:
        for owner, method in _fast_methods(manager, retention):
            _fast.replace(owner, method)
    if retention is not None:
        for owner, method in retained_manager.retaining_methods(manager, retention):
            _retaining.replace(owner, method)


def _start_retention(manager: KVCacheManager) -> CheckpointRetention | None:
    """Start retention with the interval of the settings; None if the settings ask for none.

    An interval that is wrong for the model is refused here, because the unit at which the prefix
    cache can hit is known only when the coordinator exists. If the variable is not set, adaptive
    retention takes the interval of upstream's configuration.
    """
    interval = parse_retention_interval(os.environ)
    is_adaptive = parse_retention(os.environ) is Retention.ADAPTIVE
    if interval is None and not is_adaptive:
        return None
    configured = manager.coordinator.retention_interval
    return retain(manager.coordinator, int(interval or configured or 0), is_adaptive)


def _fast_methods(
    manager: KVCacheManager, retention: CheckpointRetention | None
) -> Iterator[tuple[object, Callable[..., Any]]]:
    coordinator = manager.coordinator
    pool = coordinator.block_pool
    groups = coordinator.single_type_managers
    whole_group_ids = {
        group.kv_cache_group_id
        for group in groups
        if group.block_pool is pool and fast_group.is_cached_whole(group)
    }
    fast_pool = fast_block_pool.FastPool(pool, whole_group_ids)
    for method in fast_pool.methods(retention is not None):
        yield pool, method
    # Where nothing is cached, vLLM's hashes are of more tokens than some blocks have.
    lookup = fast_coordinator.describe_lookup(coordinator) if manager.enable_caching else None
    if lookup is not None:
        yield coordinator, fast_coordinator.FastLookup(coordinator, lookup).find_longest_cache_hit
    for group in groups:
        for method in fast_group.methods_of_group(group, retention is not None):
            yield group, method
    steps = fast_manager.describe_steps(manager, retention)
    BlockManagerState.of(manager).steps = steps
    if steps is not None:
        fast_steps = fast_manager.FastSteps(manager, steps)
        yield manager, fast_steps.allocate_slots
        yield manager, fast_steps.cache_blocks


_fast = InstanceMethods()
_retaining = InstanceMethods()

_of_fast_path = partial(
    Patch,
    target="vllm.v1.core.kv_cache_manager:KVCacheManager.__init__",
    feature=FAST_PREFIX_CACHE.name,
    wrapper=partial(make_manager, FAST_PREFIX_CACHE.name),
    undo=_fast.take_back,
    why="Upstream passes over all groups several times in every step of every request, although in "
    "most steps nothing changes, and calls functions, makes keys or computes flags for every block "
    "of a prompt.",
    retire_when="upstream's costs as little",
)

_of_retention = partial(
    Patch,
    target="vllm.v1.core.kv_cache_manager:KVCacheManager.__init__",
    feature=RETENTION,
    wrapper=partial(make_manager, RETENTION),
    undo=_retaining.take_back,
    why="Upstream caches tails at boundaries that an EAGLE group, an aligned prompt, a next turn "
    "or a preempted request cannot hit. It evicts a checkpoint before the full-attention blocks "
    "that it unlocks. And it validates the interval against another number than the unit at which "
    "hits can end.",
    retire_when="upstream derives what it keeps from its lookup, and evicts the blocks of a "
    "boundary together",
)

PATCHES = (
    _of_fast_path(
        id="KVX-242",
        vllm=BEFORE_0_30,
        relies_on=(
            *fast_block_pool.RELIES_ON,
            *fast_coordinator.RELIES_ON,
            *fast_manager.RELIES_ON,
            *fast_group.RELIES_ON,
            *fast_group.RELIES_ON_BEFORE_0_30,
        ),
        ascend=(*fast_coordinator.ASCEND, *fast_manager.ASCEND),
    ),
    _of_fast_path(
        id="KVX-243",
        vllm=SINCE_0_30,
        relies_on=(
            *fast_block_pool.RELIES_ON,
            *fast_coordinator.RELIES_ON,
            *fast_manager.RELIES_ON,
            *fast_group.RELIES_ON,
            *fast_group.RELIES_ON_SINCE_0_30,
        ),
        ascend=(*fast_coordinator.ASCEND, *fast_coordinator.ASCEND_SINCE_0_30),
    ),
    _of_retention(
        id="KVX-141",
        vllm=BEFORE_0_30,
        relies_on=(
            *retained_block_pool.RELIES_ON,
            *retained_coordinator.RELIES_ON,
            *retained_manager.RELIES_ON,
            *retained_group.RELIES_ON_BEFORE_0_30,
        ),
        ascend=(
            *retained_block_pool.ASCEND_BEFORE_0_30,
            *retained_coordinator.ASCEND,
            *retained_coordinator.ASCEND_BEFORE_0_30,
        ),
    ),
    _of_retention(
        id="KVX-147",
        vllm=SINCE_0_30,
        relies_on=(
            *retained_block_pool.RELIES_ON,
            *retained_coordinator.RELIES_ON,
            *retained_manager.RELIES_ON,
            *retained_manager.RELIES_ON_SINCE_0_30,
            *retained_group.RELIES_ON_SINCE_0_30,
            *retained_coordinator.INSIDE_BLOCKS,
        ),
        ascend=(*retained_coordinator.ASCEND, *retained_coordinator.ASCEND_INSIDE_BLOCKS),
    ),
)
