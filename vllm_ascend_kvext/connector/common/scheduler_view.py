# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The parts of vLLM's objects that the scheduler side needs. Every supported version has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_ascend_kvext.connector.common.boundary_planner import MakeBoundaryPlanner
from vllm_ascend_kvext.connector.common.fine_keys import FineKeys, HashTokens
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
        num_steps_in_flight: The maximum number of planned steps whose tokens a window holds beyond
            its length.
        use_eagle: Whether a local hit drops the last block that it finds (EAGLE, MTP).
        num_lookahead_tokens: Tokens of a step for which the drafter needs places in blocks.
        num_draft_slots: Tokens by which the drafter lengthens each request of its own step.
        num_prefill_lookahead_tokens: Tokens behind a prefill step that the drafter reads.
        leaves_a_decode: Whether a request has as many tokens behind a boundary as a decode with
            drafts has. vLLM-Ascend 0.23.0 would go on from a wrong state there.
        recomputes_failed_loads: Whether a request whose load fails goes on without the load.
        has_other_connectors: Whether other connectors see the same requests.
        num_data_parallel: The number of engines of a mixture of experts that take every step
            together.
        cached_blocks: Asks the local prefix cache. The returned blocks may be reallocated.
        on_extra_work: Called when work begins that upstream does not plan: holes, or segments that
            are learned.
        on_new_holes: Called when a step is planned, for each request that has new holes.
        on_waiting_stores: Called with whether stores are planned that have not begun, when that
            changes. They may give way to a request that lacks blocks.
        has_steps_for_states: Whether prefill steps end where a state is to be stored.
        hash_tokens: Makes keys between those of requests; None if there are no such keys.
        fine_keys: Makes the keys of all prefixes; None if the hashes of requests are the keys.
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
    num_draft_slots: int = 0
    num_prefill_lookahead_tokens: int = 0
    leaves_a_decode: Callable[[Request, int], bool] = lambda request, tokens: False
    recomputes_failed_loads: bool = True
    has_other_connectors: bool = False
    max_model_len: int = 1 << 60
    num_data_parallel: int = 1
    cached_blocks: CachedBlocks = lambda *asked: None
    on_extra_work: Callable[[], object] = lambda: None
    on_new_holes: Callable[[NewHoles], object] = lambda new: None
    on_waiting_stores: Callable[[bool], object] = lambda are_waiting: None
    has_steps_for_states: bool = False
    hash_tokens: HashTokens | None = None
    fine_keys: FineKeys | None = None

    @property
    def has_draft_layers(self) -> bool:
        """Whether drafts have layers of their own (EAGLE, MTP), which have keys and values."""
        return self.use_eagle or self.num_lookahead_tokens > 0

    def with_keys_at(self, tokens_per_key: int) -> SchedulerView:
        """This view with keys at multiples of ``tokens_per_key``."""
        if tokens_per_key == self.hash_block_size:
            return self
        assert self.hash_tokens is not None
        return replace(
            self, fine_keys=FineKeys(tokens_per_key, self.hash_block_size, self.hash_tokens)
        )

    def prefix(self, request: Request) -> HashedPrefix:
        """The tokens of a request, as far as they have keys."""
        if self.fine_keys is not None:
            return self.fine_keys.prefix(request)
        return HashedPrefix(request.block_hashes, self.hash_block_size)

    def blocks(
        self, request_id: str, group: int, first_page: int, end_page: int
    ) -> Sequence[Block]:
        """The blocks of some pages of a request, including null blocks; fewer in a short table."""
        return self.managers[group].req_to_blocks.get(request_id, ())[first_page:end_page]
