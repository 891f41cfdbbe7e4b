# SPDX-License-Identifier: Apache-2.0
"""The tree of checkpoints under random workloads on small pools, checked after every step."""

from __future__ import annotations

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
from unit.retention.manager_model import ModelCache
from unit.retention.pool_model import ModelRequest, hash_of
from unit.retention.tree_checks import check, nodes_of

from vllm_ascend_kvext.retention.checkpoints import Checkpoint
from vllm_ascend_kvext.retention.geometry import GroupGeometry, GroupKind, HitGeometry
from vllm_ascend_kvext.retention.reasons import Origin, Reason

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


def is_exact(layout: tuple[GroupGeometry, ...]) -> bool:
    return all(
        group.block_tokens == UNIT_TOKENS and not group.looks_ahead
        for group in layout
        if not group.is_sparse
    )


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
        check(self.cache, self.requests, is_exact(self.layout))


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


def test_full_attention_goes_with_the_last_checkpoint_behind_it(cache: ModelCache) -> None:
    served(cache, "a" * 40 + "x")
    for _ in range(len(cache.tree.nodes)):
        longest = max(node.boundary_tokens for node in nodes_of(cache.tree) if node.tail)
        full = [b for b in cache.pool.idle_cached_blocks() if b._block_hash.endswith(b"@0")]
        assert len(full) * UNIT_TOKENS == longest
        node = cache.tree._order.pop()
        assert node is not None
        cache.tree._evict(node)
        check(cache, ())
    assert not cache.pool.idle_cached_blocks()


def test_no_more_is_evicted_than_is_needed(cache: ModelCache) -> None:
    served(cache, "a" * 40 + "x")
    num_idle = len(cache.pool.queue) - len(cache.pool.idle_cached_blocks())
    cache.tree.make_room(num_idle)
    assert not cache.stats.checkpoints_evicted
    cache.tree.make_room(num_idle + 1)
    assert cache.stats.checkpoints_evicted == 1
    assert cache.pool.count_useless(num_idle + 1) == num_idle + 1


def test_what_a_request_holds_is_not_evicted(cache: ModelCache) -> None:
    request = ModelRequest.of("r", "a" * 48 + "x")
    cache.step(request, 48)
    cache.step(request, 1)
    cache.tree.make_room(cache.pool.num_blocks)
    held = {node.boundary_tokens for node in nodes_of(cache.tree) if node.tail}
    assert held == {44, 48}, "their windows overlap"
    assert cache.hit_tokens(request.text, 48) == 48


def test_what_was_evicted_is_remembered(cache: ModelCache) -> None:
    served(cache, "a" * 24 + "x")
    cache.tree.make_room(cache.pool.num_blocks)
    text = "a" * 24 + "yz"
    assert cache.tree.find_ghost(lambda n: text[:n].encode(), 0, 26) == 24
    assert cache.tree.find_ghost(lambda n: text[:n].encode(), 0, 23) < 24
    assert cache.tree.find_ghost(lambda n: text[:n].encode(), 24, 26) is None
    cache.reset()
    assert cache.tree.find_ghost(lambda n: text[:n].encode(), 0, 26) is None


def test_strays_are_found_and_nothing_else(cache: ModelCache) -> None:
    served(cache, "a" * 24 + "x")
    running = ModelRequest.of("r", "b" * 24 + "x")
    cache.step(running, 25)
    assert cache.keeper.forget_strays() == 0
    stray = next(block for block in cache.pool.queue if block._block_hash is None)
    stray._block_hash = b"of nobody@0"
    cache.pool.copies[stray._block_hash][stray.block_id] = stray
    assert cache.keeper.forget_strays() == 1
    assert stray._block_hash is None
    assert cache.hit_tokens("a" * 25, 24) == 24
    check(cache, [running])


def test_checkpoints_that_share_a_prefix_hang_below_it(cache: ModelCache) -> None:
    """A boundary that becomes known between two others takes its place there."""
    served(cache, "a" * 40 + "x")
    served(cache, "a" * 12 + "x")
    by_length = {node.boundary_tokens: node for node in nodes_of(cache.tree)}
    above = max(tokens for tokens in by_length if tokens < 12)
    below = min(tokens for tokens in by_length if tokens > 12)
    assert by_length[12].parent is by_length[above]
    assert by_length[below].parent is by_length[12]
    check(cache, ())


def put(cache: ModelCache, parent: Checkpoint, letters: str, reason: Reason) -> Checkpoint:
    """A checkpoint whose way and tail of one block nobody holds."""
    key = parent.key + letters.encode()
    ends = range(parent.boundary_tokens + UNIT_TOKENS, len(key) + 1, UNIT_TOKENS)
    hashes = [*(hash_of(key[:end].decode(), 0) for end in ends), hash_of(key.decode(), 1)]
    blocks = cache.pool.allocate(len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        block._block_hash = block_hash
        cache.pool.copies[block_hash][block.block_id] = block
    cache.pool.free(blocks)
    *run, tail = zip(blocks, hashes, strict=True)
    return cache.tree.add(parent, key, len(key), (run,), [], [tail], reason)


def test_an_eviction_counts_against_its_reason(cache: ModelCache) -> None:
    reason = Reason(Origin.LADDER, 2)
    put(cache, cache.tree.root, "a" * 16, reason)
    before = cache.tree.rates.expected_uses(reason)
    cache.tree.make_room(cache.pool.num_blocks)
    assert cache.tree.rates.expected_uses(reason) < before


def test_without_what_was_behind_it_a_checkpoint_is_worth_less(cache: ModelCache) -> None:
    """Its full attention is in the way of others, where it served those behind it before."""
    tree, reason = cache.tree, Reason(Origin.PROMPT)
    short = put(cache, tree.root, "a" * 16, reason)
    behind = put(cache, short, "a" * 400, reason)
    tree.keep(short, [], [], reason)
    other = put(cache, tree.root, "b" * 20, reason)
    tree._evict(behind)
    tree.make_room(cache.pool.count_useless(cache.pool.num_blocks) + 1)
    assert not short.tail and other.tail
