# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Random lives of requests on vLLM's real scheduler and block manager, with holes and segments.

Requests come, come back, are aborted and preempted in any order. Meanwhile the tier and the device
lose entries, transfers are slow or fail, requests crowd the pool, caches are reset and the
scheduler is paused. If segments are reused, requests also store and reuse them in any order. The
same prompts also come without segments.
After each step, the machine checks the KV that attention has read, the KV that any request could
find by a hash of tokens, and the reference counts of blocks. At the end, requests must have their
own outputs, and nothing may be left.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.connector.blending_engine import BlendingEngine, Reused
from support.connector.exact_contents import ExactContents
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
from support.connector.router_index import RouterIndex, last_bytes
from support.connector.scripted_transfers import TransferScript
from support.sample import IS_LONG, sampled
from support.scheduler import layouts
from support.scheduler.layouts import Attention
from support.scheduler.options import Drafter, EngineOptions
from support.scheduler.token_stream import TokenStream
from support.scheduler.workload import RequestPlan
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request, RequestStatus

from vllm_ascend_kvext.connector.scheduler import loads
from vllm_ascend_kvext.connector.scheduler.transfer_cost import TransferCost
from vllm_ascend_kvext.segments.prompt_segments import SEGMENTS_KEY, STORE_KEY
from vllm_ascend_kvext.segments.scheduler import blended_requests, make_segments, segment_contexts
from vllm_ascend_kvext.segments.scheduler.segment_store import StoredTokens
from vllm_ascend_kvext.segments.scheduler.segments_side import segments_of
from vllm_ascend_kvext.store import prefix
from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind
from vllm_ascend_kvext.store.tier import HostTier
from vllm_ascend_kvext.transfer.errors import BackendError

ONE_GROUP = (FULL, paged(layouts.FULL, ROWS))
LAYOUTS = {
    False: (ONE_GROUP, (GPT_OSS, GEMMA, DEEPSEEK_V4_LIKE)),
    True: (ONE_GROUP, (GPT_OSS, GEMMA, paged(layouts.FULL_WINDOW, ROWS))),
}
"""The layouts of each test, by whether segments are reused: first those of one group, then others.

Some move whole pages, and some move rows.
"""

BLOCK_TOKENS = FULL.groups[0].block_tokens
MAX_PROMPT_TOKENS = 32 * BLOCK_TOKENS
MAX_NEW_TOKENS = 8
MAX_TOKENS = MAX_PROMPT_TOKENS + MAX_NEW_TOKENS
MAX_STEPS_TO_THE_END = 1500
STEP_S = 0.2
MAX_LIVE_REQUESTS = 12
MAX_ROUNDS = 3
"""The maximum number of rounds of random examples. One round may miss a rare event."""

NUM_EXAMPLES = sampled(35)
"""The number of examples of each kind of layout."""

SEPARATOR = 62
"""The separator, which is never sampled, and is in no document."""

_rng = random.Random("documents")
DOCUMENTS = [tuple(tokens(_rng, length)) for length in (40, 53, 32, 37, 120, 16)]
DOCUMENTS.append((*DOCUMENTS[1][:32], *tokens(_rng, 9)))
"""What prompts are made of. Some lengths are multiples of the block size.

The last document begins as another one does.
"""

ENGINES = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([1, 8, 40, 120]).map(
            lambda n: MAX_TOKENS // BLOCK_TOKENS + 2 + n
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
        "chunk_tokens": st.sampled_from([2, 1, 4, 8]),  # The number is in units of the layout.
        "store_policy": st.sampled_from(["all", "all", "all", "second_touch"]),
    }
)
BLENDING = st.fixed_dictionaries(
    {
        "segments": st.fixed_dictionaries(
            {
                "separator": st.just([SEPARATOR]),
                "head_tokens": st.sampled_from([4, 0, 1, 8]),
                "learn": st.sampled_from([False, True]),
                "sink": st.sampled_from([None, [5], [], [5, 9, 2, 5, 11, 3, 8, 1, 40]]),
                "context": st.sampled_from([True, True, False]),
            }
        ),
        "store_policy": st.sampled_from(["all", "all", "second_touch", "never"]),
        "host_memory_gib": st.sampled_from([1 << 22, 1 << 22, 1 << 14]).map(
            lambda n: n / (1 << 30)
        ),
    }
)
CHOSEN = st.fixed_dictionaries(
    {"min_tokens": st.sampled_from([1, 6, 20])}, optional={"min_head_tokens": st.just(0)}
)
"""Options of blending. ``min_head_tokens`` is the minimum length of a head.

Users cannot choose it. With windows, the first tokens of a segment read tokens before the segment.
With a minimum of 0, such tokens may be reused.
"""

SCRIPTS = st.builds(
    TransferScript,
    seed=st.integers(0, 9),
    failing_stores=st.sampled_from([0.0, 0.0, 0.2]),
    failing_loads=st.sampled_from([0.0, 0.3]),
    max_per_step=st.sampled_from([None, None, 1, 2]),
    steps_per_transfer=st.sampled_from([None, None, 3, 20]),
)
LOST_SHARES = st.sampled_from([0.3, 0.15, 0.6, 0.0])
"""The shares of the tier's entries that are lost."""

SALTS = st.sampled_from([None, None, None, "salt"])
PROMPTS = st.lists(st.integers(0, len(DOCUMENTS) - 1), min_size=1, max_size=5)
NUM_OWN = st.integers(0, 20)
SEEDS = st.integers(0, 99)
NEW_TOKENS = st.integers(1, MAX_NEW_TOKENS)
ASKED = {"max_tokens": NEW_TOKENS, "salt": SALTS, "priority": st.integers(0, 2)}
BEGINNING = tuple(tokens(random.Random("beginning"), 7))
"""The common beginning of many prompts."""
PLAIN: dict[str, Any] = {SEGMENTS_KEY: []}
"""The arguments of a request that wants all of its prompt computed."""

WRONG_SEGMENTS = ([[0, 4], [3, 9]], [[0, 1 << 20]], [[-2, 5]], [[7, 3]], "no pairs", [[1]])

counts: Counter[str] = Counter()
"""The events of all examples of a test."""


class Watch:
    """What steps compute, and what the engine answers.

    Args:
        engine: The engine whose steps are watched.
    """

    def __init__(self, engine: BlendingEngine) -> None:
        self._engine = engine
        self._execute = engine.runner.execute
        self._update = engine.scheduler.update_from_output
        self._computed: dict[str, list[tuple[int, int]]] = {}
        self.began_again: set[str] = set()
        """The requests for which a part has to be computed more than once."""
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.was_blended: set[str] = set()
        self._answered: dict[str, Reused] = {}  # What was reused at the last token.
        # What was reused at the tokens that steps under way sample, by the id of the step.
        self._sampling: dict[int, dict[str, Reused]] = {}
        engine.scheduler.connector_prefix_cache_stats = PrefixCacheStats()
        engine.runner.execute = self.execute
        engine.scheduler.update_from_output = self.update
        self.surprises: list[Exception] = []
        for worker in engine.workers:
            runner = worker.side._runner
            runner.run = partial(self._run_job, runner.run)
        stores = engine.side._stores
        stores.give_way = partial(self._give_way, stores.give_way)

    def _run_job(self, run: Any, job: Any, recorded: Any) -> Any:
        """Let a worker execute a job. The job fails where the script says so."""
        clock = self._engine.clock
        begun_s = clock()
        try:
            moved = run(job, recorded)
            return moved._replace(seconds=clock() - begun_s)
        except BackendError:
            raise
        except Exception as error:
            self.surprises.append(error)
            raise

    def _give_way(self, give_way: Any, to_running: bool = False) -> bool:
        has_given: bool = give_way(to_running)
        counts["stores that gave way"] += has_given
        return has_given

    def execute(self, scheduled: Any) -> Any:
        """Execute a step."""
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
        self._check_common_prefix(scheduled)
        for row_id, number in num_tokens.items():
            request_id = row_id
            if row_id not in self._engine.requests:
                request_id = row_id.rpartition("-hole-")[0]
                parked = self._engine.scheduler.requests[request_id]
                assert parked.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            run = (starts[row_id], starts[row_id] + number)
            self._computed.setdefault(request_id, []).append(run)
        self.was_blended |= self._engine.reused.keys()
        self._sampling[id(scheduled)] = {
            request_id: reused
            for request_id in num_tokens
            if (reused := self._engine.reused.get(request_id)) and self._samples(request_id)
        }
        output = self._execute(scheduled)
        metadata = output.kv_connector_output.kv_connector_worker_meta
        if metadata is not None:
            self.began_again |= metadata.results.failed_loads
        return output

    def _check_common_prefix(self, scheduled: Any) -> None:
        """Cascade attention reads these blocks once, for all rows of the step."""
        row_ids = scheduled.num_scheduled_tokens.keys()
        requests = self._engine.scheduler.running
        counted = zip(self._engine.managers, scheduled.num_common_prefix_blocks, strict=True)
        for manager, number in counted:
            tables = [manager.req_to_blocks[each.request_id][:number] for each in requests]
            assert all(table == tables[0] for table in tables), "requests begin with other blocks"
            assert not number or row_ids <= self._engine.requests.keys(), (
                "the step has a common prefix, although one of its rows is a hole"
            )

    def _samples(self, request_id: str) -> bool:
        """Whether the step yields a token of the answer. The step's tokens count as computed."""
        request = self._engine.scheduler.requests[request_id]
        return request.num_computed_tokens >= request.num_tokens

    def update(self, scheduled: Any, from_model: Any) -> Any:
        """Process the output of a step."""
        results = self._update(scheduled, from_model)
        sampled = self._sampling.pop(id(scheduled))
        for output in (output for of_client in results.values() for output in of_client.outputs):
            # A reset drops steps that are under way.
            if output.new_token_ids and output.request_id in sampled:
                self._answered[output.request_id] = sampled[output.request_id]
            self.outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.ended[output.request_id] = str(output.finish_reason)
                self._check_mark(output.request_id, output.kv_transfer_params)
            if output.prefill_stats is not None:
                self._check_prefill(output.request_id, output.prefill_stats)
        return results

    def check_hits(self) -> None:
        """Loaded tokens are counted as found, and no others are."""
        stats = self._engine.scheduler.connector_prefix_cache_stats
        assert stats.hits + stats.preempted_hits == self._engine.num_loaded_tokens

    def _check_prefill(self, request_id: str, stats: Any) -> None:
        """Each token of the prompt was found, or was computed once."""
        request = self._engine.requests[request_id]
        num_tokens = stats.num_prompt_tokens
        assert num_tokens == request.num_prompt_tokens
        assert min(stats.num_external_cached_tokens, stats.num_cached_tokens) >= 0, stats
        assert stats.num_cached_tokens + stats.num_computed_tokens == num_tokens, stats
        if request_id in self.began_again or request.num_preemptions:
            return
        runs = [(first, min(end, num_tokens)) for first, end in self._computed[request_id]]
        computed = [token for first, end in runs for token in range(first, end)]
        assert len(computed) == len(set(computed)), f"{request_id} computes tokens twice: {runs}"
        assert stats.num_cached_tokens + len(computed) == num_tokens, (
            f"{request_id}: expected {num_tokens} tokens, found {stats.num_cached_tokens} cached "
            f"and {len(computed)} computed: {runs}"
        )
        counts["checked prefills"] += 1

    def _check_mark(self, request_id: str, mark: dict[str, int] | None) -> None:
        request = self._engine.requests[request_id]
        if STORE_KEY in (request.sampling_params.extra_args or {}):
            assert mark is not None and mark.keys() == {"kvext_stored_tokens"}
            num_tokens = request.num_prompt_tokens - len(self._engine.sink_ids)
            assert mark["kvext_stored_tokens"] in (0, num_tokens)
            counts["stores that were answered"] += bool(mark["kvext_stored_tokens"])
            return
        reused = self._engine.reused.get(request_id) or self._answered.get(request_id)
        if reused is None:
            assert mark is None
            return
        num_tokens = request.num_prompt_tokens
        assert mark == {
            "kvext_exact_tokens": reused.exact_tokens,
            "kvext_reused_tokens": reused.num_tokens,
            "kvext_recomputed_tokens": num_tokens - reused.exact_tokens - reused.num_tokens,
        }
        counts["marked answers"] += 1


class Router:
    """A follower of KV events. From them, it knows what can be found in host memory."""

    def __init__(self, engine: BlendingEngine) -> None:
        self._engine = engine
        self._step = engine.step
        self._index = RouterIndex()
        engine.step = self.step

    def step(self) -> Any:
        step = self._step()
        self._index.read(self._engine.last_events)
        return step

    def check(self) -> None:
        """Check that blocks are there, and that what is not known lacks the block before it."""
        self._index.read(self._engine.scheduler.connector.take_events())
        assert not self._index.refusals("CPU")
        entries = [
            entry
            for entry in self._engine.entries
            if entry.state is EntryState.STORED
            and entry.piece.kind is Kind.ROWS
            and not isinstance(entry.row_map, StoredTokens)
        ]
        stored = {last_bytes(key) for entry in entries for key in entry.keys}
        unit_tokens = self._engine.tier.geometry.unit_tokens
        for group, described in enumerate(self._engine.layout.groups):
            known = self._index.hashes("CPU", group)
            counts["followed blocks"] += len(known)
            assert known <= stored
            if described.attention not in (Attention.FULL, Attention.MLA):
                assert not known
            elif described.block_tokens == unit_tokens and self._engine.options.events:
                for entry in entries:
                    before = (entry.key_before, *entry.keys)
                    for parent, key in pairwise(before):
                        is_found = parent is None or last_bytes(parent) in known
                        assert (last_bytes(key) in known) or not is_found, entry


class RequestMachine(RuleBasedStateMachine):
    """One engine, and its users.

    Attributes:
        is_blending: Whether segments are reused.
        layouts: The engine has one of these layouts.
    """

    is_blending: bool
    layouts: tuple[PagedLayout, ...]

    def __init__(self) -> None:
        super().__init__()
        self.engine: Any = None
        self.plans: dict[str, RequestPlan] = {}
        self.num_steps = 0
        self.is_well = False  # True if no fault was found.

    @initialize(data=st.data(), engine=ENGINES, connector=CONNECTORS, script=SCRIPTS)
    def start(
        self,
        data: st.DataObject,
        engine: dict[str, Any],
        connector: dict[str, Any],
        script: TransferScript,
    ) -> None:
        layout = data.draw(st.sampled_from(self.layouts))
        if self.is_blending:
            connector |= data.draw(BLENDING)
        if engine["is_async"]:
            engine["drafter"] = None
        engine["max_num_batched_tokens"] = max(
            engine["max_num_batched_tokens"], 2 * engine["max_num_seqs"]
        )
        loads.MIN_RUN_TOKENS = data.draw(st.sampled_from([1, 1, 3])) * BLOCK_TOKENS
        engine["num_blocks"] *= 2 * len(layout.groups) - 1  # Holes have windows of their own.
        engine["num_blocks"] = max(engine["num_blocks"], 1 + blocks_of_longest(layout))
        connector["chunk_tokens"] *= layout.unit_tokens
        options = offloading(layout, **connector)
        num_contents = None
        if engine["num_workers"] > 1:  # Workers with equal KV share host memory.
            num_contents = data.draw(st.sampled_from([None, [1] * len(layout.groups)]))
        self.engine = BlendingEngine(
            layout, EngineOptions(offloading=options, **engine), script, num_contents
        )
        self.steps_per_store = script.steps_per_transfer or 1
        assert self.engine.side.computes_holes
        assert (segments_of(self.engine.side) is not None) is self.is_blending
        if self.is_blending:
            self.engine.choose(**data.draw(CHOSEN))
        self.watch, self.router = Watch(self.engine), Router(self.engine)
        self.contents = None
        if {group.block_tokens for group in layout.groups} == {self.engine.hash_block_size}:
            self.contents = ExactContents(self.engine, MAX_TOKENS)
        self.num_own_plans = 0
        # If a request waits for another's load, it waits for some steps, however fast steps are.
        self.engine.clock = lambda: self.num_steps * STEP_S
        self.is_well = True
        if self.is_blending:
            self._begin_with_segments(data)
        else:
            self._begin_with_chats(data.draw(LOST_SHARES), data.draw(SEEDS))

    def _begin_with_segments(self, data: st.DataObject) -> None:
        numbers = st.integers(0, len(DOCUMENTS) - 1)
        stored = st.lists(numbers, min_size=3, max_size=len(DOCUMENTS), unique=True)
        beginning = data.draw(st.sampled_from([BEGINNING, ()]))
        for documents in ([5, 0, 1], [1, 5, 0]):
            self.ask(documents, beginning=beginning)
        for document in data.draw(stored):
            self.store(document)
        self.go_on(40)
        self.ask([5, 0, 1, 3], beginning=beginning)
        self.ask([1, 5, 0], named=False)
        self.go_on(40)
        self.evict_ends(0.5, 0)
        self.ask([0, 5, 3], beginning=beginning)

    def _begin_with_chats(self, lost_share: float, seed: int) -> None:
        for documents in ([0, 1, 2, 3], [2, 4, 1], [4, 0, 3, 2], [1, 3, 4]):
            self.ask(documents)
        self.go_on(60)
        self.come_back([0, 1, 2, 3, 0], 3, lost_share, is_lost_on_device=True, seed=seed)

    # Requests.

    @rule(
        documents=PROMPTS,
        num_own=NUM_OWN,
        named=st.booleans(),
        is_plain=st.sampled_from([False, False, True]),
        beginning=st.sampled_from([(), BEGINNING, BEGINNING[:-2]]),
        **ASKED,
    )
    def ask(
        self,
        documents: list[int],
        num_own: int = 3,
        named: bool = True,
        is_plain: bool = False,
        beginning: tuple[int, ...] = (),
        **asked: Any,
    ) -> None:
        """A prompt of documents that other prompts have, too. Some prompts have the same order.

        The documents are segments that the prompt names, or that separators mark. For a plain
        prompt, all tokens are computed.
        """
        prompt, segments = self._prompt(documents, num_own, not named, beginning)
        self._add(prompt, PLAIN if is_plain else {SEGMENTS_KEY: segments} if named else {}, **asked)

    @rule(
        numbers=st.lists(st.integers(0, 1 << 16), min_size=1, max_size=5),
        num_own=NUM_OWN,
        lost_share=LOST_SHARES,
        is_lost_on_device=st.sampled_from([True, True, False]),
        seed=SEEDS,
        max_tokens=NEW_TOKENS,
        is_plain=st.booleans(),
    )
    def come_back(
        self,
        numbers: list[int],
        num_own: int,
        lost_share: float,
        is_lost_on_device: bool,
        seed: int,
        max_tokens: int = 4,
        is_plain: bool = False,
    ) -> None:
        """Chats continue. The tier has lost some of their KV, and the device all of it."""
        self.evict(lost_share, seed)
        self.evict_ends(lost_share, seed)
        if is_lost_on_device:
            self._evict_on_device(1.0, random.Random(seed))
        plans = list(self.plans.values())
        for number in numbers if plans else ():
            before = plans[number % len(plans)]
            args = dict(before.extra_args)
            if is_plain:
                args = PLAIN
            elif STORE_KEY in args or isinstance(args.get(SEGMENTS_KEY), str):
                args = {}
            own = tokens(random.Random(len(self.plans)), num_own + 1)
            prompt = [*before.prompt, *self.watch.outputs.get(before.request_id, ())]
            prompt = [*prompt[: MAX_PROMPT_TOKENS - len(own)], *own]
            self._add(prompt, args, max_tokens, before.cache_salt)

    @rule(num_requests=st.integers(2, 5), max_tokens=NEW_TOKENS)
    def crowd(self, num_requests: int, max_tokens: int) -> None:
        """Long prompts that share nothing. Some of them have to wait for blocks."""
        for _ in range(num_requests):
            rng = random.Random(f"crowd/{len(self.plans)}")
            prompt = tokens(rng, rng.randrange(MAX_PROMPT_TOKENS // 2, MAX_PROMPT_TOKENS))
            self._add(prompt, PLAIN, max_tokens)

    @precondition(lambda self: self.is_blending)
    @rule(
        document=st.integers(0, len(DOCUMENTS) - 1),
        has_sink=st.booleans(),
        are_lost=st.booleans(),
        **ASKED,
    )
    def store(
        self, document: int, has_sink: bool = False, are_lost: bool = False, **asked: Any
    ) -> None:
        """Ask for a segment to be stored, perhaps for a second time."""
        if are_lost:
            self.evict(1.0, 0)
        token_ids = DOCUMENTS[document]
        prompt = (*self.engine.sink_ids, *token_ids) if has_sink else token_ids
        plan = self._add(prompt, {STORE_KEY: True}, **(asked | {"max_tokens": 1}))
        if plan is not None:
            self.contents.expect_segment(token_ids, plan)

    @precondition(lambda self: self.is_blending)
    @rule(documents=PROMPTS, wrong=st.sampled_from(WRONG_SEGMENTS))
    def ask_wrongly(self, documents: list[int], wrong: Any) -> None:
        prompt, _ = self._prompt(documents, 5, has_separators=True)
        self._add(prompt, {SEGMENTS_KEY: wrong})

    @precondition(lambda self: self._live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = self._live()
        parked = [r for r in live if r.status is RequestStatus.WAITING_FOR_REMOTE_KVS]
        request_id = data.draw(st.sampled_from(parked or live)).request_id
        counts["aborts of requests with holes"] += request_id in self.engine.held.hole_ids
        counts["aborts of blended requests"] += request_id in self.engine.reused
        self.engine.abort(request_id)

    # Steps.

    @rule(num_steps=st.sampled_from([1, 2, 3, 6, 12, 40]))
    def go_on(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    @rule()
    def go_on_once(self) -> None:
        self._step()

    @rule(state=st.sampled_from([PauseState.PAUSED_ALL, PauseState.PAUSED_NEW]))
    def step_paused(self, state: PauseState) -> None:
        self.engine.scheduler.set_pause_state(state)
        self.go_on(3)
        self.engine.scheduler.set_pause_state(PauseState.UNPAUSED)

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(left=st.integers(0, 2))
    def step_without_room(self, left: int) -> None:
        """Another request takes the free blocks of the pool, so a running request is preempted."""
        self._step(self._take_free_blocks(left))

    @rule()
    def use_free_blocks(self) -> None:
        """Other requests take the free blocks for a while."""
        self.engine.block_pool.free_blocks(self._take_free_blocks(0))

    # Losses.

    @rule(share=st.sampled_from([0.1, 0.3]), seed=SEEDS)
    def evict(self, share: float, seed: int) -> None:
        rng = random.Random(seed)
        self.engine.tier.evict(lambda entry: rng.random() < share)

    @rule(share=st.sampled_from([0.3, 1.0]), seed=SEEDS)
    def evict_ends(self, share: float, seed: int) -> None:
        """Entries lose their last cuts, as if other KV needed the bytes."""
        rng = random.Random(seed)
        tier = self.engine.tier
        for entry in self.engine.entries:
            if entry.can_be_trimmed and tier._is_end(entry) and rng.random() < share:
                own_priority = tier._order.priority(entry, tier._latest_use)
                tier._evict_end(entry, num_bytes=1, next_priority=own_priority)

    @precondition(lambda self: self.engine.options.caching)
    @rule(share=st.sampled_from([0.2, 1.0]), seed=SEEDS)
    def evict_on_device(self, share: float, seed: int) -> None:
        self._evict_on_device(share, random.Random(seed))

    @rule(
        restarts_running=st.booleans(),
        resets_connector=st.integers(0, 9).map(lambda number: number == 9),
    )
    def reset(self, restarts_running: bool, resets_connector: bool) -> None:
        restarts_running &= self._can_restart_running()
        if restarts_running:
            self.watch.began_again |= {request.request_id for request in self._live()}
            counts["resets of running requests"] += 1
            counts["resets of blended requests"] += bool(self.engine.reused)
        has_reset = self.engine.reset(restarts_running, resets_connector)
        if restarts_running:
            assert has_reset
            assert not self.engine.held.num_planned_stores, (
                "a store is still planned, but sleep takes its pages away before the next step"
            )
        if resets_connector:
            assert all(entry.state is not EntryState.STORED for entry in self.engine.entries)

    # The end.

    def teardown(self) -> None:
        if self.engine is None:
            return
        try:
            if self.is_well:
                self._end()
        finally:
            self.engine.shutdown()

    def _end(self) -> None:
        engine = self.engine
        num_steps = self._finish(lambda: bool(self._live())) + self._finish(engine.has_work)
        left = {r.request_id: r.status.name for r in engine.scheduler.requests.values()}
        assert not engine.has_work(), f"after {num_steps} steps, left are {left} and {engine.held}"
        check_nothing_is_left(engine)
        assert not engine.runner._states, "workers remember requests or rows that have ended"
        assert self.watch.outputs.keys() <= self.plans.keys(), "nobody has asked for these answers"
        for request_id in self.plans:
            self._check_output(request_id)
        if self.contents is not None:
            self.contents.check(is_end=True)
            counts.update(self.contents.counts)
        counters = engine.side.counters
        counts["hole tokens"] += counters.hole_tokens
        counts["failed loads"] += counters.tier.failed_loads
        counts["preemptions"] += sum(r.num_preemptions for r in engine.requests.values())
        if self.is_blending:
            counts["learned segments"] += engine.segments.counters.learned_segments
            counts["reused tokens"] += engine.segments.counters.reused_tokens

    def _finish(self, is_unfinished: Callable[[], bool]) -> int:
        """Step while something is unfinished. Returns the number of steps.

        Workers make one store after the other, however slow each of them is.
        """
        held = self.engine.held
        num_stores = held.num_stores + held.num_planned_stores
        max_steps = MAX_STEPS_TO_THE_END + self.steps_per_store * num_stores
        for num_steps in range(max_steps):
            if not is_unfinished():
                return num_steps
            self._step()
        return max_steps

    def _check_output(self, request_id: str) -> None:
        """A request without reuse gets the same answer, in whatever way it is served."""
        output = self.watch.outputs.get(request_id, [])
        is_whole = self.watch.ended.get(request_id) in ("stop", "length")
        request = self.engine.requests[request_id]
        assert is_whole or request.status is RequestStatus.FINISHED_ABORTED
        if request_id in self.watch.was_blended:
            return
        expected = TokenStream(request.prompt_token_ids, self.plans[request_id].seed).generate(
            request.max_tokens
        )
        assert output == (expected if is_whole else expected[: len(output)])

    # Parts that rules share.

    def _step(self, taken: list[Any] | None = None) -> None:
        engine = self.engine
        self.is_well = False
        if engine.has_work():
            engine.step()
        for number in range(self.num_own_plans, len(engine.own_plans)):
            plan = engine.own_plans[number]
            self.contents.expect(plan)
            self.contents.expect_segment(engine.own_segments[number], plan)
        self.num_own_plans = len(engine.own_plans)
        if taken is not None:
            engine.block_pool.free_blocks(taken)
        check_blocks(engine)
        if self.watch.surprises:
            raise self.watch.surprises[0]
        if self.contents is not None:
            self.contents.check()
        self.watch.check_hits()
        self.router.check()
        gone = engine.held.request_ids - engine.scheduler.requests.keys()
        assert not gone, f"requests that are gone are remembered: {gone}"
        self.is_well = True
        self.num_steps += 1

    def _prompt(
        self,
        documents: list[int],
        num_own: int,
        has_separators: bool,
        beginning: tuple[int, ...] = (),
    ) -> tuple[tuple[int, ...], list[list[int]]]:
        """A prompt that ends with tokens of its own, and the places of its documents."""
        own = tokens(random.Random(len(self.plans)), num_own + 1)
        prompt = [*beginning]
        segments: list[list[int]] = []
        for document in documents:
            token_ids = DOCUMENTS[document]
            if len(prompt) + len(token_ids) + len(own) + 2 > MAX_PROMPT_TOKENS:
                break
            prompt += [SEPARATOR] if has_separators else []
            segments.append([len(prompt), len(prompt) + len(token_ids)])
            prompt += token_ids
        prompt += [SEPARATOR] if has_separators else []
        return (*prompt, *own), segments

    def _add(
        self,
        prompt: Iterable[int],
        extra_args: dict[str, Any],
        max_tokens: int = 3,
        salt: str | None = None,
        priority: int = 0,
    ) -> RequestPlan | None:
        if len(self._live()) >= MAX_LIVE_REQUESTS:
            return None
        number = len(self.plans)
        plan = RequestPlan(
            request_id=f"request-{number}",
            arrival_step=number,
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            priority=priority,
            cache_salt=salt,
            extra_args=tuple(extra_args.items()),
        )
        self.plans[plan.request_id] = plan
        self.engine.add_request(plan)
        if self.contents is not None:
            self.contents.expect(plan)
        return plan

    def _take_free_blocks(self, left: int) -> list[Any]:
        pool = self.engine.block_pool
        taken: list[Any] = pool.get_new_blocks(max(0, pool.get_num_free_blocks() - left))
        for worker in self.engine.workers:
            worker.contents.overwrite([block.block_id for block in taken])
        return taken

    def _evict_on_device(self, share: float, rng: random.Random) -> None:
        pool = self.engine.block_pool
        cached = [block.block_id for block in pool.blocks if block.block_hash is not None]
        pool.evict_blocks({block_id for block_id in cached if rng.random() < share})

    def _live(self) -> list[Request]:
        return [r for r in self.engine.scheduler.requests.values() if not r.is_finished()]

    def _can_restart_running(self) -> bool:
        """Whether running requests may be restarted. They may not while a load writes to blocks."""
        scheduler = self.engine.scheduler
        loaded = scheduler.finished_recving_kv_req_ids | self.engine.held.loaded_hole_ids
        return all(
            request.request_id in loaded
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            else not request.is_finished()
            for request in scheduler.requests.values()
        )


def blocks_of_longest(layout: PagedLayout) -> int:
    """The blocks that the longest request needs to be admitted. vLLM counts all window blocks."""
    return sum(-(-MAX_TOKENS // group.block_tokens) + 2 for group in layout.groups)


@pytest.fixture(scope="module", autouse=True)
def patches_installed() -> Iterator[None]:
    # No step is measured, so the speed of the machine does not decide which KV is stored.
    with offloading_installed(), mock.patch.object(TransferCost, "note_step"):
        yield


@pytest.mark.parametrize("is_blending", [False, True], ids=["holes", "segments"])
def test_random_lives(is_blending: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_contexts, "NUM_DOCUMENTS", 2)
    monkeypatch.setattr(segment_contexts, "FEW_DOCUMENTS", 1)
    monkeypatch.setattr(segment_contexts, "NUM_PROMPTS", 2)
    monkeypatch.setattr(segment_contexts, "MIN_BEGINNING_TOKENS", 1)
    monkeypatch.setattr(make_segments, "MIN_REUSED_TOKENS", 1)
    monkeypatch.setattr(blended_requests, "_is_exact", counted_exact)
    monkeypatch.setattr(prefix, "MIN_CUT_TOKENS", 1)  # Prompts are short, so cuts are, too.
    monkeypatch.setattr(HostTier, "_trim", counted_trim)
    # Each example sets this number. This line makes monkeypatch restore it after the test.
    monkeypatch.setattr(loads, "MIN_RUN_TOKENS", loads.MIN_RUN_TOKENS)
    counts.clear()
    RequestMachine.is_blending = is_blending
    met = ["hole tokens", "checked prefills", "cached blocks", "rows", "tails", "followed blocks"]
    met += ["stores that gave way", "lost ends"]
    rare = ["aborts of requests with holes", "resets of running requests"]
    if is_blending:
        met += ["reused tokens", "marked answers", "learned segments", "segments"]
        met += ["stores that were answered", "segments behind a context", "segments without a head"]
        rare = ["aborts of blended requests", "resets of blended requests"]
    rare += ["failed loads", "preemptions"]
    if IS_LONG:
        met += rare
    for _ in range(MAX_ROUNDS):
        run_round(LAYOUTS[is_blending])
        missed = [name for name in met if not counts[name]]
        if not missed:
            return
    raise AssertionError(f"{missed} have not occurred: {counts}")


_trim = HostTier._trim


def counted_trim(tier: HostTier, entry: Entry, *how: Any) -> None:
    counts["lost ends"] += 1
    _trim(tier, entry, *how)


def counted_exact(*args: Any, is_exact: Callable[..., bool] = blended_requests._is_exact) -> bool:
    """Whether a segment was computed behind the text that is before it now. If so, count it."""
    found = is_exact(*args)
    counts["segments without a head"] += found
    return found


def run_round(layouts: Sequence[Sequence[PagedLayout]]) -> None:
    for RequestMachine.layouts in layouts:
        machine = RequestMachine.TestCase
        machine.settings = settings(
            max_examples=NUM_EXAMPLES,
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
        )
        machine().runTest()
