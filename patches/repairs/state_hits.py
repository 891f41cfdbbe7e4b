# SPDX-License-Identifier: Apache-2.0
"""How far a request of a model with states hits, where a scheduler takes no look at the states.

A scheduler with a KV connector may take what full attention hits, though no state is kept where
that ends: the connector brings the state with the tokens behind the hit. A connector that brings no
token brings no state either, and the request would go on from one that was never computed. There
the hit of all groups is taken, as vLLM's own scheduler does. Since vLLM 0.30 a connector says
whether it brings states at all (``supports_divergent_local_hybrid_hits``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patching.instance_methods import InstanceMethods

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    Matched = tuple[int | None, bool]
    """Tokens that a connector brings, None while it looks for them; whether it does so later."""

replaced = InstanceMethods()


def repair_hits(scheduler: Scheduler, brings_states: bool) -> None:
    """Have a new scheduler whose lookup of its own ignores states hit what its request may use.

    When the patch is taken back, it goes on with the hits of all groups.

    Args:
        scheduler: The lookup of its own is taken where ``has_mamba_layers`` is true, which it reads
            for nothing else once it is constructed.
        brings_states: Whether its connector may bring the state at the end of its tokens.
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
    """The lookups of one scheduler, whose manager and connector get methods of this object.

    A connector is asked once for each lookup: what it answers to the longer hit is kept for the
    question of the scheduler, which follows.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._manager = scheduler.kv_cache_manager
        self._connector = scheduler.connector
        self._asked: tuple[str, int, Matched] | None = None
        self._counts_itself = not hasattr(self._manager, "record_prefix_cache_stats")
        self.brings_states = False

    def get_computed_blocks(self, wrapped: Callable[[Request], Any], request: Request) -> Any:
        """Take what full attention hits if the connector brings the state behind it."""
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
        """Answer what the connector has just answered to the same question."""
        asked = self._asked
        self._asked = None
        if asked is not None and asked[:2] == (request.request_id, num_computed_tokens):
            return asked[2]
        return wrapped(request, num_computed_tokens)

    def _hit_of_attention(self, request: Request) -> tuple[Any, ...] | None:
        """The hit of full attention, and what else a lookup of this vLLM returns.

        None if it is not longer than that of all groups, or another group has hit more.
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
