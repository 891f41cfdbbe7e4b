# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Which function runs, for each method that the fast path or retention replaces.

Both features bind methods to single block managers and to parts of them. An engine that uses
neither feature runs upstream's own functions, whatever is installed in its process.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import vllm
from support import family
from support.installed import apply_feature, installed, revert_feature
from support.retention.checkpoints import adaptive_chosen
from support.retention.started import retention_of
from support.scheduler.block_manager import (
    BlockManager,
    Layout,
    full,
    mamba,
    retention_interval,
    window,
)
from support.scheduler.engine import SchedulerEngine
from support.scheduler.layouts import FULL_WINDOW
from support.scheduler.options import EngineOptions
from support.upstream_version import IS_SINCE_0_30
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_ascend_kvext.compat import version_in
from vllm_ascend_kvext.patches import PATCHES
from vllm_ascend_kvext.patches.block_managers.kv_cache_manager import bind
from vllm_ascend_kvext.patches.upstream import defining_class, uncache
from vllm_ascend_kvext.patching.target import resolve, wrapper_chain
from vllm_ascend_kvext.upstream_state import PoolState

DIRECT = Layout((full(16), window(16, 40)))
STATES = Layout((full(16), mamba(16)))
FAST, RETENTION = "fast-prefix-cache", "retention"
POOL_OF_FAST = {"cache_full_blocks", "get_new_blocks"}
LOOKUP_IS_BOUND = IS_SINCE_0_30 or not family.IS_ASCEND
"""vLLM-Ascend 0.23 has a lookup of its own, which is left alone."""


def owners_of(manager: Any) -> dict[str, Any]:
    """A manager and its parts, by the names that the tests below use."""
    coordinator = manager.coordinator
    groups = enumerate(coordinator.single_type_managers)
    return {
        "manager": manager,
        "coordinator": coordinator,
        "pool": coordinator.block_pool,
        **{f"group {index}": group for index, group in groups},
    }


def bound_in(manager: Any) -> dict[str, set[str]]:
    """The methods that single objects have in place of their classes' methods, by owner."""
    found = {
        owner: {name for name in vars(each) if callable(getattr(type(each), name, None))}
        for owner, each in owners_of(manager).items()
    }
    return {owner: names for owner, names in found.items() if names}


OF_FAST_PATH = {
    "manager": {"allocate_slots", "cache_blocks"},
    "pool": POOL_OF_FAST,
    "group 1": (
        {"cache_blocks", "_remove_blocks_in_range"}
        if IS_SINCE_0_30
        else {"cache_blocks", "remove_skipped_blocks", "free"}
    ),
    **({"coordinator": {"find_longest_cache_hit"}} if LOOKUP_IS_BOUND else {}),
}
OF_RETENTION = {
    "manager": {"free", "pop_blocks_for_free"} if IS_SINCE_0_30 else {"free"},
    "coordinator": {"cache_blocks", "remove_skipped_blocks"},
    "pool": {"cache_full_blocks", "free_blocks", "get_new_blocks", "reset_prefix_cache"},
    "group 0": {"pop_blocks_for_free" if IS_SINCE_0_30 else "free"},
    "group 1": {"pop_blocks_for_free" if IS_SINCE_0_30 else "free"},
}
OF_BOTH = {
    owner: OF_RETENTION.get(owner, set()) | OF_FAST_PATH.get(owner, set())
    for owner in (*OF_RETENTION, *OF_FAST_PATH)
}
# With retention, no manager of upstream caches blocks.
OF_BOTH["group 1"] = OF_BOTH["group 1"] - {"cache_blocks"}


def class_functions(manager: Any) -> dict[tuple[str, str], object]:
    """The functions of the classes, by owner and by name of the method."""
    return {
        (owner, name): value
        for owner, each in owners_of(manager).items()
        for cls in reversed(type(each).__mro__)
        for name, value in vars(cls).items()
    }


def test_nothing_is_bound_in_a_process_without_the_features() -> None:
    assert bound_in(BlockManager(DIRECT).manager) == {}


@pytest.mark.parametrize("layout", [DIRECT, STATES], ids=["window", "state"])
def test_an_engine_that_asks_for_neither_runs_upstreams_functions(layout: Layout) -> None:
    if family.IS_ASCEND and layout is STATES:
        pytest.skip("vLLM-Ascend has other layouts of states")
    stock = class_functions(BlockManager(layout).manager)
    with installed(RETENTION):
        world = BlockManager(layout)  # No interval is set.
        # The repair that retention requires is on.
        assert bound_in(world.manager) == {"manager": {"free"}}
        now = class_functions(world.manager)
        differing = {name for _, name in stock if stock.get((_, name)) is not now.get((_, name))}
        # Another repair replaces `get_computed_blocks`.
        assert differing <= {"__init__", "get_computed_blocks"}
        for owner, each in owners_of(world.manager).items():
            for name in OF_BOTH.get(owner, set()) - {"free"}:
                method = getattr(each, name)
                assert method.__func__ is inspect.getattr_static(type(each), name)
                assert method.__func__ is stock[owner, name]


def test_the_fast_path_binds_what_it_knows() -> None:
    with installed(FAST):
        assert bound_in(BlockManager(DIRECT).manager) == OF_FAST_PATH


def test_retention_binds_what_it_decides() -> None:
    with installed(RETENTION):
        revert_feature("preempted-in-step")
        assert bound_in(BlockManager(DIRECT, interval=0).manager) == OF_RETENTION


def layers_of(owner: object, name: str) -> list[str]:
    """The owners of the functions that one call of an object's method runs, the first one first."""
    called, call = [], vars(owner)[name]
    while hasattr(call, "kvext_layer"):
        called.append(type(call.func.__self__).__name__.removesuffix("Before030"))
        (call,) = call.args
    return called


@pytest.mark.parametrize("order", list(itertools.permutations([FAST, RETENTION])))
def test_both_share_one_binding_whatever_the_order(order: tuple[str, ...]) -> None:
    try:
        for feature in order:
            apply_feature(feature)
        pool = BlockManager(DIRECT, interval=0).pool
        world = BlockManager(DIRECT, interval=0)
        assert bound_in(world.manager) == OF_BOTH
        # Retention makes room before the fast path takes blocks, and alone caches runs.
        assert layers_of(pool, "get_new_blocks") == ["RetainingPool", "FastPool"]
        assert layers_of(pool, "cache_full_blocks") == ["RetainingPool"]
    finally:
        for feature in (RETENTION, FAST):
            revert_feature(feature)


def test_two_managers_of_one_process_have_their_own_settings() -> None:
    with installed(RETENTION):
        retaining, plain = BlockManager(DIRECT, interval=0), BlockManager(DIRECT)
        with adaptive_chosen():
            adaptive = BlockManager(DIRECT)
        assert bound_in(plain.manager) == {"manager": {"free"}}
        assert bound_in(retaining.manager) == bound_in(adaptive.manager) == OF_RETENTION
        for world in (plain, retaining, adaptive):
            request = world.request(range(100))
            world.prefill(request, 48)
            world.finish(request)
        of_plain, of_retaining, of_adaptive = (
            retention_of(world.manager.coordinator) for world in (plain, retaining, adaptive)
        )
        assert of_plain is None
        assert not of_retaining.policy.is_adaptive and of_adaptive.policy.is_adaptive
        assert of_retaining.stats.checkpoints_kept and of_adaptive.stats.checkpoints_kept


@pytest.mark.skipif(not IS_SINCE_0_30, reason="before vLLM 0.30, blocks have no number of tokens")
def test_blocks_say_for_how_many_tokens_their_keys_stand() -> None:
    with installed(RETENTION):
        world = BlockManager(DIRECT, interval=0)
        request = world.request(range(100))
        world.prefill(request, 48)
        for group in world.manager.coordinator.single_type_managers:
            blocks = enumerate(group.req_to_blocks[request.request_id], start=1)
            cached = [(number, block) for number, block in blocks if block.block_hash]
            assert len(cached) >= 3
            for number, block in cached:
                assert block.block_hash_num_tokens == number * group.block_size


def test_a_model_that_retention_does_not_know_is_not_bound() -> None:
    with installed(RETENTION):
        revert_feature("preempted-in-step")
        uncached = BlockManager(DIRECT, interval=0, enable_caching=False)
        only_full = BlockManager(Layout((full(16),)), interval=0)
        assert bound_in(uncached.manager) == bound_in(only_full.manager) == {}


def test_a_group_of_another_kind_is_left_to_upstream() -> None:
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    class TheirManager(SlidingWindowManager):
        """A model's own manager, which has its own functions to cache, free and look up blocks."""

        def cache_blocks(self, *args: Any, **kwargs: Any) -> None:
            super().cache_blocks(*args, **kwargs)

        def free(self, request_id: str) -> None:
            super().free(request_id)

        def remove_skipped_blocks(self, *args: Any, **kwargs: Any) -> None:
            super().remove_skipped_blocks(*args, **kwargs)

        def _remove_blocks_in_range(self, *args: Any) -> None:
            super()._remove_blocks_in_range(*args)

    manager = BlockManager(DIRECT).manager
    manager.coordinator.single_type_managers[1].__class__ = TheirManager
    with installed(FAST):
        bind(manager, {FAST})
        assert bound_in(manager) == {"pool": POOL_OF_FAST}


def test_a_manager_and_a_pool_of_another_kind_are_left_to_upstream() -> None:
    class TheirBlockManager(KVCacheManager):
        def allocate_slots(self, *args: Any, **kwargs: Any) -> Any:
            return super().allocate_slots(*args, **kwargs)

    class TheirPool(BlockPool):
        def get_new_blocks(self, num_blocks: int) -> list[Any]:
            return super().get_new_blocks(num_blocks)

    manager = BlockManager(DIRECT).manager
    manager.__class__ = TheirBlockManager
    manager.coordinator.block_pool.__class__ = TheirPool
    with installed(FAST):
        bind(manager, {FAST})
        bound = bound_in(manager)
        assert "manager" not in bound
        assert bound["pool"] == {"cache_full_blocks"}


@pytest.mark.parametrize("method", ["cache_blocks", "remove_skipped_blocks"])
def test_a_coordinator_that_decides_itself_is_not_retained(method: str) -> None:
    manager = BlockManager(DIRECT).manager
    theirs = type(manager.coordinator)

    def decide(self: Any, *args: Any) -> None:
        getattr(theirs, method)(self, *args)

    manager.coordinator.__class__ = type("TheirCoordinator", (theirs,), {method: decide})
    with installed(RETENTION), retention_interval(0):
        bind(manager, {RETENTION})
        assert bound_in(manager) == {}
        assert retention_of(manager.coordinator) is None


@pytest.mark.parametrize("first", [FAST, RETENTION])
def test_what_is_reverted_is_gone_and_the_other_stays(first: str) -> None:
    with installed(FAST, RETENTION):
        world = BlockManager(DIRECT, interval=0)
        second = FAST if first is RETENTION else RETENTION
        request = world.request(range(100))
        world.prefill(request, 48)
        revert_feature(first)
        left = OF_FAST_PATH if first is RETENTION else OF_RETENTION
        bound = bound_in(world.manager)
        for owner, names in bound.items():
            assert names <= left.get(owner, set()) | {"free"} and names
        world.decode(request, range(20))
        revert_feature(second)
        assert bound_in(world.manager) in ({}, {"manager": {"free"}})
        world.decode(request, range(20))
        world.finish(request)
    assert bound_in(world.manager) == {}
    request = world.request(range(100))
    world.prefill(request, 48)
    world.finish(request)


def test_a_request_is_settled_once_what_it_has_not_computed_is_gone() -> None:
    with installed(RETENTION):
        world = BlockManager(DIRECT, interval=0)
        request = world.request(range(64))
        world.prefill(request, 64)
        request.num_computed_tokens = 32  # The step that computes the rest preempts it.
        cached_when_settled: list[list[bool]] = []
        retention = vars(world.manager)["free"].args[0].func.__self__._retention
        group = world.manager.coordinator.single_type_managers[0]

        class Watched:
            def release(self, request: Any) -> None:
                blocks = group.req_to_blocks[request.request_id]
                cached_when_settled.append([block.block_hash is not None for block in blocks])
                retention.release(request)

        vars(world.manager)["free"].args[0].func.__self__._retention = Watched()
        world.manager.free(request)
        assert cached_when_settled == [[True, True, False, False]]


OF_SCHEDULER = {"make_stats", "_mamba_block_aligned_split"}


def bound_in_scheduler(scheduler: Scheduler) -> set[str]:
    return {name for name in vars(scheduler) if callable(getattr(type(scheduler), name, None))}


def test_a_scheduler_reports_what_is_retained_and_no_other() -> None:
    options = EngineOptions(num_blocks=100)
    with installed(RETENTION):
        plain = SchedulerEngine(FULL_WINDOW, options).scheduler
        with adaptive_chosen():
            retaining = SchedulerEngine(FULL_WINDOW, options).scheduler
        assert not OF_SCHEDULER & bound_in_scheduler(plain)
        assert bound_in_scheduler(retaining) >= OF_SCHEDULER
    assert not OF_SCHEDULER & bound_in_scheduler(retaining)


def bound_methods() -> Iterator[tuple[str, object, str, Callable[..., Any]]]:
    """Feature, owner and name of each method, and our function, which calls the replaced one."""
    for feature, layout in itertools.product((FAST, RETENTION), (DIRECT, STATES)):
        if family.IS_ASCEND and layout is STATES:
            continue
        with installed(feature):
            if feature is RETENTION:
                revert_feature("preempted-in-step")
            manager = BlockManager(layout, interval=0 if feature is RETENTION else None).manager
            for owner in owners_of(manager).values():
                for name in sorted(vars(owner)):
                    call = vars(owner)[name]
                    if hasattr(call, "kvext_layer"):
                        yield feature, owner, name, call.func


def test_each_function_that_is_replaced_is_fingerprinted() -> None:
    relied_on: dict[str, set[str]] = {FAST: set(), RETENTION: set()}
    for patch in PATCHES:
        if patch.feature in relied_on and any(
            version_in(vllm.__version__, versions) for versions in patch.vllm
        ):
            relied_on[patch.feature] |= {*patch.fingerprinted, *patch.ascend}
    num_checked = 0
    for feature, owner, name, _ in bound_methods():
        cls = defining_class(type(owner), name)
        theirs = f"{cls.__module__}:{cls.__qualname__}.{name}"
        if cls.__module__.startswith("vllm_ascend") and feature is RETENTION:
            # Retention calls vLLM-Ascend's functions, except where it knows more.
            continue
        assert theirs in relied_on[feature], (feature, theirs)
        num_checked += 1
    assert num_checked >= 15


ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def test_bound_methods_take_what_upstreams_take() -> None:
    num_checked = 0
    for _, owner, name, ours in bound_methods():
        cls = defining_class(type(owner), name)
        found = wrapper_chain(resolve(f"{cls.__module__}:{cls.__qualname__}.{name}").found)[-1]
        while hasattr(found, "__wrapped__"):
            found = found.__wrapped__
        theirs = list(inspect.signature(found).parameters.values())[1:]  # Leaves out self.
        # Leaves out the replaced function.
        mine = list(inspect.signature(ours).parameters.values())[1:]
        named = [parameter for parameter in mine if parameter.kind not in ANY]
        for one, other in zip(named, theirs, strict=False):
            # vLLM 0.23's state managers have another name for it. All callers pass it by position.
            assert one.name == other.name or name == "remove_skipped_blocks", (name, one, other)
            assert one.kind == other.kind, name
            assert (one.default is one.empty) == (other.default is other.empty), (name, one)
        for parameter in named[len(theirs) :]:
            assert parameter.default is not parameter.empty, (name, parameter)
        rest = theirs[len(named) :]
        kinds = {parameter.kind for parameter in mine if parameter.kind in ANY}
        assert not rest or inspect.Parameter.VAR_KEYWORD in kinds, name
        num_checked += 1
    assert num_checked >= 15


def test_the_books_of_retention_are_told_of_what_leaves_the_cache() -> None:
    with installed(RETENTION):
        assert PoolState.of(BlockManager(DIRECT).pool).on_uncached is None
        world = BlockManager(DIRECT, interval=0)
        state = PoolState.of(world.pool)
        note_uncached, told = state.on_uncached, []

        def tell(blocks: list[Any]) -> None:
            told.extend(blocks)
            note_uncached(blocks)

        state.on_uncached = tell
        request = world.request(range(100))
        world.prefill(request, 48)
        held = world.manager.coordinator.single_type_managers[0].req_to_blocks[request.request_id][
            0
        ]
        uncache(world.pool, [held])
        assert told == [] and held.block_hash is None  # The block is not free.
        world.finish(request)
        told.clear()
        cached = [block for block in world.pool.blocks if block.block_hash is not None][:2]
        uncache(world.pool, cached)
        assert told == cached and not any(block.block_hash for block in cached)
        assert world.pool.free_block_queue.get_all_free_blocks()[:2] == cached
