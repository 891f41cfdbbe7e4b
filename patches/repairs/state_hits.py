# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Repairs the hits of a scheduler whose own lookup ignores the states of a model.

A scheduler with a KV connector may take the hit of full attention although no state is kept at the
end of this hit. The connector then loads the state with the tokens behind the hit. But a connector
that loads no token loads no state either, and the request would go on from a state that was never
computed. In that case the repair takes the hit of all groups, as vLLM's own scheduler does. Since
vLLM 0.30, a connector says whether it loads states (``supports_divergent_local_hybrid_hits``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patching.instance_methods import InstanceMethods

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    Matched = tuple[int | None, bool]
    """The tokens that a connector can load, None while it still searches; whether it loads them
    asynchronously."""

replaced = InstanceMethods()


def repair_hits(scheduler: Scheduler, brings_states: bool) -> None:
    """Repair the hits of a new scheduler whose own lookup ignores states.

    After the patch is taken back, the scheduler goes on with the hits of all groups.

    Args:
        scheduler: The scheduler. It uses its own lookup if ``has_mamba_layers`` is true. After its
            construction, the scheduler reads this attribute for nothing else.
        brings_states: Whether its connector may load the state at the end of its tokens.
    """
    from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator

    coordinator = scheduler.kv_cache_manager.coordinator
    if (
        scheduler.connector is not None
        and scheduler.has_mamba_layers
        and isinstance(coordinator, HybridKVCacheCoordinator)
    ):
        scheduler.has_mamba_layers = False
        hits = StateHits(scheduler)
        replaced.replace(scheduler.kv_cache_manager, hits.get_computed_blocks)
        if brings_states:
            hits.brings_states = True
            replaced.replace(scheduler.connector, hits.get_num_new_matched_tokens)


class StateHits:
    """The lookups of one scheduler. Its methods replace methods of the manager and the connector.

    The connector is asked once per lookup. The connector's answer for the longer hit is kept for
    the scheduler, which asks the same question next.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._manager = scheduler.kv_cache_manager
        self._connector = scheduler.connector
        self._asked: tuple[str, int, Matched] | None = None
        self._counts_itself = not hasattr(self._manager, "record_prefix_cache_stats")
        self.brings_states = False

    def get_computed_blocks(self, wrapped: Callable[[Request], Any], request: Request) -> Any:
        """Take the hit of full attention if the connector loads the state behind it."""
        if self.brings_states and (longer := self._hit_of_attention(request)) is not None:
            blocks, num_tokens, *boundary = longer
            self._asked = None
            matched = self._connector.get_num_new_matched_tokens(request, num_tokens)
            if matched[0] != 0:
                self._asked = (request.request_id, num_tokens, matched)
                self._count(request, num_tokens)
                return blocks, num_tokens, *boundary
        found = wrapped(request)
        if not self._counts_itself:
            self._count(request, found[1])
        return found

    def get_num_new_matched_tokens(
        self,
        wrapped: Callable[[Request, int], Matched],
        request: Request,
        num_computed_tokens: int,
    ) -> Matched:
        """Return the kept answer of the connector to the same question, or ask it."""
        asked = self._asked
        self._asked = None
        if asked is not None and asked[:2] == (request.request_id, num_computed_tokens):
            return asked[2]
        return wrapped(request, num_computed_tokens)

    def _hit_of_attention(self, request: Request) -> tuple[Any, ...] | None:
        """The hit of full attention, in the form of a lookup of this vLLM.

        Returns:
            None if the hit is not longer than the hit of all groups, or if another group has a
            longer hit.
        """
        manager = self._manager
        if not manager.enable_caching or request.skip_reading_prefix_cache:
            return None
        coordinator = manager.coordinator
        computed, hits = coordinator.find_longest_cache_hit_per_group(
            request.block_hashes, request.num_tokens - 1
        )
        if isinstance(hits, int):  # vLLM-Ascend 0.23 leaves the states out.
            return (manager.create_kv_cache_blocks(computed), hits) if hits else None
        group_id = coordinator.full_attention_group_id
        if group_id is None or not min(hits) < hits[group_id] == max(hits):
            return None
        return manager.create_kv_cache_blocks(computed), hits[group_id], 0

    def _count(self, request: Request, num_tokens: int) -> None:
        """Count a hit for vLLM's metrics, as the scheduler's own lookup does."""
        manager = self._manager
        if manager.log_stats and manager.enable_caching and not request.skip_reading_prefix_cache:
            manager.prefix_cache_stats.record(
                num_tokens=request.num_tokens,
                num_hits=num_tokens,
                preempted=request.num_preemptions > 0,
            )
