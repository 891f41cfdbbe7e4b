# SPDX-License-Identifier: Apache-2.0
"""What retention needs of the block manager; upstream's objects have it in every version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Block(Protocol):
    """``vllm.v1.core.kv_cache_utils.KVCacheBlock``.

    Of its hash the field, not upstream's property: it is read for every block of a prompt.
    """

    block_id: int
    ref_cnt: int
    is_null: bool
    _block_hash: bytes | None


CachedBlock = tuple[Block, bytes]
"""A block and its hash when it was recorded: with another hash it holds something else."""


class Request(Protocol):
    """``vllm.v1.request.Request``."""

    block_hashes: Sequence[bytes]
    request_id: str
    num_computed_tokens: int
    num_output_placeholders: int
    num_prompt_tokens: int
    sampling_params: Any

    @property
    def num_tokens(self) -> int: ...

    def is_finished(self) -> bool: ...


class GroupManager(Protocol):
    """``vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager``."""

    kv_cache_group_id: int
    req_to_blocks: dict[str, list[Any]]
    num_cached_block: dict[str, int]

    def cache_blocks(self, request: Any, num_tokens: int) -> None: ...

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int: ...

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None: ...


@dataclass(frozen=True, slots=True)
class ManagedGroup:
    """A KV cache group.

    Attributes:
        manager: Upstream's manager of its blocks.
        geometry_index: Its place in ``HitGeometry.groups``.
        block_tokens: Tokens that one block covers.
    """

    manager: GroupManager
    geometry_index: int
    block_tokens: int


class Pool(Protocol):
    """The block pool, adapted in ``vllm_ascend_kvext.patches.retention.block_pool``."""

    @property
    def num_blocks(self) -> int: ...

    def cache(self, request: Any, group: ManagedGroup, run: range) -> None:
        """Cache a run of a request's blocks, all full and none cached yet."""

    def find(self, request: Any, group: ManagedGroup, block_index: int) -> Block | None:
        """The cached block that holds what a request's block holds, if there is one."""

    def prefix_key(self, request: Any, num_tokens: int) -> bytes:
        """The chained hash of a request's first tokens; a multiple of every block's tokens."""

    @property
    def has_checkpoints(self) -> bool:
        """Whether checkpoints account for all that is cached."""

    def is_needed(self, block: Block) -> bool:
        """Whether a block belongs to a checkpoint, whichever request cached it."""

    def count_useless(self, limit: int) -> int:
        """How many of the next ``limit`` blocks to be reallocated are not cached, in a row."""

    def idle_cached_blocks(self) -> list[Block]:
        """Cached blocks that no request holds."""

    def refresh(self, block: Block) -> None:
        """Make a free block the last to be reallocated."""

    def discard(self, blocks: list[Block]) -> None:
        """Uncache blocks; those that are free become the next ones to be reallocated."""
