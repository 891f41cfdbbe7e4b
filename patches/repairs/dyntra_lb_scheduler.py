# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm_ascend/core/dyntra_lb_scheduler.py``: only some connectors get a hit without its state.

vLLM's scheduler offers a connector a hit that lacks its state only if the connector says that it
loads states. The load-balancing scheduler of decode nodes offers such a hit to every connector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patching.declaration import SINCE_0_30, Patch

if TYPE_CHECKING:
    from vllm.v1.request import Request


def ask_whether_states_come(
    wrapped: Callable[..., Any], scheduler: Any, request: Request
) -> tuple[Any, ...]:
    """Take the hit of all groups for a connector that loads no states.

    Returns:
        The blocks of the hit, their tokens, the end of a prefix that is to be kept, whether states
        are missing, and, since vLLM 0.30, whether the last block may be left out.
    """
    if scheduler.connector.supports_divergent_local_hybrid_hits:
        found: tuple[Any, ...] = wrapped(request)
        return found
    return *scheduler.kv_cache_manager.get_computed_blocks(request), False, True


_SCHEDULER = "vllm_ascend.core.dyntra_lb_scheduler:DyntraLBPolicyMixin"

PATCHES = (
    Patch(
        id="KVX-178",
        target=f"{_SCHEDULER}._get_connector_computed_blocks",
        feature="state-hits",
        vllm=SINCE_0_30,
        wrapper=ask_whether_states_come,
        why="The load-balancing scheduler offers every connector a hit that may lack its state. "
        "If a connector loads tokens behind the hit, but no state, the request goes on from a "
        "state that was never computed.",
        retire_when="the load-balancing scheduler calls vLLM's `_get_local_prefix_cache_hit`",
        relies_on=("vllm_ascend.core.dyntra_lb_scheduler:DyntraLBScheduler.schedule",),
    ),
)
