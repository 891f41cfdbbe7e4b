# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The hits that are left if retention frees blocks, compared with caching of every block.

The tests run vLLM's real block managers and vLLM-Ascend's. At interval 0, a request that comes
back, continues or resumes hits as much as with dense caching, for every length and choice of EAGLE
groups. This holds even if other requests have taken all surplus blocks. With adaptive retention, it
holds for the third request that shares a prefix. With a hint, it holds for the second request.
"""

from __future__ import annotations

import gc
import itertools
import logging
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence

import pytest
from pytest_mock import MockerFixture
from support import family
from support.installed import retention_installed
from support.retention import inspection
from support.retention.checkpoints import adaptive_retention, cache_state_of
from support.retention.reachability import (
    Difference,
    UnderPressure,
    serve_conversation,
    serve_prompt_only,
)
from support.retention.small_layouts import (
    LAYOUTS,
    LIVES_OF,
    PREEMPT_EVERY,
    eagle_sets,
    longest_window,
    some_eagle_sets,
    unit_of,
)
from support.retention.started import retention_of
from support.sample import LENGTH_STRIDE
from support.scheduler.block_manager import BlockManager, Layout, full, mamba, window
from support.scheduler.layouts import MAMBA, MAMBA_WINDOW, Attention, Group
from support.scheduler.layouts import Layout as EngineLayout
from support.scheduler.model_runner import ReadCheck
from support.scheduler.options import EngineOptions
from support.scheduler.run import run
from support.scheduler.workload import RequestPlan, Workload
from support.upstream_version import IS_SINCE_0_30
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from vllm_ascend_kvext.retention.hints import HINT_ARGUMENT

NUM_BLOCKS = 800
NUM_ADAPTIVE_BLOCKS = 4000
SMALL_POOL_BLOCKS = 400
IS_ASCEND_0_30 = family.IS_ASCEND and IS_SINCE_0_30
STOCK_LOSES = {"resend", "prompt extended", "resume", "next turn"}
ADAPTIVE_LAYOUTS = sorted(LAYOUTS.keys() - {"window of half a unit", "two wide windows"})


@pytest.mark.parametrize("policy", ["interval 0", "adaptive"])
@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_a_request_hits_what_dense_caching_hits(layout_name: str, policy: str) -> None:
    specs = LAYOUTS[layout_name]
    unit_tokens = unit_of(specs)
    is_adaptive = policy == "adaptive"
    stride = unit_tokens // 2 + 1 if is_adaptive else LENGTH_STRIDE
    difference = Difference()
    for number, eagle_group_ids in enumerate(eagle_sets(specs)):
        layout = Layout(specs, eagle_group_ids, has_connector=number % 2 == 1)
        dense = BlockManager(layout, None, NUM_BLOCKS)
        with adaptive_retention() if is_adaptive else retention_installed():
            sparse = UnderPressure(layout, None if is_adaptive else 0, NUM_BLOCKS)
            for length in range(1, 3 * unit_tokens + longest_window(specs) + 2, stride):
                case = f"EAGLE {sorted(eagle_group_ids)}, {length} tokens"
                lives = [lambda world, n=length: serve_prompt_only(world, n)]
                if length % LIVES_OF == number % LIVES_OF:
                    lives.append(
                        lambda world, n=length: serve_conversation(
                            world, n, unit_tokens, PREEMPT_EVERY
                        )
                    )
                for serve in lives:
                    dense.reset()
                    sparse.reset()
                    difference.compare(case, serve(dense), serve(sparse))
    print(f"{layout_name}: {difference.num_cases} cases")
    assert not difference.examples


@pytest.mark.skipif(IS_ASCEND_0_30, reason="in this version, interval 0 caches densely")
def test_stock_loses_hits() -> None:
    """The same comparison fails with vLLM's own interval 0, in each of the known ways."""
    difference = Difference()
    for specs in LAYOUTS.values():
        unit_tokens = unit_of(specs)
        for eagle_group_ids in some_eagle_sets(specs):
            layout = Layout(specs, eagle_group_ids)
            worlds = [BlockManager(layout, interval, NUM_BLOCKS) for interval in (None, 0)]
            for length in range(1, 5 * unit_tokens + 2, 3 * LIVES_OF):
                case = f"EAGLE {sorted(eagle_group_ids)}, {length} tokens"
                for serve, arguments in (
                    (serve_prompt_only, (length,)),
                    (serve_conversation, (length, unit_tokens, unit_tokens)),
                ):
                    for world in worlds:
                        world.reset()
                    difference.compare(case, *(serve(world, *arguments) for world in worlds))
    print(f"stock differs in {difference.num_different} of {difference.num_cases} cases")
    assert set(difference.examples) >= STOCK_LOSES


@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_interval_leaves_a_checkpoint_at_each_multiple(layout_name: str) -> None:
    """A conversation that branches off hits up to the last multiple before the branch."""
    specs = LAYOUTS[layout_name]
    interval_tokens = 2 * unit_of(specs)
    num_tokens = longest_window(specs) + 4 * interval_tokens + 1
    prompt = list(range(num_tokens))
    with retention_installed():
        for eagle_group_ids in eagle_sets(specs):
            layout = Layout(specs, eagle_group_ids)
            dense = BlockManager(layout, None, NUM_BLOCKS)
            sparse = UnderPressure(layout, interval_tokens, NUM_BLOCKS)
            for world in (dense, sparse):
                request = world.request(prompt)
                world.prefill(request, 2 * interval_tokens + 3)
                world.finish(request)
            branches = [[*prompt[:end], *range(1000, 1100)] for end in range(1, num_tokens)]
            dense_hits = [dense.hit_tokens(dense.request(branch)) for branch in branches]
            # EAGLE cannot hit some multiples within the first window.
            checkpoints = {hit for hit in dense_hits if hit % interval_tokens == 0}
            for branch, dense_tokens in zip(branches, dense_hits, strict=True):
                found = sparse.hit_tokens(sparse.request(branch))
                expected = max(tokens for tokens in checkpoints if tokens <= dense_tokens)
                # A late branch may hit more, because the prompt's end has two tails.
                assert expected <= found <= dense_tokens, sorted(eagle_group_ids)


def test_stock_keeps_blocks_that_no_lookup_needs() -> None:
    for specs in LAYOUTS.values():
        world = BlockManager(Layout(specs), None, NUM_BLOCKS)
        num_tokens = 3 * unit_of(specs) + 2 * longest_window(specs)
        assert unneeded_blocks(world, num_tokens, 0)


@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_no_block_is_kept_in_vain(layout_name: str) -> None:
    """The same prompt or the next turn uses every block that is not surplus."""
    specs = LAYOUTS[layout_name]
    unit_tokens = unit_of(specs)
    with retention_installed():
        for groups in ((), (len(specs) - 1,), range(len(specs))):
            eagle_group_ids = frozenset(groups)
            world = UnderPressure(Layout(specs, eagle_group_ids), 0, NUM_BLOCKS)
            for num_prompt_tokens in range(1, 4 * unit_tokens, 5):
                for num_output_tokens in (0, unit_tokens + 3):
                    world.reset()
                    found = unneeded_blocks(world, num_prompt_tokens, num_output_tokens)
                    assert not found, (eagle_group_ids, num_prompt_tokens, num_output_tokens)


def unneeded_blocks(
    world: BlockManager, num_prompt_tokens: int, num_output_tokens: int
) -> list[bytes]:
    """The keys of cached blocks without which the same prompt and the next turn hit as much."""
    request = world.request(range(num_prompt_tokens))
    world.prefill(request, 20)
    world.decode(request, range(1000, 1000 + num_output_tokens))
    world.finish(request)
    resend = world.request(request.prompt_token_ids)
    next_turn = world.request([*request.all_token_ids, *range(5000, 5100)])

    def hits() -> tuple[int, int]:
        return world.hit_tokens(resend), world.hit_tokens(next_turn)

    with_all = hits()
    blocks_of_key = defaultdict(list)
    for block in world.pool.blocks:
        if block.block_hash is not None:
            blocks_of_key[block.block_hash].append(block)
    unneeded = []
    index = world.pool.cached_block_hash_to_block
    for key, blocks in blocks_of_key.items():
        for block in blocks:
            assert index.pop(key, block.block_id) is block
        if hits() == with_all:
            unneeded.append(key)
        for block in blocks:
            index.insert(key, block)
    return unneeded


def serve_in_chunks(
    world: BlockManager, token_ids: Sequence[int], hints: Sequence[int] = ()
) -> int:
    """Run a request to its end, and return its hit tokens."""
    request = world.request(token_ids)
    if hints:
        request.sampling_params.extra_args = {HINT_ARGUMENT: list(hints)}
    hit_tokens = world.prefill(request, 11)
    world.decode(request, [1, 2, 3])
    world.finish(request)
    return hit_tokens


def branches(num_shared_tokens: int, num_own_tokens: int) -> Iterator[list[int]]:
    """Prompts that begin with the same tokens, and then differ."""
    for number in itertools.count(1):
        own = range(number * 10_000, number * 10_000 + num_own_tokens)
        yield [*range(num_shared_tokens), *own]


@pytest.mark.parametrize("layout_name", ADAPTIVE_LAYOUTS)
def test_prefixes_that_requests_share_are_hit(layout_name: str) -> None:
    """While there is room, the second request hits the shared prefix, as with dense caching.

    If others have taken all surplus blocks, the third request hits the prefix, because two requests
    have shared it. With a hint of the first request, the second request hits it.
    """
    specs = LAYOUTS[layout_name]
    unit_tokens = unit_of(specs)
    num_hits = num_missed = 0
    for eagle_group_ids in some_eagle_sets(specs):
        layout = Layout(specs, eagle_group_ids)
        dense_manager = BlockManager(layout, None, NUM_ADAPTIVE_BLOCKS)
        with adaptive_retention():
            roomy_manager = BlockManager(layout, None, NUM_ADAPTIVE_BLOCKS)
            longest = 2 * longest_window(specs) + 5 * unit_tokens
            for num_shared_tokens in range(1, longest, unit_tokens // 2 + 1):

                def hits(world: BlockManager, hints: Sequence[int] = ()) -> list[int]:
                    prompts = branches(num_shared_tokens, 5 * unit_tokens + 3)  # noqa: B023
                    return [
                        serve_in_chunks(world, next(prompts), () if number else hints)
                        for number in range(3)
                    ]

                dense_manager.reset()
                roomy_manager.reset()
                dense = hits(dense_manager)
                assert hits(roomy_manager) == dense
                pressed = hits(UnderPressure(layout, None, SMALL_POOL_BLOCKS))
                small = UnderPressure(layout, None, SMALL_POOL_BLOCKS)
                hinted = hits(small, [num_shared_tokens])
                case = f"EAGLE {sorted(eagle_group_ids)}, {num_shared_tokens} shared"
                assert hinted[1] >= dense[1], case
                # A layout without full attention does not show where requests part.
                assert pressed[2] >= dense[2] or layout_name == "window only", case
                num_hits += dense[1] > 0
                num_missed += pressed[1] < dense[1]
    assert num_hits > 10
    assert num_missed > 0, "the second request always hits, so this shows nothing"


WIDE = pytest.param(
    "window wider than the unit",
    marks=pytest.mark.xfail(strict=True, reason="EAGLE in a window: a junction that is not kept"),
)


@pytest.mark.vllm(">=0.30")
@pytest.mark.parametrize(
    "layout_name", [*(name for name in ADAPTIVE_LAYOUTS if name not in WIDE.values), WIDE]
)
def test_interval_0_keeps_the_junctions_that_upstream_keeps(layout_name: str) -> None:
    """A third request that shares a prefix hits at least as much as at upstream's interval 0."""
    specs = LAYOUTS[layout_name]
    unit_tokens = unit_of(specs)
    num_hits = 0
    for eagle_group_ids in some_eagle_sets(specs):
        layout = Layout(specs, eagle_group_ids)
        stock = BlockManager(layout, 0, NUM_BLOCKS)
        with retention_installed():
            world = UnderPressure(layout, 0, NUM_BLOCKS)
            for num_shared_tokens in range(1, 5 * unit_tokens, unit_tokens // 2 + 1):

                def third_hit(world: BlockManager) -> int:
                    world.reset()
                    prompts = branches(num_shared_tokens, 3 * unit_tokens + 3)  # noqa: B023
                    return [serve_in_chunks(world, next(prompts)) for _ in range(3)][2]

                upstreams_tokens = third_hit(stock)
                assert third_hit(world) >= upstreams_tokens, (eagle_group_ids, num_shared_tokens)
                num_hits += upstreams_tokens > 0
    assert num_hits > 0 or layout_name == "window only"


@pytest.mark.vllm(">=0.30")
def test_hits_that_end_within_a_state_are_left_to_upstream(mocker: MockerFixture) -> None:
    warning = mocker.patch("vllm.logger.init_logger").return_value.warning
    with adaptive_retention():
        world = BlockManager(Layout((full(4), mamba(8))), None, NUM_BLOCKS)
    assert world.manager.coordinator.enable_partial_hash_hits
    assert retention_of(world.manager.coordinator) is None
    (_, reason) = warning.call_args.args
    assert "within a block" in reason


@pytest.mark.vllm(">=0.30")
def test_groups_with_a_manager_of_others_are_left_to_upstream(mocker: MockerFixture) -> None:
    mocker.patch.object(
        FullAttentionManager, "cache_blocks", lambda *args, **kwargs: None
    )  # A function of this module.
    warning = mocker.patch("vllm.logger.init_logger").return_value.warning
    with adaptive_retention():
        world = BlockManager(Layout((full(4), window(4, 9))), None, NUM_BLOCKS)
    assert retention_of(world.manager.coordinator) is None
    (_, reason) = warning.call_args.args
    assert "not vLLM's own" in reason
    world.prefill(world.request(range(40)), 40)


@pytest.mark.vllm(">=0.30")
def test_interval_of_the_configuration_stays_where_retention_has_nothing_to_do() -> None:
    chunked = Group(Attention.CHUNKED, 4, 12).to_spec()
    with adaptive_retention():
        world = BlockManager(Layout((full(4), window(4, 9), chunked)), 8, NUM_BLOCKS)
    assert retention_of(world.manager.coordinator) is None
    assert world.manager.coordinator.retention_interval == 8


def test_retention_that_was_asked_for_warns_where_nothing_is_cached(mocker: MockerFixture) -> None:
    with adaptive_retention():
        log = mocker.patch("vllm.logger.init_logger").return_value.log
        world = BlockManager(
            Layout((full(4), window(4, 9))), None, NUM_BLOCKS, enable_caching=False
        )
    assert retention_of(world.manager.coordinator) is None
    (level, _, reason) = log.call_args.args
    assert level == logging.WARNING and "--enable-prefix-caching" in reason


@pytest.mark.vllm(">=0.30")
def test_blocks_that_a_drafter_computes_again_are_not_cached() -> None:
    """MTP of several modules computes the KV of the last tokens again, with the next tokens."""
    layout = Layout((full(4), window(4, 9)), frozenset({1}))
    with retention_installed():
        world = BlockManager(layout, 0, NUM_BLOCKS, num_prefill_lookahead=3)
        request = world.request(range(40))
        world.prefill(request, 11)
        tables = world.manager.get_blocks(request.request_id).blocks
        assert [table[9].block_hash for table in tables] == [None, None]
        world.decode(request, [1, 2, 3])
        assert tables[1][9].block_hash is not None


UNIT_TOKENS = MAMBA.unit_tokens
OPTIONS = EngineOptions(
    num_blocks=NUM_ADAPTIVE_BLOCKS, max_num_batched_tokens=256, max_model_len=512
)


def step_ends(
    layout: EngineLayout, prompts: Sequence[Sequence[int]], hints: tuple[int, ...] = ()
) -> list[list[int]]:
    """The hit tokens of each request, and the ends of the steps of its prompt and its answer.

    The real scheduler serves one request after the other. It chooses where steps end. The first
    request may name a boundary.
    """
    plans = [
        RequestPlan(
            request_id=f"request-{number}",
            arrival_step=20 * number,
            prompt=tuple(prompt),
            max_tokens=3,
            checkpoint_tokens=() if number else hints,
        )
        for number, prompt in enumerate(prompts)
    ]
    workload = Workload(name="", layout=layout, options=OPTIONS, requests=tuple(plans))
    lengths: dict[str, list[int]] = defaultdict(list)
    result = run(workload, read_check=ReadCheck.ALL)
    assert not result.wrong_outputs(workload)
    for step in result.transcript.steps:
        for scheduled in step.scheduled:
            ends = lengths[scheduled.request_id] or [scheduled.num_computed_tokens]
            ends.append(scheduled.num_computed_tokens + scheduled.num_tokens)
            lengths[scheduled.request_id] = ends
    return [lengths[plan.request_id] for plan in plans]


@pytest.mark.parametrize("num_shared_tokens", range(2 * UNIT_TOKENS, 9 * UNIT_TOKENS, 5))
@pytest.mark.parametrize("layout", [MAMBA, MAMBA_WINDOW], ids=lambda layout: layout.name)
def test_a_step_ends_where_states_are_shared(layout: EngineLayout, num_shared_tokens: int) -> None:
    """A state exists only where a step ends, so the second request lets a step end at the junction.

    If the first request names the junction, it lets a step end there.
    """
    junction = num_shared_tokens // UNIT_TOKENS * UNIT_TOKENS
    prompts = [*itertools.islice(branches(num_shared_tokens, 7 * UNIT_TOKENS + 3), 3)]
    with adaptive_retention():
        first, second, third = step_ends(layout, prompts)
    assert first[0] == second[0] == 0
    assert junction not in first, "a step ends there anyway, so this shows nothing"
    assert junction in second
    assert third[0] == junction
    with adaptive_retention():
        first, second, _ = step_ends(layout, prompts, (num_shared_tokens,))
    assert junction in first
    assert second[0] == junction


@pytest.mark.parametrize("num_blocks", [2, 3, 10, 32, 33])
@pytest.mark.parametrize("layout", [MAMBA, MAMBA_WINDOW], ids=lambda layout: layout.name)
def test_a_prompt_of_whole_blocks_hits_when_it_is_sent_again(
    layout: EngineLayout, num_blocks: int
) -> None:
    """The last token is computed again, so the request resumes one block before its end."""
    num_tokens = num_blocks * UNIT_TOKENS
    prompts = [range(1, num_tokens + 1)] * 3
    stock = step_ends(layout, prompts)
    with adaptive_retention():
        ends = step_ends(layout, prompts)
    hit_tokens = num_tokens - UNIT_TOKENS
    assert [each[0] for each in ends] == [0, hit_tokens, hit_tokens]
    assert len(ends[0]) <= len(stock[0]) + 1
    if num_tokens % OPTIONS.max_num_batched_tokens != UNIT_TOKENS:
        assert stock[1][0] < hit_tokens, "stock hits as much, so this shows nothing"


@pytest.mark.parametrize("num_tokens", range(2 * UNIT_TOKENS + 1, 3 * UNIT_TOKENS))
def test_no_step_more_where_a_step_ends_before_the_last_tokens_anyway(num_tokens: int) -> None:
    prompts = [range(1, num_tokens + 1)] * 2
    stock = step_ends(MAMBA, prompts)
    with adaptive_retention():
        assert step_ends(MAMBA, prompts) == stock


@pytest.mark.parametrize("is_running", [False, True])
def test_a_prefix_recovers_from_blocks_that_a_connector_uncached(is_running: bool) -> None:
    """The prefix is computed again, and then checkpoints keep the blocks that it has now."""
    layout = Layout((full(4), window(4, 9)))
    with adaptive_retention():
        world = BlockManager(layout, None, SMALL_POOL_BLOCKS)
        cache_state = cache_state_of(world.manager)
        prompt = [*range(200)]
        serve_in_chunks(world, prompt)
        reader = world.request(prompt)
        if is_running:
            assert world.prefill(reader, 64) > 0
        first = min(inspection.describe(cache_state), key=lambda node: node["boundary_tokens"])
        world.pool.evict_blocks({first["runs"][0][0]})
        if is_running:
            world.finish(reader)
        assert serve_in_chunks(world, prompt) == 0
        for _ in range(3):
            world.pool.evict_blocks(set(inspection.surplus(cache_state)))
            assert serve_in_chunks(world, prompt) == 196
        uncached = [block for block in world.pool.blocks[1:] if block.block_hash is None]
        assert not any(inspection.num_needs(cache_state, block.block_id) for block in uncached)


def test_a_long_path_of_checkpoints_is_dropped_with_its_engine() -> None:
    """The path has as many checkpoints as a million tokens in small blocks. Dropping it is safe."""
    num_tokens = 1_000_000
    with adaptive_retention():
        world = BlockManager(Layout((window(4, 11),)), 4, num_tokens // 4 + 4000)
        request = world.request(range(num_tokens))
        world.prefill(request, 8192)
        world.finish(request)
        assert cache_state_of(world.manager).counts()[0] > 100_000
        pool = weakref.ref(world.pool)
        del world, request
        gc.collect()
    assert pool() is None
