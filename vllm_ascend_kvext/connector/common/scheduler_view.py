# SPDX-License-Identifier: Apache-2.0
"""The parts of vLLM's objects that the scheduler side needs. Every supported version has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vllm_ascend_kvext.connector.common.boundary_planner import MakeBoundaryPlanner
from vllm_ascend_kvext.holes.hole_queue import NewHoles
from vllm_ascend_kvext.store.prefix import HashedPrefix
from vllm_ascend_kvext.upstream_types import Block as Block
from vllm_ascend_kvext.upstream_types import BlockPool, GroupManager
from vllm_ascend_kvext.upstream_types import Request as Request

CachedBlocks = Callable[[Request, int, int, int], Sequence[Block] | None]
"""Returns the blocks of the local prefix cache that hold some pages; None if one is missing.

The arguments are the request, the KV cache group, the first page and the end page.
"""


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """The parts of one scheduler.

    Attributes:
        requests: The requests that have not ended, by id.
        managers: The managers of the block tables, by KV cache group.
        num_blocks: The blocks of the pool, including the null block.
        hash_block_size: Tokens per hash of a request.
        make_boundary_planner: Decides at which boundaries tails are stored.
        num_steps_in_flight: The most planned steps for which a window keeps the blocks that it has
            left behind.
        use_eagle: Whether a local hit drops the last block that it finds (EAGLE, MTP).
        num_lookahead_tokens: Draft tokens of a step.
        recomputes_failed_loads: Whether a request whose load fails goes on without the load.
        has_other_connectors: Whether other connectors see the same requests.
        num_data_parallel: The number of engines of a mixture of experts that take every step
            together.
        cached_blocks: Asks the local prefix cache. The blocks that it names may be reallocated.
        on_extra_work: Called when work begins that upstream does not plan: holes, or segments that
            are learned.
        on_new_holes: Called when a step is planned, for each request that has new holes.
    """

    requests: Mapping[str, Request]
    managers: Sequence[GroupManager]
    block_pool: BlockPool
    num_blocks: int
    hash_block_size: int
    make_boundary_planner: MakeBoundaryPlanner
    enable_caching: bool = True
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
        """The blocks of some pages of a request, including null blocks; fewer in a short table."""
        return self.managers[group].req_to_blocks.get(request_id, ())[first_page:end_page]
