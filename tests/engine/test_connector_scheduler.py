# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""KvextConnector's two sides on vLLM's real scheduler: a soak, and the cases that it may miss.

There is no model. Pages are real tensors, to which steps write what they compute. Every byte that
attention would read is compared, so a wrong load, store or reuse shows where it happens.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from support.connector.engines import engine_of, plan_of
from support.connector.offload_run import (
    check_nothing_is_left,
    run_offloading,
    serve,
)
from support.connector.offload_workloads import (
    EngineKind,
    blocks_for_longest,
    chats,
    random_offload,
    tokens,
)
from support.connector.page_contents import WrongBytesError
from support.connector.paged_layouts import (
    FULL,
    FULL_EAGLE,
    GPT_OSS,
    LAYOUTS,
    STATE_LAYOUTS,
    UPSTREAM_LAYOUTS,
    WINDOW,
    PagedLayout,
)
from support.connector.scripted_transfers import TransferScript
from support.connector.simulated_engine import SimulatedEngine
from support.sample import IS_LONG, sampled
from support.scheduler.workload import RequestPlan
from support.upstream_version import IS_SINCE_0_30
from vllm import SamplingParams
from vllm.v1.metrics.stats import PrefixCacheStats

from vllm_ascend_kvext.connector.scheduler import loads
from vllm_ascend_kvext.holes.load_plan import plan_of_hit
from vllm_ascend_kvext.retention.hints import HINT_ARGUMENT
from vllm_ascend_kvext.retention.reasons import Origin
from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind
from vllm_ascend_kvext.store.prefix import HashedPrefix
from vllm_ascend_kvext.upstream_state import CoordinatorState

pytestmark = pytest.mark.usefixtures("offloading_in_effect")

SMALL_LAYOUTS = (*LAYOUTS, FULL_EAGLE, *STATE_LAYOUTS)
ALL_LAYOUTS = SMALL_LAYOUTS + UPSTREAM_LAYOUTS

NUM_SEEDS = 4 if IS_LONG else 2
NUM_REQUESTS = dict.fromkeys(SMALL_LAYOUTS, 20) | dict.fromkeys(UPSTREAM_LAYOUTS, 10)
"""The number of requests of one random run."""

NUM_RUNS_PER_LAYOUT = len(EngineKind) * NUM_SEEDS

OCCURRENCES = (
    "aborts",
    "aborts while loading",
    "preemptions",
    "swaps",
    "joined loads",
    "failed stores",
    "failed loads",
    "refused: no_room",
    "removed: evicted",
    "hole tokens",
    "resets",
    "resets of running requests",
    "resets with stores under way",
)
"""The events that a soak has to meet, so that it proves something."""

by_layout = {"ids": lambda layout: layout.name}
every_layout = pytest.mark.parametrize("layout", ALL_LAYOUTS, **by_layout)
every_small_layout = pytest.mark.parametrize("layout", SMALL_LAYOUTS, **by_layout)


@pytest.fixture(scope="module")
def soaked() -> Counter[str]:
    """The events of all random runs so far."""
    return Counter()


@pytest.mark.parametrize("kind", EngineKind, ids=lambda kind: kind.value)
@every_layout
def test_random_requests(
    layout: PagedLayout, kind: EngineKind, soaked: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes and outputs are right. No block, pin, place in host memory or note of a request is
    left.

    Entries are evicted from the middle of prompts. Runs behind holes are loaded, however short.
    """
    monkeypatch.setattr(loads, "MIN_RUN_TOKENS", 0)
    counts: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        counts += run_offloading(random_offload(layout, seed, NUM_REQUESTS[layout], kind)).counts
    assert counts["finished"] > counts["requests"] // 2
    soaked += counts
    soaked["runs"] += NUM_SEEDS


def test_soak_has_met_everything(soaked: Counter[str]) -> None:
    if soaked["runs"] < len(ALL_LAYOUTS) * NUM_RUNS_PER_LAYOUT:
        pytest.skip("only a part of the soak has run")
    assert soaked["requests"] == sum(NUM_REQUESTS.values()) * NUM_RUNS_PER_LAYOUT
    assert soaked["requests"] > 2000 or not IS_LONG
    assert soaked["hit requests"] > soaked["requests"] / 10
    assert {name for name in OCCURRENCES if not soaked[name]} == set()


# Loads wait for each other's blocks.


@pytest.mark.parametrize("failing", [0.0, 0.5], ids=["loaded", "failing"])
@every_small_layout
def test_loads_do_not_stop_the_engine(layout: PagedLayout, failing: float) -> None:
    """Several prompts are loaded at once, in pools that hold little more than one of them.

    If a load fails, its prompt is computed before requests that have loaded and hold their blocks.
    """
    rng = random.Random(layout.name)
    unit = layout.unit_tokens
    prompts = [tokens(rng, 4 * unit + rng.randrange(2 * unit)) for _ in range(4)]
    plans = [plan_of(f"first-{number}", prompt) for number, prompt in enumerate(prompts)]
    longer = [
        plan_of(f"second-{number}", [*prompt, *tokens(rng, rng.randrange(1, 2 * unit))], 12)
        for number, prompt in enumerate(prompts)
    ]
    batched_tokens = unit + 16
    fewest = blocks_for_longest(layout, tuple(longer), batched_tokens)
    pools = range(fewest, int(2.5 * fewest), -(-fewest // 3))
    for number, num_blocks in enumerate(pools):
        with engine_of(
            layout,
            TransferScript(seed=number, failing_loads=failing, max_per_step=1),
            num_blocks=num_blocks,
            max_num_batched_tokens=batched_tokens,
            reserve_full_prompt=number % 2 == 0,
        ) as engine:
            serve(engine, *plans)
            serve(engine, *longer)
            check_nothing_is_left(engine)
            counters = engine.side.counters
            assert counters.hit_requests or (failing and counters.tier.failed_loads)


# Hits.


@every_layout
def test_hits_are_as_large_as_they_can_be(layout: PagedLayout) -> None:
    """Brute force checks requests that run one after the other, without evictions and failures."""
    num_hits = 0
    for seed in range(sampled(2)):
        ended: list[tuple[RequestPlan, list[int]]] = []
        with engine_of(layout) as engine:
            for plan in chats(random.Random(f"hits/{layout.name}/{seed}"), layout, 12):
                found = found_in_tier(engine, plan)
                must = max((ends_shared_with(engine, plan, *each) for each in ended), default=0)
                hit_tokens = serve_and_count(engine, plan)
                assert hit_tokens == found
                assert hit_tokens >= must
                num_hits += hit_tokens > 0
                ended.append((plan, [*plan.prompt, *plan.expected_output()]))
            check_nothing_is_left(engine)
    assert num_hits


@pytest.mark.parametrize("layout", STATE_LAYOUTS, **by_layout)
@pytest.mark.parametrize("caching", [False, True], ids=["host", "both"])
def test_step_ends_where_a_shared_prefix_ends(layout: PagedLayout, caching: bool) -> None:
    """A state exists only where a step ends.

    Otherwise the third request would find no state there.
    """
    rng = random.Random(layout.name)
    unit = layout.unit_tokens
    shared = tokens(rng, 3 * unit)
    plans = [
        plan_of(f"{number}", [*shared, *tokens(rng, 6 * unit + 1)], max_tokens=1)
        for number in range(3)
    ]
    hits = []
    with engine_of(layout, max_num_batched_tokens=16 * unit, caching=caching) as engine:
        for plan in plans:
            hits.append(serve_and_count(engine, plan))
            engine.reset()
        check_nothing_is_left(engine)
    # The first request has left states at distances before its end, the second at the junction.
    assert hits[0] < hits[1] < hits[2] == len(shared)


@pytest.mark.parametrize("layout", STATE_LAYOUTS, **by_layout)
@pytest.mark.parametrize("over_tokens", [0, 1])
def test_prompt_resumes_where_its_last_state_can_be_hit(
    layout: PagedLayout, over_tokens: int
) -> None:
    """vLLM ends a step with the last block, even if no lookup reaches so far."""
    rng = random.Random(layout.name)
    unit = layout.unit_tokens
    with engine_of(layout, max_num_batched_tokens=64 * unit) as engine:
        # Rungs that no request resumes from are given up. The steps of an answer earn the step that
        # the end of its prompt adds.
        for number in range(40):
            serve(engine, plan_of(f"other-{number}", tokens(rng, 20 * unit), max_tokens=25))
        prompt = tokens(rng, 20 * unit + over_tokens)
        serve(engine, plan_of("first", prompt, max_tokens=1))
        hit_tokens = serve_and_count(engine, plan_of("second", prompt, max_tokens=1))
    assert hit_tokens == (len(prompt) - 1) // unit * unit


@pytest.mark.parametrize("seed", range(sampled(12)))
@pytest.mark.parametrize("layout", STATE_LAYOUTS, **by_layout)
def test_prompts_in_steps_shorter_than_a_block_come_to_an_end(
    layout: PagedLayout, seed: int
) -> None:
    """Steps end inside blocks, and such a block's state is not stored."""
    workload = random_offload(layout, seed, num_requests=12)
    options = replace(workload.options, long_prefill_tokens=1 + seed % layout.unit_tokens)
    run_offloading(workload._replace(options=options))


@pytest.mark.parametrize("layout", STATE_LAYOUTS, **by_layout)
def test_request_that_begins_again_stores_again(layout: PagedLayout) -> None:
    """After a reset of all caches, a request's KV is stored like that of another request."""
    unit = layout.unit_tokens
    prompt = tokens(random.Random(layout.name), 20 * unit + 1)
    with engine_of(layout, max_num_batched_tokens=64 * unit, caching=True) as engine:
        engine.add_request(plan_of("first", prompt, max_tokens=5))
        while engine.scheduler.requests["first"].num_output_tokens < 2:
            engine.step()
        while engine.side.has_transfers:
            engine.step()
        assert engine.reset(reset_running_requests=True, reset_connector=True)
        assert not entries_of(engine)
        serve(engine)
        assert engine.reset()
        assert serve_and_count(engine, plan_of("second", prompt)) == 20 * unit
        check_nothing_is_left(engine)


def serve_and_count(engine: SimulatedEngine, plan: RequestPlan) -> int:
    """The number of tokens that a request has loaded."""
    before = engine.side.counters.hit_tokens
    serve(engine, plan)
    return engine.side.counters.hit_tokens - before


def found_in_tier(engine: SimulatedEngine, plan: RequestPlan) -> int:
    """The largest boundary at which the tier has everything that the request needs."""
    geometry = engine.tier.geometry
    prefix = prefix_of(engine, plan)
    keys: dict[Kind, set[bytes]] = {kind: set() for kind in Kind}
    for entry in entries_of(engine):
        keys[entry.piece.kind].update(entry.keys)
    best = 0
    for boundary in range(geometry.unit_tokens, len(plan.prompt), geometry.unit_tokens):
        key = prefix.key_at(boundary)
        if geometry.needs_rows and key not in keys[Kind.ROWS]:
            break
        if not geometry.needs_tails or key in keys[Kind.TAILS]:
            best = boundary
    return best


def ends_shared_with(
    engine: SimulatedEngine, plan: RequestPlan, other: RequestPlan, other_tokens: list[int]
) -> int:
    """The largest end of the other prompt, or of its answer, that this prompt continues."""
    if (plan.adapter, plan.cache_salt) != (other.adapter, other.cache_salt):
        return 0
    unit: int = engine.tier.geometry.unit_tokens
    # The last token of a prompt is always computed, and the last token of an answer never.
    ends = {(len(other_tokens) - 1) // unit * unit}
    ends.add((len(other.prompt) - 1) // unit * unit)
    return max(
        end
        for end in {0, *ends}
        if end < len(plan.prompt) and list(plan.prompt[:end]) == other_tokens[:end]
    )


# The check notices wrong bytes.


def corrupt(host: Any, entry: Entry, others: list[Entry]) -> None:
    host[entry.offset_bytes : entry.offset_bytes + entry.num_bytes] += 1


def swap(host: Any, entry: Entry, others: list[Entry]) -> None:
    other = next(each for each in others if each.num_bytes == entry.num_bytes)
    first = slice(entry.offset_bytes, entry.offset_bytes + entry.num_bytes)
    second = slice(other.offset_bytes, other.offset_bytes + other.num_bytes)
    host[first], host[second] = host[second].clone(), host[first].clone()


@pytest.mark.parametrize("spoil", [corrupt, swap], ids=["corrupted", "swapped"])
@every_layout
def test_spoilt_host_memory_is_noticed(
    layout: PagedLayout, spoil: Callable[[Any, Entry, list[Entry]], None]
) -> None:
    """The check of all other tests here can fail."""
    rng = random.Random(layout.name)
    prompts = [tokens(rng, 3 * layout.unit_tokens + 1) for _ in range(2)]
    for kind in Kind:
        with engine_of(layout) as engine:
            for number, prompt in enumerate(prompts):
                serve(engine, plan_of(f"first-{number}", prompt))
            found = [entries_for(engine, prompt, kind) for prompt in prompts]
            if not found[0]:
                continue  # Such a layout has no rows of full attention, or no tails.
            (worker,) = engine.workers
            host: Any = worker.side._host
            spoil(host.tensor, found[0][-1], found[1])
            with pytest.raises(WrongBytesError):
                serve(engine, plan_of("second", prompts[0]))


def entries_for(engine: SimulatedEngine, prompt: list[int], kind: Kind) -> list[Entry]:
    """The tokens that a request with this prompt would load."""
    prefix = prefix_of(engine, plan_of("", prompt))
    plan = plan_of_hit(engine.tier.look_up(prefix, len(prompt) - 1))
    return [entry for entry in plan.entries if entry.piece.kind is kind]


# Resets of the prefix cache.


@pytest.mark.parametrize("reset_connector", [False, True], ids=["keep", "clear"])
def test_reset_restarts_requests_that_have_loaded(reset_connector: bool) -> None:
    """vLLM's reset fails if a waiting request holds blocks. It does not clear the connector."""
    layout = LAYOUTS[0]
    prompt = tokens(random.Random(5), 6 * layout.unit_tokens)
    with engine_of(layout) as engine:
        serve(engine, plan_of("first", prompt))
        engine.add_request(plan_of("second", prompt))
        while not engine.scheduler.finished_recving_kv_req_ids:
            engine.step()
        assert engine.reset(reset_running_requests=True, reset_connector=reset_connector)
        assert bool(engine.side.counters.tier.entries_held) is not reset_connector
        serve(engine)
        check_nothing_is_left(engine)


def test_session_that_goes_on_has_the_hashes_of_its_tokens() -> None:
    """vLLM drops the last token of an answer, but keeps the hash of the block with this token."""
    layout = LAYOUTS[0]
    unit = layout.unit_tokens
    prompt = tokens(random.Random(5), 6 * unit - 1)
    with engine_of(layout) as engine:
        request = engine.add_request(plan_of("first", prompt, max_tokens=60))
        while request.num_tokens < len(prompt) + 1:
            engine.step()
        assert len(request.block_hashes) * engine.hash_block_size == request.num_tokens
        new_tokens = tokens(random.Random(6), unit)
        update = SimpleNamespace(
            prompt_token_ids=new_tokens, mm_features=None, arrival_time=0.0, sampling_params=None
        )
        kept = list(request.all_token_ids[: request.num_computed_tokens])
        engine.scheduler._update_request_as_session(request, update)
        expected = engine.make_request(plan_of("expected", [*kept, *new_tokens]))
        assert list(request.all_token_ids) == [*kept, *new_tokens]
        assert request.block_hashes == expected.block_hashes


def test_step_looks_up_few_of_the_requests_that_have_to_wait() -> None:
    num_requests, num_at_once = 60, 3
    layout = LAYOUTS[0]
    rng = random.Random(7)
    prompts = [tokens(rng, 8 * layout.unit_tokens) for _ in range(num_requests)]
    blocks_per_request = len(prompts[0]) // layout.groups[0].block_tokens + 1
    num_blocks = num_at_once * blocks_per_request + 1
    with engine_of(layout, num_blocks=num_blocks, max_num_seqs=num_requests) as engine:
        for number, prompt in enumerate(prompts):
            serve(engine, plan_of(f"first-{number}", prompt))
        lookups: list[int] = []  # Sorted by step.
        look_up, schedule = engine.tier.look_up, engine.scheduler.schedule

        def counted(*arguments: Any) -> Any:
            lookups[-1] += 1
            return look_up(*arguments)

        def one_step() -> Any:
            lookups.append(0)
            return schedule()

        engine.tier.look_up, engine.scheduler.schedule = counted, one_step
        requests = [
            engine.add_request(plan_of(f"again-{number}", prompt))
            for number, prompt in enumerate(prompts)
        ]
        while engine.has_work():
            engine.step()
        assert all(request.is_finished() for request in requests)
        assert engine.side.counters.hit_requests == num_requests
        assert max(lookups) <= loads.MAX_LOOKUPS_IN_VAIN + num_at_once
        # Each request is looked up when it comes and at its turn, but not when another one ends.
        assert sum(lookups) <= 3 * num_requests


def test_hints_that_leave_no_checkpoint_are_reported_without_retention(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "vllm.ascend_kvext.retention")
    layout = STATE_LAYOUTS[0]
    prompt = tokens(random.Random(layout.name), 4 * layout.unit_tokens + 1)
    with engine_of(layout) as engine:
        for name, hint in (("right", len(prompt)), ("wrong", "oops")):
            serve(engine, replace(plan_of(name, prompt), extra_args=((HINT_ARGUMENT, hint),)))
    (message,) = {text for text in caplog.messages if HINT_ARGUMENT in text}
    assert message.startswith("Request wrong: ")


@pytest.mark.parametrize(("layout", "has_tails"), [(FULL, False), (GPT_OSS, True)])
def test_the_start_says_how_many_tokens_host_memory_holds(
    layout: PagedLayout, has_tails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vllm.ascend_kvext"), engine_of(layout) as engine:
        num_tokens = engine.side.tier.num_tokens
    (line,) = [text for text in caplog.messages if "GiB of host memory" in text]
    less = " less what windows and states take" if has_tails else ""
    assert num_tokens and f" that holds {num_tokens} tokens{less}" in line
    assert ("less what" in line) is has_tails


def test_tails_are_stored_at_the_interval_of_retention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patch that passes the scheduler to the connector also passes the interval."""
    layout = WINDOW
    interval_tokens = 3 * layout.unit_tokens
    found = CoordinatorState.of

    def with_interval(coordinator: Any) -> CoordinatorState:
        state = found(coordinator)
        state.interval_tokens = interval_tokens
        return state

    monkeypatch.setattr(CoordinatorState, "of", with_interval)
    prompt = tokens(random.Random(layout.name), 7 * layout.unit_tokens + 1)
    stored: list[int] = []
    with engine_of(layout) as engine:
        planner = engine.side._stores.planner
        monkeypatch.setattr(planner, "note_tried", lambda reason: stored.append(reason.origin))
        serve(engine, plan_of("a", prompt))
        assert planner.next_after({}, 0) == interval_tokens
    assert stored.count(Origin.GRID) == 2


# The parts of the cases.


def prefix_of(engine: SimulatedEngine, plan: RequestPlan) -> HashedPrefix:
    return HashedPrefix(engine.make_request(plan).block_hashes, engine.hash_block_size)


def entries_of(engine: SimulatedEngine) -> list[Entry]:
    """The stored entries, the oldest first."""
    return [entry for entry in engine.entries if entry.state is EntryState.STORED]


# The counters of vLLM beside the connector: docs/metrics.md.


def counted(engine: SimulatedEngine) -> tuple[PrefixCacheStats, PrefixCacheStats]:
    """What vLLM counts from now on, for the device and for the connector."""
    manager = engine.scheduler.kv_cache_manager
    manager.log_stats, manager.prefix_cache_stats = True, PrefixCacheStats()
    engine.scheduler.connector_prefix_cache_stats = PrefixCacheStats()
    return manager.prefix_cache_stats, engine.scheduler.connector_prefix_cache_stats


def counts_of(stats: PrefixCacheStats) -> tuple[int, int, int]:
    return stats.requests, stats.queries, stats.hits


@pytest.mark.parametrize("reads_caches", [True, False], ids=["plain", "prompt logprobs"])
def test_what_reads_no_cache_is_an_external_miss_to_vllm_and_nothing_here(
    reads_caches: bool,
) -> None:
    """vLLM issue 57596: vLLM does not count such a request in the counters of the device."""
    layout = LAYOUTS[0]
    prompt = tokens(random.Random(6), 6 * layout.unit_tokens)
    assert SamplingParams(prompt_logprobs=1).skip_reading_prefix_cache
    with engine_of(layout, caching=True) as engine:
        serve(engine, plan_of("first", prompt))
        assert engine.reset()
        device, external = counted(engine)
        before = dict(engine.side.counters.tier.shortfalls)
        hit_tokens = engine.side.counters.hit_tokens
        request = engine.add_request(plan_of("second", prompt))
        request.skip_reading_prefix_cache = not reads_caches
        serve(engine)
        hits = engine.side.counters.hit_tokens - hit_tokens
        assert (hits > 0) is reads_caches
        assert counts_of(external) == (1, len(prompt), hits)
        assert counts_of(device) == ((1, len(prompt), 0) if reads_caches else (0, 0, 0))
        assert engine.side.counters.tier.shortfalls == before


def test_what_waits_for_the_load_of_another_is_one_external_query() -> None:
    """vLLM 0.23.0 counts a query of the device each time that it looks the request up again."""
    layout = LAYOUTS[0]
    prompt = tokens(random.Random(7), 6 * layout.unit_tokens)
    with engine_of(layout, caching=True) as engine:
        serve(engine, plan_of("first", prompt))
        assert engine.reset()
        device, external = counted(engine)
        for name in ("second", "third"):
            engine.add_request(plan_of(name, prompt))
        (worker,) = engine.workers
        with mock.patch.object(worker.transfers, "end_some"):
            for _ in range(4):
                engine.step()
        serve(engine)
        assert engine.side.counters.joined_loads == 1
        assert external.requests == 2 and external.hits == engine.side.counters.hit_tokens
        assert external.queries == 2 * len(prompt) - device.hits
        assert (device.requests == 2) is IS_SINCE_0_30 and device.requests >= 2
