# SPDX-License-Identifier: Apache-2.0
"""``vllm/v1/core/kv_cache_manager.py``: steps of a running request that change nothing.

Most steps of a decode need no block, free none and cache none. Each request carries the number of
tokens up to which that holds, with the block table for which it was computed: a table is given up
when a request is freed, by whomever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patches.fast_prefix_cache.factory import has_connector
from vllm_ascend_kvext.patches.fast_prefix_cache.key_scheme import choose_short_keys
from vllm_ascend_kvext.patches.fast_prefix_cache.kv_cache_coordinator import sees_all_keys
from vllm_ascend_kvext.patches.upstream import cache_unit_tokens
from vllm_ascend_kvext.patching.declaration import Kind, Patch
from vllm_ascend_kvext.prefix_cache.edges import GroupEdges
from vllm_ascend_kvext.prefix_cache.steps import CachingRule

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.request import Request

_NEVER = 1 << 62
_CACHING_RULE = "_kvext_caching_rule"


def set_caching_rule(coordinator: KVCacheCoordinator, rule: CachingRule) -> None:
    """Let a rule say when a step of a running request caches something; before the first step."""
    setattr(coordinator, _CACHING_RULE, rule)


def choose_keys(
    wrapped: Callable[..., None], manager: KVCacheManager, *args: Any, **kwargs: Any
) -> None:
    """Use short keys where nobody but this package sees them."""
    wrapped(*args, **kwargs)
    pool = manager.block_pool
    if (
        manager.enable_caching
        and not pool.enable_kv_cache_events
        and not has_connector()
        and sees_all_keys(manager.coordinator)
    ):
        choose_short_keys(pool)


def allocate_what_changes(
    wrapped: Callable[..., KVCacheBlocks | None],
    manager: KVCacheManager,
    request: Request,
    num_new_tokens: int,
    num_new_computed_tokens: int = 0,
    new_computed_blocks: KVCacheBlocks | None = None,
    num_lookahead_tokens: int = 0,
    **admission: Any,
) -> KVCacheBlocks | None:
    """Return at once from a step in which nothing changes."""
    try:
        steps: Steps = manager._kvext_steps
    except AttributeError:
        steps = manager._kvext_steps = Steps.of(
            manager, is_plain=not hasattr(wrapped, "__wrapped__")
        )
    # Upstream's scheduler names no other argument for a running request.
    if steps.groups and not admission and not num_new_computed_tokens:
        progress = getattr(request, "_kvext_progress", None)
        if (
            progress is not None
            and new_computed_blocks is None
            and num_new_tokens > 0
            and steps.tables.get(request.request_id) is progress.table
        ):
            num_tokens = request.num_computed_tokens + num_new_tokens
            if num_tokens + num_lookahead_tokens < progress.until_tokens:
                if steps.rule is not None:
                    steps.rule.note_quiet_step(request, num_tokens)
                return manager.empty_kv_cache_blocks
            if steps.is_plain:
                return steps.advance(request, progress, num_new_tokens, num_lookahead_tokens)
    allocated = wrapped(
        request,
        num_new_tokens,
        num_new_computed_tokens,
        new_computed_blocks,
        num_lookahead_tokens,
        **admission,
    )
    if allocated is not None and steps.groups:
        steps.look_ahead(request)
    return allocated


@dataclass(frozen=True, slots=True)
class _Group:
    manager: SingleTypeKVCacheManager
    edges: GroupEdges
    null: Any


class Progress:
    """Where the next thing happens to a running request, per group and at all, in tokens.

    Every number is a lower bound. It holds for as long as the request has the block table for
    which it was computed.
    """

    __slots__ = (
        "next_cache_tokens",
        "next_skip_tokens",
        "next_slot_tokens",
        "skip_tokens",
        "slot_tokens",
        "table",
        "until_tokens",
    )

    def __init__(self, table: list[Any], num_groups: int) -> None:
        self.table = table
        self.slot_tokens = [0] * num_groups
        self.skip_tokens = [_NEVER] * num_groups
        self.next_cache_tokens = 0
        self.settle()

    def settle(self) -> None:
        """Take in what was changed for single groups."""
        self.next_slot_tokens = min(self.slot_tokens)
        self.next_skip_tokens = min(self.skip_tokens)
        self.until_tokens = min(
            self.next_slot_tokens, self.next_skip_tokens, self.next_cache_tokens
        )


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of running requests on one block manager.

    Attributes:
        block_manager: Upstream's.
        groups: All its groups; none if there is one whose steps are not known here.
        tables: Block tables of the first group.
        is_plain: Whether upstream's function is all there is to call.
        rule: What decides instead of upstream when something is cached, if anything does.
        skips_apart: Whether each group's window moves on by itself.
    """

    block_manager: KVCacheManager
    groups: tuple[_Group, ...]
    tables: dict[str, list[Any]]
    is_plain: bool
    rule: CachingRule | None
    skips_apart: bool

    @classmethod
    def of(cls, block_manager: KVCacheManager, is_plain: bool) -> Steps:
        coordinator = block_manager.coordinator
        managers = coordinator.single_type_managers
        groups = [_group(coordinator, manager) for manager in managers]
        known = tuple(group for group in groups if group is not None)
        return cls(
            block_manager,
            known if len(known) == len(groups) else (),
            managers[0].req_to_blocks if managers else {},
            is_plain,
            rule := getattr(coordinator, _CACHING_RULE, None),
            # A rule that was put into this one coordinator is to be asked.
            rule is None and "remove_skipped_blocks" not in vars(coordinator),
        )

    def advance(
        self, request: Request, progress: Progress, num_new_tokens: int, lookahead_tokens: int
    ) -> KVCacheBlocks | None:
        """A step of a running request: what changes, in the groups in which it does.

        In upstream's order: all groups free, all groups allocate or none, all groups cache.
        """
        request_id = request.request_id
        block_manager = self.block_manager
        computed_tokens = min(request.num_computed_tokens, block_manager.max_model_len)
        num_tokens = computed_tokens + num_new_tokens
        slot_tokens = min(num_tokens + lookahead_tokens, block_manager.max_model_len)
        if computed_tokens >= progress.next_skip_tokens:
            self._skip(request_id, progress, computed_tokens)
        new_blocks = block_manager.empty_kv_cache_blocks
        if slot_tokens >= progress.next_slot_tokens:
            allocated = self._allocate(request_id, progress, slot_tokens, num_tokens)
            if allocated is None:
                progress.settle()
                return None
            new_blocks = allocated
        if num_tokens >= progress.next_cache_tokens and block_manager.enable_caching:
            block_manager.coordinator.cache_blocks(request, min(num_tokens, request.num_tokens))
            self._note_cached(request, progress)
        elif self.rule is not None:
            self.rule.note_quiet_step(request, num_tokens)
        progress.settle()
        return new_blocks

    def look_ahead(self, request: Request) -> None:
        """Note where the next thing happens, once a step has been allocated."""
        request_id = request.request_id
        table = self.tables.get(request_id)
        if table is None:
            return
        progress = request._kvext_progress = Progress(table, len(self.groups))
        for index, group in enumerate(self.groups):
            num_blocks = len(group.manager.req_to_blocks[request_id])
            progress.slot_tokens[index] = group.edges.next_slot_tokens(num_blocks)
        for index in range(len(self.groups)):
            self._note_skips(request_id, progress, index, request.num_computed_tokens)
        self._note_cached(request, progress)
        progress.settle()

    def _skip(self, request_id: str, progress: Progress, computed_tokens: int) -> None:
        due = [i for i, edge in enumerate(progress.skip_tokens) if computed_tokens >= edge]
        if self.skips_apart:
            for index in due:
                self.groups[index].manager.remove_skipped_blocks(request_id, computed_tokens)
        else:
            self.block_manager.coordinator.remove_skipped_blocks(request_id, computed_tokens)
        for index in due:
            self._note_skips(request_id, progress, index, computed_tokens)

    def _allocate(
        self, request_id: str, progress: Progress, slot_tokens: int, num_tokens: int
    ) -> KVCacheBlocks | None:
        short: list[int] = []
        num_missing = 0
        for index, edge in enumerate(progress.slot_tokens):
            if slot_tokens >= edge:
                group = self.groups[index]
                num_blocks = -(-slot_tokens // group.edges.block_tokens)
                num_missing += num_blocks - len(group.manager.req_to_blocks[request_id])
                progress.slot_tokens[index] = group.edges.next_slot_tokens(num_blocks)
                short.append(index)
        if num_missing > self.block_manager.block_pool.free_block_queue.num_free_blocks:
            for index in short:
                progress.slot_tokens[index] = 0
            return None
        new_blocks: list[list[KVCacheBlock]] = [[] for _ in self.groups]
        for index in short:
            allocate = self.groups[index].manager.allocate_new_blocks
            new_blocks[index] = allocate(request_id, slot_tokens, num_tokens)
        return self.block_manager.create_kv_cache_blocks(tuple(new_blocks))

    def _note_skips(
        self, request_id: str, progress: Progress, index: int, computed_tokens: int
    ) -> None:
        group = self.groups[index]
        edges = group.edges
        if edges.window_tokens:
            blocks = group.manager.req_to_blocks[request_id]
            num_skipped = min(edges.num_skipped_blocks(computed_tokens), len(blocks))
            if num_skipped and blocks[num_skipped - 1] is not group.null:
                progress.skip_tokens[index] = 0  # it waits for drafts or steps in flight
            else:
                progress.skip_tokens[index] = edges.next_skip_tokens(num_skipped)

    def _note_cached(self, request: Request, progress: Progress) -> None:
        edge = _NEVER
        if self.rule is not None:
            edge = self.rule.quiet_until_tokens(request)
        elif self.block_manager.enable_caching:
            for group in self.groups:
                num_cached = group.manager.num_cached_block.get(request.request_id, 0)
                edge = min(edge, group.edges.next_cache_tokens(num_cached))
        progress.next_cache_tokens = edge


def _group(coordinator: KVCacheCoordinator, manager: SingleTypeKVCacheManager) -> _Group | None:
    from vllm.v1.core import single_type_kv_cache_manager as managers
    from vllm.v1.core.kv_cache_coordinator import (
        HybridKVCacheCoordinator,
        KVCacheCoordinatorNoPrefixCache,
        UnitaryKVCacheCoordinator,
    )

    is_window = type(manager) is managers.SlidingWindowManager
    if not is_window and type(manager) is not managers.FullAttentionManager:
        return None
    is_hybrid = type(coordinator) is HybridKVCacheCoordinator
    if not is_hybrid and type(coordinator) not in (
        UnitaryKVCacheCoordinator,
        KVCacheCoordinatorNoPrefixCache,
    ):
        return None
    unit_tokens = cache_unit_tokens(coordinator)
    edges = GroupEdges(
        block_tokens=manager.block_size,
        window_tokens=manager.sliding_window if is_window else 0,
        unit_tokens=unit_tokens or 1,
        looks_ahead=unit_tokens is not None and manager.use_eagle,
    )
    return _Group(manager, edges, manager._null_block)


_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_COORDINATOR = "vllm.v1.core.kv_cache_coordinator"
_GROUP_MANAGER = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"
_BOTH = ("==0.20.2.*", "==0.23.0.*")

PATCHES = (
    Patch(
        id="KVX-231",
        target=f"{_MANAGER}.__init__",
        kind=Kind.WRAP,
        feature="fast-prefix-cache",
        vllm=_BOTH,
        wrapper=choose_keys,
        why="Upstream joins up to 64 hashes into a key of 2 KB, where the last one says the same.",
        retire_when="vLLM >= 0.32, whose keys are the last hash",
    ),
    Patch(
        id="KVX-232",
        target=f"{_MANAGER}.allocate_slots",
        kind=Kind.REPLACE,
        feature="fast-prefix-cache",
        vllm=_BOTH,
        wrapper=allocate_what_changes,
        why="Upstream passes over all groups four times in every step of every request, although "
        "in most steps of a decode nothing changes.",
        retire_when="upstream's costs as little",
        relies_on=(
            f"{_COORDINATOR}:KVCacheCoordinator.remove_skipped_blocks",
            f"{_COORDINATOR}:KVCacheCoordinator.get_num_blocks_to_allocate",
            f"{_COORDINATOR}:KVCacheCoordinator.allocate_new_blocks",
            f"{_COORDINATOR}:KVCacheCoordinator.cache_blocks",
            f"{_GROUP_MANAGER}.get_num_blocks_to_allocate",
            f"{_GROUP_MANAGER}.allocate_new_blocks",
            "vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager.get_num_skipped_tokens",
        ),
        ascend=(
            "vllm_ascend.patch.platform.patch_async_swa_kv_lifetime:_patched_allocate_slots",
            "vllm_ascend.patch.platform.patch_async_swa_kv_lifetime:_patched_remove_skipped_blocks",
        ),
    ),
)
