# SPDX-License-Identifier: Apache-2.0
"""Random lives of requests whose prompts have holes, on vLLM's real scheduler and block manager.

Requests come, come back, are aborted and preempted in any order, while the tier and the device lose
entries, transfers are slow or fail, caches are reset and the scheduler is paused. After each step,
what attention has read, what the local prefix cache holds and what blocks count is checked; at the
end, every request has its own output, and nothing is left.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from support.connector.cached_blocks import CachedBlocks
from support.connector.engine_machine import EngineMachine, NoEstimates, blocks_of_longest
from support.connector.offload_run import (
    check_blocks,
    check_nothing_is_left,
    offloading_installed,
)
from support.connector.offload_workloads import offloading, tokens
from support.connector.paged_layouts import (
    DEEPSEEK_V4_LIKE,
    FULL,
    GEMMA,
    GPT_OSS,
    ROWS,
    PagedLayout,
    paged,
)
from support.connector.scripted_transfers import TransferScript
from support.connector.simulated_engine import SimulatedEngine
from support.sample import IS_SAMPLE, sampled
from support.scheduler import layouts
from support.scheduler.options import Drafter, EngineOptions
from support.scheduler.workload import RequestPlan
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request, RequestStatus

from vllm_ascend_kvext.connector import loads

LAYOUTS = {
    "one group": (FULL, paged(layouts.FULL, ROWS)),
    "hybrid": (GPT_OSS, GEMMA, DEEPSEEK_V4_LIKE),
}
"""Whose pages move whole, and row by row."""

BLOCK_TOKENS = FULL.groups[0].block_tokens
MOST_PROMPT_TOKENS = 32 * BLOCK_TOKENS
MOST_NEW_TOKENS = 8
MOST_TOKENS = MOST_PROMPT_TOKENS + MOST_NEW_TOKENS
MOST_STEPS_TO_THE_END = 1500
STEP_S = 0.2
MOST_LIVE_REQUESTS = 12
NUM_EXAMPLES = sampled(35)
"""Of each kind of layout."""

_rng = random.Random("documents")
DOCUMENTS = [tokens(_rng, length) for length in (5 * BLOCK_TOKENS, 83, 4 * BLOCK_TOKENS, 37, 120)]
"""What prompts are made of."""

ENGINES = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([1, 8, 40, 120]).map(
            lambda n: MOST_TOKENS // BLOCK_TOKENS + 2 + n
        ),
        "max_num_seqs": st.sampled_from([1, 2, 4, 8]),
        "max_num_batched_tokens": st.sampled_from([18, 40, 64, 256]),
        "long_prefill_tokens": st.sampled_from([0, 0, 24]),
        "reserve_full_prompt": st.booleans(),
        "by_priority": st.sampled_from([False, False, True]),
        "is_async": st.booleans(),
        "caching": st.sampled_from([True, True, False]),
        "events": st.booleans(),
        "num_workers": st.sampled_from([1, 1, 1, 2]),
        "drafter": st.sampled_from([None, None, Drafter.NGRAM]),
    }
)
CONNECTORS = st.fixed_dictionaries(
    {
        "chunk_tokens": st.sampled_from([2, 1, 4, 8]),  # units of the layout
        "store_policy": st.sampled_from(["all", "all", "all", "second_touch"]),
        "swap_on_preemption": st.booleans(),
    }
)
SCRIPTS = st.builds(
    TransferScript,
    seed=st.integers(0, 9),
    failing_stores=st.sampled_from([0.0, 0.0, 0.2]),
    failing_loads=st.sampled_from([0.0, 0.3]),
    most_per_step=st.sampled_from([None, None, 1, 2]),
)

LOST_SHARES = st.sampled_from([0.3, 0.15, 0.6, 0.0])
"""Of the entries of the tier."""

counts: Counter[str] = Counter()
"""What has happened in all examples of a test."""


class Watch:
    """What steps compute, and what the engine says of it.

    Args:
        engine: Whose steps are watched.
    """

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        self._execute = engine.runner.execute
        self._update = engine.scheduler.update_from_output
        self._computed: dict[str, list[tuple[int, int]]] = {}
        self.began_again: set[str] = set()
        """Requests part of which is computed more than once, as it has to be."""
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self._allocated = engine.side.allocated
        self._num_loaded_tokens = 0
        engine.scheduler.connector_prefix_cache_stats = PrefixCacheStats()
        engine.side.allocated = self.allocated  # type: ignore[method-assign]
        engine.runner.execute = self.execute  # type: ignore[method-assign]
        engine.scheduler.update_from_output = self.update  # type: ignore[method-assign]

    def execute(self, scheduled: Any) -> Any:
        """A step."""
        num_tokens = scheduled.num_scheduled_tokens
        options = self._engine.options
        assert sum(num_tokens.values()) == scheduled.total_num_scheduled_tokens
        assert scheduled.total_num_scheduled_tokens <= options.max_num_batched_tokens
        assert len(num_tokens) <= options.max_num_seqs
        if self._engine.scheduler.pause_state is PauseState.PAUSED_ALL:
            assert not num_tokens
        starts = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self.began_again |= set(cached.resumed_req_ids) | (scheduled.preempted_req_ids or set())
        for row_id, number in num_tokens.items():
            request_id = row_id
            if row_id not in self._engine.requests:
                request_id = row_id.rpartition("-hole-")[0]
                counts["hole rows"] += 1
                parked = self._engine.scheduler.requests[request_id]
                assert parked.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            run = (starts[row_id], starts[row_id] + number)
            self._computed.setdefault(request_id, []).append(run)
        output = self._execute(scheduled)
        metadata = output.kv_connector_output.kv_connector_worker_meta
        if metadata is not None:
            self.began_again |= metadata.results.failed_loads
        return output

    def update(self, scheduled: Any, from_model: Any) -> Any:
        """The output of a step."""
        results = self._update(scheduled, from_model)
        for output in (output for of_client in results.values() for output in of_client.outputs):
            self.outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.ended[output.request_id] = str(output.finish_reason)
            if output.prefill_stats is not None:
                self._check_prefill(output.request_id, output.prefill_stats)
        return results

    def allocated(self, request: Request, block_ids: Any, num_tokens: int) -> None:
        """A request has got blocks, perhaps for a load."""
        self._allocated(request, block_ids, num_tokens)
        if num_tokens:
            hit = self._engine.parts.loads._under_way[request.request_id].hit
            assert num_tokens == hit.loaded_tokens + sum(end - first for first, end in hit.holes)
            self._num_loaded_tokens += hit.loaded_tokens

    def check_hits(self) -> None:
        """What is loaded is counted as found, and nothing else."""
        stats = self._engine.scheduler.connector_prefix_cache_stats
        assert stats.hits + stats.preempted_hits == self._num_loaded_tokens

    def _check_prefill(self, request_id: str, stats: Any) -> None:
        """Each token of the prompt was found, or computed once."""
        request = self._engine.requests[request_id]
        if request_id in self.began_again or request.num_preemptions:
            return
        num_tokens = stats.num_prompt_tokens
        assert num_tokens == request.num_prompt_tokens
        runs = [(first, min(end, num_tokens)) for first, end in self._computed[request_id]]
        computed = [token for first, end in runs for token in range(first, end)]
        assert len(computed) == len(set(computed)), f"{request_id} computes tokens twice: {runs}"
        assert stats.num_cached_tokens + len(computed) == num_tokens, (
            f"{request_id}: expected {num_tokens} tokens, found {stats.num_cached_tokens} cached "
            f"and {len(computed)} computed: {runs}"
        )
        counts["checked prefills"] += 1


class HoleMachine(EngineMachine):
    """One engine, and those who use it."""

    layouts: tuple[PagedLayout, ...]

    @initialize(
        data=st.data(),
        least_run_blocks=st.sampled_from([1, 1, 3]),
        engine=ENGINES,
        connector=CONNECTORS,
        script=SCRIPTS,
        lost_share=LOST_SHARES,
        seed=st.integers(0, 99),
    )
    def start(
        self,
        data: st.DataObject,
        least_run_blocks: int,
        engine: dict[str, Any],
        connector: dict[str, Any],
        script: TransferScript,
        lost_share: float,
        seed: int,
    ) -> None:
        layout = data.draw(st.sampled_from(self.layouts))
        if engine["is_async"]:
            engine["drafter"] = None
        engine["max_num_batched_tokens"] = max(
            engine["max_num_batched_tokens"], 2 * engine["max_num_seqs"]
        )
        loads.LEAST_RUN_TOKENS = least_run_blocks * BLOCK_TOKENS
        engine["num_blocks"] *= 2 * len(layout.groups) - 1  # Holes have windows of their own.
        engine["num_blocks"] = max(engine["num_blocks"], 1 + blocks_of_longest(layout, MOST_TOKENS))
        connector["chunk_tokens"] *= layout.unit_tokens
        options = offloading(layout, hole_reuse=True, **connector)
        self.engine = SimulatedEngine(layout, EngineOptions(offloading=options, **engine), script)
        assert self.engine.side.fills_holes
        self.engine.side._cost = NoEstimates()  # type: ignore[assignment]
        self.watch = Watch(self.engine)
        self.cached = CachedBlocks(self.engine) if len(layout.groups) == 1 else None
        self.num_steps = 0
        # Who waits for the load of another waits for a number of steps, however fast they are.
        self.engine.parts.loads._clock = lambda: self.num_steps * STEP_S
        self.is_well = True
        for documents in ([0, 1, 2, 3], [2, 4, 1], [4, 0, 3, 2], [1, 3, 4]):
            self.arrive(documents, num_own=3, max_tokens=2, priority=0)
        for _ in range(60):
            self._step()
        self.come_back([0, 1, 2, 3, 0], 3, 4, lost_share, is_lost_on_device=True, seed=seed)

    # Requests.

    @rule(
        documents=st.lists(st.sampled_from(range(len(DOCUMENTS))), min_size=1, max_size=5),
        num_own=st.integers(0, 20),
        max_tokens=st.integers(1, MOST_NEW_TOKENS),
        priority=st.integers(0, 2),
    )
    def arrive(self, documents: list[int], num_own: int, max_tokens: int, priority: int) -> None:
        """A prompt that shares documents with others, and their order with some."""
        prompt = [token for number in documents for token in DOCUMENTS[number]]
        self._add(prompt, num_own, max_tokens, priority)

    @rule(
        numbers=st.lists(st.integers(0, 1 << 16), min_size=1, max_size=5),
        num_own=st.integers(0, 20),
        max_tokens=st.integers(1, MOST_NEW_TOKENS),
        lost_share=LOST_SHARES,
        is_lost_on_device=st.sampled_from([True, True, False]),
        seed=st.integers(0, 99),
    )
    def come_back(
        self,
        numbers: list[int],
        num_own: int,
        max_tokens: int,
        lost_share: float,
        is_lost_on_device: bool,
        seed: int,
    ) -> None:
        """The next turns of chats, of which the tier has lost some since, and the device all."""
        self._evict(lost_share, random.Random(seed))
        if is_lost_on_device:
            self._evict_on_device(1.0, random.Random(seed))
        plans = list(self.plans.values())
        for number in numbers:
            before = plans[number % len(plans)]
            self._add([*before.prompt, *before.expected_output()], num_own, max_tokens, 0)

    @precondition(lambda self: self._live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = self._live()
        parked = [r for r in live if r.status is RequestStatus.WAITING_FOR_REMOTE_KVS]
        request = data.draw(st.sampled_from(parked or live))
        counts["aborts of parked requests"] += request in parked
        counts["aborts of requests with holes"] += request.request_id in self._with_holes()
        self.engine.abort(request.request_id)

    # Steps.

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(left=st.integers(0, 2))
    def step_without_room(self, left: int) -> None:
        """Somebody else has the free blocks of the pool: what runs is preempted."""
        pool = self.engine.block_pool
        taken = pool.get_new_blocks(max(0, pool.get_num_free_blocks() - left))
        self._step(taken)

    # What is lost.

    @rule(
        restarts_running=st.booleans(),
        resets_connector=st.integers(0, 9).map(lambda number: number == 9),
    )
    def reset(self, restarts_running: bool, resets_connector: bool) -> None:
        if not restarts_running or not self._can_restart_running():
            self.engine.reset(False, resets_connector)
            return
        self.watch.began_again |= {request.request_id for request in self._live()}
        has_reset = self.engine.reset(True, resets_connector)
        assert has_reset
        counts["resets of running requests"] += 1

    # The end.

    def _end(self) -> None:
        engine = self.engine
        for _ in range(MOST_STEPS_TO_THE_END):
            if not engine.has_work():
                break
            self._step()
        left = {r.request_id: r.status.name for r in engine.scheduler.requests.values()}
        assert not engine.has_work(), f"after {MOST_STEPS_TO_THE_END} steps, left are {left}"
        check_nothing_is_left(engine)
        assert not engine.runner._states, "workers remember requests or rows that have ended"
        for request_id, plan in self.plans.items():
            output, expected = self.watch.outputs.get(request_id, []), plan.expected_output()
            is_whole = self.watch.ended.get(request_id) in ("stop", "length")
            was_aborted = engine.requests[request_id].status is RequestStatus.FINISHED_ABORTED
            assert is_whole or was_aborted
            assert output == (expected if is_whole else expected[: len(output)])
            counts["whole outputs"] += is_whole
        counters = engine.side.counters
        counts["hole tokens"] += counters.hole_tokens
        counts["failed loads"] += counters.tier.failed_loads
        counts["preemptions"] += sum(r.num_preemptions for r in engine.requests.values())
        if self.cached is not None:
            counts["checked blocks"] += self.cached.num_checked
        counts["examples"] += 1
        if counters.hole_tokens:
            counts["examples with holes"] += 1

    def _step(self, taken: list[Any] | None = None) -> None:
        engine = self.engine
        self.is_well = False
        if engine.has_work():
            engine.step()
        if taken is not None:
            engine.block_pool.free_blocks(taken)
        check_blocks(engine)
        if self.cached is not None:
            self.cached.check()
        self.watch.check_hits()
        self.is_well = True
        self.num_steps += 1

    def _add(self, prompt: list[int], num_own: int, max_tokens: int, priority: int) -> None:
        if len(self._live()) >= MOST_LIVE_REQUESTS:
            return
        rng = random.Random(self.num_plans)
        prompt = prompt[: MOST_PROMPT_TOKENS - num_own - 1] + tokens(rng, num_own + 1)
        plan = RequestPlan(
            request_id=f"request-{self.num_plans}",
            arrival_step=self.num_plans,
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            priority=priority,
        )
        self.num_plans += 1
        self.plans[plan.request_id] = plan
        self.engine.add_request(plan)
        if self.cached is not None:
            self.cached.expect(plan)

    def _with_holes(self) -> set[str]:
        return set(self.engine.side._holes._parked)


@pytest.fixture(scope="module", autouse=True)
def patches_installed() -> Iterator[None]:
    with offloading_installed():
        yield


def test_random_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "LEAST_RUN_TOKENS", loads.LEAST_RUN_TOKENS)  # and back again
    counts.clear()
    for of_kind in LAYOUTS.values():
        HoleMachine.layouts = of_kind
        machine = HoleMachine.TestCase
        machine.settings = settings(
            max_examples=NUM_EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        machine().runTest()
    assert counts["hole tokens"] and counts["checked prefills"] and counts["checked blocks"]
    if not IS_SAMPLE:  # Half as many examples may well miss one of these.
        assert counts["aborts of requests with holes"] and counts["failed loads"]
        assert counts["preemptions"] and counts["resets of running requests"]
