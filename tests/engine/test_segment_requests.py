# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Segments that clients store, or that are learned. The scheduler and the pages are vLLM's.

``test_request_machine`` checks in general what is computed, loaded, counted and answered.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from support.connector.blending_engine import BlendingEngine
from support.connector.engines import engine_of, fail_next
from support.connector.learning_engine import (
    HEAD_TOKENS,
    QUESTION,
    SINK,
    LearningEngine,
    learning_engine,
)
from support.connector.offload_workloads import offloading, tokens
from support.connector.paged_layouts import FULL, FULL_EAGLE, GEMMA, GPT_OSS, PagedLayout
from support.connector.scripted_transfers import TransferScript
from support.connector.simulated_segments import SimulatedMover
from support.scheduler.options import Drafter
from support.scheduler.token_stream import VOCAB_SIZE
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import RequestStatus

from vllm_ascend_kvext.connector.common.messages import WorkerOutput
from vllm_ascend_kvext.connector.common.scheduler_view import SchedulerView
from vllm_ascend_kvext.patches.connector import scheduler as patched_scheduler
from vllm_ascend_kvext.segments.counters import SegmentRefusal
from vllm_ascend_kvext.segments.keys.key_check import MIN_PAIRS, find_pairs
from vllm_ascend_kvext.segments.messages import SegmentOutput
from vllm_ascend_kvext.segments.prompt_segments import SEGMENTS_KEY, STORE_KEY
from vllm_ascend_kvext.segments.scheduler import segment_learning
from vllm_ascend_kvext.segments.scheduler.segment_learning import MAX_BEGUN_SEGMENTS
from vllm_ascend_kvext.segments.scheduler.segment_store import SegmentPrefix, StoredTokens
from vllm_ascend_kvext.segments.token_rows import SegmentRows
from vllm_ascend_kvext.store.counters import Refusal, Removal
from vllm_ascend_kvext.store.entries import Entry

pytestmark = pytest.mark.usefixtures("offloading_in_effect")

_rng = random.Random("two requests")
ONE, OTHER = tuple(tokens(_rng, 40)), tuple(tokens(_rng, 53))
LONG = tuple(tokens(_rng, 150))
LONGEST = tuple(tokens(_rng, 300))


@pytest.mark.parametrize("layout", [FULL, GPT_OSS], ids=["full", "windows"])
@pytest.mark.parametrize("is_async", [False, True], ids=["", "async"])
@pytest.mark.parametrize(("num_workers", "num_heads"), [(1, 0), (2, 1), (4, 2)])
def test_what_two_requests_have_had_is_reused_by_the_third(
    layout: PagedLayout, is_async: bool, num_workers: int, num_heads: int
) -> None:
    """Workers with the same heads share host memory."""
    num_contents = [num_heads] * len(layout.groups) if num_heads else None
    with learning_engine(
        layout, is_async=is_async, num_workers=num_workers, num_contents=num_contents
    ) as engine:
        is_shared = [worker.side.describe().sharing is not None for worker in engine.workers]
        assert is_shared == [bool(num_heads)] * num_workers
        # Otherwise a window covers all of such a short segment.
        engine.choose(min_head_tokens=0)
        engine.answer(ONE, OTHER)
        assert not engine.learned
        engine.answer(OTHER)
        assert engine.learned == [OTHER]
        assert engine.counts.learned_segments == engine.counts.stored_segments == 1
        assert engine.counts.reused_tokens == 0
        engine.answer(ONE, OTHER)
        assert engine.counts.reused_tokens == len(OTHER) - HEAD_TOKENS
        engine.answer(ONE, OTHER)
        assert engine.learned == [OTHER, ONE]
        reused_tokens = 3 * (len(OTHER) - HEAD_TOKENS) + 2 * (len(ONE) - HEAD_TOKENS)
        engine.answer(ONE, OTHER)
        assert engine.counts.reused_tokens == reused_tokens


@pytest.mark.parametrize(
    ("segments", "is_learned"),
    [
        ({"learn": None}, False),
        ({"learn": False, "separator": [62]}, False),
        ({"learn": None, "separator": [62]}, True),
    ],
    ids=["no separator", "refused", "separator"],
)
def test_with_separators_segments_are_learned_by_default(
    segments: dict[str, Any], is_learned: bool
) -> None:
    with learning_engine(segments=segments) as engine:
        for _ in range(3):
            engine.answer((62, *ONE, 62), extra_args={SEGMENTS_KEY: None})
        assert engine.learned == [ONE] * is_learned
        assert engine.counts.reused_tokens == (len(ONE) - HEAD_TOKENS) * is_learned


@pytest.mark.parametrize("sink", [SINK, tokens(random.Random("sink"), 50)], ids=["", "cached"])
def test_nothing_of_it_is_answered_or_counted_as_a_query(sink: list[int]) -> None:
    with learning_engine(segments={"sink": sink}) as engine:
        if sink is not SINK:  # The blocks of this sink are in the prefix cache then.
            engine.store(OTHER)
            engine.serve()
            del engine.answers[f"request-{engine.num_asked}"]
        engine.scheduler.connector_prefix_cache_stats = stats = PrefixCacheStats()
        ids = [engine.ask(ONE), engine.ask(ONE)]
        engine.serve()
        assert engine.counts.learned_segments == 1
        assert engine.answers.keys() == set(ids)
        num_tokens = sum(len(engine.requests[each].prompt_token_ids) for each in ids)
        assert (stats.requests, stats.queries) == (len(ids), num_tokens)


def test_a_segment_that_begins_like_the_sink_is_found() -> None:
    segment = (*SINK, *ONE)
    with learning_engine() as engine:
        for _ in range(3):
            engine.answer(QUESTION, segment)
        assert engine.learned == [segment]
        assert engine.counts.reused_tokens == len(segment) - HEAD_TOKENS


def test_what_would_not_be_reused_is_not_learned() -> None:
    with learning_engine() as engine:
        short = ONE[: HEAD_TOKENS + 7]
        for _ in range(3):
            engine.ask(QUESTION, short)
            engine.ask(ONE, adapter="adapter-1")
            engine.ask(ONE, extra_args={SEGMENTS_KEY: [[5, 4]]})
            engine.answer(ONE, extra_args={SEGMENTS_KEY: []})
        assert not engine.own_plans


def test_it_does_not_begin_while_a_request_waits() -> None:
    with learning_engine(max_num_seqs=1) as engine:
        for _ in range(4):
            engine.ask(ONE)
        engine.step_until(lambda: not engine.scheduler.waiting)
        assert not engine.own_plans
        engine.serve()
        assert engine.learned == [ONE]


def test_it_is_taken_back_where_a_request_has_to_wait_for_it() -> None:
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 32}
    with learning_engine(**options) as engine:
        engine.answer(LONG)
        engine.ask(LONG)
        engine.step_until(lambda: engine.own_ids)
        engine.ask(QUESTION, max_tokens=30)
        engine.ask(QUESTION, max_tokens=30)
        engine.step()
        assert not engine.own_ids
        engine.serve()
        assert engine.drops == 1
        assert engine.counts.learned_segments == 0
        engine.answer(LONG)
        assert len(engine.learned) == 1, "the segment was seen only once since then"
        engine.answer(LONG)
        assert engine.counts.learned_segments == 1


def test_no_request_is_preempted_for_it() -> None:
    """Upstream would preempt the request that was admitted last, whichever request needs blocks."""
    steps = {"max_num_batched_tokens": 32, "long_prefill_tokens": 16}
    with learning_engine(reserve_full_prompt=False, **steps) as engine:
        engine.begin_learning(LONGEST)
        client = engine.requests[engine.ask(QUESTION, max_tokens=30)]
        engine.step_until(lambda: client.num_output_tokens)
        assert len(engine.scheduler.running) == 2
        taken = engine.block_pool.get_new_blocks(engine.block_pool.get_num_free_blocks())
        for _ in range(4):
            BlendingEngine.step(engine)  # Blocks of another request do not belong to this request.
        engine.block_pool.free_blocks(taken)
        assert not engine.own_ids and not client.num_preemptions
        engine.serve()
        assert engine.drops == 1


@pytest.mark.parametrize("is_blended", [False, True], ids=["prompt", "segments"])
def test_it_is_taken_back_where_what_has_been_loaded_cannot_go_on(is_blended: bool) -> None:
    """When the client's request was admitted, the learning request left it some tokens of the step.

    Now a third request has taken them.
    """
    steps = {"max_num_batched_tokens": 32, "long_prefill_tokens": 16}
    plain = {SEGMENTS_KEY: []}
    with learning_engine(**steps) as engine:
        engine.store(ONE)
        engine.answer(LONG, extra_args=plain)
        engine.begin_learning(LONGEST)
        engine.block_pool.evict_blocks({block.block_id for block in engine.block_pool.blocks})
        if is_blended:
            engine.ask(QUESTION, ONE, QUESTION, max_tokens=1)
        else:
            engine.num_asked = 1  # The client has the same prompt.
            engine.ask(LONG, extra_args=plain, max_tokens=1)
            engine.num_asked = len(engine.requests)
        engine.ask(tokens(_rng, 200), extra_args=plain)
        engine.step()
        assert engine.own_ids
        for _ in range(3):
            engine.step()
        assert not engine.own_ids
        assert engine.drops == 1


SLOW_STORES = {"script": TransferScript(max_per_step=1), "connector": {"host_memory_gib": 1}}


def test_it_waits_for_the_stores_of_others() -> None:
    """Only this request waits.

    It is not taken back, so two more requests need not have the segment.
    """
    documents = [tuple(tokens(_rng, 150)) for _ in range(4)]
    with learning_engine(num_blocks=100, max_num_batched_tokens=512, **SLOW_STORES) as engine:
        engine.queue(*documents)
        engine.serve()
        assert engine.learned == documents
        assert engine.counts.learned_segments == len(documents) and not engine.drops


@pytest.mark.parametrize("comes_first", [False, True])
def test_clients_store_what_it_computes(comes_first: bool) -> None:
    """The stores do not wait for each other forever, although the pool has room for only one."""
    documents = [tuple(tokens(_rng, 150)) for _ in range(4)]
    with learning_engine(num_blocks=100, max_num_batched_tokens=64, **SLOW_STORES) as engine:
        if comes_first:
            engine.begin_learning(*documents[:2])
        else:
            engine.queue(*documents[:2])
        for document in documents:
            engine.store(document)
        engine.serve()
        store = engine.segments.store
        assert not any(store.is_missing(*store.prefixes(document, None)) for document in documents)
        assert not engine.counts.refusals[SegmentRefusal.ROOM]
        assert bool(engine.drops) is comes_first, (
            "learning must be given up only if a client waits for its blocks"
        )


def test_a_paused_scheduler_begins_nothing() -> None:
    with learning_engine() as engine:
        engine.answer(ONE)
        engine.ask(ONE)
        engine.step()
        engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        engine.serve()
        assert not engine.own_plans
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        engine.answer(QUESTION)
        assert engine.counts.learned_segments == 1


CANCELS: dict[str, Callable[[LearningEngine], Any]] = {
    "reset": lambda engine: engine.reset(reset_running_requests=False),
    "reset that restarts": lambda engine: engine.reset(reset_running_requests=True),
    "reset of the scheduler": lambda engine: engine.scheduler.reset_prefix_cache(),
    "abort": lambda engine: engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED),
}


@pytest.mark.parametrize("way", CANCELS)
@pytest.mark.parametrize("is_async", [False, True], ids=["", "async"])
def test_resets_and_an_abort_of_all_requests_cancel_it(way: str, is_async: bool) -> None:
    with learning_engine(max_num_batched_tokens=32, is_async=is_async) as engine:
        engine.show_twice(LONG, max_tokens=1)
        engine.step_until(lambda: engine.own_ids)
        assert CANCELS[way](engine) is not False
        assert not engine.own_ids
        engine.serve()
        assert engine.drops == 1


def test_a_reset_of_the_connector_forgets_what_was_seen() -> None:
    with learning_engine() as engine:
        engine.answer(ONE)
        engine.reset(reset_connector=True)
        engine.answer(ONE)
        assert not engine.own_plans


def stopping(engine: LearningEngine, shutdown_timeout: int) -> EngineCoreProc:
    """The engine core of a process that has been asked to stop."""
    core = EngineCoreProc.__new__(EngineCoreProc)
    core.scheduler = engine.scheduler
    core.vllm_config = SimpleNamespace(shutdown_timeout=shutdown_timeout)
    core.shutdown_state = EngineShutdownState.REQUESTED
    core.engines_running, core.batch_queue = False, engine._in_flight
    core._send_abort_outputs = lambda aborted: None
    return core


@pytest.mark.parametrize("shutdown_timeout", [0, 30], ids=["abort", "drain"])
@pytest.mark.parametrize("is_async", [False, True], ids=["", "async"])
def test_a_shutdown_does_not_wait_for_it(shutdown_timeout: int, is_async: bool) -> None:
    """In the remaining steps, no such request continues or begins: host memory ends, too."""
    with learning_engine(max_num_batched_tokens=32, is_async=is_async) as engine:
        engine.begin_learning(LONG, ONE, OTHER)
        client = engine.ask(QUESTION)
        core = stopping(engine, shutdown_timeout)
        core.shutdown_state = EngineShutdownState.RUNNING
        assert core._handle_shutdown() and engine.own_ids, (
            "the learning request was taken back before the shutdown"
        )
        core.shutdown_state = EngineShutdownState.REQUESTED
        num_own = len(engine.own_plans)
        for _ in range(50):
            if not core._handle_shutdown():
                break
            assert not engine.own_ids
            engine.step()
        assert not engine.has_work() and len(engine.own_plans) == num_own
        assert engine.drops == 3
        assert (client in engine.answers) is bool(shutdown_timeout)


def test_a_store_that_fails_is_not_tried_in_a_loop() -> None:
    with learning_engine(script=TransferScript(seed=1, failing_stores=1.0)) as engine:
        for _ in range(4):
            engine.answer(ONE)
        assert engine.learned == [ONE, ONE]
        assert engine.drops == 2
        assert engine.counts.learned_segments == 0


def test_where_it_does_not_fit_into_host_memory_no_client_is_refused() -> None:
    tiny = {"host_memory_gib": 2048 / (1 << 30)}
    with learning_engine(connector=tiny) as engine:
        for _ in range(2):
            engine.answer(LONG)
        assert engine.learned == [LONG]
        assert engine.drops == 1
        assert not engine.counts.refusals[SegmentRefusal.ROOM]


def test_by_priority_it_comes_last() -> None:
    with learning_engine(by_priority=True, caching=False) as engine:
        engine.ask(ONE, priority=1 << 40)
        engine.answer(ONE, priority=1 << 40)
        (plan,) = engine.own_plans
        assert plan.priority > 1 << 40


def test_engines_that_take_their_steps_together_learn_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def two_engines(**facts: Any) -> SchedulerView:
        return SchedulerView(**{**facts, "num_data_parallel": 2})

    monkeypatch.setattr(patched_scheduler, "SchedulerView", two_engines)
    with learning_engine() as engine:
        for _ in range(3):
            engine.answer(ONE)
        assert not engine.own_plans
    assert "segments: learn is off: the 2 data-parallel engines" in caplog.text


def test_where_keys_are_not_what_they_should_be_nothing_more_is_learned() -> None:
    with learning_engine() as engine:
        for document in (ONE, OTHER):
            engine.answer(document)
        engine.side.update_connector_output(
            WorkerOutput(extras=SegmentOutput(key_check_failure="keys of equal tokens differ")), ()
        )
        for document in (ONE, OTHER):
            engine.answer(document)
        assert not engine.own_plans


def test_a_reset_that_waits_for_stores_begins_nothing() -> None:
    """Queued segments begin in the first step of the next client's request."""
    with learning_engine(script=TransferScript(max_per_step=1)) as engine:
        documents = [ONE, OTHER, LONG]
        engine.show_twice(*documents)
        engine.step_until(lambda: len(engine.own_plans) == MAX_BEGUN_SEGMENTS)
        engine.step_until(lambda: not engine.scheduler.requests)
        assert engine.side.has_transfers and engine.segments.learning.has_queue
        assert engine.reset()
        assert len(engine.own_plans) == MAX_BEGUN_SEGMENTS
        engine.answer(QUESTION)
        assert sorted(engine.learned) == sorted(documents)


def test_it_is_not_learned_twice_nor_what_a_client_has_stored() -> None:
    with learning_engine() as engine:
        engine.answer(ONE, ONE)
        assert not engine.own_plans, "one request with the segment twice counted twice"
        engine.store(ONE)
        for _ in range(2):
            engine.answer(ONE)
        assert not engine.own_plans
        engine.queue(OTHER)
        engine.store(OTHER)
        engine.serve()
        for _ in range(3):
            engine.answer(OTHER)
        assert engine.learned in ([], [OTHER])


def test_a_segment_that_is_too_long_behind_the_sink_is_not_computed() -> None:
    with learning_engine() as engine:
        engine.segments.learning._max_model_len = len(SINK) + len(OTHER)
        engine.show_twice(ONE, OTHER)
        engine.serve()
        assert engine.learned == [ONE]
        assert engine.drops == 1


def test_no_more_are_remembered_or_queued_than_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_learning, "MAX_QUEUED_SEGMENTS", 1)
    with learning_engine() as engine:
        engine.queue(ONE, OTHER)
        engine.serve()
        assert engine.learned == [ONE] and engine.drops == 1
    monkeypatch.setattr(segment_learning, "MAX_SEEN_SEGMENTS", 1)
    with learning_engine() as engine:
        for document in (ONE, OTHER, ONE):
            engine.answer(document)
        assert not engine.own_plans, "the segment that was seen first was not forgotten"


# Documents with too few equal tokens to compare keys by them.

ALL_DIFFERENT = [tuple(random.Random(seed).sample(range(VOCAB_SIZE), 48)) for seed in range(10)]
FEW_ALIKE = (*ALL_DIFFERENT[0], *ALL_DIFFERENT[0][: MIN_PAIRS - 1])


def checks(engine: LearningEngine) -> list[tuple[int, ...]]:
    """The engine's own texts for comparing keys: those with enough pairs."""
    return [each for each in engine.learned if len(find_pairs(each)) >= MIN_PAIRS]


@pytest.fixture
def comparing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Workers compare only texts with pairs. The comparison fails if the list has an error."""
    wrong: list[str] = []

    def check_keys(mover: SimulatedMover, rows: Sequence[SegmentRows]) -> str | None:
        token_ids = [token_id for each in rows for token_id in each.token_ids]
        if len(find_pairs(token_ids)) < MIN_PAIRS:
            return None
        return "".join(wrong)

    monkeypatch.setattr(SimulatedMover, "check_keys", check_keys)
    return wrong


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("layout", [FULL, GPT_OSS], ids=["full", "windows"])
@pytest.mark.parametrize("document", [ALL_DIFFERENT[0], FEW_ALIKE], ids=["none", "few"])
@pytest.mark.usefixtures("comparing")
def test_a_document_with_few_equal_tokens_is_reused_by_the_third(
    document: tuple[int, ...], layout: PagedLayout, num_workers: int
) -> None:
    with learning_engine(layout, num_workers=num_workers) as engine:
        engine.choose(min_head_tokens=0)
        for _ in range(3):
            engine.answer(document)
        assert engine.counts.reused_tokens == len(document) - HEAD_TOKENS
        (check,) = checks(engine)
        assert engine.learned == [check, document], (
            "the document was learned before keys were compared"
        )
        for other in ALL_DIFFERENT[1:4]:
            engine.show_twice(other)
        assert checks(engine) == [check], "keys were compared more than once"


@pytest.mark.usefixtures("comparing")
def test_of_what_keys_are_compared_by_nothing_is_kept_or_counted() -> None:
    with learning_engine() as engine:
        for _ in range(2):
            engine.answer(ALL_DIFFERENT[0])
        stored = [each for each in engine.entries if isinstance(each.row_map, StoredTokens)]
        assert sum(each.row_map.num_rows for each in stored) == len(ALL_DIFFERENT[0])
        assert engine.counts.stored_segments == engine.counts.learned_segments == 1
        assert not engine.side.counters.tier.failed_stores and not engine.drops


@pytest.mark.usefixtures("comparing")
@pytest.mark.parametrize("has_context", [False, True])
def test_what_clients_store_with_few_equal_tokens_is_reused(has_context: bool) -> None:
    settings = {"learn": False, "context": has_context}
    with learning_engine(segments=settings) as engine:
        for document in ALL_DIFFERENT[:8]:
            engine.store(document)
            engine.serve()
        (check,) = checks(engine)
        assert check == engine.learned[0]
        assert len(engine.learned) == 1 + 2 * 8 * has_context, (
            "the text for comparing keys was learned behind a context"
        )
        engine.answer(ALL_DIFFERENT[0])
        assert engine.counts.reused_tokens == len(ALL_DIFFERENT[0]) - HEAD_TOKENS


@pytest.mark.usefixtures("comparing")
def test_a_document_with_enough_equal_tokens_needs_no_other_text() -> None:
    with learning_engine() as engine:
        for _ in range(3):
            engine.answer(LONG)
        assert engine.learned == [LONG]
        engine.answer(ALL_DIFFERENT[0])
        engine.answer(ALL_DIFFERENT[0])
        assert engine.learned == [LONG, ALL_DIFFERENT[0]]


@pytest.mark.parametrize("is_stored", [False, True], ids=["learned", "stored"])
def test_of_a_model_with_wrong_keys_no_document_with_few_equal_tokens_is_reused(
    is_stored: bool, comparing: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    comparing.append("keys of equal tokens differ.")
    with learning_engine() as engine:
        if is_stored:
            engine.store(ALL_DIFFERENT[0])
        for document in ALL_DIFFERENT[:4] * 3:
            engine.answer(document)
        assert engine.learned == checks(engine) and len(engine.learned) == 1
        assert engine.counts.reused_tokens == engine.counts.learned_segments == 0
        assert engine.counts.refusals[SegmentRefusal.UNCHECKED_KEYS] > 0
    assert "segments are off: keys of equal tokens differ." in caplog.text


@pytest.mark.usefixtures("comparing")
def test_where_keys_cannot_be_compared_nothing_is_learned_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with learning_engine(script=TransferScript(seed=1, failing_stores=1.0)) as engine:
        for _ in range(2):
            engine.answer(ALL_DIFFERENT[0])
        num_tries = len(engine.learned)
        assert engine.learned == checks(engine) and num_tries > 1
        assert engine.drops == 1
        for _ in range(2):
            engine.answer(ALL_DIFFERENT[0])
        assert len(engine.learned) == 2 * num_tries, (
            "two more requests must let the check begin once more"
        )
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert any("segments are not reused yet" in each for each in warnings)


@pytest.mark.usefixtures("comparing")
def test_a_request_that_cannot_reuse_what_is_stored_has_keys_compared_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with learning_engine(segments=STORED_ONLY) as engine:
        segments = engine.segments.store
        begin_store = segments.begin_store

        def begin_of_document(prefix: SegmentPrefix) -> list[Entry] | Refusal:
            is_document = tuple(prefix.token_ids) == ALL_DIFFERENT[0]
            return begin_store(prefix) if is_document else Refusal.NO_ROOM

        with monkeypatch.context() as patch:
            patch.setattr(segments, "begin_store", begin_of_document)
            engine.store(ALL_DIFFERENT[0])
            engine.step_until(lambda: engine.own_plans and not engine.has_work())
        engine.answer(ALL_DIFFERENT[1])
        assert len(engine.own_plans) == 1, "keys were compared for a document that is not stored"
        engine.answer(ALL_DIFFERENT[0])
        assert engine.counts.reused_tokens == 0 and len(engine.own_plans) == 2
        engine.answer(ALL_DIFFERENT[0])
        assert engine.counts.reused_tokens == len(ALL_DIFFERENT[0]) - HEAD_TOKENS


@pytest.mark.main_version
@pytest.mark.usefixtures("comparing")
@pytest.mark.parametrize("learns", [False, True])
def test_thousands_of_requests_do_not_have_keys_compared_in_vain(
    learns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each time that the check is given up, twice as many requests come before the next."""
    document, num_requests = ALL_DIFFERENT[0], 100
    with learning_engine(segments={"learn": learns}) as engine:
        segments = engine.segments.store
        begin_store = segments.begin_store

        def begin_of_document(prefix: SegmentPrefix) -> list[Entry] | Refusal:
            return begin_store(prefix) if tuple(prefix.token_ids) == document else Refusal.NO_ROOM

        with monkeypatch.context() as patch:
            patch.setattr(segments, "begin_store", begin_of_document)
            if not learns:
                engine.store(document)
            for _ in range(num_requests):
                engine.answer(document)
            assert 4 < len(engine.learned) <= 9
            assert engine.learned == checks(engine), "a document was learned, but cannot be reused"
            given_up = [each for each in caplog.messages if "keys are compared was not" in each]
            assert len(given_up) == len(engine.learned)
        for _ in range(4 * num_requests):
            engine.answer(document)
        assert engine.counts.reused_tokens > 0


@pytest.mark.usefixtures("comparing")
def test_why_nothing_is_reused_is_said_before_keys_are_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"), learning_engine() as engine:
        engine.show_twice(ALL_DIFFERENT[0])
    assert "48 tokens has 0 pairs of equal tokens, 8 are needed" in caplog.text


@pytest.mark.usefixtures("comparing")
def test_engines_without_requests_of_their_own_say_why_nothing_is_reused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def two_engines(**facts: Any) -> SchedulerView:
        return SchedulerView(**{**facts, "num_data_parallel": 2})

    monkeypatch.setattr(patched_scheduler, "SchedulerView", two_engines)
    with learning_engine(segments=STORED_ONLY) as engine:
        for document in ALL_DIFFERENT[:2]:
            engine.store(document)
            engine.answer(document)
        assert engine.counts.reused_tokens == 0 and not engine.own_plans
        engine.store(LONG)
        engine.answer(ALL_DIFFERENT[0])
        engine.answer(ALL_DIFFERENT[0])
        assert engine.counts.reused_tokens > 0, "nothing was reused, although the log announces it"
    assert caplog.text.count("segments are not reused yet") == 1
    assert "segments: context is off" not in caplog.text, "no request has asked for a context"


@pytest.mark.usefixtures("comparing")
@pytest.mark.parametrize("way", CANCELS)
def test_resets_and_an_abort_of_all_requests_while_keys_are_compared(way: str) -> None:
    with learning_engine(max_num_batched_tokens=32) as engine:
        engine.show_twice(ALL_DIFFERENT[0], max_tokens=1)
        engine.step_until(lambda: engine.own_ids)
        assert engine.learned == checks(engine)
        assert CANCELS[way](engine) is not False
        assert not engine.own_ids
        engine.serve()
        for _ in range(4):
            engine.answer(ALL_DIFFERENT[0])
        assert engine.counts.reused_tokens > 0


# Segments that clients store.

STORED_ONLY = {"learn": False}


def params_of_answers(engine: LearningEngine) -> list[Any]:
    """The fields of responses, in the order in which requests end."""
    params: list[Any] = []
    finished = engine.scheduler._connector_finished

    def finish(request: Any) -> Any:
        segments = engine.segments
        params.append(segments.stores.params(request) or segments.blended.params(request))
        return finished(request)

    engine.scheduler._connector_finished = finish
    return params


def test_answers_say_how_much_of_a_segment_was_stored() -> None:
    with learning_engine(num_blocks=40, segments=STORED_ONLY) as engine:
        params = params_of_answers(engine)
        for document, is_stored in ((ONE, True), (LONGEST, True), (ONE, "perhaps")):
            engine.store(document, is_stored)
        engine.serve()
        stored_tokens = [len(ONE), 0, 0]
        assert params == [{"kvext_stored_tokens": number} for number in stored_tokens]
        assert engine.counts.refusals[SegmentRefusal.ROOM] == 1


@pytest.mark.parametrize("sent", [[], [5], [5, 8, 9]], ids=["", "first token", "whole sink"])
def test_a_document_is_found_whatever_a_tokenizer_has_put_before_it(sent: list[int]) -> None:
    with learning_engine(segments={**STORED_ONLY, "sink": [5, 8, 9]}) as engine:
        engine.segments.stores._first_ids = (5,)
        plan = engine.send((*sent, *ONE), 1, extra_args=((STORE_KEY, True),))
        engine.contents.expect_segment(ONE, plan)
        engine.serve()
        engine.answer(QUESTION, ONE)
        assert engine.counts.reused_tokens == len(ONE) - HEAD_TOKENS


@pytest.mark.parametrize("num_blocks", [140, 200, 260])
def test_nobody_waits_for_more_blocks_than_the_pool_has(num_blocks: int) -> None:
    """Tokens computed between segments need blocks for windows, besides the request's own."""
    with learning_engine(GEMMA, num_blocks=num_blocks, segments=STORED_ONLY) as engine:
        engine.choose(min_tokens=1)
        engine.clock = lambda: 0.0  # So no request has waited for long.
        for document in (ONE, OTHER):
            engine.store(document)
        engine.serve()
        engine.answer(OTHER, QUESTION, ONE)
        assert bool(engine.counts.refusals[SegmentRefusal.ROOM]) is not bool(
            engine.counts.reused_tokens
        )


@pytest.mark.parametrize("layout", [FULL, GEMMA], ids=["full", "windows"])
def test_whole_blocks_of_a_sink_are_computed_once_and_nothing_of_segments_is_cached(
    layout: PagedLayout,
) -> None:
    sink = tokens(random.Random("sink"), 3 * layout.unit_tokens + 2)
    with learning_engine(layout, segments={**STORED_ONLY, "sink": sink}) as engine:
        computed_tokens = []
        for document in (ONE, ONE, ONE, OTHER):
            engine.store(document)
            computed_tokens.append(sum(engine.step_tokens() for _ in iter(engine.has_work, False)))
            engine.side.reset_cache()
        again = 2 + len(ONE)
        assert computed_tokens == [len(sink) + len(ONE), again, again, 2 + len(OTHER)]


def test_segments_that_were_read_well_stay_when_a_load_fails() -> None:
    documents = [tokens(_rng, 64) for _ in range(5)]
    with learning_engine(segments=STORED_ONLY) as engine:
        for document in documents:
            engine.store(document)
        engine.serve()
        (worker,) = engine.workers
        removed = engine.side.counters.tier.removed_entries
        for number, failing in enumerate([{1}, {1, 2}]):
            fail_next(engine, *failing)
            engine.answer(*documents)
            assert worker.transfers.counts["failed loads"] == len(failing)
            assert removed[Removal.LOAD_FAILED] == number


@pytest.mark.parametrize(("num_tokens", "is_stored"), [(100, True), (300, False)])
def test_a_segment_is_given_up_for_the_blocks_of_its_own_request(
    num_tokens: int, is_stored: bool
) -> None:
    """The pool has just enough blocks for the request, but none for the windows of its store."""
    options = {"num_blocks": 33, "max_model_len": 448, "max_num_batched_tokens": 20}
    with learning_engine(GPT_OSS, **options) as engine:
        engine.store(tokens(random.Random(3), num_tokens))
        engine.serve()
        assert engine.counts.stored_segments == is_stored
        assert engine.counts.refusals[SegmentRefusal.ROOM] == (not is_stored)


def test_segments_are_off_beside_draft_layers(caplog: pytest.LogCaptureFixture) -> None:
    """Holes are not: a preview has blocks of its own behind its rows, and a hole has none."""
    options = offloading(FULL_EAGLE, segments={"sink": SINK})
    with engine_of(FULL_EAGLE, drafter=Drafter.EAGLE, offloading=options) as engine:
        assert engine.side.computes_holes
    assert "segments are off: draft tokens" in caplog.text
