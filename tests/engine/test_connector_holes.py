# SPDX-License-Identifier: Apache-2.0
"""Chunks that are missing in the host tier are computed, and what lies behind them is loaded.

On vLLM's real scheduler, with real pages and without a model: see ``test_connector_scheduler``.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
from support.connector import engines
from support.connector.engines import plan_of
from support.connector.offload_run import (
    check_nothing_is_left,
    offloading_installed,
    run_offloading,
    serve,
)
from support.connector.offload_workloads import EngineKind, offloading, random_offload, tokens
from support.connector.paged_layouts import FULL, LAYOUTS, PagedLayout
from support.connector.scripted_transfers import TransferScript
from support.connector.simulated_engine import SimulatedEngine
from support.sample import IS_SAMPLE, sampled

from vllm_ascend_kvext.connector import loads
from vllm_ascend_kvext.store.counters import Removal
from vllm_ascend_kvext.store.entries import EntryState

PROMPT_TOKENS = 400
NUM_SEEDS = sampled(12)


@pytest.fixture(scope="module", autouse=True)
def patches_installed() -> Iterator[None]:
    with offloading_installed():
        yield


def engine_of(
    layout: PagedLayout, script: TransferScript | None = None, **options: Any
) -> AbstractContextManager[SimulatedEngine]:
    """As of ``support.connector.engines``, with holes."""
    reusing = offloading(layout, hole_reuse=True)
    return engines.engine_of(layout, script, offloading=reusing, **options)


def make_holes(engine: SimulatedEngine, *holes: tuple[int, int]) -> None:
    """Entries with rows of these tokens leave the tier."""
    for entry in list(engine.tier._entries.values()):
        piece = entry.piece
        if entry.state is EntryState.STORED and any(
            piece.first_tokens < end and first < piece.end_tokens for first, end in holes
        ):
            engine.tier._remove(entry, Removal.EVICTED)


HOLES = {
    "at the beginning": ([(0, 32)], [(0, 32)]),
    "in the middle": ([(160, 192)], [(160, 192)]),
    "several": ([(64, 96), (160, 192), (288, 320)], [(64, 96), (160, 192), (288, 320)]),
    "adjacent": ([(64, 96), (96, 128)], [(64, 128)]),
    "before a short run": ([(64, 96), (128, 160)], [(64, 160)]),
    "before the last chunk": ([(352, 384)], []),
    "at the end": ([(384, 400)], []),
    "larger than a step": ([(32, 320)], [(32, 320)]),
}
"""Tokens that are missing in the tier, and those that are computed before the request goes on."""


@pytest.mark.parametrize("caching", [False, True], ids=["host", "both"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", HOLES)
def test_only_holes_and_the_end_are_computed(name: str, is_async: bool, caching: bool) -> None:
    layout = FULL
    missing, holes = HOLES[name]
    prompt = tokens(random.Random(layout.name), PROMPT_TOKENS)
    with engine_of(layout, caching=caching, is_async=is_async) as engine:
        serve(engine, plan_of("first", prompt))
        assert engine.reset()
        make_holes(engine, *missing)
        computed = watch_computed(engine)
        serve(engine, plan_of("second", prompt))
        of_request = [run for id, runs in computed.items() if "hole" not in id for run in runs]
        of_holes = [run for id, runs in computed.items() if "hole" in id for run in runs]
        assert joined(of_holes) == holes
        first_tokens = of_request[0][0]
        last_boundary = (PROMPT_TOKENS - 1) // layout.unit_tokens * layout.unit_tokens
        assert first_tokens == (last_boundary if holes else missing[0][0])
        assert engine.side.counters.hole_tokens == sum(end - first for first, end in holes)
        check_nothing_is_left(engine)


@pytest.mark.parametrize("kind", EngineKind, ids=lambda kind: kind.value)
def test_random_requests(kind: EngineKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries are evicted from the middle of prompts; right bytes, and nothing is left."""
    monkeypatch.setattr(loads, "LEAST_RUN_TOKENS", FULL.unit_tokens)
    counts: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        workload = random_offload(FULL, seed, 40, kind)
        options = replace(workload.options, offloading=with_holes(workload.options.offloading))
        counts += run_offloading(replace(workload, options=options, eviction_share=0.5)).counts
    assert counts["hole tokens"]
    if not IS_SAMPLE:
        assert counts["aborts while loading"] and counts["failed loads"] and counts["preemptions"]


def with_holes(offloading: dict[str, Any] | None) -> dict[str, Any]:
    return {**(offloading or {}), "hole_reuse": True}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_steps", range(8))
def test_abort_at_any_step_leaves_nothing(num_steps: int, is_async: bool) -> None:
    prompt = tokens(random.Random(1), PROMPT_TOKENS)
    slow = TransferScript(seed=1, most_per_step=1)
    with engine_of(FULL, slow, is_async=is_async, max_num_batched_tokens=48) as engine:
        serve(engine, plan_of("first", prompt))
        make_holes(engine, (64, 160), (256, 288))
        engine.add_request(plan_of("second", prompt))
        for _ in range(num_steps):
            engine.step()
        engine.abort("second")
        serve(engine, plan_of("third", prompt))
        check_nothing_is_left(engine)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_requests_decode_while_holes_of_many_are_computed(is_async: bool) -> None:
    """More rows than the engine has room for, and more tokens than a step has."""
    rng = random.Random(2)
    prompts = [tokens(rng, PROMPT_TOKENS) for _ in range(6)]
    small = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "is_async": is_async}
    with engine_of(FULL, **small) as engine:
        serve(engine, *(plan_of(f"first-{n}", prompt) for n, prompt in enumerate(prompts)))
        make_holes(engine, (64, 96), (160, 224), (288, 304))
        computed = watch_computed(engine)
        decoding = plan_of("decoding", tokens(rng, 20), max_tokens=60)
        serve(engine, decoding, *(plan_of(f"second-{n}", p) for n, p in enumerate(prompts)))
        assert engine.side.counters.hole_tokens == len(prompts) * (32 + 64 + 16)
        assert len(computed["decoding"]) >= 60
        check_nothing_is_left(engine)


def test_load_that_fails_is_computed_from_where_the_device_has_rows() -> None:
    prompt = tokens(random.Random(3), PROMPT_TOKENS)
    with engine_of(FULL, TransferScript(failing_loads=1.0)) as engine:
        serve(engine, plan_of("first", prompt))
        make_holes(engine, (64, 160))
        serve(engine, plan_of("second", prompt))
        assert engine.side.counters.tier.failed_loads == 1
        check_nothing_is_left(engine)


@pytest.mark.parametrize(
    "layout",
    [layout for layout in LAYOUTS if layout is not FULL],
    ids=lambda layout: layout.name,
)
def test_models_that_read_more_than_rows_stop_at_the_first_hole(layout: PagedLayout) -> None:
    with engine_of(layout) as engine:
        assert not engine.side.fills_holes


def test_adapters_stop_at_the_first_hole() -> None:
    prompt = tokens(random.Random(4), PROMPT_TOKENS)
    with engine_of(FULL) as engine:
        serve(engine, replace(plan_of("first", prompt), adapter="adapter-0"))
        make_holes(engine, (64, 96))
        serve(engine, replace(plan_of("second", prompt), adapter="adapter-0"))
        assert engine.side.counters.hole_tokens == 0
        assert engine.side.counters.hit_tokens == 64


def watch_computed(engine: SimulatedEngine) -> dict[str, list[tuple[int, int]]]:
    """From now on, the tokens that steps compute, by request or row."""
    computed: dict[str, list[tuple[int, int]]] = {}
    execute = engine.runner.execute

    def watched(output: Any) -> Any:
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            first = starts[request_id]
            computed.setdefault(request_id, []).append((first, first + num_tokens))
        assert sum(output.num_scheduled_tokens.values()) == output.total_num_scheduled_tokens
        assert output.total_num_scheduled_tokens <= engine.scheduler.max_num_scheduled_tokens
        return execute(output)

    engine.runner.execute = watched  # type: ignore[method-assign]
    return computed


def joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for first, end in sorted(runs):
        if found and found[-1][1] == first:
            first = found.pop()[0]
        found.append((first, end))
    return found
