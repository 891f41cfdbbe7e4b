# SPDX-License-Identifier: Apache-2.0
"""What a load that fails in part costs others, and how often it is tried."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest
from support.connector import engines, offload_run
from support.connector.engines import fail_next, plan_of, watch_computed
from support.connector.offload_run import check_nothing_is_left, offloading_installed, serve
from support.connector.offload_workloads import blocks_for_longest, offloading, tokens
from support.connector.paged_layouts import FULL, GEMMA, UPSTREAM_LAYOUTS, PagedLayout
from support.connector.scripted_transfers import TransferScript

from vllm_ascend_kvext.store.counters import Removal

PROMPT_TOKENS = 400
CHUNK_TOKENS = 16


@pytest.fixture(scope="module", autouse=True)
def patches_installed() -> Iterator[None]:
    with offloading_installed():
        yield


@pytest.mark.parametrize("local_tokens", [0, 32])
def test_a_full_model_without_holes_is_looked_up_again_also_behind_a_local_hit(
    local_tokens: int,
) -> None:
    """Whether the device has the beginning or not, only what is missing is computed."""
    prompt = tokens(random.Random(4), PROMPT_TOKENS)
    values = offloading(FULL, hole_reuse=False, chunk_tokens=CHUNK_TOKENS)
    with engines.engine_of(FULL, offloading=values, caching=True) as engine:
        serve(engine, plan_of("first", prompt, max_tokens=1))
        assert engine.reset()
        if local_tokens:
            serve(engine, plan_of("local", prompt[: local_tokens + 1], max_tokens=1))
            block_pool = engine.block_pool
            kept = {b.block_id for b in block_pool.blocks if b.block_hash is not None}
            assert len(kept) == local_tokens // FULL.groups[0].block_tokens
        computed = watch_computed(engine)
        num_parts = (PROMPT_TOKENS - local_tokens) // CHUNK_TOKENS
        fail_next(engine, 1, num_parts)  # The whole, and the last part but one.
        serve(engine, plan_of("second", prompt))
        assert engine.side.counters.tier.removed_entries[Removal.LOAD_FAILED] == 1
        num_computed = sum(end - first for first, end in computed["second"])
        assert num_computed < 100, f"computed {num_computed} of {PROMPT_TOKENS} tokens"
        check_nothing_is_left(engine)


@pytest.mark.parametrize("layout", [FULL, GEMMA], ids=lambda layout: layout.name)
def test_a_load_that_fails_as_a_whole_and_not_in_parts_is_reported(
    layout: PagedLayout, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parts can be read: nothing is lost, but each load is made twice."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    prompt = tokens(random.Random(4), PROMPT_TOKENS)
    values = offloading(layout, hole_reuse=True, chunk_tokens=CHUNK_TOKENS)
    with engines.engine_of(layout, offloading=values) as engine:
        serve(engine, plan_of("first", prompt, max_tokens=1))
        fail_next(engine, 1)
        with caplog.at_level(logging.DEBUG, "vllm.ascend_kvext"):
            serve(engine, plan_of("second", prompt))
        (worker,) = engine.workers
        assert worker.transfers.counts["failed loads"] == 1
        said = {record.message for record in caplog.records if "failed" in record.message}
        assert len(said) == 1 and "made again without 0 of its" in said.pop()


def test_shortfalls_are_counted_once_for_each_request() -> None:
    """``HostTier.count_shortfall``: "once for each request"."""
    prompt = tokens(random.Random(4), PROMPT_TOKENS)
    values = offloading(GEMMA, hole_reuse=False, chunk_tokens=CHUNK_TOKENS)
    with engines.engine_of(GEMMA, offloading=values) as engine:
        serve(engine, plan_of("first", prompt, max_tokens=1))
        shortfalls = engine.tier.counters.shortfalls
        before = sum(shortfalls.values())
        fail_next(engine, 1, 20)
        serve(engine, plan_of("second", [*prompt, *tokens(random.Random(6), 100)]))
        assert sum(shortfalls.values()) - before <= 1, dict(shortfalls)


def test_calls_to_a_dead_device_are_few() -> None:
    """Each call may last until a timeout, and all other transfers wait behind it."""
    rng = random.Random(4)
    prompts = [tokens(rng, PROMPT_TOKENS) for _ in range(8)]
    values = offloading(GEMMA, hole_reuse=True, chunk_tokens=CHUNK_TOKENS)
    with engines.engine_of(GEMMA, offloading=values) as engine:
        for number, prompt in enumerate(prompts):
            serve(engine, plan_of(f"first-{number}", prompt, max_tokens=1))
        fail_next(engine, *range(1, 10_000))
        serve(engine, *(plan_of(f"second-{n}", prompt) for n, prompt in enumerate(prompts)))
        (worker,) = engine.workers
        num_calls = worker.transfers.counts["failed loads"]
        assert num_calls <= 4 * len(prompts), f"{num_calls} calls for {len(prompts)} loads"


@pytest.mark.skipif(not UPSTREAM_LAYOUTS, reason="vLLM's own DeepSeek V4 is in 0.23.0")
@pytest.mark.parametrize("num_requests", [2, 3])
def test_a_failed_load_behind_a_request_that_does_not_fit_gives_its_blocks_back(
    num_requests: int,
) -> None:
    """The first request, which is computed, needs what the second holds until vLLM comes to it.

    vLLM comes to nobody behind a request that does not fit: nothing would run any more.
    """
    (layout,) = UPSTREAM_LAYOUTS
    rng = random.Random(4)
    num_tokens = min(960, 3 * layout.unit_tokens + 40)
    shared = tokens(rng, num_tokens * 2 // 5)
    prompts = [[*shared, *tokens(rng, num_tokens - len(shared))] for _ in range(num_requests)]
    plans = [plan_of(f"second-{number}", prompt) for number, prompt in enumerate(prompts)]
    room = 1.0 if num_requests == 2 else 1.3
    num_blocks = int(blocks_for_longest(layout, tuple(plans), 256) * room) + 1
    values = offloading(layout, hole_reuse=False)
    with engines.engine_of(layout, offloading=values, num_blocks=num_blocks) as engine:
        for number, prompt in enumerate(prompts):
            serve(engine, plan_of(f"first-{number}", prompt, max_tokens=1))
        (worker,) = engine.workers
        worker.transfers._script = TransferScript(failing_loads=1.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(offload_run, "MAX_STEPS", 400)
            serve(engine, *plans)
