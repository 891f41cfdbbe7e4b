# SPDX-License-Identifier: Apache-2.0
"""Adaptive retention on vllm-ascend's coordinator, managers and block pool.

Hits against dense caching on the small layout and the true one; and random lives of requests in a
small pool, each hit of which is checked against a record of what every block was written with.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

pytest.importorskip(
    "vllm_ascend",
    reason="needs KVEXT_ASCEND_SOURCES and a pytest process that runs tests/ascend alone",
)

from ascend_geometry import HIT_UNIT_TOKENS, SMALL_HIT_UNIT_TOKENS, planned_layout, small_layout
from long_prompts import NUM_BLOCKS, hits_around, outputs, prompt
from support.retention.books import check_books
from support.retention.checkpoints import (
    adaptive_retention,
    check_idle,
    num_checkpoints,
    retention_books,
)
from support.retention.reachability import serve_conversation, serve_prompt_only
from support.scheduler.block_manager import BlockManager, Layout
from vllm.v1.request import Request

from vllm_ascend_kvext.patches.retention.kv_cache_coordinator import retention_of
from vllm_ascend_kvext.retention.hints import HINT_ARGUMENT

UNIT_TOKENS = SMALL_HIT_UNIT_TOKENS
TRUE_UNIT_TOKENS = HIT_UNIT_TOKENS[128]
ROOMY_BLOCKS = 3000
EAGLE_SETS = {"none": frozenset(), "MTP": frozenset({3}), "all": frozenset(range(6))}


@pytest.fixture(autouse=True)
def adaptive() -> Iterator[None]:
    with adaptive_retention():
        yield


def dense_world(layout: Layout, num_blocks: int) -> BlockManager:
    """Caches every block, although the patches are in place."""
    with pytest.MonkeyPatch.context() as environ:
        environ.delenv("VLLM_ASCEND_KVEXT_RETENTION")
        return BlockManager(layout, None, num_blocks)


def serve(world: BlockManager, token_ids: Sequence[int], hints: Sequence[int] = ()) -> int:
    """Run a request to its end; returns the tokens hit."""
    request = world.request(token_ids)
    if hints:
        request.sampling_params.extra_args = {HINT_ARGUMENT: list(hints)}
    hit_tokens = world.prefill(request, max(20, len(token_ids) // 8))
    world.decode(request, outputs(3))
    world.finish(request)
    return hit_tokens


@pytest.mark.parametrize("eagle", EAGLE_SETS)
def test_a_request_hits_at_least_what_dense_caching_hits(eagle: str) -> None:
    layout = small_layout(EAGLE_SETS[eagle])
    dense, sparse = dense_world(layout, ROOMY_BLOCKS), BlockManager(layout, None, ROOMY_BLOCKS)
    for length in range(1, 4 * UNIT_TOKENS, 7):
        for run in (
            lambda world, n=length: serve_conversation(world, n, UNIT_TOKENS, preempt_every=9),
            lambda world, n=length: serve_prompt_only(world, n),
        ):
            dense.reset()
            sparse.reset()
            found = run(sparse)
            for moment, hit_tokens in run(dense).items():
                assert found[moment] >= hit_tokens, (length, moment)


def three_branches(num_shared_tokens: int, num_own_tokens: int) -> list[list[int]]:
    """Prompts that begin with the same tokens, and then part ways."""
    return [
        [*prompt(num_shared_tokens), *range(start, start + num_own_tokens)]
        for start in (10**6, 2 * 10**6, 3 * 10**6)
    ]


@pytest.mark.parametrize("eagle", EAGLE_SETS)
def test_every_branch_hits_what_dense_caching_hits(eagle: str) -> None:
    """Requests that share a prefix hit it from the second one on: nothing has been dropped."""
    layout = small_layout(EAGLE_SETS[eagle])
    dense, sparse = dense_world(layout, ROOMY_BLOCKS), BlockManager(layout, None, ROOMY_BLOCKS)
    num_hits = 0
    for num_shared_tokens in range(UNIT_TOKENS, 7 * UNIT_TOKENS, 5):
        hits = []
        for world in (dense, sparse):
            world.reset()
            prompts = three_branches(num_shared_tokens, 4 * UNIT_TOKENS + 3)
            hits.append([serve(world, token_ids) for token_ids in prompts])
        expected, found = hits
        assert all(ours >= theirs for ours, theirs in zip(found, expected, strict=True)), hits
        num_hits += expected[1] > 0
    assert num_hits > 10


@pytest.mark.parametrize("eagle", EAGLE_SETS)
def test_first_demand_for_a_hinted_prefix_is_met(eagle: str) -> None:
    layout = small_layout(EAGLE_SETS[eagle])
    dense, sparse = dense_world(layout, ROOMY_BLOCKS), BlockManager(layout, None, ROOMY_BLOCKS)
    num_hits = 0
    for num_shared_tokens in range(UNIT_TOKENS, 7 * UNIT_TOKENS, 5):
        dense.reset()
        sparse.reset()
        first, second, _ = three_branches(num_shared_tokens, 4 * UNIT_TOKENS + 3)
        serve(dense, first)
        serve(sparse, first, [num_shared_tokens])
        dense_tokens = serve(dense, second)
        assert serve(sparse, second) >= dense_tokens, num_shared_tokens
        num_hits += dense_tokens > 0
    assert num_hits > 10


@pytest.mark.parametrize("eagle", EAGLE_SETS)
def test_true_layout_hits_at_least_what_dense_caching_hits(eagle: str) -> None:
    """Sent again, extended, resumed; and the third of those that share a prefix."""
    layout = planned_layout(128, EAGLE_SETS[eagle])
    dense, sparse = dense_world(layout, NUM_BLOCKS), BlockManager(layout, None, NUM_BLOCKS)
    for num_tokens in (
        TRUE_UNIT_TOKENS + 129,
        2 * TRUE_UNIT_TOKENS + 1,
        3 * TRUE_UNIT_TOKENS + 700,
    ):
        found = hits_around(sparse, num_tokens)
        for moment, hit_tokens in hits_around(dense, num_tokens).items():
            assert found[moment] >= hit_tokens, (num_tokens, moment)
    num_hits = 0
    for num_shared_tokens in (TRUE_UNIT_TOKENS + 200, 2 * TRUE_UNIT_TOKENS + 5000):
        prompts = three_branches(num_shared_tokens, TRUE_UNIT_TOKENS + 500)
        hits = []
        for world in (dense, sparse):
            world.reset()
            hits.append([serve(world, token_ids) for token_ids in prompts][-1])
        assert hits[1] >= hits[0], f"{num_shared_tokens} shared: {hits}"
        num_hits += hits[0] > 0
    assert num_hits > 0


class Lives:
    """Random requests on one small pool; remembers what every block was written with.

    Args:
        world: The manager.
        seed: Determines everything.
    """

    def __init__(self, world: BlockManager, seed: int) -> None:
        retention = retention_of(world.manager.coordinator)
        self._world = world
        self._rng = random.Random(seed)
        self._groups = (*retention.full_groups, *retention.sparse_groups)
        self.written: dict[int, tuple[int, int]] = {}
        """Block id -> group, and hash of the tokens up to the end of what was written last."""
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self.num_hits = 0
        self.num_preemptions = 0

    def live(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._rng.choice((self._arrive, self._admit, self._step, self._step, self._step))()
            if self._rng.random() < 0.03:
                self._preempt()
            if self._rng.random() < 0.05:
                self._finish()
            self._check_books()
        while self._running:
            self._finish()
        for request in self._waiting:
            self._world.finish(request)
        check_idle(self._world.manager)

    def _check_books(self) -> None:
        pool = self._world.pool
        retention = retention_of(self._world.manager.coordinator)
        check_books(retention, pool.blocks, pool.free_block_queue.get_all_free_blocks())

    def serve(self, token_ids: Sequence[int]) -> None:
        """One request, from its arrival to its end."""
        self._waiting = [self._world.request(token_ids)]
        self._admit()
        (request,) = self._running
        while request.num_computed_tokens < request.num_tokens:
            self._step()
        self._finish()

    def _arrive(self) -> None:
        if len(self._waiting) > 3:
            return
        root = self._rng.randrange(3)
        num_shared, num_own = self._rng.randrange(6 * UNIT_TOKENS), self._rng.randrange(1, 50)
        own = [self._rng.randrange(10**6) for _ in range(num_own)]
        shared = [(root + 1) * 10**7 + position for position in range(num_shared)]
        request = self._world.request([*shared, *own])
        if self._rng.random() < 0.3:
            request.sampling_params.extra_args = {HINT_ARGUMENT: [max(1, num_shared)]}
        self._waiting.append(request)

    def _admit(self) -> None:
        if not self._waiting:
            return
        request = self._waiting[0]
        manager = self._world.manager
        blocks, hit_tokens = manager.get_computed_blocks(request)
        num_new_tokens = min(self._rng.randrange(1, 70), request.num_tokens - hit_tokens)
        if manager.allocate_slots(request, num_new_tokens, hit_tokens, blocks) is None:
            return
        self._running.append(self._waiting.pop(0))
        self._check_hit(request, hit_tokens)
        request.num_computed_tokens = hit_tokens
        self._write(request, num_new_tokens)

    def _step(self) -> None:
        if not self._running:
            return
        request = self._rng.choice(self._running)
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids(self._rng.randrange(3))
        left = request.num_tokens - request.num_computed_tokens
        num_new_tokens = min(self._rng.randrange(1, 70), left)
        if self._world.manager.allocate_slots(request, num_new_tokens) is not None:
            self._write(request, num_new_tokens)
        else:
            self._preempt()

    def _preempt(self) -> None:
        if self._running:
            request = self._running.pop(self._rng.randrange(len(self._running)))
            self._world.preempt(request)
            self._waiting.insert(0, request)
            self.num_preemptions += 1

    def _finish(self) -> None:
        if self._running:
            self._world.finish(self._running.pop(self._rng.randrange(len(self._running))))

    def _write(self, request: Request, num_tokens: int) -> None:
        first = request.num_computed_tokens
        request.num_computed_tokens += num_tokens
        for group in self._groups:
            blocks = group.manager.req_to_blocks[request.request_id]
            stop_block = -(-request.num_computed_tokens // group.block_tokens)
            # A compressed group has no block for less than a row.
            for index in range(first // group.block_tokens, min(stop_block, len(blocks))):
                if not blocks[index].is_null:
                    stop = min((index + 1) * group.block_tokens, request.num_computed_tokens)
                    self.written[blocks[index].block_id] = self._content(request, group, stop)

    def _check_hit(self, request: Request, hit_tokens: int) -> None:
        """Every block that the first new token reads holds the request's own tokens."""
        self.num_hits += hit_tokens > 0
        for group in self._groups:
            blocks = group.manager.req_to_blocks[request.request_id]
            skipped_tokens = group.manager.get_num_skipped_tokens(hit_tokens)
            first = -(-skipped_tokens // group.block_tokens)
            for index in range(first, hit_tokens // group.block_tokens):
                expected = self._content(request, group, (index + 1) * group.block_tokens)
                assert not blocks[index].is_null
                assert self.written[blocks[index].block_id] == expected

    @staticmethod
    def _content(request: Request, group, stop: int) -> tuple[int, int]:
        return group.manager.kv_cache_group_id, hash(tuple(request.all_token_ids[:stop]))


@pytest.mark.parametrize("eagle", EAGLE_SETS)
def test_hits_hold_the_request_s_own_tokens(eagle: str) -> None:
    num_hits = num_preemptions = num_kept = 0
    for seed in range(12):
        world = BlockManager(small_layout(EAGLE_SETS[eagle]), None, num_blocks=260)
        lives = Lives(world, seed)
        lives.live(400)
        num_hits += lives.num_hits
        num_preemptions += lives.num_preemptions
        num_kept += num_checkpoints(retention_books(world.manager))
    assert num_hits > 50
    assert num_preemptions > 5
    assert num_kept > 5


def test_sees_blocks_of_another_request() -> None:
    """The control: what the cached blocks hold is moved on by one."""
    world = BlockManager(small_layout(), None, num_blocks=260)
    lives = Lives(world, 0)
    lives.serve(prompt(3 * UNIT_TOKENS))
    lives.serve(prompt(3 * UNIT_TOKENS))
    assert lives.num_hits == 1
    cached = [block.block_id for block in world.pool.blocks if block.block_hash is not None]
    contents = [lives.written[block_id] for block_id in cached]
    lives.written |= dict(zip(cached, contents[1:] + contents[:1], strict=True))
    with pytest.raises(AssertionError):
        lives.serve(prompt(3 * UNIT_TOKENS))
