# SPDX-License-Identifier: Apache-2.0
"""A connector reports gaps in what it has matched, as in vLLM's pull request 32785.

On vLLM's real scheduler, without a model: what each position of the KV cache holds is checked
whenever it is read, and what the prefix cache holds after every step.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.connector.offload_run import offloading_installed
from support.sample import IS_SAMPLE, sampled
from support.scheduler.connector import GappedConnector
from support.scheduler.engine import SchedulerEngine
from support.scheduler.invariants import CacheContents, blocks_are_conserved
from support.scheduler.layouts import FULL, GEMMA, Layout
from support.scheduler.model_runner import ReadCheck, WrongKVError
from support.scheduler.options import Drafter, EngineOptions, ExternalLoad, FailingLoads
from support.scheduler.random_workloads import random_workload, without_upstream_defects
from support.scheduler.run import Run, run
from support.scheduler.token_stream import VOCAB_SIZE
from support.scheduler.transcript import Step
from support.scheduler.workload import RequestPlan, ResetPrefixCache, Workload
from vllm.v1.metrics.stats import PrefixCacheStats

from vllm_ascend_kvext.holes import token_gaps
from vllm_ascend_kvext.patches.connector import computed_token_gaps
from vllm_ascend_kvext.patches.connector.computed_token_gaps import connectors_with_gaps

NUM_SEEDS = sampled(12)

every_load = pytest.mark.parametrize(
    "load", [ExternalLoad.IN_STEP, ExternalLoad.BETWEEN_STEPS], ids=lambda load: load.value
)
every_scheduler = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


@pytest.fixture(scope="module", autouse=True)
def patches_installed() -> Iterator[None]:
    with offloading_installed():
        yield


class Watch:
    """What steps compute, and that they stay within the engine's limits."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.engine: SchedulerEngine | None = None

    def __call__(self, engine: SchedulerEngine, step: Step) -> None:
        self.engine = engine
        options = engine.options
        rows = [request for request in step.scheduled if "-hole-" in request.request_id]
        assert sum(each.num_tokens for each in step.scheduled) <= options.max_num_batched_tokens
        assert len(step.scheduled) <= options.max_num_seqs
        self.counts["rows"] += len(rows)
        self.counts["gap tokens"] += sum(row.num_tokens for row in rows)


def gapped(layout: Layout, seed: int, load: ExternalLoad, is_async: bool) -> Workload:
    """A random workload whose connector lacks parts of what it claims to hold."""
    repairs = frozenset({"two-phase-allocation"})
    workload = without_upstream_defects(random_workload(layout, seed), repairs)
    options = workload.options
    has_room = options.external_load is ExternalLoad.BETWEEN_STEPS
    needs_room = load is ExternalLoad.BETWEEN_STEPS
    num_blocks = options.num_blocks
    if has_room != needs_room:
        num_blocks = num_blocks * 3 if needs_room else num_blocks // 3
    options = replace(
        options,
        num_blocks=num_blocks,
        max_num_batched_tokens=max(64, options.max_num_batched_tokens),
        external_load=load,
        has_gaps=True,
        is_async=is_async,
        by_priority=False,
        drafter=None,
    )
    resets = tuple(ResetPrefixCache(reset.step, False) for reset in workload.resets)
    # Rows of gaps have neither adapters nor images.
    requests = tuple(replace(plan, adapter=None, images=()) for plan in workload.requests)
    return replace(workload, options=options, resets=resets, requests=requests)


def run_checked(workload: Workload) -> tuple[Run, Counter[str]]:
    contents, watch = CacheContents(workload), Watch()

    def check_cached(engine: SchedulerEngine, step: Step) -> None:
        contents.learn(engine)
        contents.check_blocks(engine)

    result = run(workload, [blocks_are_conserved, check_cached, watch], ReadCheck.ALL)
    assert not result.wrong_outputs(workload), workload.name
    engine = watch.engine
    assert engine is not None
    pool = engine.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert not engine.scheduler.requests
    assert not engine.scheduler.finished_recving_kv_req_ids
    assert not engine.scheduler.failed_recving_kv_req_ids
    return result, watch.counts + result.transcript.counts


@every_scheduler
@every_load
def test_random_requests(load: ExternalLoad, is_async: bool) -> None:
    counts: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        counts += run_checked(gapped(FULL, seed, load, is_async))[1]
    assert counts["rows"]
    if not IS_SAMPLE:
        # In a pool that is too small for all, loads between steps could wait for each other.
        assert counts["preemptions"] or load is ExternalLoad.BETWEEN_STEPS
        assert counts["aborts"] and counts["hits"]


@every_scheduler
def test_random_requests_whose_loads_fail(is_async: bool) -> None:
    """Between steps only: from one that fails within a step, upstream itself does not recover."""
    counts: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        workload = gapped(FULL, seed, ExternalLoad.BETWEEN_STEPS, is_async)
        options = replace(workload.options, failing_loads=FailingLoads(seed=seed, max_steps=3))
        counts += run_checked(replace(workload, options=options))[1]
    assert counts["rows"] and counts["failed loads"]


def alone(load: ExternalLoad, is_async: bool = False, **options: Any) -> Workload:
    """One request, of which the connector claims the first 120 tokens of 160."""
    rng = random.Random(1)
    prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(160))
    request = RequestPlan(request_id="request-0", arrival_step=0, prompt=prompt, max_tokens=5)
    defaults = {"num_blocks": 80, "max_num_batched_tokens": 64, "has_gaps": True}
    of_engine = EngineOptions(
        **{**defaults, "external_load": load, "is_async": is_async, **options}
    )
    return Workload(name="alone", layout=FULL, options=of_engine, requests=(request,))


GAPS = {
    "at the beginning": [(0, 8)],
    "in the middle": [(32, 40)],
    "several, not of whole blocks": [(3, 5), (17, 30), (64, 65)],
    "adjacent, not in order": [(48, 56), (40, 48)],
    "at the end": [(112, 120)],
    "beyond the end": [(112, 140)],
    "nearly a step": [(8, 71)],
}


@pytest.fixture
def gaps(monkeypatch: pytest.MonkeyPatch) -> Any:
    def report(gaps: list[tuple[int, int]]) -> None:
        def get_computed_token_gaps(connector: GappedConnector, request: Any) -> Any:
            connector._gaps[request.request_id] = sorted(gaps)
            return gaps

        monkeypatch.setattr(GappedConnector, "get_computed_token_gaps", get_computed_token_gaps)

    return report


@every_scheduler
@every_load
@pytest.mark.parametrize("name", GAPS)
def test_gaps_alone_are_computed(name: str, load: ExternalLoad, is_async: bool, gaps: Any) -> None:
    gaps(GAPS[name])
    _, counts = run_checked(alone(load, is_async))
    missing = {token for first, end in GAPS[name] for token in range(first, min(end, 120))}
    assert counts["gap tokens"] == len(missing)
    assert counts["scheduled tokens"] == len(missing) + 40 + 5 - 1
    assert counts["hit tokens"] >= 120


@every_load
def test_gaps_that_are_not_computed_would_be_read(
    load: ExternalLoad, gaps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gaps(GAPS["in the middle"])
    monkeypatch.setattr(computed_token_gaps, "add_rows", lambda *_: None)
    with pytest.raises(WrongKVError):
        run_checked(alone(load))


@every_load
def test_gaps_are_no_hits(load: ExternalLoad, gaps: Any) -> None:
    gaps([(32, 40), (48, 64)])
    workload = alone(load)
    engine = SchedulerEngine(workload.layout, workload.options, ReadCheck.ALL)
    engine.scheduler.connector_prefix_cache_stats = found = PrefixCacheStats()
    request = engine.add_request(workload.requests[0])
    of_request = request.prefill_stats
    while engine.has_work():
        engine.step()
    assert found.hits == 120 - 24
    assert of_request.num_external_cached_tokens == 120 - 24
    assert of_request.num_computed_tokens == 40 + 24
    engine.shutdown()


@every_scheduler
def test_gaps_larger_than_a_step_are_computed_if_loaded_between_steps(
    is_async: bool, gaps: Any
) -> None:
    gaps([(8, 110)])
    _, counts = run_checked(alone(ExternalLoad.BETWEEN_STEPS, is_async))
    assert counts["gap tokens"] == 102


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="tokens of a step"),
        pytest.param({"max_num_batched_tokens": 160, "long_prefill_tokens": 60}, id="threshold"),
        pytest.param({"max_num_batched_tokens": 160, "max_num_seqs": 2}, id="rows"),
    ],
)
def test_gaps_that_fit_into_no_step_are_matched_by_nothing(
    options: dict[str, int], gaps: Any, caplog: pytest.LogCaptureFixture
) -> None:
    gaps([(8, 60), (68, 80)])
    with caplog.at_level(logging.WARNING, "vllm.ascend_kvext"):
        _, counts = run_checked(alone(ExternalLoad.IN_STEP, **options))
    assert counts["gap tokens"] == counts["hit tokens"] == 0
    assert "no step has room for all gaps" in caplog.text


@pytest.mark.parametrize(
    "wrong", [[(40, 40)], [(-8, 8)], [(48, 40)]], ids=["empty", "negative", "backwards"]
)
@every_load
def test_wrong_gaps_are_matched_by_nothing(
    wrong: list[tuple[int, int]], load: ExternalLoad, gaps: Any, caplog: pytest.LogCaptureFixture
) -> None:
    gaps(wrong)
    with caplog.at_level(logging.WARNING, "vllm.ascend_kvext"):
        _, counts = run_checked(alone(load))
    assert counts["hit tokens"] == 0
    assert f"found {wrong[0]}" in caplog.text


@every_scheduler
@every_load
@pytest.mark.parametrize("number", [0, 6], ids=["freed at once", "freed later"])
def test_abort_at_any_step_leaves_nothing(
    number: int, load: ExternalLoad, is_async: bool, gaps: Any
) -> None:
    gaps([(8, 110)] if load is ExternalLoad.BETWEEN_STEPS else [(8, 24), (64, 72)])
    num_rows = 0
    for num_steps in range(8):
        workload = alone(load, is_async, max_num_batched_tokens=32)
        plan = replace(workload.requests[0], request_id=f"request-{number}")
        engine = SchedulerEngine(workload.layout, workload.options, ReadCheck.ALL)
        engine.add_request(plan)
        for _ in range(num_steps):
            step = engine.step()
            num_rows += len([each for each in step.scheduled if "-hole-" in each.request_id])
        engine.abort(plan.request_id)
        serving = engine.scheduler.schedule.__self__
        assert not serving._found
        assert not serving._in_steps
        for _ in range(20):
            engine.step()
        assert not engine.has_work()
        assert not serving._first_gap_tokens
        pool = engine.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        engine.shutdown()
    assert num_rows


def test_request_does_without_what_it_has_waited_for_too_long(
    gaps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gaps(GAPS["in the middle"])
    monkeypatch.setattr(token_gaps, "MOST_PATIENCE_S", 0.0)
    _, counts = run_checked(alone(ExternalLoad.IN_STEP))
    assert counts["gap tokens"] == counts["hit tokens"] == 0


@every_load
@pytest.mark.parametrize(
    ("layout", "drafter"), [(GEMMA, None), (FULL, Drafter.EAGLE)], ids=["windows", "drafts"]
)
def test_engines_that_cannot_compute_gaps_say_so(
    layout: Layout, drafter: Drafter | None, load: ExternalLoad, caplog: pytest.LogCaptureFixture
) -> None:
    workload = gapped(layout, 1, load, is_async=False)
    options = replace(workload.options, drafter=drafter)
    with caplog.at_level(logging.WARNING, "vllm.ascend_kvext"):
        _, counts = run_checked(replace(workload, options=options))
    assert counts["gap tokens"] == 0
    assert "in this engine none are computed" in caplog.text


def test_a_connector_without_the_method_is_left_alone() -> None:
    workload = alone(ExternalLoad.IN_STEP, has_gaps=False)
    engine = SchedulerEngine(workload.layout, workload.options)
    assert not {"schedule", "finish_requests"} & vars(engine.scheduler).keys()
    engine.shutdown()


def test_parts_of_a_connector_are_asked_unless_it_asks_them_itself() -> None:
    plain, gapped = SimpleNamespace(), SimpleNamespace(get_computed_token_gaps=list)
    several = SimpleNamespace(_connectors=[plain, gapped])
    assert connectors_with_gaps(None) == []
    assert connectors_with_gaps(SimpleNamespace(_connectors=[plain, several])) == [gapped]
    several.get_computed_token_gaps = list
    assert connectors_with_gaps(several) == [several]
