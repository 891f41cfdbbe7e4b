# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The tree of checkpoints under random workloads on small pools, checked after every step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

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
from support.retention import inspection
from support.sample import sampled
from unit.retention.small_cache import (
    FULL,
    LAYOUTS,
    STATE,
    UNIT_TOKENS,
    WINDOW,
    ModelBlock,
    ModelCache,
    ModelRequest,
    spelled,
)

from vllm_ascend_kvext.retention.geometry import GroupGeometry
from vllm_ascend_kvext.retention.reasons import Origin

MAX_RUNNING = 3
CHOICE = st.integers(0, MAX_RUNNING - 1)
MAX_PROBES = 256
"""The constant of ``csrc/retention/use_rates.h``."""
REMEMBERED = 8192
"""The constant of ``csrc/retention/checkpoint_tree.cpp``."""


class CheckpointTreeMachine(RuleBasedStateMachine):
    """Requests over texts that share prefixes come, compute, and go."""

    layout: str
    loses_unasked = False
    has_events = False

    @initialize(
        num_blocks=st.integers(16, 60),
        interval_units=st.sampled_from([0, 0, 1, 2]),
        is_upstreams=st.booleans(),
        has_short_keys=st.booleans(),
        does_quiet_steps=st.booleans(),
    )
    def start(self, num_blocks: int, interval_units: int, **ways: bool) -> None:
        self.cache = ModelCache(
            self.layout, num_blocks, interval_units * UNIT_TOKENS, self.has_events, **ways
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
        self.requests.append(ModelRequest(f"r{self.num_requests}", text, hints))
        self.num_requests += 1

    @precondition(lambda self: self.requests)
    @rule(choice=CHOICE, num_tokens=st.integers(1, 5 * UNIT_TOKENS))
    def compute(self, choice: int, num_tokens: int) -> None:
        request = self._choose(choice)
        self.last_stepped = None
        if request.running and request.num_computed_tokens == request.num_tokens:
            return
        if self.cache.step(request, num_tokens):
            self.last_stepped = request
            if not self.pool.lost_unasked:
                self._check_that_full_blocks_are_cached(request)
        elif request.running:
            self.cache.preempt(request)

    @precondition(lambda self: self.requests)
    @rule(choice=CHOICE, letters=st.text("ab", min_size=1, max_size=6))
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
    @rule(choice=CHOICE, is_finished=st.booleans())
    def finish_or_preempt(self, choice: int, is_finished: bool) -> None:
        request = self._choose(choice)
        if request.running:
            (self.cache.finish if is_finished else self.cache.preempt)(request)
        if is_finished:
            self.requests.remove(request)

    @precondition(lambda self: self.loses_unasked and self._can_undo())
    @rule()
    def preempt_before_it_computes(self) -> None:
        """Preempt within one step. The undone blocks may already have replaced copies of blocks."""
        request = self.last_stepped
        assert request is not None
        self.pool.lost_unasked = True
        self.cache.undo_step(request)

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
            assert not inspection.describe(self.cache.cache_state)
            assert self.cache.num_surplus == len(self.pool.blocks)

    def _check_that_full_blocks_are_cached(self, request: ModelRequest) -> None:
        """Check this in the step that fills blocks. Some hit reads every block of a window."""
        for manager in self.cache.managers:
            group = manager.geometry
            if group.kind is WINDOW and group.window_blocks * group.block_tokens >= UNIT_TOKENS:
                num_full = request.num_computed_tokens // group.block_tokens
                blocks = manager.req_to_blocks[request.request_id][:num_full]
                assert group.use_eagle or all(b.is_null or b._block_hash for b in blocks)

    def _can_undo(self) -> bool:
        return self.last_stepped is not None and self.last_stepped.running

    def _choose(self, choice: int) -> ModelRequest:
        return self.requests[choice % len(self.requests)]

    @invariant()
    def everything_fits(self) -> None:
        self.cache.check()

    @invariant()
    def every_cached_block_is_found_and_reported(self) -> None:
        table = self.pool.cached_block_hash_to_block
        for block in self.pool.blocks:
            key = block._block_hash
            assert key is None or block in table.find_all(key), (
                f"{block} is cached, but not in the table"
            )
        if self.has_events:
            assert set(table._cache) <= set(self.pool.reported)

    @invariant()
    def upstream_knows_the_states_that_it_must_not_hit_in_their_step(self) -> None:
        for manager in self.cache.managers:
            for block in chain.from_iterable(manager.req_to_blocks.values()):
                if block._block_hash is not None and manager.geometry.kind is STATE:
                    assert block._block_hash in manager.cached_blocks_this_step

    @invariant()
    def no_more_requests_are_at_checkpoints_than_run(self) -> None:
        num_running = sum(request.running for request in self.requests)
        at_checkpoints = [
            node["num_requests"] for node in inspection.describe(self.cache.cache_state)
        ]
        assert sum(at_checkpoints) <= num_running


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

    Machine.layout, Machine.loses_unasked, Machine.has_events = layout, loses_unasked, has_events
    run_state_machine_as_test(Machine, settings=SETTINGS)


def test_some_steps_of_one_token_are_quiet() -> None:
    cache = ModelCache("blocks below the unit", 100, does_quiet_steps=True)
    request = ModelRequest("r", "a" * 40)
    while request.num_computed_tokens < 40:
        assert cache.step(request, 1)
    assert cache.num_quiet_steps


@pytest.fixture
def cache() -> ModelCache:
    return ModelCache("full and window", 200)


def with_held_blocks(are_idle: bool) -> tuple[ModelCache, ModelRequest, list[ModelBlock]]:
    """A cache, a request, and held blocks: for a boundary to come, or for one that it has left."""
    layout = (GroupGeometry(FULL, 8), GroupGeometry(WINDOW, 4, 5, True, 4))
    cache = ModelCache(layout, 40, unit_tokens=8)
    request = ModelRequest("r", "a" * 60)
    held: list[ModelBlock] = []
    while not held:
        assert cache.step(request, 1) and request.num_computed_tokens < 60
        ids = inspection.held_blocks(cache.retention._request_states["r"])
        held = [b for b in map(cache.pool.blocks.__getitem__, ids) if not (are_idle and b.ref_cnt)]
    return cache, request, held


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
    cache = ModelCache("full and window", 300)
    for prompt in prompts:
        cache.serve(spelled(prompt))
    evicted = {node["key"].decode() for node in cache.checkpoints()}
    cache.evict_everything()
    text = spelled(asked)
    lengths = [len(prefix) for prefix in evicted if text.startswith(prefix)]
    expected = max((n for n in lengths if after_tokens < n <= upto_tokens), default=0)
    assert cache.find_evicted(text, after_tokens, min(upto_tokens, len(text))) == expected
    cache.reset()
    assert cache.find_evicted(text, 0, len(text)) == 0


def test_a_bounded_number_of_lengths_is_tried() -> None:
    """The longest lengths are tried first. A boundary that is shorter than so many is not found."""
    cache = ModelCache("full and window", 1500, UNIT_TOKENS)
    cache.serve("a" * 4 + "x")
    cache.serve("b" * 4 * (MAX_PROBES + 2) + "x")
    cache.evict_everything()
    text = "a" * 4 + "c" * 4 * (MAX_PROBES + 10)
    assert cache.find_evicted(text, 0, 4 * MAX_PROBES) == 4
    assert cache.find_evicted(text, 0, 4 * (MAX_PROBES + 1)) == 0


def test_the_oldest_eviction_is_forgotten_first() -> None:
    cache = ModelCache("window only", 1000, UNIT_TOKENS)
    num_units = 128
    for number in range(REMEMBERED // num_units):
        cache.serve(chr(97 + number % 26) + chr(97 + number // 26) + "a" * (4 * num_units - 1))
        cache.evict_everything()
    assert cache.stats.checkpoints_evicted == REMEMBERED
    first = "aa" + "a" * (4 * num_units - 1)
    assert cache.find_evicted(first, 0, 4 * num_units) > 0
    cache.serve("A" * 4 * num_units + "x")
    cache.evict_everything()
    assert cache.find_evicted(first, 0, 4 * num_units) == 0
    second = "ba" + "a" * (4 * num_units - 1)
    assert cache.find_evicted(second, 0, 4 * num_units) == 4 * num_units


def test_without_full_attention_a_boundary_is_behind_shorter_ones_only() -> None:
    """A request is undone within its step.

    The step ends before a boundary that others have left.
    """
    cache = ModelCache("window only", 100)
    first = ModelRequest("r1", "a" * 16 + "x")
    second = ModelRequest("r2", "a" * 40 + "y", [16])
    assert cache.step(first, 2) and cache.step(second, 13)
    assert cache.step(first, 15)
    cache.finish(first)
    assert [node["boundary_tokens"] for node in cache.checkpoints()] == [16]
    assert cache.step(second, 8)
    cache.pool.lost_unasked = True
    cache.undo_step(second)
    assert {node["boundary_tokens"] for node in cache.checkpoints()} == {12, 16}
    cache.check()


def test_evictions_count_against_their_reason(cache: ModelCache) -> None:
    prompts = [f"{number:04}" + "a" * 20 + "x" for number in range(60)]
    rates, hint = inspection.rates_of(cache.cache_state), (Origin.HINT, 0, 0)
    latest = (Origin.LATEST, 1, 0)  # An answer of one token crosses no boundary.
    assert rates.is_worth_trying(latest)
    for prompt in prompts:
        cache.serve(prompt)
        cache.evict_everything()
    assert [rates.is_worth_trying(latest) for _ in range(15)].count(True) == 0
    assert rates.is_worth_trying(hint)
    assert rates.expected_uses((Origin.LATEST, 0, 0)) == 1
    for prompt in prompts[:10]:
        cache.serve(prompt)  # This request asks for the evicted checkpoint.
    assert rates.is_worth_trying(latest)


def test_a_boundary_without_its_state_is_not_passed() -> None:
    """Draft tokens are accepted, and a step passes a boundary. The boundary before it is kept."""
    cache = ModelCache("full and state", 100)
    request = ModelRequest("r", "a" * 5)
    for _ in range(2):  # The first step ends where a request with the same prompt resumes.
        assert cache.step(request, 5)
    assert request.num_computed_tokens == 5
    request.text += "a" * 4
    assert cache.step(request, 3)
    assert request.num_computed_tokens == 8
    request.text += "a" * 6
    assert cache.step(request, 6)
    cache.finish(request)
    assert 8 in {node["boundary_tokens"] for node in cache.checkpoints()}
    assert cache.hit_tokens("a" * 15, 14) == 8
    cache.check()


def test_of_a_boundary_every_continuation_is_kept_that_a_hit_reads() -> None:
    cache = ModelCache("full looks ahead", 100)
    texts = ["a" * 8 + letter * 4 + "x" for letter in "bcd"]
    for text in texts:
        cache.serve(text)
    cache.pool.allocate(cache.num_surplus)
    assert [cache.hit_tokens(text, 12) for text in texts] == [8, 8, 8]
    assert cache.hit_tokens("a" * 8 + "e" * 4 + "x", 12) == 4
    (node,) = (node for node in cache.checkpoints() if node["boundary_tokens"] == 8)
    assert node["num_ahead"] == 3


def test_what_was_cached_for_a_boundary_that_is_not_reached_is_uncached() -> None:
    layout = (GroupGeometry(FULL, 8), GroupGeometry(WINDOW, 4, 9))
    cache = ModelCache(layout, 100, unit_tokens=8)
    request = ModelRequest("r", "a" * 14)
    assert cache.step(request, 14)
    window = cache.managers[1]
    assert [block._block_hash is not None for block in window.req_to_blocks["r"]] == [True] * 3 + [
        False
    ]
    cache.finish(request)
    found = [cache.pool.find(request, window.group, index) is not None for index in range(3)]
    assert found == [True, True, False]


def lost_first_blocks(layout: str, num_tokens: int, groups: Sequence[int]) -> ModelCache:
    """A cache that lost the first block of some groups while a request had the block.

    A connector uncaches blocks like this when it fails to load them. Later requests get such a
    block, and cache in it what they compute.
    """
    cache = ModelCache(layout, 30)
    request = ModelRequest("loads", "a" * (num_tokens + 1))
    assert cache.step(request, num_tokens)
    for group in groups:
        cache.pool.uncache_unasked(cache.managers[group].req_to_blocks["loads"][0])
    cache.finish(request)
    return cache


def tail_at(cache: ModelCache, boundary_tokens: int) -> list[ModelBlock]:
    (node,) = (n for n in cache.checkpoints() if n["boundary_tokens"] == boundary_tokens)
    return [cache.pool.blocks[index] for index in node["tail"]]


def test_who_passes_a_boundary_whose_tail_holds_something_else_takes_it_anew() -> None:
    """Otherwise the reallocated block is in the tail twice, and a hit's block becomes surplus."""
    cache = lost_first_blocks("full looks ahead", 16, groups=[0, 1])
    before = tail_at(cache, 4)
    request = ModelRequest("computes", "a" * 9)
    assert cache.step(request, 8)
    assert before[0] is cache.managers[0].req_to_blocks["computes"][1]
    cache.check()
    own = [cache.managers[1].req_to_blocks["computes"][0], before[0]]
    assert tail_at(cache, 4) == own
    cache.finish(request)
    cache.pool.allocate(cache.num_surplus)
    assert cache.hit_tokens("a" * 9, 8) == 4


def test_a_held_block_that_is_uncached_is_needed_no_longer_than_others() -> None:
    """A connector uncaches blocks like this when it fails to load them."""
    cache, request, held = with_held_blocks(are_idle=False)
    for block in held:
        cache.pool.uncache_unasked(block)
    ids = [block.block_id for block in held]
    assert inspection.held_blocks(cache.retention._request_states["r"]) == ids
    cache.preempt(request)
    assert not any(inspection.num_needs(cache.cache_state, index) for index in ids)


def test_a_need_that_was_overruled_is_not_taken_back_from_others() -> None:
    """The held block is reallocated, because blocks are lacking. Then a checkpoint needs it."""
    cache, holder, (block, *_) = with_held_blocks(are_idle=True)
    taken = cache.pool.allocate(len(cache.pool.queue))
    cache.pool.free([other for other in taken if other is not block])
    cache.pool.free([block])
    other = ModelRequest("r2", "b" * 24 + "x")
    assert cache.step(other, 24)
    cache.finish(other)
    assert inspection.num_needs(cache.cache_state, block.block_id)
    cache.pool.uncache_unasked(block)
    cache.preempt(holder)
    cache.check()


def test_what_a_lookup_read_behind_its_hit_is_not_cached_twice() -> None:
    cache = ModelCache("both look ahead", 100)
    cache.serve("a" * 24 + "x")
    request = ModelRequest("r", "a" * 24 + "y")
    assert cache.step(request, 30)
    assert 0 < request.before_step_tokens < 24
    cache.finish(request)
    window = cache.managers[1].group
    assert all(len(cache.pool.copies(request, window, index)) <= 1 for index in range(12))


def test_who_hits_a_boundary_whose_tail_holds_something_else_takes_it_anew() -> None:
    """The prefix is still hit, because other requests have computed the block again."""
    cache = lost_first_blocks("full and window", 24, groups=[1])
    lost = tail_at(cache, 8)[0]
    other = ModelRequest("shorter", "a" * 4 + "x")
    assert cache.step(other, 4)
    assert cache.managers[0].req_to_blocks["shorter"] == [lost]
    request = ModelRequest("hits", "a" * 8 + "x")
    assert cache.step(request, 1)
    assert request.before_step_tokens == 8
    assert tail_at(cache, 8) == cache.managers[1].req_to_blocks["hits"][:2]


def test_a_tail_that_was_taken_anew_goes_with_what_was_not_computed() -> None:
    cache = lost_first_blocks("full looks ahead", 16, groups=[0, 1])
    request = ModelRequest("undone", "a" * 9)
    assert cache.step(request, 8)
    assert tail_at(cache, 4)
    cache.undo_step(request)
    tails = [cache.pool.blocks[index] for node in cache.checkpoints() for index in node["tail"]]
    assert all(block._block_hash is not None for block in tails)


def test_nothing_is_evicted_while_blocks_are_free_that_were_uncached(cache: ModelCache) -> None:
    """Checkpoints that have lost blocks must not cost other checkpoints their blocks."""
    cache.serve("b" * 12 + "x")
    request = ModelRequest("r", "a" * 12 + "x")
    assert cache.step(request, 12)
    for manager in cache.managers:
        cache.pool.uncache_unasked(manager.req_to_blocks["r"][0])
    cache.finish(request)
    num_uncached = sum(block._block_hash is None for block in cache.pool.queue)
    assert any(
        inspection.num_needs(cache.cache_state, block.block_id)
        for block in cache.pool.queue[:num_uncached]
    )
    cache.pool.allocate(num_uncached)
    assert not cache.stats.checkpoints_evicted
