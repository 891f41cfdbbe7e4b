# SPDX-License-Identifier: Apache-2.0
"""Chunks that are missing in the host tier are computed, and what lies behind them is loaded.

On vLLM's real scheduler, with real pages and without a model: see ``test_connector_scheduler``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.connector.engines import engine_of, make_holes, plan_of, watch_computed
from support.connector.offload_run import check_nothing_is_left, offloading_installed, serve
from support.connector.offload_workloads import tokens
from support.connector.paged_layouts import (
    DEEPSEEK_V4_EAGLE,
    FULL,
    LAYOUTS,
    TWO_FULL,
    TWO_WINDOWS,
    WINDOW,
    PagedLayout,
)
from support.connector.scripted_transfers import TransferScript
from support.connector.simulated_engine import SimulatedEngine

from vllm_ascend_kvext.connector.common.scheduler_view import SchedulerView
from vllm_ascend_kvext.connector.scheduler import loads
from vllm_ascend_kvext.patches.connector import scheduler as patched_scheduler
from vllm_ascend_kvext.store.counters import Removal
from vllm_ascend_kvext.store.entries import Kind

PROMPT_TOKENS = 400
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
    monkeypatch.setattr(loads, "MIN_RUN_TOKENS", 0)


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


def test_load_fails_as_a_whole_where_requests_are_to_fail_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def that_fails_requests(**facts: Any) -> SchedulerView:
        return SchedulerView(**{**facts, "recomputes_failed_loads": False})

    monkeypatch.setattr(patched_scheduler, "SchedulerView", that_fails_requests)
    prompt = tokens(random.Random(4), 12 * CHUNK_TOKENS + 3)
    with engine_of(FULL, TransferScript(failing_load_numbers=frozenset({1, 3}))) as engine:
        serve(engine, plan_of("first", prompt))
        assert engine.reset()
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


def stored_tails(engine: SimulatedEngine) -> list[int]:
    """Boundaries at which tails are stored."""
    return [e.piece.end_tokens for e in engine.entries if e.piece.kind is Kind.TAILS]


@pytest.mark.parametrize("layout", [WINDOW, DEEPSEEK_V4_EAGLE], ids=lambda layout: layout.name)
def test_models_without_rows_or_with_drafts_stop_at_the_first_hole(layout: PagedLayout) -> None:
    with engine_of(layout) as engine:
        assert not engine.side.computes_holes


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
