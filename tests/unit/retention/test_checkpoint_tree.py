# SPDX-License-Identifier: Apache-2.0
"""The tree of checkpoints under random workloads on small pools, checked after every step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.retention.books import check_books, num_checkpoints
from unit.retention.manager_model import ModelCache
from unit.retention.pool_model import ModelRequest

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.retention.geometry import GroupGeometry, HitGeometry

UNIT_TOKENS = 4
MOST_RUNNING = 3
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
}


def check(cache: ModelCache) -> None:
    """The books agree, and whoever comes with the prompt of a checkpoint resumes there or later."""
    is_exact = not cache.pool.lost_unasked
    check_books(cache.retention, cache.pool.blocks, cache.pool.queue, is_exact)
    if not is_exact:
        return  # a block may be gone, and what it was part of be incomplete
    for node in cache.tree.nodes.values():
        if node.has_tail and not cache.geometry.looks_ahead:
            text = node.key.decode()
            hit_tokens = cache.hit_tokens(text + "?", node.boundary_tokens)
            assert hit_tokens == node.boundary_tokens, f"{text} hits {hit_tokens} of {node}"


class CheckpointTreeMachine(RuleBasedStateMachine):
    """Requests over texts that share prefixes come, compute, and go."""

    layout: tuple[GroupGeometry, ...]
    loses_unasked = False

    @initialize(num_blocks=st.integers(16, 60), interval_units=st.sampled_from([0, 0, 1, 2]))
    def start(self, num_blocks: int, interval_units: int) -> None:
        geometry = HitGeometry(self.layout, UNIT_TOKENS)
        self.cache = ModelCache(geometry, num_blocks, interval_units * UNIT_TOKENS)
        self.pool, self.tree = self.cache.pool, self.cache.tree
        self.requests: list[ModelRequest] = []
        self.num_requests = 0
        self.last_stepped: ModelRequest | None = None

    @precondition(lambda self: len(self.requests) < MOST_RUNNING)
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
    @rule(choice=st.integers(0, MOST_RUNNING - 1), num_tokens=st.integers(1, 5 * UNIT_TOKENS))
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
    @rule(choice=st.integers(0, MOST_RUNNING - 1), letters=st.text("ab", min_size=1, max_size=6))
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
    @rule(choice=st.integers(0, MOST_RUNNING - 1))
    def finish(self, choice: int) -> None:
        request = self._choose(choice)
        if request.running:
            self.cache.finish(request)
        self.requests.remove(request)

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, MOST_RUNNING - 1))
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
            assert not len(self.tree.nodes) and not self.tree.root.children

    def _can_undo(self) -> bool:
        return self.last_stepped is not None and self.last_stepped.running

    def _choose(self, choice: int) -> ModelRequest:
        return self.requests[choice % len(self.requests)]

    @invariant()
    def everything_fits(self) -> None:
        check(self.cache)


SETTINGS = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("loses_unasked", [False, True], ids=["keeps blocks", "loses blocks"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_workloads(layout: str, loses_unasked: bool) -> None:
    class Machine(CheckpointTreeMachine):
        pass

    Machine.layout = LAYOUTS[layout]
    Machine.loses_unasked = loses_unasked
    run_state_machine_as_test(Machine, settings=SETTINGS)


def served(cache: ModelCache, text: str) -> None:
    request = ModelRequest.of(f"r{text}", text)
    assert cache.step(request, len(text))
    cache.finish(request)


@pytest.fixture
def cache() -> ModelCache:
    return ModelCache(HitGeometry(LAYOUTS["full and window"], UNIT_TOKENS), 200)


def needed_blocks(cache: ModelCache) -> int:
    return sum(count > 0 for count in cache.tree.needs.count)


def num_surplus(cache: ModelCache) -> int:
    return cache.tree.free_order.count_next(len(cache.pool.blocks))


def evict_everything(cache: ModelCache) -> None:
    cache.tree.make_room(len(cache.pool.blocks))


def test_full_attention_is_needed_up_to_the_longest_checkpoint(cache: ModelCache) -> None:
    served(cache, "a" * 40 + "x")
    while num_checkpoints(cache.tree):
        longest = max(n.boundary_tokens for n in cache.tree.nodes.values() if n.has_tail)
        in_runs = sum(node.num_run_blocks for node in cache.tree.nodes.values())
        assert in_runs * UNIT_TOKENS == longest
        cache.tree.make_room(num_surplus(cache) + 1)
        check(cache)
    assert not needed_blocks(cache)


def test_what_no_checkpoint_needs_can_be_hit_until_it_is_reallocated(cache: ModelCache) -> None:
    text = "a" * 40 + "x"
    served(cache, text)
    evict_everything(cache)
    assert not num_checkpoints(cache.tree)
    assert cache.hit_tokens(text, 40) == 40
    cache.pool.allocate(len(cache.pool.queue))
    assert cache.hit_tokens(text, 40) == 0


def test_surplus_is_reallocated_before_checkpoints(cache: ModelCache) -> None:
    served(cache, "a" * 40 + "x")
    num_blocks = num_surplus(cache)
    assert num_blocks < len(cache.pool.queue)
    cache.pool.allocate(num_blocks)
    assert not cache.stats.checkpoints_evicted
    cache.pool.allocate(1)
    assert cache.stats.checkpoints_evicted == 1


def test_a_checkpoint_that_running_requests_read_is_not_evicted_before_others(
    cache: ModelCache,
) -> None:
    served(cache, "b" * 48 + "x")
    request = ModelRequest.of("r", "a" * 48 + "x")
    cache.step(request, 48)
    cache.step(request, 1)
    cache.tree.make_room(num_surplus(cache) + 1)
    lost = [key for key, node in cache.tree.evicted._entries.items()]
    assert lost and all(key.startswith(b"b") for key in lost)


def test_an_evicted_boundary_is_remembered_until_reset(cache: ModelCache) -> None:
    served(cache, "a" * 24 + "x")
    evict_everything(cache)
    text = "a" * 24 + "yz"

    def find(after_tokens: int, upto_tokens: int) -> int | None:
        return cache.tree.find_evicted(lambda n: text[:n].encode(), after_tokens, upto_tokens)

    assert find(0, 26) == 24
    assert (find(0, 23) or 0) < 24
    assert find(24, 26) is None
    cache.reset()
    assert find(0, 26) is None


def test_a_boundary_between_two_others_becomes_the_parent_of_the_longer(cache: ModelCache) -> None:
    served(cache, "a" * 40 + "x")
    served(cache, "a" * 12 + "x")
    by_length = {node.boundary_tokens: node for node in cache.tree.nodes.values()}
    above = max((tokens for tokens in by_length if tokens < 12), default=0)
    below = min(tokens for tokens in by_length if tokens > 12)
    assert by_length[12].parent.boundary_tokens == above
    assert by_length[below].parent is by_length[12]
    check(cache)


def test_prompts_that_part_ways_share_the_runs_before(cache: ModelCache) -> None:
    served(cache, "a" * 24 + "x")
    served(cache, "a" * 12 + "b" * 12 + "x")
    in_runs = [i for node in cache.tree.nodes.values() for run in node.runs for i in run.tolist()]
    assert len(in_runs) == len(set(in_runs)) == (24 + 12) // UNIT_TOKENS
    check(cache)


def test_an_eviction_counts_against_its_reason(cache: ModelCache) -> None:
    served(cache, "a" * 24 + "x")
    reasons = {node.reason for node in cache.tree.nodes.values() if node.has_tail}
    before = {reason: cache.tree.rates.expected_uses(reason) for reason in reasons}
    evict_everything(cache)
    assert all(cache.tree.rates.expected_uses(reason) < before[reason] for reason in reasons)


def test_the_cost_of_a_request_does_not_grow_with_its_siblings() -> None:
    """Counted are the calls of Python functions, for one prompt among few and among many."""
    geometry = HitGeometry(LAYOUTS["full and window"], UNIT_TOKENS)
    num_calls = []
    for num_siblings in (20, 400):
        cache = ModelCache(geometry, 8000)
        for number in range(num_siblings):
            served(cache, "s" * 40 + chr(0x4E00 + number) * 12 + "x")
        num_calls.append(count_calls(lambda cache=cache: served(cache, "s" * 40 + "y" * 12 + "x")))
    assert num_calls[1] < 1.5 * num_calls[0]


def count_calls(function: Callable[[], None]) -> int:
    """Calls into the package while a function runs."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call" and "vllm_ascend_kvext" in frame.f_code.co_filename

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count
