# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Runs vLLM's block manager, and records its cache. The module knows no trace and no policy."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from support.scheduler.releases import in_flight_argument, look_up
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from retention.layouts import BenchLayout
from vllm_ascend_kvext.patches.retention.scheduler import RetainingScheduler
from vllm_ascend_kvext.upstream_state import CoordinatorState

GROUP_ID_BYTES = 4
HASH_BYTES = 32


class RecordingTable(dict):
    """The table of a block pool's cached blocks, which also records its history.

    A value is a block, or a dict of blocks if several hold the same tokens. A key ends with the
    hash of the block's last tokens and the group id; more hashes may come before them.

    Attributes:
        ever_cached: The end of each key that was ever in the table.
        num_dropped: The number of blocks that were taken out of the table.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ever_cached: set[bytes] = set()
        self.num_dropped = 0
        self._taken_out: tuple[bytes, int] | None = None

    def __setitem__(self, key: bytes, value: object) -> None:
        if self._taken_out is not None and self._taken_out[0] is key:
            # The pool takes a dict of blocks out of the table, and puts it back without one block.
            self.num_dropped -= num_blocks(value)
        self._taken_out = None
        self.ever_cached.add(key[-HASH_BYTES - GROUP_ID_BYTES :])
        super().__setitem__(key, value)

    def setdefault(self, key: bytes, value: object = None) -> object:
        if key not in self:
            self[key] = value
        return super().__getitem__(key)

    def update(self, *others: object, **more: object) -> None:
        for key, value in dict(*others, **more).items():
            self[key] = value

    def pop(self, key: bytes, *default: object) -> object:
        if key in self:
            self._taken_out = (key, num_blocks(self[key]))
            self.num_dropped += self._taken_out[1]
        return super().pop(key, *default)

    def __delitem__(self, key: bytes) -> None:
        self.num_dropped += num_blocks(self[key])
        super().__delitem__(key)

    def num_cached_by_group(self) -> Counter[int]:
        counts: Counter[bytes] = Counter()
        for key, value in self.items():
            counts[key[-GROUP_ID_BYTES:]] += num_blocks(value)
        return Counter({int.from_bytes(group, "big"): n for group, n in counts.items()})


def num_blocks(value: object) -> int:
    return len(value) if isinstance(value, dict) else 1


@dataclass(slots=True)
class _CacheConfig:
    block_size: int


@dataclass(slots=True)
class _SchedulerConfig:
    long_prefill_token_threshold: int = 0


@dataclass(slots=True)
class _VllmConfig:
    kv_transfer_config: None = None


@dataclass(slots=True)
class _SplittingScheduler:
    """The attributes of a scheduler that ``_mamba_block_aligned_split`` and its patch read."""

    cache_config: _CacheConfig
    kv_cache_manager: KVCacheManager
    max_num_scheduled_tokens: int
    hash_block_size: int
    mamba_partial_cache_hit: bool
    """This attribute and the following ones exist since vLLM 0.30. They are off here: no drafts,
    and no checkpoints inside a chunk."""

    scheduler_config: _SchedulerConfig = field(default_factory=_SchedulerConfig)
    vllm_config: _VllmConfig = field(default_factory=_VllmConfig)
    use_eagle: bool = False
    use_eagle_block_drop: bool = False
    mamba_fine_grained_prefix_cache: bool = False
    mamba_has_prefill_checkpoint_blocks: bool = False
    mamba_prefill_checkpoint_alignment: int | None = None


class Engine:
    """A ``KVCacheManager`` and the CPU time spent in it.

    Args:
        layout: The layout of the cache.
        num_blocks: The size of the pool.
        records: Whether to record the history of the cache, which takes CPU time.

    Attributes:
        table: The recorded history; None if it is not recorded.

    Raises:
        ValueError: vLLM or a patch refuses the interval for this layout, or vLLM has no hits inside
            blocks, and the layout wants them.
    """

    def __init__(self, layout: BenchLayout, num_blocks: int, records: bool = True) -> None:
        self.manager = KVCacheManager(
            kv_cache_config=layout.to_config(num_blocks),
            max_model_len=1 << 20,
            scheduler_block_size=layout.scheduler_block_tokens,
            hash_block_size=layout.hash_block_tokens,
            enable_caching=True,
            **in_flight_argument(layout.max_num_batched_tokens),
        )
        self.table = RecordingTable() if records else None
        if self.table is not None:
            self.manager.block_pool.cached_block_hash_to_block._cache = self.table
        # Hits inside blocks are copied, since vLLM 0.30. A scheduler holds both blocks for a step.
        self._takes_copies = hasattr(self.manager, "take_kv_cache_block_copies")
        ends_inside_blocks = getattr(self.manager.coordinator, "enable_partial_hash_hits", False)
        if layout.match_unit_tokens and not ends_inside_blocks:
            raise ValueError(f"hits of {layout.name} do not end inside blocks: it needs vLLM 0.30")
        self._elapsed_ns = 0
        self._split: Callable[[Request, int, int], int] | None = None
        if layout.state_block_tokens:
            host = _SplittingScheduler(
                _CacheConfig(layout.state_block_tokens),
                self.manager,
                layout.max_num_batched_tokens,
                layout.hash_block_tokens,
                ends_inside_blocks,
            )
            # The method is bound to the host, because a patch reads the object that it is bound to.
            self._split = Scheduler._mamba_block_aligned_split.__get__(host)
            retention = CoordinatorState.of(self.manager.coordinator).retention
            if retention is not None:
                # Retention changes the method of a scheduler when vLLM makes the scheduler.
                methods = RetainingScheduler(host, retention)
                self._split = partial(methods._mamba_block_aligned_split, self._split)

    @property
    def scheduler_s(self) -> float:
        """The CPU time in the block manager, which includes the time of recording."""
        return self._elapsed_ns / 1e9

    def start_step(self) -> None:
        """Begin a step. The copies of the step before have run, so their blocks are given back."""
        if self._takes_copies:
            _, blocks = self.manager.take_kv_cache_block_copies()
            self.manager.block_pool.free_blocks(blocks)
        self._timed(self.manager.new_step_starts)

    def look_up(self, request: Request) -> tuple[Any, int]:
        """The cached blocks and the cached tokens of a waiting request."""
        return self._timed(look_up, self.manager, request)

    def chunk(self, request: Request, num_tokens: int, hit_tokens: int = 0) -> int:
        """The computed tokens of a prefill chunk. vLLM ends it where a state can be saved."""
        if self._split is None:
            return num_tokens
        return self._timed(self._split, request, num_tokens, hit_tokens)

    def admit(self, request: Request, num_tokens: int, hit_tokens: int, blocks: Any) -> bool:
        """Allocate the first chunk of a waiting request, if there is room for the whole request."""
        allocate = self.manager.allocate_slots
        more = {"full_sequence_must_fit": True}
        return self._timed(allocate, request, num_tokens, hit_tokens, blocks, **more) is not None

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Allocate the next tokens of a running request, if there is room."""
        return self._timed(self.manager.allocate_slots, request, num_tokens) is not None

    def free(self, request: Request) -> None:
        self._timed(self.manager.free, request)

    def _timed(self, function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        started_ns = time.thread_time_ns()
        try:
            return function(*args, **kwargs)
        finally:
            self._elapsed_ns += time.thread_time_ns() - started_ns
