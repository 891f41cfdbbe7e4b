# SPDX-License-Identifier: Apache-2.0
"""What retention needs of the block manager; upstream's objects have it in every version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from vllm_ascend_kvext.retention.stats import RetentionStats

if TYPE_CHECKING:
    from vllm_ascend_kvext.retention.policy import RetentionPolicy


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


class Prompt(Protocol):
    """What a request says of itself before anything of it is computed."""

    request_id: str
    num_prompt_tokens: int
    sampling_params: Any


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
        is_upstreams: Whether upstream's own code caches its blocks and moves its window on.
    """

    manager: GroupManager
    geometry_index: int
    block_tokens: int
    is_upstreams: bool = False


class Pool(Protocol):
    """The block pool, adapted in ``vllm_ascend_kvext.patches.retention.block_pool``."""

    def cache(self, request: Any, group: ManagedGroup, run: range) -> None:
        """Cache a run of a request's blocks, all full and none cached yet."""

    def find(self, request: Any, group: ManagedGroup, block_index: int) -> Block | None:
        """The cached block that holds what a request's block holds, if there is one."""

    def refresh(self, block: Block) -> None:
        """Make a free block the last to be reallocated."""

    def discard(self, blocks: list[Block]) -> None:
        """Uncache blocks; those that are free become the next ones to be reallocated."""


class CheckpointPool(Pool, Protocol):
    """The block pool where checkpoints decide what is reallocated next.

    Attributes:
        blocks: Every block, by id.
        free_queue: ``vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue``.
        key_table: ``vllm.v1.core.block_pool.BlockHashToBlockMap``; a new one after each reset.
        hash_block_tokens: Tokens per hash of a request.
        has_events: Whether it reports what is cached.
    """

    @property
    def blocks(self) -> list[Any]: ...

    @property
    def free_queue(self) -> Any: ...

    @property
    def key_table(self) -> Any: ...

    @property
    def hash_block_tokens(self) -> int: ...

    @property
    def has_events(self) -> bool: ...


class Retention(Protocol):
    """Decides for one coordinator which blocks are cached; one for each running engine.

    Attributes:
        policy: Which boundaries to keep.
        sparse_groups: Groups of which a hit reads a tail only: sliding windows and states.
        full_groups: Cached from the first token up to what the latest boundary needs.
        stats: What to report of it.
    """

    policy: RetentionPolicy
    sparse_groups: tuple[ManagedGroup, ...]
    full_groups: tuple[ManagedGroup, ...]

    @property
    def stats(self) -> RetentionStats: ...

    def cache(self, request: Any, num_computed_tokens: int) -> None:
        """Cache what is worth keeping once tokens of a request are scheduled.

        Args:
            num_computed_tokens: As upstream counts them: those being scheduled are included,
                draft tokens are not.
        """

    def quiet_until_tokens(self, request: Any) -> int:
        """The tokens to cache up to which `cache` only takes note of them."""

    def note_quiet_step(self, request: Any, num_computed_tokens: int) -> None:
        """What `cache` does below `quiet_until_tokens`."""

    def before_skip(self, request_id: str, total_computed_tokens: int) -> int | None:
        """Blocks are about to leave the windows of a request.

        Returns:
            The computed tokens up to which windows may move on; None if no block leaves one, as
            in most steps of a decode. Draft tokens that are still in flight do not count: where
            they are rejected, the request needs the window before them (vLLM #47728).
        """

    def next_stop_tokens(self, request: Any, computed_tokens: int) -> int | None:
        """Where a prefill step of a request has to end, so that a state is there to keep.

        Returns:
            The nearest boundary past ``computed_tokens`` that was asked for; None where states
            play no part, or nothing was asked for.
        """

    def release(self, request: Any) -> None:
        """Settle what a request leaves behind; call it before its blocks are freed."""
