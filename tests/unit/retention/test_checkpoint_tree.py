# SPDX-License-Identifier: Apache-2.0
"""The tree of checkpoints under random workloads on small pools, checked after every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.retention.cache_state import check_cache_state
from support.sample import sampled
from unit.retention.manager_model import ModelCache
from unit.retention.pool_model import ModelBlock, ModelRequest

from vllm_ascend_kvext._native import RetainedRequest
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.retention.geometry import GroupGeometry, HitGeometry
from vllm_ascend_kvext.retention.reasons import Origin

UNIT_TOKENS = 4
MAX_RUNNING = 3
MAX_PROBES = 256
"""Of ``csrc/retention/use_rates.h``."""
REMEMBERED = 8192
"""Of ``csrc/retention/checkpoint_tree.cpp``."""
FULL, WINDOW, STATE = GroupKind.FULL, GroupKind.WINDOW, GroupKind.STATE

LAYOUTS = {
    "full and window": (GroupGeometry(FULL, 4), GroupGeometry(WINDOW, 4, 9)),
    "two full, two windows": (
        GroupGeometry(FULL, 4),
        GroupGeometry(FULL, 4),
        GroupGeometry(WINDOW, 2, 5),
        GroupGeometry(WINDOW, 4, 5),
    ),
    "full and state": (GroupGeometry(FULL, 4), GroupGeometry(STATE, 4)),
    "blocks below the unit": (
        GroupGeometry(FULL, 4),
        GroupGeometry(FULL, 2),
        GroupGeometry(WINDOW, 2, 5),
        GroupGeometry(WINDOW, 4, 5),
    ),
    "full looks ahead": (GroupGeometry(FULL, 4, 0, True, 4), GroupGeometry(WINDOW, 4, 5)),
    "both look ahead": (GroupGeometry(FULL, 2, 0, True, 2), GroupGeometry(WINDOW, 2, 6, True, 2)),
    "window only": (GroupGeometry(WINDOW, 4, 9),),
    "two windows only": (GroupGeometry(WINDOW, 2, 5), GroupGeometry(WINDOW, 4, 9)),
}


def check(cache: ModelCache) -> None:
    """Whoever comes with the prompt of a checkpoint resumes there or later."""
    is_exact = not cache.pool.lost_unasked
    check_cache_state(cache.retention, cache.pool.blocks, cache.pool.queue, is_exact)
    if not is_exact:
        return  # a block may be gone, and what it was part of be incomplete
    if cache.geometry.use_eagle:
        return
    for node in checkpoints(cache):
        text = node["key"].decode()
        hit_tokens = cache.hit_tokens(text + "?", node["boundary_tokens"])
        assert hit_tokens == node["boundary_tokens"], f"{text} hits {hit_tokens} of {node}"


def checkpoints(cache: ModelCache) -> list[dict[str, Any]]:
    """Boundaries that can be resumed from."""
    return [node for node in cache.cache_state.describe() if node["tail"]]


class CheckpointTreeMachine(RuleBasedStateMachine):
    """Requests over texts that share prefixes come, compute, and go."""

    layout: tuple[GroupGeometry, ...]
    loses_unasked = False
    has_events = False

    @initialize(
        num_blocks=st.integers(16, 60),
        interval_units=st.sampled_from([0, 0, 1, 2]),
        is_upstreams=st.booleans(),
        does_quiet_steps=st.booleans(),
    )
    def start(self, num_blocks: int, interval_units: int, **ways: bool) -> None:
        geometry = HitGeometry(self.layout, UNIT_TOKENS)
        self.cache = ModelCache(
            geometry, num_blocks, interval_units * UNIT_TOKENS, self.has_events, **ways
        )
        self.pool = self.cache.pool
        self.requests: list[ModelRequest] = []
        self.num_requests = 0
        self.last_stepped: ModelRequest | None = None

    @precondition(lambda self: len(self.requests) < MAX_RUNNING)
    @rule(
        units=st.lists(st.sampled_from("aab"), max_size=6),
        rest=st.integers(1, UNIT_TOKENS),
        hint_units=st.lists(st.integers(1, 6), max_size=2),
    )
    def submit(self, units: list[str], rest: int, hint_units: list[int]) -> None:
        text = "".join(letter * UNIT_TOKENS for letter in units) + "a" * rest
        hints = [units * UNIT_TOKENS for units in hint_units if units * UNIT_TOKENS <= len(text)]
        self.requests.append(ModelRequest.of(f"r{self.num_requests}", text, hints))
        self.num_requests += 1

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, MAX_RUNNING - 1), num_tokens=st.integers(1, 5 * UNIT_TOKENS))
    def compute(self, choice: int, num_tokens: int) -> None:
        request = self._choose(choice)
        self.last_stepped = None
        if request.running and request.num_computed_tokens == request.num_tokens:
            return
        if self.cache.step(request, num_tokens):
            self.last_stepped = request
        elif request.running:
            self.cache.preempt(request)

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, MAX_RUNNING - 1), letters=st.text("ab", min_size=1, max_size=6))
    def decode(self, choice: int, letters: str) -> None:
        request = self._choose(choice)
        self.last_stepped = None
        for letter in letters:
            if not request.running or request.num_computed_tokens < request.num_tokens:
                return
            request.text += letter
            if not self.cache.step(request, 1):
                self.cache.preempt(request)

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, MAX_RUNNING - 1))
    def finish(self, choice: int) -> None:
        request = self._choose(choice)
        if request.running:
            self.cache.finish(request)
        self.requests.remove(request)

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, MAX_RUNNING - 1))
    def preempt(self, choice: int) -> None:
        request = self._choose(choice)
        if request.running:
            self.cache.preempt(request)

    @precondition(lambda self: self.loses_unasked and self._can_undo())
    @rule()
    def preempt_before_it_computes(self) -> None:
        """Within one scheduling step; copies of blocks may have given way to what is undone."""
        request = self.last_stepped
        assert request is not None
        self.pool.lost_unasked = True
        request.num_computed_tokens = request.before_step_tokens
        self.cache.preempt(request)

    @precondition(lambda self: self.loses_unasked)
    @rule(data=st.data())
    def lose_a_block(self, data: st.DataObject) -> None:
        cached = [block for block in self.pool.blocks if block._block_hash is not None]
        if cached:
            self.pool.uncache_unasked(data.draw(st.sampled_from(cached)))

    @precondition(lambda self: not any(request.running for request in self.requests))
    @rule(is_reset=st.sampled_from([False, False, True]))
    def reset(self, is_reset: bool) -> None:
        if is_reset:
            self.cache.reset()
            assert not self.cache.cache_state.describe()
            assert len(self.cache.cache_state.surplus()) == len(self.pool.blocks)

    def _can_undo(self) -> bool:
        return self.last_stepped is not None and self.last_stepped.running

    def _choose(self, choice: int) -> ModelRequest:
        return self.requests[choice % len(self.requests)]

    @invariant()
    def everything_fits(self) -> None:
        check(self.cache)

    @invariant()
    def every_cached_block_is_found_and_reported(self) -> None:
        table = self.pool.cached_block_hash_to_block
        for block in self.pool.blocks:
            key = block._block_hash
            assert key is None or block in table.find_all(key), f"{block} is lost"
        if self.has_events:
            assert set(table._cache) <= set(self.pool.reported)


SETTINGS = settings(
    max_examples=sampled(60),
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("has_events", [False, True], ids=["quiet", "events"])
@pytest.mark.parametrize("loses_unasked", [False, True], ids=["keeps blocks", "loses blocks"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_workloads(layout: str, loses_unasked: bool, has_events: bool) -> None:
    class Machine(CheckpointTreeMachine):
        pass

    Machine.layout = LAYOUTS[layout]
    Machine.loses_unasked = loses_unasked
    Machine.has_events = has_events
    run_state_machine_as_test(Machine, settings=SETTINGS)


@pytest.fixture
def cache() -> ModelCache:
    return ModelCache(HitGeometry(LAYOUTS["full and window"], UNIT_TOKENS), 200)


def num_surplus(cache: ModelCache) -> int:
    return len(cache.cache_state.surplus())


def evict_everything(cache: ModelCache) -> None:
    cache.cache_state.make_room(len(cache.pool.blocks))


def with_idle_held_blocks() -> tuple[ModelCache, ModelRequest, list[int]]:
    """A cache, a request that holds blocks for a boundary to come, and those that it has left."""
    layout = (GroupGeometry(FULL, 8), GroupGeometry(WINDOW, 4, 5, True, 4))
    cache = ModelCache(HitGeometry(layout, 8), 40)
    request = ModelRequest.of("r", "a" * 60)
    idle: list[int] = []
    while not idle and request.num_computed_tokens < 60:
        assert cache.step(request, 1)
        held = cache.retention._request_states["r"].held_blocks()
        idle = [index for index in held if not cache.pool.blocks[index].ref_cnt]
    return cache, request, idle


def find_evicted(cache: ModelCache, text: str, after_tokens: int, upto_tokens: int) -> int:
    request = RetainedRequest(cache.cache_state, cache.request("asks", text))
    return request.find_evicted(after_tokens, upto_tokens)


@settings(max_examples=sampled(60))
@given(
    prompts=st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=6), max_size=6),
    asked=st.lists(st.sampled_from("ab"), min_size=1, max_size=7),
    after_tokens=st.integers(0, 28),
    upto_tokens=st.integers(0, 28),
)
def test_the_longest_evicted_prefix_is_found(
    prompts: list[list[str]], asked: list[str], after_tokens: int, upto_tokens: int
) -> None:
    cache = ModelCache(HitGeometry(LAYOUTS["full and window"], UNIT_TOKENS), 300)
    for prompt in prompts:
        cache.serve(spelled(prompt) + "x")
    evicted = {node["key"].decode() for node in checkpoints(cache)}
    evict_everything(cache)
    text = spelled(asked) + "x"
    lengths = [len(prefix) for prefix in evicted if text.startswith(prefix)]
    expected = max((n for n in lengths if after_tokens < n <= upto_tokens), default=0)
    assert find_evicted(cache, text, after_tokens, min(upto_tokens, len(text))) == expected
    cache.reset()
    assert find_evicted(cache, text, 0, len(text)) == 0


def test_a_bounded_number_of_lengths_is_tried() -> None:
    """The longest first: what is shorter than so many others is not found any more."""
    cache = ModelCache(HitGeometry(LAYOUTS["full and window"], UNIT_TOKENS), 1500, UNIT_TOKENS)
    cache.serve("a" * 4 + "x")
    cache.serve("b" * 4 * (MAX_PROBES + 2) + "x")
    evict_everything(cache)
    text = "a" * 4 + "c" * 4 * (MAX_PROBES + 10)
    assert find_evicted(cache, text, 0, 4 * MAX_PROBES) == 4
    assert find_evicted(cache, text, 0, 4 * (MAX_PROBES + 1)) == 0


def test_the_oldest_eviction_is_forgotten_first() -> None:
    cache = ModelCache(HitGeometry(LAYOUTS["window only"], UNIT_TOKENS), 1000, UNIT_TOKENS)
    num_units = 128
    for number in range(REMEMBERED // num_units):
        cache.serve(chr(97 + number % 26) + chr(97 + number // 26) + "a" * (4 * num_units - 1))
        evict_everything(cache)
    assert cache.stats.checkpoints_evicted == REMEMBERED
    first = "aa" + "a" * (4 * num_units - 1)
    assert find_evicted(cache, first, 0, 4 * num_units) > 0
    cache.serve("A" * 4 * num_units + "x")
    evict_everything(cache)
    assert find_evicted(cache, first, 0, 4 * num_units) == 0
    second = "ba" + "a" * (4 * num_units - 1)
    assert find_evicted(cache, second, 0, 4 * num_units) == 4 * num_units


def test_without_full_attention_a_boundary_is_behind_shorter_ones_only() -> None:
    """Undone within its step, a request is before a boundary that others had left."""
    cache = ModelCache(HitGeometry(LAYOUTS["window only"], UNIT_TOKENS), 100)
    first = ModelRequest.of("r1", "a" * 16 + "x")
    second = ModelRequest.of("r2", "a" * 40 + "y", [16])
    assert cache.step(first, 2) and cache.step(second, 13)
    assert cache.step(first, 15)
    cache.finish(first)
    assert [node["boundary_tokens"] for node in checkpoints(cache)] == [16]
    assert cache.step(second, 8)
    cache.pool.lost_unasked = True
    second.num_computed_tokens = second.before_step_tokens
    cache.preempt(second)
    assert {node["boundary_tokens"] for node in checkpoints(cache)} == {12, 16}
    check(cache)


def test_evictions_count_against_their_reason(cache: ModelCache) -> None:
    prompts = [f"{number:04}" + "a" * 20 + "x" for number in range(60)]
    rates, latest, hint = cache.cache_state.rates, (Origin.LATEST, 0, 0), (Origin.HINT, 0, 0)
    assert rates.is_worth_trying(latest)
    for prompt in prompts:
        cache.serve(prompt)
        evict_everything(cache)
    assert [rates.is_worth_trying(latest) for _ in range(15)].count(True) == 0
    assert rates.is_worth_trying(hint)
    for prompt in prompts[:10]:
        cache.serve(prompt)  # asks for what was evicted
    assert rates.is_worth_trying(latest)


def test_a_boundary_without_its_state_is_not_passed() -> None:
    """Draft tokens are accepted, and a step goes over a boundary: the one before it is kept."""
    cache = ModelCache(HitGeometry(LAYOUTS["full and state"], UNIT_TOKENS), 100)
    request = ModelRequest.of("r", "a" * 5)
    assert cache.step(request, 5)
    request.text += "a" * 4
    assert cache.step(request, 3)
    assert request.num_computed_tokens == 8
    request.text += "a" * 6
    assert cache.step(request, 6)
    cache.finish(request)
    assert 8 in {node["boundary_tokens"] for node in checkpoints(cache)}
    assert cache.hit_tokens("a" * 15, 14) == 8
    check(cache)


def test_of_a_boundary_every_continuation_is_kept_that_a_hit_reads() -> None:
    cache = ModelCache(HitGeometry(LAYOUTS["full looks ahead"], UNIT_TOKENS), 100)
    texts = ["a" * 8 + letter * 4 + "x" for letter in "bcd"]
    for text in texts:
        cache.serve(text)
    cache.pool.allocate(num_surplus(cache))
    assert [cache.hit_tokens(text, 12) for text in texts] == [8, 8, 8]
    assert cache.hit_tokens("a" * 8 + "e" * 4 + "x", 12) == 4
    (node,) = (node for node in checkpoints(cache) if node["boundary_tokens"] == 8)
    assert node["num_ahead"] == 3


def test_what_was_cached_for_a_boundary_that_is_not_reached_is_uncached() -> None:
    layout = (GroupGeometry(FULL, 8), GroupGeometry(WINDOW, 4, 9))
    cache = ModelCache(HitGeometry(layout, 8), 100)
    request = ModelRequest.of("r", "a" * 14)
    assert cache.step(request, 14)
    window = cache.managers[1]
    assert [block._block_hash is not None for block in window.req_to_blocks["r"]] == [True] * 3 + [
        False
    ]
    cache.finish(request)
    found = [cache.pool.find(request, window.group, index) is not None for index in range(3)]
    assert found == [True, True, False]


@pytest.mark.parametrize("does_quiet_steps", [False, True])
def test_a_block_is_cached_in_the_step_that_fills_it(does_quiet_steps: bool) -> None:
    geometry = HitGeometry(LAYOUTS["blocks below the unit"], UNIT_TOKENS)
    cache = ModelCache(geometry, 100, does_quiet_steps=does_quiet_steps)
    request = ModelRequest.of("r", "a" * 40)
    while request.num_computed_tokens < 40:
        assert cache.step(request, 1)
        for manager in cache.managers[2:]:
            num_full = request.num_computed_tokens // manager.geometry.block_tokens
            blocks = manager.req_to_blocks["r"][:num_full]
            assert all(block.is_null or block._block_hash for block in blocks)
    assert bool(cache.num_quiet_steps) is does_quiet_steps


def lost_first_blocks(layout: str, num_tokens: int, groups: Sequence[int]) -> ModelCache:
    """A cache from which the first block of some groups was uncached while a request had it.

    As a connector uncaches what it failed to load. Those who come next get it, and cache what they
    compute in it.
    """
    cache = ModelCache(HitGeometry(LAYOUTS[layout], UNIT_TOKENS), 30)
    request = ModelRequest.of("loads", "a" * (num_tokens + 1))
    assert cache.step(request, num_tokens)
    for group in groups:
        cache.pool.uncache_unasked(cache.managers[group].req_to_blocks["loads"][0])
    cache.finish(request)
    return cache


def tail_at(cache: ModelCache, boundary_tokens: int) -> list[ModelBlock]:
    (node,) = (n for n in checkpoints(cache) if n["boundary_tokens"] == boundary_tokens)
    return [cache.pool.blocks[index] for index in node["tail"]]


def test_who_passes_a_boundary_whose_tail_holds_something_else_takes_it_anew() -> None:
    """The reallocated block would be in the tail twice, and what a hit reads be surplus."""
    cache = lost_first_blocks("full looks ahead", 16, groups=[0, 1])
    before = tail_at(cache, 4)
    request = ModelRequest.of("computes", "a" * 9)
    assert cache.step(request, 8)
    assert before[0] is cache.managers[0].req_to_blocks["computes"][1]
    check(cache)
    own = [cache.managers[1].req_to_blocks["computes"][0], before[0]]
    assert tail_at(cache, 4) == own
    cache.finish(request)
    cache.pool.allocate(num_surplus(cache))
    assert cache.hit_tokens("a" * 9, 8) == 4


def test_a_held_block_that_is_uncached_is_needed_no_longer_than_others() -> None:
    """As a connector uncaches what it failed to load."""
    layout = (GroupGeometry(FULL, 8), GroupGeometry(WINDOW, 4, 5, True, 4))
    cache = ModelCache(HitGeometry(layout, 8), 40)
    request = ModelRequest.of("r", "a" * 60)
    held: list[int] = []
    while not held and request.num_computed_tokens < 60:
        assert cache.step(request, 1)
        held = cache.retention._request_states["r"].held_blocks()
    assert held
    for index in held:
        cache.pool.uncache_unasked(cache.pool.blocks[index])
    assert cache.retention._request_states["r"].held_blocks() == held
    cache.preempt(request)
    assert not any(cache.cache_state.num_needs(index) for index in held)


def test_a_need_that_was_overruled_is_not_taken_back_from_others() -> None:
    """A held block is reallocated for want of others, and a checkpoint comes to need it."""
    cache, holder, idle = with_idle_held_blocks()
    block = cache.pool.blocks[idle[0]]
    taken = cache.pool.allocate(len(cache.pool.queue))
    cache.pool.free([other for other in taken if other is not block])
    cache.pool.free([block])
    other = ModelRequest.of("r2", "b" * 24 + "x")
    assert cache.step(other, 24)
    cache.finish(other)
    assert cache.cache_state.num_needs(block.block_id)
    cache.pool.uncache_unasked(block)
    cache.preempt(holder)
    check(cache)


@pytest.mark.parametrize("has_events", [False, True])
def test_states_of_the_current_step_are_listed(has_events: bool) -> None:
    """Upstream must not hit a state in the step that computes it."""
    geometry = HitGeometry(LAYOUTS["full and state"], UNIT_TOKENS)
    cache = ModelCache(geometry, 100, has_events=has_events)
    assert cache.step(ModelRequest.of("r", "a" * 8 + "x"), 8)
    new_keys = cache.managers[1].cached_blocks_this_step
    states = [block for block in cache.managers[1].req_to_blocks["r"] if not block.is_null]
    assert new_keys == {block._block_hash for block in states} and len(new_keys) == 1


def test_what_a_lookup_read_behind_its_hit_is_not_cached_twice() -> None:
    cache = ModelCache(HitGeometry(LAYOUTS["both look ahead"], UNIT_TOKENS), 100)
    cache.serve("a" * 24 + "x")
    request = ModelRequest.of("r", "a" * 24 + "y")
    assert cache.step(request, 30)
    assert 0 < request.before_step_tokens < 24
    cache.finish(request)
    window = cache.managers[1].group
    assert all(len(cache.pool.copies(request, window, index)) <= 1 for index in range(12))


def test_who_hits_a_boundary_whose_tail_holds_something_else_takes_it_anew() -> None:
    """It is hit all the same: others have computed the block since."""
    cache = lost_first_blocks("full and window", 24, groups=[1])
    lost = tail_at(cache, 8)[0]
    other = ModelRequest.of("shorter", "a" * 4 + "x")
    assert cache.step(other, 4)
    assert cache.managers[0].req_to_blocks["shorter"] == [lost]
    request = ModelRequest.of("hits", "a" * 8 + "x")
    assert cache.step(request, 1)
    assert request.before_step_tokens == 8
    assert tail_at(cache, 8) == cache.managers[1].req_to_blocks["hits"][:2]


def test_a_tail_that_was_taken_anew_goes_with_what_was_not_computed() -> None:
    cache = lost_first_blocks("full looks ahead", 16, groups=[0, 1])
    request = ModelRequest.of("undone", "a" * 9)
    assert cache.step(request, 8)
    assert tail_at(cache, 4)
    request.num_computed_tokens = request.before_step_tokens
    cache.preempt(request)
    tails = [cache.pool.blocks[index] for node in checkpoints(cache) for index in node["tail"]]
    assert all(block._block_hash is not None for block in tails)


def test_nothing_is_evicted_while_blocks_are_free_that_were_uncached(cache: ModelCache) -> None:
    """Checkpoints that have lost blocks do not cost others theirs."""
    cache.serve("b" * 12 + "x")
    request = ModelRequest.of("r", "a" * 12 + "x")
    assert cache.step(request, 12)
    for manager in cache.managers:
        cache.pool.uncache_unasked(manager.req_to_blocks["r"][0])
    cache.finish(request)
    num_uncached = sum(block._block_hash is None for block in cache.pool.queue)
    assert any(
        cache.cache_state.num_needs(block.block_id) for block in cache.pool.queue[:num_uncached]
    )
    cache.pool.allocate(num_uncached)
    assert not cache.stats.checkpoints_evicted


def spelled(units: list[str]) -> str:
    return "".join(letter * UNIT_TOKENS for letter in units)
