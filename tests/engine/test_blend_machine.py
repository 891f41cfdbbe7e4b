# SPDX-License-Identifier: Apache-2.0
"""Random lives of requests in whose prompts segments are reused, on vLLM's real scheduler.

Segments are stored, reused in any order, and lost; the same prompts come without segments, and
answers come back as prompts; requests are aborted and preempted, transfers are slow or fail, caches
are reset. After each step, what attention has read, all that anybody could find by a hash of
tokens, and what blocks count is checked; at the end, nothing is left.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from support.connector.blending_engine import BlendingEngine
from support.connector.engine_machine import EngineMachine, NoEstimates, blocks_of_longest
from support.connector.exact_contents import ExactContents
from support.connector.offload_run import (
    check_blocks,
    check_nothing_is_left,
    offloading_installed,
)
from support.connector.offload_workloads import offloading, tokens
from support.connector.paged_layouts import FULL, GEMMA, GPT_OSS, ROWS, PagedLayout, paged
from support.connector.scripted_transfers import TransferScript
from support.sample import IS_SAMPLE, sampled
from support.scheduler import layouts
from support.scheduler.options import Drafter, EngineOptions
from support.scheduler.token_stream import TokenStream
from support.scheduler.workload import RequestPlan
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import RequestStatus

from vllm_ascend_kvext.blending.segments import SEGMENTS_KEY, STORE_KEY
from vllm_ascend_kvext.connector import loads
from vllm_ascend_kvext.transfer.errors import BackendError

FULL_WINDOW_ROWS = paged(layouts.FULL_WINDOW, ROWS)
LAYOUTS = {
    "one group": (FULL, paged(layouts.FULL, ROWS)),
    "hybrid": (GPT_OSS, GEMMA, FULL_WINDOW_ROWS),
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

_GIB = 1 << 30

SEPARATOR = 62
"""Nothing that is sampled, and in no document."""

_rng = random.Random("segments")
DOCUMENTS = [tuple(tokens(_rng, length)) for length in (40, 53, 16, 37, 61)]
DOCUMENTS.append((*DOCUMENTS[1][:32], *tokens(_rng, 9)))
"""Some of them as long as blocks are; the last one begins as another does."""

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
        "caching": st.sampled_from([True, True, True, False]),
        "events": st.booleans(),
        "num_workers": st.sampled_from([1, 1, 1, 2]),
        "drafter": st.sampled_from([None, None, Drafter.NGRAM]),
    }
)
CONNECTORS = st.fixed_dictionaries(
    {
        "chunk_tokens": st.sampled_from([2, 1, 4, 8]),  # units of the layout
        "store_policy": st.sampled_from(["all", "all", "second_touch", "never"]),
        "swap_on_preemption": st.booleans(),
        "blend_head_tokens": st.sampled_from([4, 0, 1, 8]),
        "blend_min_tokens": st.sampled_from([1, 6, 20]),
        "blend_across_windows": st.booleans(),
        "learn_segments": st.sampled_from([False, True]),
        "segment_sink": st.sampled_from([[5], [], [5, 9, 2, 5, 11, 3, 8, 1, 40]]),
        "host_memory_gib": st.sampled_from([1 << 22, 1 << 22, 1 << 14]).map(
            lambda n: n / (1 << 30)
        ),
    }
)
SCRIPTS = st.builds(
    TransferScript,
    seed=st.integers(0, 9),
    failing_stores=st.sampled_from([0.0, 0.0, 0.2]),
    failing_loads=st.sampled_from([0.0, 0.3]),
    most_per_step=st.sampled_from([None, None, 1, 2]),
)
SALTS = st.sampled_from([None, None, None, "salt"])
PROMPTS = st.lists(st.integers(0, len(DOCUMENTS) - 1), min_size=1, max_size=5)
WRONG_SEGMENTS = ([[0, 4], [3, 9]], [[0, 1 << 20]], [[-2, 5]], [[7, 3]], "no pairs", [[1]])

counts: Counter[str] = Counter()
"""What has happened in all examples of a test."""


class Watch:
    """What steps compute, and what the engine answers.

    Args:
        engine: Whose steps are watched.
    """

    def __init__(self, engine: BlendingEngine) -> None:
        self._engine = engine
        self._execute = engine.runner.execute
        self._update = engine.scheduler.update_from_output
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.was_blended: set[str] = set()
        self._answered: dict[str, Any] = {}  # What was reused when a token was last sampled.
        self._sampling: dict[int, dict[str, Any]] = {}  # The same, by step that is on its way.
        engine.scheduler.connector_prefix_cache_stats = PrefixCacheStats()
        engine.runner.execute = self.execute  # type: ignore[method-assign]
        engine.scheduler.update_from_output = self.update  # type: ignore[method-assign]
        self.surprises: list[Exception] = []
        for worker in engine.workers:
            runner = worker.side._runner
            runner.run = partial(self._run_job, runner.run)  # type: ignore[method-assign]

    def _run_job(self, run: Any, job: Any, recorded: Any) -> Any:
        """A worker carries out a job: it fails where the script says so."""
        try:
            return run(job, recorded)
        except BackendError:
            raise
        except Exception as error:
            self.surprises.append(error)
            raise

    def execute(self, scheduled: Any) -> Any:
        """A step."""
        num_tokens = scheduled.num_scheduled_tokens
        options = self._engine.options
        assert sum(num_tokens.values()) == scheduled.total_num_scheduled_tokens
        assert scheduled.total_num_scheduled_tokens <= options.max_num_batched_tokens
        assert len(num_tokens) <= options.max_num_seqs
        if self._engine.scheduler.pause_state is PauseState.PAUSED_ALL:
            assert not num_tokens
        for row_id in num_tokens:
            if row_id in self._engine.requests:
                counts["steps of blended requests"] += row_id in self._engine.reused
                continue
            request_id = row_id.rpartition("-hole-")[0]
            counts["hole rows"] += 1
            counts["hole rows of blended requests"] += request_id in self._engine.reused
            parked = self._engine.scheduler.requests[request_id]
            assert parked.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        self.was_blended |= self._engine.reused.keys()
        self._sampling[id(scheduled)] = {
            request_id: hit
            for request_id in num_tokens
            if (hit := self._engine.reused.get(request_id)) and self._samples(request_id)
        }
        return self._execute(scheduled)

    def _samples(self, request_id: str) -> bool:
        """Whether the step leads to a token of the answer; its tokens count as computed already."""
        request = self._engine.scheduler.requests[request_id]
        return request.num_computed_tokens >= request.num_tokens

    def update(self, scheduled: Any, from_model: Any) -> Any:
        """The output of a step."""
        results = self._update(scheduled, from_model)
        sampled = self._sampling.pop(id(scheduled))
        for output in (output for of_client in results.values() for output in of_client.outputs):
            # A reset throws away what was on its way.
            if output.new_token_ids and output.request_id in sampled:
                self._answered[output.request_id] = sampled[output.request_id]
            self.outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.ended[output.request_id] = str(output.finish_reason)
                self._check_mark(output.request_id, output.kv_transfer_params)
        return results

    def check_hits(self) -> None:
        """What is loaded is counted as found, and nothing else."""
        stats = self._engine.scheduler.connector_prefix_cache_stats
        assert stats.hits + stats.preempted_hits == self._engine.num_loaded_tokens

    def _check_mark(self, request_id: str, mark: dict[str, int] | None) -> None:
        request = self._engine.requests[request_id]
        if STORE_KEY in (request.sampling_params.extra_args or {}):
            assert mark is not None and mark.keys() == {"kvext_stored_tokens"}
            counts["stores that were answered"] += bool(mark["kvext_stored_tokens"])
            return
        hit = self._engine.reused.get(request_id) or self._answered.get(request_id)
        if hit is None:
            assert mark is None
            return
        reused_tokens = sum(rows.end_tokens - rows.first_tokens for rows in hit.placed)
        num_tokens = request.num_prompt_tokens
        assert mark == {
            "kvext_exact_tokens": hit.exact_tokens,
            "kvext_reused_tokens": reused_tokens,
            "kvext_recomputed_tokens": num_tokens - hit.exact_tokens - reused_tokens,
        }
        counts["marked answers"] += 1


class BlendMachine(EngineMachine):
    """One engine, and those who use it."""

    layouts: tuple[PagedLayout, ...]

    @initialize(
        data=st.data(),
        engine=ENGINES,
        connector=CONNECTORS,
        script=SCRIPTS,
        stored=st.lists(
            st.integers(0, len(DOCUMENTS) - 1), min_size=3, max_size=len(DOCUMENTS), unique=True
        ),
    )
    def start(
        self,
        data: st.DataObject,
        engine: dict[str, Any],
        connector: dict[str, Any],
        script: TransferScript,
        stored: list[int],
    ) -> None:
        layout = data.draw(st.sampled_from(self.layouts))
        if engine["is_async"]:
            engine["drafter"] = None
        engine["max_num_batched_tokens"] = max(
            engine["max_num_batched_tokens"], 2 * engine["max_num_seqs"]
        )
        loads.LEAST_RUN_TOKENS = BLOCK_TOKENS
        engine["num_blocks"] *= 2 * len(layout.groups) - 1  # Holes have windows of their own.
        engine["num_blocks"] = max(engine["num_blocks"], 1 + blocks_of_longest(layout, MOST_TOKENS))
        connector["chunk_tokens"] *= layout.unit_tokens
        options = offloading(
            layout, hole_reuse=True, blending=True, segment_separator=[SEPARATOR], **connector
        )
        self.engine = BlendingEngine(layout, EngineOptions(offloading=options, **engine), script)
        assert self.engine.parts.blending is not None
        self.engine.side._cost = NoEstimates()  # type: ignore[assignment]
        self.watch = Watch(self.engine)
        self.contents = ExactContents(self.engine, MOST_TOKENS)
        self.num_steps = 0
        self.num_own_plans = 0
        # Who waits for the load of another waits for a number of steps, however fast they are.
        self.engine.parts.loads._clock = lambda: self.num_steps * STEP_S
        self.is_well = True
        for document in stored:
            self.store(document, salt=None, has_sink=False, priority=0, are_lost=False)
        for _ in range(40):
            self._step()
        self.ask([4, 0, 1, 3], num_own=9, max_tokens=3, salt=None, named=True, priority=0)
        self.ask([1, 4, 0], num_own=3, max_tokens=3, salt=None, named=False, priority=0)

    # Requests.

    @rule(
        document=st.integers(0, len(DOCUMENTS) - 1),
        salt=SALTS,
        has_sink=st.booleans(),
        priority=st.integers(0, 2),
        are_lost=st.booleans(),
    )
    def store(
        self, document: int, salt: str | None, has_sink: bool, priority: int, are_lost: bool
    ) -> None:
        """A segment is to be stored, once more perhaps."""
        if are_lost:
            self._evict(1.0, random.Random(0))
        token_ids = DOCUMENTS[document]
        prompt = (*self.engine.sink_ids, *token_ids) if has_sink else token_ids
        plan = self._add(prompt, 1, priority, salt, {STORE_KEY: True})
        if plan is not None:
            self.contents.expect_segment(token_ids, plan)

    @rule(
        documents=PROMPTS,
        num_own=st.integers(0, 20),
        max_tokens=st.integers(1, MOST_NEW_TOKENS),
        salt=SALTS,
        named=st.booleans(),
        priority=st.integers(0, 2),
    )
    def ask(
        self,
        documents: list[int],
        num_own: int,
        max_tokens: int,
        salt: str | None,
        named: bool,
        priority: int,
    ) -> None:
        """A prompt with segments, that it names or that separators show."""
        prompt, segments = self._prompt(documents, num_own, has_separators=not named)
        self._add(prompt, max_tokens, priority, salt, {SEGMENTS_KEY: segments} if named else {})

    @rule(
        documents=PROMPTS,
        num_own=st.integers(0, 20),
        max_tokens=st.integers(1, MOST_NEW_TOKENS),
        has_separators=st.booleans(),
        priority=st.integers(0, 2),
    )
    def ask_plainly(
        self,
        documents: list[int],
        num_own: int,
        max_tokens: int,
        has_separators: bool,
        priority: int,
    ) -> None:
        """The same prompts from somebody who wants them computed."""
        prompt, _ = self._prompt(documents, num_own, has_separators)
        self._add(prompt, max_tokens, priority, None, {SEGMENTS_KEY: []})

    @rule(documents=PROMPTS, wrong=st.sampled_from(WRONG_SEGMENTS))
    def ask_wrongly(self, documents: list[int], wrong: Any) -> None:
        prompt, _ = self._prompt(documents, 5, has_separators=True)
        self._add(prompt, 2, 0, None, {SEGMENTS_KEY: wrong})

    @rule(
        number=st.integers(0, 1 << 16),
        num_own=st.integers(0, 20),
        max_tokens=st.integers(1, MOST_NEW_TOKENS),
        is_plain=st.booleans(),
        is_lost_on_device=st.booleans(),
    )
    def go_on_asking(
        self, number: int, num_own: int, max_tokens: int, is_plain: bool, is_lost_on_device: bool
    ) -> None:
        """The next turn of a chat: what was answered is part of its prompt."""
        if is_lost_on_device:
            self._evict_on_device(1.0, random.Random(number))
        before = list(self.plans.values())[number % len(self.plans)]
        args = dict(before.extra_args)
        if STORE_KEY in args or isinstance(args.get(SEGMENTS_KEY), str):
            args = {}
        answer = self.watch.outputs.get(before.request_id, [])
        own = tokens(random.Random(self.num_plans), num_own + 1)
        prompt = (*before.prompt, *answer, *own)[:MOST_PROMPT_TOKENS]
        self._add(
            prompt, max_tokens, 0, before.cache_salt, {SEGMENTS_KEY: []} if is_plain else args
        )

    @precondition(lambda self: self._live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = self._live()
        parked = [r for r in live if r.status is RequestStatus.WAITING_FOR_REMOTE_KVS]
        request = data.draw(st.sampled_from(parked or live))
        counts["aborts of parked requests"] += request in parked
        counts["aborts of blended requests"] += request.request_id in self.engine.reused
        self.engine.abort(request.request_id)

    # Steps.

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(left=st.integers(0, 2))
    def step_without_room(self, left: int) -> None:
        """Somebody else has the free blocks of the pool: what runs is preempted."""
        self._step(self._take_free_blocks(left))

    @rule()
    def use_free_blocks(self) -> None:
        """Somebody else has had them for a while."""
        self.engine.block_pool.free_blocks(self._take_free_blocks(0))

    # What is lost.

    @rule(
        restarts_running=st.booleans(),
        resets_connector=st.integers(0, 9).map(lambda number: number == 9),
    )
    def reset(self, restarts_running: bool, resets_connector: bool) -> None:
        if not restarts_running or not self._can_restart_running():
            self.engine.reset(False, resets_connector)
            return
        counts["resets of blended requests"] += bool(self.engine.reused)
        assert self.engine.reset(True, resets_connector)

    # The end.

    def _end(self) -> None:
        engine = self.engine
        for _ in range(MOST_STEPS_TO_THE_END):
            if not engine.has_work():
                break
            self._step()
        left = {r.request_id: r.status.name for r in engine.scheduler.requests.values()}
        assert not engine.has_work(), f"after {MOST_STEPS_TO_THE_END} steps, left are {left}"
        self.contents.check(is_end=True)
        check_nothing_is_left(engine)
        self._check_nothing_is_remembered(set())
        assert not engine.parts.jobs
        learning = engine.side.learning
        assert learning is None or not learning._begun
        assert self.watch.outputs.keys() <= self.plans.keys(), "nobody has asked for these answers"
        assert not engine.parts.blending.stores._num_expected_blocks
        assert not engine.runner._states, "workers remember requests or rows that have ended"
        windows = engine.side._holes.windows
        assert windows is None or not (len(windows) or windows._leaving)
        for request_id in self.plans:
            self._check_output(request_id)
        counters = engine.side.counters
        counts["stored segments"] += counters.blending.stored_segments
        counts["learned segments"] += counters.blending.learned_segments
        for drop, number in counters.blending.learning_drops.items():
            counts[f"not learned: {drop.value}"] += number
        counts["reused tokens"] += counters.blending.reused_tokens
        counts["failed loads"] += counters.tier.failed_loads
        counts["preemptions"] += sum(r.num_preemptions for r in engine.requests.values())
        counts["preemptions of blended requests"] += sum(
            engine.requests[request_id].num_preemptions for request_id in self.watch.was_blended
        )
        for refusal, number in counters.blending.refusals.items():
            counts[f"refused: {refusal.value}"] += number
        counts.update(self.contents.counts)
        counts["examples"] += 1
        counts["examples with reused tokens"] += bool(counters.blending.reused_tokens)

    def _check_output(self, request_id: str) -> None:
        """What a request is answered that has reused nothing, is the same however it is served."""
        output = self.watch.outputs.get(request_id, [])
        is_whole = self.watch.ended.get(request_id) in ("stop", "length")
        request = self.engine.requests[request_id]
        assert is_whole or request.status is RequestStatus.FINISHED_ABORTED
        counts["whole outputs"] += is_whole
        if request_id in self.watch.was_blended:
            return
        expected = TokenStream(request.prompt_token_ids, self.plans[request_id].seed).generate(
            request.max_tokens
        )
        assert output == (expected if is_whole else expected[: len(output)])

    def _check_nothing_is_remembered(self, live: set[str]) -> None:
        blending = self.engine.parts.blending
        requests, stores, learning = blending.requests, blending.stores, blending.learning
        remembered = (
            *(requests._known, requests._blended),
            *(requests._answered, requests._refused),
        )
        own_ids = learning.request_ids if learning is not None else ()
        of_stores = stores._wanted, stores._segment_ids, stores._stored_tokens, own_ids
        for books in (*remembered, *of_stores):
            assert set(books) <= live, f"requests that are gone are remembered: {books}"

    def _step(self, taken: list[Any] | None = None) -> None:
        engine = self.engine
        self.is_well = False
        if engine.has_work():
            engine.step()
        for plan in engine.own_plans[self.num_own_plans :]:
            self.contents.expect(plan)
            self.contents.expect_segment(plan.prompt[len(engine.sink_ids) :], plan)
        self.num_own_plans = len(engine.own_plans)
        if taken is not None:
            engine.block_pool.free_blocks(taken)
        check_blocks(engine)
        if self.watch.surprises:
            raise self.watch.surprises[0]
        self.contents.check()
        self.watch.check_hits()
        self._check_nothing_is_remembered(set(engine.scheduler.requests))
        self.is_well = True
        self.num_steps += 1

    def _prompt(
        self, documents: list[int], num_own: int, has_separators: bool
    ) -> tuple[tuple[int, ...], list[list[int]]]:
        """A prompt, and where its documents are in it. It ends with tokens of its own."""
        own = tokens(random.Random(self.num_plans), num_own + 1)
        prompt: list[int] = []
        segments: list[list[int]] = []
        for document in documents:
            token_ids = DOCUMENTS[document]
            if len(prompt) + len(token_ids) + len(own) + 2 > MOST_PROMPT_TOKENS:
                break
            prompt += [SEPARATOR] if has_separators else []
            segments.append([len(prompt), len(prompt) + len(token_ids)])
            prompt += token_ids
        prompt += [SEPARATOR] if has_separators else []
        return (*prompt, *own), segments

    def _add(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        priority: int,
        salt: str | None,
        extra_args: dict[str, Any],
    ) -> RequestPlan | None:
        if len(self._live()) >= MOST_LIVE_REQUESTS:
            return None
        plan = RequestPlan(
            request_id=f"request-{self.num_plans}",
            arrival_step=self.num_plans,
            prompt=prompt,
            max_tokens=max_tokens,
            priority=priority,
            cache_salt=salt,
            extra_args=tuple(extra_args.items()),
        )
        self.num_plans += 1
        self.plans[plan.request_id] = plan
        self.engine.add_request(plan)
        self.contents.expect(plan)
        return plan

    def _take_free_blocks(self, left: int) -> list[Any]:
        pool = self.engine.block_pool
        taken: list[Any] = pool.get_new_blocks(max(0, pool.get_num_free_blocks() - left))
        for worker in self.engine.workers:
            worker.contents.overwrite([block.block_id for block in taken])
        return taken


@pytest.fixture(scope="module", autouse=True)
def patches_installed() -> Iterator[None]:
    with offloading_installed():
        yield


def test_random_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "LEAST_RUN_TOKENS", loads.LEAST_RUN_TOKENS)  # and back again
    counts.clear()
    for of_kind in LAYOUTS.values():
        BlendMachine.layouts = of_kind
        machine = BlendMachine.TestCase
        machine.settings = settings(
            max_examples=NUM_EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        machine().runTest()
    assert counts["reused tokens"] and counts["marked answers"] and counts["learned segments"]
    assert counts["stores that were answered"]
    assert counts["cached blocks"] and counts["segments"] and counts["rows"] and counts["tails"]
    if not IS_SAMPLE:  # Half as many examples may well miss one of these.
        assert counts["aborts of blended requests"] and counts["failed loads"]
        assert counts["preemptions"] and counts["resets of blended requests"]
