# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm_ascend/core/recompute_scheduler.py``: a hit that has its state.

On a decode node, the recompute scheduler of vLLM-Ascend 0.23 takes the hit of the groups without
states, because a prefill node sends the state. But no node sends a state for a request that was not
prefilled elsewhere. See ``state_hits``. The recompute scheduler of 0.30 asks vLLM's scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_ascend_kvext.patches.repairs.state_hits import repair_hits, replaced
from vllm_ascend_kvext.patching.declaration import BEFORE_0_30, Patch


def take_hits_with_states(
    wrapped: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any
) -> None:
    """Repair the hits of a decode node. Connectors of vLLM 0.23 do not say if they load states."""
    wrapped(*args, **kwargs)
    if not scheduler.is_kv_producer:
        repair_hits(scheduler, brings_states=True)


_SCHEDULER = "vllm_ascend.core.recompute_scheduler:RecomputeScheduler"

PATCHES = (
    Patch(
        id="KVX-177",
        target=f"{_SCHEDULER}.__init__",
        feature="state-hits",
        vllm=BEFORE_0_30,
        wrapper=take_hits_with_states,
        undo=replaced.take_back,
        why="On a decode node, the recompute scheduler takes a hit without its state, also if the "
        "connector loads nothing for the request. The request then goes on from a state that was "
        "never computed, and answers wrong.",
        retire_when="0.23 is not supported any more: vLLM-Ascend 0.30 asks vLLM's scheduler",
        relies_on=(
            f"{_SCHEDULER}.schedule",
            "vllm_ascend.patch.platform.patch_kv_cache_coordinator:"
            "AscendHybridKVCacheCoordinator.find_longest_cache_hit_per_group",
        ),
        when_imported=True,
    ),
)
