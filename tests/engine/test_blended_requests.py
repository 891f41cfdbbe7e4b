# SPDX-License-Identifier: Apache-2.0
"""Single requests in whose prompts segments are reused, on vLLM's real scheduler and real pages."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from support.connector.blending_engine import BlendingEngine
from support.connector.engines import fail_next
from support.connector.offload_run import check_nothing_is_left, offloading_installed
from support.connector.offload_workloads import offloading, tokens
from support.connector.paged_layouts import FULL, GEMMA, PagedLayout
from support.connector.scripted_transfers import TransferScript
from support.scheduler.options import EngineOptions
from support.scheduler.workload import RequestPlan
from vllm.v1.metrics.stats import PrefixCacheStats

from vllm_ascend_kvext.blending.segments import SEGMENTS_KEY, STORE_KEY
from vllm_ascend_kvext.connector.blend_counters import BlendRefusal
from vllm_ascend_kvext.store.counters import Removal

_rng = random.Random("documents")
SINK = [5]
ONE, OTHER = tuple(tokens(_rng, 40)), tuple(tokens(_rng, 53))
QUESTION = tuple(tokens(_rng, 9))
HEAD_TOKENS = 4


@pytest.fixture(scope="module", autouse=True)
def patches_installed() -> Iterator[None]:
    with offloading_installed():
        yield


@contextmanager
def engine_with(
    *documents: Sequence[int],
    layout: PagedLayout = FULL,
    script: TransferScript | None = None,
    connector: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[BlendingEngine]:
    """An engine that has stored some documents as segments."""
    settings = {
        "blending": True,
        "segment_sink": SINK,
        "blend_head_tokens": HEAD_TOKENS,
        "blend_min_tokens": 1,
    }
    config = offloading(layout, **(settings | (connector or {})))
    engine = BlendingEngine(
        layout,
        EngineOptions(**({"num_blocks": 200} | options), offloading=config),
        script or TransferScript(),
    )
    try:
        for number, document in enumerate(documents):
            engine.add_request(plan(f"store-{number}", document, 1, {STORE_KEY: True}))
        run(engine)
        engine.scheduler.connector_prefix_cache_stats = PrefixCacheStats()
        yield engine
        check_nothing_is_left(engine)
    finally:
        engine.shutdown()


def plan(
    request_id: str, prompt: Sequence[int], max_tokens: int, extra_args: dict[str, Any]
) -> RequestPlan:
    return RequestPlan(
        request_id=request_id,
        arrival_step=0,
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        extra_args=tuple(extra_args.items()),
    )


def asked(request_id: str, *documents: Sequence[int]) -> RequestPlan:
    """A question behind documents, which are named as segments."""
    prompt: list[int] = []
    segments = []
    for document in documents:
        segments.append([len(prompt), len(prompt) + len(document)])
        prompt += document
    return plan(request_id, [*prompt, *QUESTION], 3, {SEGMENTS_KEY: segments})


def run(engine: BlendingEngine) -> None:
    for _ in range(200):
        if not engine.has_work():
            return
        engine.step()
    raise AssertionError("the engine stands still")


def params_of_answers(engine: BlendingEngine) -> dict[str, Any]:
    """What responses will say, by request."""
    params: dict[str, Any] = {}
    finished = engine.scheduler._connector_finished

    def finish(request: Any) -> Any:
        params[request.request_id] = engine.side.params(request)
        return finished(request)

    engine.scheduler._connector_finished = finish
    return params


def test_segments_wait_for_the_stores_of_others() -> None:
    """A client stores all it has at once, and copies take their time."""
    rng = random.Random(3)
    documents = [tokens(rng, 40) for _ in range(60)]
    script = TransferScript(most_per_step=1)
    with engine_with(script=script, num_blocks=80, max_num_seqs=8) as engine:
        params = params_of_answers(engine)
        for number, document in enumerate(documents):
            engine.add_request(plan(f"store-{number}", document, 1, {STORE_KEY: True}))
        run(engine)
        assert engine.side.counters.blending.stored_segments == len(documents)
        assert not engine.side.counters.blending.refusals[BlendRefusal.ROOM]
        assert list(params.values()) == [{"kvext_stored_tokens": 40}] * len(documents)


def test_answers_say_that_segments_were_not_stored() -> None:
    with engine_with(num_blocks=12) as engine:
        params = params_of_answers(engine)
        long = tokens(random.Random(3), 80)
        engine.add_request(plan("long", long, 1, {STORE_KEY: True}))
        engine.add_request(plan("wrong", ONE, 1, {STORE_KEY: "perhaps"}))
        run(engine)
        assert list(params.values()) == [{"kvext_stored_tokens": 0}] * 2
        assert engine.side.counters.blending.refusals[BlendRefusal.ROOM] == 1


def test_what_is_loaded_is_counted_as_hits_and_what_lies_between_is_not() -> None:
    with engine_with(ONE, OTHER) as engine:
        engine.add_request(asked("blended", QUESTION, OTHER, ONE))
        run(engine)
        reused_tokens = engine.side.counters.blending.reused_tokens
        assert reused_tokens == len(ONE) + len(OTHER) - 2 * HEAD_TOKENS
        assert engine.scheduler.connector_prefix_cache_stats.hits == reused_tokens


def test_exact_tokens_before_a_segment_are_hits_too() -> None:
    with engine_with(ONE) as engine:
        engine.add_request(plan("plain", [*OTHER, *QUESTION], 3, {}))
        run(engine)
        engine.block_pool.evict_blocks({block.block_id for block in engine.block_pool.blocks})
        engine.scheduler.connector_prefix_cache_stats = stats = PrefixCacheStats()
        engine.add_request(asked("blended", OTHER, ONE))
        run(engine)
        exact_tokens = len(OTHER) // 8 * 8
        assert stats.hits == exact_tokens + len(ONE) - HEAD_TOKENS


def test_a_segment_may_stand_in_a_prompt_twice() -> None:
    with engine_with(ONE) as engine:
        engine.add_request(asked("blended", ONE, QUESTION, ONE))
        run(engine)
        assert engine.tier.counters.failed_loads == 0
        assert engine.side.counters.blending.reused_tokens == 2 * (len(ONE) - HEAD_TOKENS)


@pytest.mark.parametrize("num_blocks", [140, 170, 200, 220, 260])
def test_nobody_waits_for_more_blocks_than_the_pool_has(num_blocks: int) -> None:
    """Windows of what is computed between segments take blocks beside those of the request."""
    with engine_with(ONE, OTHER, layout=GEMMA, num_blocks=num_blocks) as engine:
        engine.parts.loads._clock = lambda: 0.0  # Nobody has ever waited for long.
        engine.add_request(asked("blended", OTHER, QUESTION, ONE))
        run(engine)
        counters = engine.side.counters.blending
        assert bool(counters.refusals[BlendRefusal.ROOM]) is not bool(counters.reused_tokens)


@pytest.mark.parametrize("is_async", [False, True])
def test_an_answer_that_began_with_reused_tokens_stays_marked(is_async: bool) -> None:
    with engine_with(ONE, OTHER, is_async=is_async) as engine:
        marks = {}
        update = engine.scheduler.update_from_output

        def watched(*args: Any) -> Any:
            results = update(*args)
            for output in (each for of_client in results.values() for each in of_client.outputs):
                if output.finish_reason is not None:
                    marks[output.request_id] = output.kv_transfer_params
            return results

        engine.scheduler.update_from_output = watched
        request = engine.add_request(
            plan("blended", [*OTHER, *QUESTION], 9, {SEGMENTS_KEY: [[0, len(OTHER)]]})
        )
        engine.add_request(plan("plain", [*QUESTION, *ONE], 9, {}))
        while request.num_output_tokens < 3:
            engine.step()
        assert engine.reset(reset_running_requests=True, reset_connector=True)
        run(engine)
        assert not engine.reused, "there was nothing left to reuse"
        assert marks["plain"] is None
        assert marks["blended"] == {
            "kvext_exact_tokens": 0,
            "kvext_reused_tokens": len(OTHER) - HEAD_TOKENS,
            "kvext_recomputed_tokens": len(QUESTION) + HEAD_TOKENS,
        }


def count_computed(engine: BlendingEngine) -> Counter[str]:
    """Tokens computed from now on, by request."""
    computed_tokens: Counter[str] = Counter()
    schedule = engine.scheduler.schedule

    def counted() -> Any:
        output = schedule()
        computed_tokens.update(output.num_scheduled_tokens)
        return output

    engine.scheduler.schedule = counted  # type: ignore[method-assign]
    return computed_tokens


@pytest.mark.parametrize("layout", [FULL, GEMMA], ids=["full attention", "windows"])
def test_whole_blocks_of_a_sink_are_computed_once_and_nothing_of_segments_is_cached(
    layout: PagedLayout,
) -> None:
    block_tokens = layout.unit_tokens
    sink = tokens(random.Random("sink"), 3 * block_tokens + 2)
    with engine_with(layout=layout, connector={"segment_sink": sink}) as engine:
        computed_tokens = count_computed(engine)
        engine.add_request(plan("first", ONE, 1, {STORE_KEY: True}))
        run(engine)
        engine.side.clear()
        for number in range(2):
            engine.add_request(plan(f"again-{number}", ONE, 1, {STORE_KEY: True}))
            run(engine)
        engine.add_request(plan("other", OTHER, 1, {STORE_KEY: True}))
        run(engine)
        assert computed_tokens == {
            "first": len(sink) + len(ONE),
            "again-0": 2 + len(ONE),
            "again-1": 2 + len(ONE),
            "other": 2 + len(OTHER),
        }
        params = params_of_answers(engine)
        engine.add_request(asked("asked", ONE, OTHER))
        run(engine)
        assert params["asked"]["kvext_reused_tokens"] > 0


def test_a_sink_that_is_shorter_than_a_block_is_computed_each_time() -> None:
    with engine_with(ONE) as engine:
        computed_tokens = count_computed(engine)
        engine.add_request(plan("again", ONE, 1, {STORE_KEY: True}))
        run(engine)
        assert computed_tokens == {"again": len(SINK) + len(ONE)}


def test_a_store_that_begins_again_finds_its_sink_and_not_its_own_blocks() -> None:
    block_tokens = FULL.unit_tokens
    sink = tokens(random.Random("sink"), 2 * block_tokens)
    with engine_with(connector={"segment_sink": sink}, max_num_batched_tokens=32) as engine:
        request = engine.add_request(plan("store", tokens(_rng, 160), 1, {STORE_KEY: True}))
        for _ in range(3):
            engine.step()
        assert request.num_computed_tokens > len(sink)
        manager = engine.scheduler.kv_cache_manager
        assert manager.get_computed_blocks(request)[1] == len(sink)
        run(engine)


def test_segments_that_were_read_well_stay_when_a_load_fails() -> None:
    documents = [tokens(_rng, 64) for _ in range(5)]
    with engine_with(*documents, layout=FULL, num_blocks=400) as engine:
        (worker,) = engine.workers
        removed = engine.side.counters.tier.removed_entries
        for number, failing in enumerate([{1}, {1, 2}]):
            fail_next(engine, *failing)
            engine.add_request(asked(f"question-{number}", *documents))
            run(engine)
            assert worker.transfers.counts["failed loads"] == len(failing)
            assert removed[Removal.LOAD_FAILED] == number
