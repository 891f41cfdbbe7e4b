# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm_ascend/patch/platform/patch_balance_schedule.py``: a hit that has its state.

With a KV connector and a model with states, the balance scheduler of vLLM-Ascend 0.30 takes the
longest hit of any group. See ``state_hits``. The balance scheduler of 0.23 takes the hit of all
groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_ascend_kvext.patches.repairs.state_hits import repair_hits, replaced
from vllm_ascend_kvext.patching.declaration import SINCE_0_30, Patch


def take_hits_with_states(
    wrapped: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any
) -> None:
    """Repair the hits of a scheduler that balances. Without balancing, it uses vLLM's lookup."""
    wrapped(*args, **kwargs)
    if scheduler._balance_enabled and scheduler.connector is not None:
        repair_hits(scheduler, scheduler.connector.supports_divergent_local_hybrid_hits)


_SCHEDULER = "vllm_ascend.patch.platform.patch_balance_schedule:BalanceScheduler"

PATCHES = (
    Patch(
        id="KVX-176",
        target=f"{_SCHEDULER}.__init__",
        feature="state-hits",
        vllm=SINCE_0_30,
        wrapper=take_hits_with_states,
        undo=replaced.take_back,
        why="With any KV connector and a model with states, the balance scheduler takes the "
        "longest hit of any group. If no state was kept there, the request goes on from a state "
        "that was never computed, and answers wrong.",
        retire_when="the balance scheduler calls vLLM's `_get_local_prefix_cache_hit`",
        relies_on=(f"{_SCHEDULER}.schedule",),
    ),
)
