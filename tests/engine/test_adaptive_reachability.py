# SPDX-License-Identifier: Apache-2.0
"""Where no block has to give way, adaptive retention hits what dense caching hits.

A request that comes back, goes on or resumes hits at least as much, and so does the second demand
for a prefix that requests share; with a hint, already the first.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from support.retention.checkpoints import adaptive_retention, retention_books
from support.retention.reachability import eagle_sets, serve_conversation, serve_prompt_only
from support.scheduler.block_manager import BlockManager, Layout, full, window
from support.scheduler.engine import SchedulerEngine
from support.scheduler.layouts import MAMBA, MAMBA_WINDOW
from support.scheduler.layouts import Layout as EngineLayout
from support.scheduler.model_runner import ReadCheck
from support.scheduler.options import EngineOptions
from support.scheduler.workload import RequestPlan

from vllm_ascend_kvext.retention.hints import HINT_ARGUMENT

NUM_BLOCKS = 4000
SMALL_POOL_BLOCKS = 400

LAYOUTS = {
    "one full, one window": (full(4), window(4, 9)),
    "one full, two windows": (full(4), window(4, 13), window(4, 13, head_size=2)),
    "three block sizes": (full(8), window(4, 7), window(2, 5)),
    "window wider than the unit": (full(8), window(2, 23)),
    "window only": (window(4, 11),),
    "compressor states": (full(16), window(4, 8), window(2, 4), window(4, 16)),
}


@dataclass(frozen=True)
class Case:
    """The same layout twice: densely cached, and adaptively.

    Attributes:
        name: For messages.
        unit_tokens: The granularity of hits.
        window_tokens: The widest window.
        layout: The layout.
    """

    name: str
    unit_tokens: int
    window_tokens: int
    layout: Layout
    dense: BlockManager
    adaptive: BlockManager


def cases(layout_name: str) -> Iterator[Case]:
    specs = LAYOUTS[layout_name]
    for eagle_group_ids in eagle_sets(len(specs)):
        layout = Layout(specs, eagle_group_ids)
        yield Case(
            f"{layout_name}, EAGLE {sorted(eagle_group_ids)}",
            max(spec.block_size for spec in specs),
            max(getattr(spec, "sliding_window", None) or 0 for spec in specs),
            layout,
            dense_manager(layout),
            BlockManager(layout, None, NUM_BLOCKS),
        )


def dense_manager(layout: Layout) -> BlockManager:
    """A manager that retention leaves alone, although its patches are in place."""
    with pytest.MonkeyPatch.context() as environ:
        environ.delenv("VLLM_ASCEND_KVEXT_RETENTION")
        return BlockManager(layout, None, NUM_BLOCKS)


@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_a_request_hits_at_least_what_dense_caching_hits(layout_name: str) -> None:
    num_compared = 0
    with adaptive_retention():
        for number, case in enumerate(cases(layout_name)):
            longest = 3 * case.unit_tokens + case.window_tokens + 2
            stride = case.unit_tokens // 2 + 1
            for length in range(1 + number % stride, longest, stride):
                for serve in (
                    lambda world, n=length, c=case: serve_conversation(world, n, c.unit_tokens, 5),
                    lambda world, n=length: serve_prompt_only(world, n),
                ):
                    case.dense.reset()
                    case.adaptive.reset()
                    expected, found = serve(case.dense), serve(case.adaptive)
                    num_compared += len(expected)
                    for moment, hit_tokens in expected.items():
                        assert found[moment] >= hit_tokens, f"{case.name}, {length}, {moment}"
    assert num_compared > 100


def serve_in_chunks(
    world: BlockManager, token_ids: Sequence[int], hints: Sequence[int] = ()
) -> int:
    """Run a request to its end; returns the tokens hit."""
    request = world.request(token_ids)
    if hints:
        request.sampling_params.extra_args = {HINT_ARGUMENT: list(hints)}
    hit_tokens = world.prefill(request, 11)
    world.decode(request, [1, 2, 3])
    world.finish(request)
    return hit_tokens


def branches(num_shared_tokens: int, num_own_tokens: int) -> Iterator[list[int]]:
    """Prompts that begin with the same tokens, and then part ways."""
    for number in itertools.count(1):
        own = range(number * 10_000, number * 10_000 + num_own_tokens)
        yield [*range(num_shared_tokens), *own]


def shared_lengths(case: Case) -> range:
    longest = 2 * case.window_tokens + 5 * case.unit_tokens
    return range(1, longest, case.unit_tokens // 2 + 1)


@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_every_branch_hits_what_dense_caching_hits(layout_name: str) -> None:
    """Requests that share a prefix hit it from the second one on: nothing has been dropped."""
    num_hits = 0
    with adaptive_retention():
        for case in cases(layout_name):
            for num_shared_tokens in shared_lengths(case):
                hits = []
                for world in (case.dense, case.adaptive):
                    world.reset()
                    prompts = branches(num_shared_tokens, 5 * case.unit_tokens + 3)
                    hits.append([serve_in_chunks(world, next(prompts)) for _ in range(3)])
                dense, adaptive = hits
                assert adaptive == dense, f"{case.name}, {num_shared_tokens} shared"
                num_hits += dense[1] > 0
    assert num_hits > 10


def branch_under_pressure(
    case: Case, num_shared_tokens: int, hints: Sequence[int] = ()
) -> list[int]:
    """The hits of branches of one prefix, between which other requests take all that is surplus."""
    world = BlockManager(case.layout, None, SMALL_POOL_BLOCKS)
    prompts = branches(num_shared_tokens, 5 * case.unit_tokens + 3)
    hits = []
    for number in range(3):
        hits.append(serve_in_chunks(world, next(prompts), hints if not number else ()))
        world.pool.evict_blocks(set(retention_books(world.manager).surplus()))
    return hits


@pytest.mark.parametrize("layout_name", sorted(LAYOUTS.keys() - {"window only"}))
def test_second_demand_for_a_prefix_keeps_it_under_pressure(layout_name: str) -> None:
    """Two requests share a prefix whose surplus is gone; the third hits what they shared."""
    num_hits = num_missed = 0
    with adaptive_retention():
        for case in cases(layout_name):
            for num_shared_tokens in shared_lengths(case):
                case.dense.reset()
                prompts = branches(num_shared_tokens, 5 * case.unit_tokens + 3)
                dense = [serve_in_chunks(case.dense, next(prompts)) for _ in range(3)]
                found = branch_under_pressure(case, num_shared_tokens)
                assert found[2] >= dense[2], f"{case.name}, {num_shared_tokens} shared"
                num_hits += dense[2] > 0
                num_missed += found[1] < dense[1]
    assert num_hits > 10
    assert num_missed > 0, "the second hits as well: nothing is shown"


@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_a_hint_keeps_a_prefix_under_pressure(layout_name: str) -> None:
    num_hits = num_missed = 0
    with adaptive_retention():
        for case in cases(layout_name):
            for num_shared_tokens in shared_lengths(case):
                case.dense.reset()
                prompts = branches(num_shared_tokens, 5 * case.unit_tokens + 3)
                dense = [serve_in_chunks(case.dense, next(prompts)) for _ in range(2)]
                hinted = branch_under_pressure(case, num_shared_tokens, [num_shared_tokens])
                unhinted = branch_under_pressure(case, num_shared_tokens)
                assert hinted[1] >= dense[1], f"{case.name}, {num_shared_tokens} shared"
                num_hits += dense[1] > 0
                num_missed += unhinted[1] < dense[1]
    assert num_hits > 10
    assert num_missed > 0, "it hits without the hint as well: nothing is shown"


@pytest.mark.parametrize("evicted", [True, False])
def test_second_demand_for_an_evicted_boundary_is_met(evicted: bool) -> None:
    """What had to give way is kept again when it is asked for again, whatever else hits it."""
    layout = Layout((full(4), window(4, 9)))
    with adaptive_retention():
        world = BlockManager(layout, None, num_blocks=120)
        prompt = [*range(80)]
        serve_in_chunks(world, prompt)
        if evicted:
            for number in range(1, 6):
                serve_in_chunks(world, range(number * 1000, number * 1000 + 200))
            assert world.hit_tokens(world.request([*prompt, 5])) == 0
        serve_in_chunks(world, [*prompt, *range(5000, 5100)])
        hit_tokens = world.hit_tokens(world.request([*prompt, *range(6000, 6010)]))
        assert hit_tokens == 80


UNIT_TOKENS = MAMBA.unit_tokens
OPTIONS = EngineOptions(num_blocks=NUM_BLOCKS, max_num_batched_tokens=256, max_model_len=512)


class Steps:
    """Serves one request after the other on the real scheduler, whose steps end where they like."""

    def __init__(self, layout: EngineLayout) -> None:
        self._engine = SchedulerEngine(layout, OPTIONS, ReadCheck.ALL)
        self._numbers = itertools.count()

    def serve(self, prompt: Sequence[int], hints: Sequence[int] = ()) -> list[int]:
        """The lengths at which the steps of the prompt begin and end; the first is the hit."""
        plan = RequestPlan(
            request_id=f"request-{next(self._numbers)}",
            arrival_step=0,
            prompt=tuple(prompt),
            max_tokens=3,
            checkpoint_tokens=tuple(hints),
        )
        self._engine.add_request(plan)
        lengths: list[int] = []
        while self._engine.has_work():
            for scheduled in self._engine.step().scheduled:
                if not lengths:
                    lengths.append(scheduled.num_computed_tokens)
                if lengths[-1] < len(prompt):
                    lengths.append(scheduled.num_computed_tokens + scheduled.num_tokens)
        return lengths


@pytest.mark.parametrize("layout", [MAMBA, MAMBA_WINDOW], ids=lambda layout: layout.name)
def test_a_step_ends_where_states_are_shared(layout: EngineLayout) -> None:
    """A state exists only where a step ends: the second request makes one at the junction."""
    with adaptive_retention():
        for num_shared_tokens in range(2 * UNIT_TOKENS, 9 * UNIT_TOKENS, 5):
            steps = Steps(layout)
            junction = num_shared_tokens // UNIT_TOKENS * UNIT_TOKENS
            prompts = branches(num_shared_tokens, 7 * UNIT_TOKENS + 3)
            first, second, third = (steps.serve(next(prompts)) for _ in range(3))
            assert first[0] == second[0] == 0
            assert junction not in first, "a step ends there anyway: nothing is shown"
            assert junction in second
            assert third[0] == junction


@pytest.mark.parametrize("layout", [MAMBA, MAMBA_WINDOW], ids=lambda layout: layout.name)
def test_a_step_ends_where_a_hint_says(layout: EngineLayout) -> None:
    with adaptive_retention():
        for num_shared_tokens in range(2 * UNIT_TOKENS, 9 * UNIT_TOKENS, 5):
            steps = Steps(layout)
            boundary = num_shared_tokens // UNIT_TOKENS * UNIT_TOKENS
            prompts = branches(num_shared_tokens, 7 * UNIT_TOKENS + 3)
            first = steps.serve(next(prompts), [num_shared_tokens])
            second = steps.serve(next(prompts))
            assert boundary in first
            assert second[0] == boundary


@pytest.mark.parametrize("layout", [MAMBA, MAMBA_WINDOW], ids=lambda layout: layout.name)
def test_states_of_a_conversation_are_hit(layout: EngineLayout) -> None:
    """Sent again, and extended, a prompt hits at the last state that its steps left."""
    with adaptive_retention():
        for length in range(3 * UNIT_TOKENS + 1, 7 * UNIT_TOKENS, 3):
            if length % UNIT_TOKENS == 0:
                continue  # one step, whose end no resend can hit: all but the last token
            steps = Steps(layout)
            prompt = list(range(length))
            boundaries = {tokens for tokens in steps.serve(prompt) if tokens % UNIT_TOKENS == 0}
            replay = max(tokens for tokens in boundaries if tokens < length)
            assert replay > 0
            assert steps.serve(prompt)[0] == replay
            assert steps.serve([*prompt, *range(900, 940)])[0] >= replay


@pytest.mark.parametrize("is_running", [False, True])
def test_a_prefix_recovers_from_blocks_that_a_connector_uncached(is_running: bool) -> None:
    """Once it is computed again, checkpoints keep the blocks that it has now."""
    layout = Layout((full(4), window(4, 9)))
    with adaptive_retention():
        world = BlockManager(layout, None, SMALL_POOL_BLOCKS)
        books = retention_books(world.manager)
        prompt = [*range(200)]
        serve_in_chunks(world, prompt)
        reader = world.request(prompt)
        if is_running:
            assert world.prefill(reader, 64) > 0
        first = min(books.describe(), key=lambda node: node["boundary_tokens"])
        world.pool.evict_blocks({first["runs"][0][0]})
        if is_running:
            world.finish(reader)
        assert serve_in_chunks(world, prompt) == 0
        for _ in range(3):
            world.pool.evict_blocks(set(books.surplus()))
            assert serve_in_chunks(world, prompt) == 196
        uncached = [block for block in world.pool.blocks[1:] if block.block_hash is None]
        assert not any(books.num_needs(block.block_id) for block in uncached)


def test_a_long_path_of_checkpoints_is_dropped_with_its_engine() -> None:
    """As long as a million tokens in small blocks make it; its end does not end the process."""
    num_tokens = 1_000_000
    with adaptive_retention():
        world = BlockManager(Layout((window(4, 11),)), 4, num_tokens // 4 + 4000)
        request = world.request(range(num_tokens))
        world.prefill(request, 8192)
        world.finish(request)
        assert retention_books(world.manager).counts()[0] > 100_000
        pool = weakref.ref(world.pool)
        del world, request
        gc.collect()
    assert pool() is None
