# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side needs of vLLM's objects; they have it in every supported version."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_ascend_kvext.connector.block_references import BlockPool
from vllm_ascend_kvext.store.prefix import HashedPrefix


class Request(Protocol):
    """``vllm.v1.request.Request``."""

    request_id: str
    block_hashes: Sequence[bytes]
    num_computed_tokens: int
    num_prompt_tokens: int
    num_output_placeholders: int
    all_token_ids: Sequence[int]
    lora_request: Any
    sampling_params: Any
    skip_reading_prefix_cache: bool
    pooling_params: Any
    prompt_token_ids: Any
    prompt_embeds: Any
    mm_features: Any
    cache_salt: str | None
    status: Any
    _block_hasher: Any

    @property
    def num_tokens(self) -> int: ...

    def is_finished(self) -> bool: ...


class Block(Protocol):
    """``vllm.v1.core.kv_cache_utils.KVCacheBlock``."""

    block_id: int
    is_null: bool


CachedBlocks = Callable[["Request", int, int, int], Sequence["Block"] | None]
"""Of a request, a KV cache group, a first and an end page: what the local prefix cache has of them;
None if it lacks one."""


class GroupManager(Protocol):
    """``vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager``."""

    req_to_blocks: Mapping[str, Sequence[Block]]


@dataclass(frozen=True, slots=True)
class Engine:
    """The parts of one scheduler.

    Attributes:
        requests: Those that have not ended, by id.
        managers: Of the block tables, by KV cache group.
        block_pool: Of all groups.
        num_blocks: In the pool.
        hash_tokens: Tokens per hash of a request.
        caches_prefixes: Whether the local prefix cache is on.
        interval_tokens: Of ``VLLM_PREFIX_CACHE_RETENTION_INTERVAL``; 0 if unset.
        step_tokens: That a step computes at most.
        num_running: How many requests run.
        looks_ahead: Whether a local hit drops the last block that it finds (EAGLE, MTP).
        num_lookahead_tokens: Draft tokens of a step.
        recomputes_failed_loads: Whether a request whose load fails goes on without it.
        has_other_connectors: Whether other connectors see the same requests.
        most_request_tokens: Of a prompt and its answer.
        num_data_parallel: Engines that take every step together, of a mixture of experts.
        cached_blocks: Asks the local prefix cache. What it names may be reallocated.
    """

    requests: Mapping[str, Request]
    managers: Sequence[GroupManager]
    block_pool: BlockPool
    num_blocks: int
    hash_tokens: int
    caches_prefixes: bool = True
    interval_tokens: int = 0
    step_tokens: int = 1
    num_running: Callable[[], int] = lambda: 0
    looks_ahead: bool = False
    num_lookahead_tokens: int = 0
    recomputes_failed_loads: bool = True
    has_other_connectors: bool = False
    most_request_tokens: int = 1 << 60
    num_data_parallel: int = 1
    cached_blocks: CachedBlocks = lambda *asked: None

    def prefix(self, request: Request) -> HashedPrefix:
        """The tokens of a request, as far as they are hashed."""
        return HashedPrefix(request.block_hashes, self.hash_tokens)

    def blocks(
        self, request_id: str, group: int, first_page: int, end_page: int
    ) -> Sequence[Block]:
        """Blocks of pages of a request, null ones included; fewer if its table is shorter."""
        return self.managers[group].req_to_blocks.get(request_id, ())[first_page:end_page]
