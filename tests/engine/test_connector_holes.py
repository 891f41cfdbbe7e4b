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
from support.connector.engines import make_holes, plan_of, watch_computed
from support.connector.offload_run import (
    check_nothing_is_left,
    offloading_installed,
    run_offloading,
    serve,
)
from support.connector.offload_workloads import EngineKind, offloading, random_offload, tokens
from support.connector.paged_layouts import (
    DEEPSEEK_V4_EAGLE,
    FULL,
    GEMMA,
    LAYOUTS,
    TWO_FULL,
    TWO_WINDOWS,
    UPSTREAM_LAYOUTS,
    WINDOW,
    PagedLayout,
)
from support.connector.scripted_transfers import TransferScript
from support.connector.simulated_engine import SimulatedEngine
from support.sample import IS_SAMPLE, sampled

from vllm_ascend_kvext.connector import loads
from vllm_ascend_kvext.holes.eligibility import HoleRefusal
from vllm_ascend_kvext.store.counters import Removal
from vllm_ascend_kvext.store.entries import Kind

PROMPT_TOKENS = 400
NUM_SEEDS = sampled(12)
NUM_HYBRID_SEEDS = sampled(3)
NO_ROWS = (WINDOW, TWO_WINDOWS)
HYBRIDS = tuple(
    layout for layout in LAYOUTS if layout not in (FULL, TWO_FULL, *NO_ROWS, DEEPSEEK_V4_EAGLE)
)
"""Whose holes read windows, too."""


@pytest.fixture(scope="module", autouse=True)
def patches_installed() -> Iterator[None]:
    with offloading_installed():
        yield


@pytest.fixture
def any_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs behind holes are loaded however short they are."""
    monkeypatch.setattr(loads, "LEAST_RUN_TOKENS", 0)


def engine_of(
    layout: PagedLayout, script: TransferScript | None = None, **options: Any
) -> AbstractContextManager[SimulatedEngine]:
    """As of ``support.connector.engines``, with holes."""
    reusing = offloading(layout, hole_reuse=True)
    return engines.engine_of(layout, script, offloading=reusing, **options)


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
    counts = run_random(FULL, kind, NUM_SEEDS)
    assert counts["hole tokens"]
    if not IS_SAMPLE:
        assert counts["aborts while loading"] and counts["failed loads"] and counts["preemptions"]


@pytest.mark.parametrize(
    "layout", [TWO_FULL, *HYBRIDS, *UPSTREAM_LAYOUTS], ids=lambda layout: layout.name
)
@pytest.mark.usefixtures("any_run")
def test_random_requests_of_models_with_several_groups(layout: PagedLayout) -> None:
    counts: Counter[str] = Counter()
    for kind in EngineKind:
        counts += run_random(layout, kind, NUM_HYBRID_SEEDS)
    if not IS_SAMPLE and layout not in UPSTREAM_LAYOUTS:
        assert counts["hole tokens"]


def run_random(layout: PagedLayout, kind: EngineKind, num_seeds: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in range(num_seeds):
        workload = random_offload(layout, seed, 40, kind)
        options = replace(workload.options, offloading=with_holes(workload.options.offloading))
        counts += run_offloading(replace(workload, options=options, eviction_share=0.5)).counts
    return counts


def with_holes(offloading: dict[str, Any] | None) -> dict[str, Any]:
    return {**(offloading or {}), "hole_reuse": True}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("failing", [(), (1, 3)], ids=["all loaded", "one chunk fails"])
@pytest.mark.parametrize("num_steps", range(8))
def test_abort_at_any_step_leaves_nothing(
    num_steps: int, failing: tuple[int, ...], is_async: bool
) -> None:
    prompt = tokens(random.Random(1), PROMPT_TOKENS)
    slow = TransferScript(seed=1, most_per_step=1, failing_load_numbers=frozenset(failing))
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


def test_what_is_computed_in_holes_is_stored_again() -> None:
    prompt = tokens(random.Random(5), PROMPT_TOKENS)
    with engine_of(FULL) as engine:
        serve(engine, plan_of("first", prompt))
        assert engine.reset()
        make_holes(engine, (64, 96), (160, 192))
        for request_id in ("second", "third"):
            serve(engine, plan_of(request_id, prompt))
            assert engine.side.counters.hole_tokens == 64
            assert engine.reset()
        assert not engine.side.counters.tier.failed_stores


CHUNK_TOKENS = 16
FAILING_CHUNKS = {
    "the first": {0},
    "in the middle": {5},
    "adjacent": {5, 6},
    "beside a hole": {1, 4},
    "all but the first": {1, 4, 5, 6, 7, 8, 9, 10, 11},
}
"""Of a prompt of 12 chunks, of which the third and the fourth are not stored."""


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", FAILING_CHUNKS)
@pytest.mark.usefixtures("any_run")
def test_chunk_whose_load_fails_is_computed_alone(name: str, is_async: bool) -> None:
    failing, missing = FAILING_CHUNKS[name], {2, 3}
    stored = [chunk for chunk in range(12) if chunk not in missing]
    # The first load is that of all chunks, and those that follow are of one chunk each.
    numbers = frozenset([1, *(2 + stored.index(chunk) for chunk in failing)])
    script = TransferScript(failing_load_numbers=numbers)
    prompt = tokens(random.Random(4), 12 * CHUNK_TOKENS + 3)
    with engine_of(FULL, script, is_async=is_async, max_num_batched_tokens=96) as engine:
        assert engine.tier.geometry.chunk_tokens == CHUNK_TOKENS
        serve(engine, plan_of("first", prompt))
        assert engine.reset()
        make_holes(engine, (2 * CHUNK_TOKENS, 4 * CHUNK_TOKENS))
        computed = watch_computed(engine)
        serve(engine, plan_of("second", prompt))
        of_holes = [run for id, runs in computed.items() if "hole" in id for run in runs]
        found = {token // CHUNK_TOKENS for first, end in of_holes for token in range(first, end)}
        hole_tokens = sum(end - first for first, end in of_holes)
        assert found == failing | missing
        assert hole_tokens == len(found) * CHUNK_TOKENS
        assert computed["second"][0][0] == 12 * CHUNK_TOKENS
        counters = engine.side.counters
        assert counters.hole_tokens == hole_tokens
        assert counters.hit_tokens == 12 * CHUNK_TOKENS - hole_tokens
        assert counters.tier.failed_loads == 1
        assert counters.tier.removed_entries[Removal.LOAD_FAILED] == len(failing)
        assert engine.reset()
        serve(engine, plan_of("third", prompt))  # What was computed is stored again.
        assert counters.hole_tokens == hole_tokens
        check_nothing_is_left(engine)


def test_load_fails_as_a_whole_where_requests_are_to_fail_with_it() -> None:
    prompt = tokens(random.Random(4), 12 * CHUNK_TOKENS + 3)
    with engine_of(FULL, TransferScript(failing_load_numbers=frozenset({1, 3}))) as engine:
        serve(engine, plan_of("first", prompt))
        assert engine.reset()
        engine.parts.loads._engine = replace(
            engine.parts.loads._engine, recomputes_failed_loads=False
        )
        engine.scheduler.recompute_kv_load_failures = False
        engine.add_request(plan_of("second", prompt))
        while engine.scheduler.requests or engine.side.has_work:
            engine.step()
        counters = engine.side.counters
        assert counters.hit_tokens == counters.hole_tokens == 0
        assert counters.tier.removed_entries[Removal.LOAD_FAILED] == 1  # The others stay.
        check_nothing_is_left(engine)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_tokens", [48, 10_000], ids=["small steps", "one step"])
@pytest.mark.parametrize("layout", HYBRIDS, ids=lambda layout: layout.name)
@pytest.mark.usefixtures("any_run")
def test_hole_begins_at_the_last_tails_before_what_is_missing(
    layout: PagedLayout, num_tokens: int, is_async: bool
) -> None:
    """Three turns, whose ends have tails; rows of the second are missing."""
    with engine_of(layout, max_num_batched_tokens=num_tokens, is_async=is_async) as engine:
        chunk_tokens = engine.tier.geometry.chunk_tokens
        turn_tokens = 2 * chunk_tokens
        prompt = tokens(random.Random(layout.name), 3 * turn_tokens)
        for turn in (1, 2, 3):
            serve(engine, plan_of(f"turn-{turn}", prompt[: turn * turn_tokens], max_tokens=1))
        assert engine.reset()
        missing = (turn_tokens + chunk_tokens, turn_tokens + 2 * chunk_tokens)
        make_holes(engine, missing)
        tails = stored_tails(engine)
        computed = watch_computed(engine)
        serve(engine, plan_of("last", [*prompt, *tokens(random.Random(1), 20)]))
        of_holes = [run for id, runs in computed.items() if "hole" in id for run in runs]
        first_tokens = max(tokens for tokens in tails if tokens <= missing[0])
        assert first_tokens
        assert joined(of_holes) == [(first_tokens, missing[1])]
        assert computed["last"][0][0] == max(tails)
        check_nothing_is_left(engine)


@pytest.mark.parametrize("layout", HYBRIDS, ids=lambda layout: layout.name)
@pytest.mark.usefixtures("any_run")
def test_hole_at_the_first_token_is_computed_beside_the_load(layout: PagedLayout) -> None:
    with engine_of(layout, TransferScript(seed=1, most_per_step=1)) as engine:
        chunk_tokens = engine.tier.geometry.chunk_tokens
        prompt = tokens(random.Random(layout.name), 6 * chunk_tokens)
        serve(engine, plan_of("first", prompt, max_tokens=1))
        make_holes(engine, (0, chunk_tokens))
        computed = watch_computed(engine)
        serve(engine, plan_of("second", [*prompt, *tokens(random.Random(1), 20)]))
        of_holes = [run for id, runs in computed.items() if "hole" in id for run in runs]
        assert joined(of_holes) == [(0, chunk_tokens)]
        assert computed["second"][0][0] == max(stored_tails(engine, upto=len(prompt)))
        check_nothing_is_left(engine)


class EqualCost:
    """Loading a prompt takes as long as computing it."""

    def __init__(self, num_bytes: int, num_tokens: int) -> None:
        self._tokens_per_byte = num_tokens / num_bytes

    def load_s(self, num_bytes: int) -> float:
        return num_bytes * self._tokens_per_byte

    def compute_s(self, num_tokens: int) -> float:
        return float(num_tokens)

    def is_too_dear(self, num_bytes: int, num_tokens: int) -> bool:
        return self.load_s(num_bytes) > self.compute_s(num_tokens)

    def note_load(self, num_bytes: int, seconds: float) -> None:
        pass


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("layout", [FULL, *HYBRIDS], ids=lambda layout: layout.name)
def test_beginning_is_computed_while_the_rest_is_loaded(
    layout: PagedLayout, is_async: bool
) -> None:
    """Where both take as long, each has about a half; and only while nothing else runs."""
    slow = TransferScript(seed=1, most_per_step=1)
    with engine_of(layout, slow, is_async=is_async, max_num_batched_tokens=64) as engine:
        chunk_tokens = engine.tier.geometry.chunk_tokens
        num_tokens = 16 * chunk_tokens
        prompt = tokens(random.Random(layout.name), num_tokens)
        serve(engine, plan_of("first", prompt, max_tokens=1))
        rows = [e for e in engine.tier._entries.values() if e.piece.kind is Kind.ROWS]
        engine.parts.loads._cost = EqualCost(sum(e.num_bytes for e in rows), num_tokens)
        computed = watch_computed(engine)
        serve(engine, plan_of("second", [*prompt, *tokens(random.Random(1), 20)]))
        of_holes = [run for id, runs in computed.items() if "hole" in id for run in runs]
        ((first_tokens, end_tokens),) = joined(of_holes)
        assert first_tokens == 0
        assert num_tokens / 4 < end_tokens <= num_tokens * 3 / 4
        assert computed["second"][0][0] == num_tokens
        assert {entry.is_hit for entry in rows} == {True}
        assert {entry.was_loaded for entry in rows} == {True, False}
        check_nothing_is_left(engine)

        engine.add_request(plan_of("decoding", prompt[:5], max_tokens=30))
        engine.step()
        of_holes.clear()
        computed.clear()
        serve(engine, plan_of("third", [*prompt, *tokens(random.Random(2), 20)]))
        assert not any("hole" in id for id in computed)


def stored_tails(engine: SimulatedEngine, upto: int = 1 << 30) -> list[int]:
    """Boundaries at which tails are stored."""
    return [
        entry.piece.end_tokens
        for entry in engine.tier._entries.values()
        if entry.piece.kind is Kind.TAILS and entry.piece.end_tokens <= upto
    ]


@pytest.mark.usefixtures("any_run")
@pytest.mark.parametrize("waits_long", [False, True], ids=["for a while", "for long"])
def test_request_waits_for_the_blocks_of_its_holes(waits_long: bool) -> None:
    """Upstream asks only for those of the request: with one too few, the load would fail."""
    prompt = tokens(random.Random(5), 40)
    following = plan_of("second", [*prompt, *tokens(random.Random(6), 20)])
    used_blocks: list[int] = []
    for num_missing in (0, 1):
        with engine_of(GEMMA, reserve_full_prompt=False) as engine:
            serve(engine, plan_of("short", prompt[:16], max_tokens=1))
            serve(engine, plan_of("first", prompt, max_tokens=1))
            make_holes(engine, (24, 32))
            pool = engine.block_pool
            num_free = pool.get_num_free_blocks()
            held = pool.get_new_blocks(num_free - used_blocks[0] + 1) if num_missing else []
            engine.add_request(following)
            engine.step()
            used_blocks.append(num_free - len(held) - pool.get_num_free_blocks())
            if num_missing and waits_long:
                engine.parts.loads._clock = lambda: 1e9
                engine.step()
                assert engine.scheduler.requests["second"].num_computed_tokens
            pool.free_blocks(held)
            serve(engine)
            counters = engine.side.counters
            goes_without = bool(num_missing) and waits_long
            assert bool(counters.hole_tokens) is not goes_without
            assert counters.hole_refusals[HoleRefusal.ROOM] == goes_without
            assert not counters.tier.failed_loads
            check_nothing_is_left(engine)
    assert used_blocks[0] and not used_blocks[1]


@pytest.mark.usefixtures("any_run")
def test_holes_are_computed_beside_requests_that_fill_the_pool() -> None:
    rng = random.Random(5)
    with engine_of(GEMMA, num_blocks=110, max_num_batched_tokens=64) as engine:
        chunk_tokens = engine.tier.geometry.chunk_tokens
        prompts = [tokens(rng, 5 * chunk_tokens) for _ in range(6)]
        for number, prompt in enumerate(prompts):
            serve(engine, plan_of(f"short-{number}", prompt[: 2 * chunk_tokens], max_tokens=1))
            serve(engine, plan_of(f"first-{number}", prompt, max_tokens=1))
        make_holes(engine, (3 * chunk_tokens, 4 * chunk_tokens))
        others = [plan_of(f"other-{number}", tokens(rng, 70), 60) for number in range(4)]
        again = [
            plan_of(f"second-{number}", [*prompt, *tokens(rng, 20)], 8)
            for number, prompt in enumerate(prompts)
        ]
        serve(engine, *others, *again)
        assert engine.side.counters.hole_tokens
        assert not engine.side.counters.tier.failed_loads
        check_nothing_is_left(engine)


@pytest.mark.parametrize("layout", [WINDOW, DEEPSEEK_V4_EAGLE], ids=lambda layout: layout.name)
def test_models_without_rows_or_with_drafts_stop_at_the_first_hole(layout: PagedLayout) -> None:
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


def joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for first, end in sorted(runs):
        if found and found[-1][1] == first:
            first = found.pop()[0]
        found.append((first, end))
    return found
