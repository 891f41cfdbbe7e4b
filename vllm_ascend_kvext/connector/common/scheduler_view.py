# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side needs of vLLM's objects; they have it in every supported version."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vllm_ascend_kvext.holes.hole_queue import NewHoles
from vllm_ascend_kvext.store.prefix import HashedPrefix
from vllm_ascend_kvext.upstream_types import Block as Block
from vllm_ascend_kvext.upstream_types import BlockPool, GroupManager
from vllm_ascend_kvext.upstream_types import Request as Request

CachedBlocks = Callable[[Request, int, int, int], Sequence[Block] | None]
"""Of a request, a KV cache group, a first and an end page: what the local prefix cache has of them;
None if it lacks one."""


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """The parts of one scheduler.

    Attributes:
        requests: Those that have not ended, by id.
        managers: By KV cache group: they have the block tables.
        num_blocks: Blocks of the pool, the null block among them.
        hash_block_size: Tokens per hash of a request.
        interval_tokens: ``VLLM_PREFIX_CACHE_RETENTION_INTERVAL``; 0 if unset.
        num_steps_in_flight: Planned steps at most of which windows keep what they have left behind.
        use_eagle: Whether a local hit drops the last block that it finds (EAGLE, MTP).
        num_lookahead_tokens: Draft tokens of a step.
        recomputes_failed_loads: Whether a request whose load fails goes on without it.
        has_other_connectors: Whether other connectors see the same requests.
        num_data_parallel: Engines that take every step together, of a mixture of experts.
        cached_blocks: Asks the local prefix cache. What it names may be reallocated.
        on_extra_work: Called when there begins to be something that steps have to compute, and
            upstream does not plan: holes, or segments that are learned.
        on_new_holes: Called when a step is planned, for each request that has new holes.
    """

    requests: Mapping[str, Request]
    managers: Sequence[GroupManager]
    block_pool: BlockPool
    num_blocks: int
    hash_block_size: int
    enable_caching: bool = True
    interval_tokens: int = 0
    max_num_batched_tokens: int = 1
    num_steps_in_flight: int = 1
    num_running: Callable[[], int] = lambda: 0
    use_eagle: bool = False
    num_lookahead_tokens: int = 0
    recomputes_failed_loads: bool = True
    has_other_connectors: bool = False
    max_model_len: int = 1 << 60
    num_data_parallel: int = 1
    cached_blocks: CachedBlocks = lambda *asked: None
    on_extra_work: Callable[[], object] = lambda: None
    on_new_holes: Callable[[NewHoles], object] = lambda new: None

    def prefix(self, request: Request) -> HashedPrefix:
        """The tokens of a request, as far as they are hashed."""
        return HashedPrefix(request.block_hashes, self.hash_block_size)

    def blocks(
        self, request_id: str, group: int, first_page: int, end_page: int
    ) -> Sequence[Block]:
        """Blocks of pages of a request, null ones included; fewer if its table is shorter."""
        return self.managers[group].req_to_blocks.get(request_id, ())[first_page:end_page]
