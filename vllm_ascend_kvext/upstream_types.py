# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Protocols of vLLM's objects, under upstream's names, with the attributes that plain code reads.

Every supported version of vLLM has these attributes, and so have the subclasses of vLLM-Ascend. The
module does not know its readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol


class Block(Protocol):
    """``vllm.v1.core.kv_cache_utils.KVCacheBlock``."""

    block_id: int
    is_null: bool
    ref_cnt: int


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


class BlockPool(Protocol):
    """``vllm.v1.core.block_pool.BlockPool``."""

    blocks: list[Any]
    free_block_queue: Any
    cached_block_hash_to_block: Any  # Each reset replaces it by another object.
    hash_block_size: int
    enable_kv_cache_events: bool

    def touch(self, blocks: Sequence[Any]) -> None: ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...

    def get_new_blocks(self, num_blocks: int) -> Sequence[Any]: ...

    def get_num_free_blocks(self) -> int: ...


class GroupManager(Protocol):
    """``vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager``."""

    kv_cache_group_id: int
    req_to_blocks: dict[str, list[Any]]
    num_cached_block: dict[str, int]

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[Any]: ...

    def cache_blocks(self, request: Any, num_tokens: int) -> None: ...

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int: ...

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None: ...
