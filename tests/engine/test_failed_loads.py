# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A KV connector fails to load. The models have several KV cache groups, or no full attention.

Random workloads, in which half of all loads fail, run on real schedulers. The model runner of the
harness checks every position that is read. `CacheContents` checks every block that can be hit.
Single cases follow.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture
from support import family
from support.installed import installed, repairs_installed, retention_installed
from support.retention.checkpoints import adaptive_retention
from support.sample import IS_LONG
from support.scheduler.block_manager import retention_interval
from support.scheduler.connector import ScriptedConnector
from support.scheduler.engine import SchedulerEngine
from support.scheduler.invariants import CacheContents, blocks_are_conserved
from support.scheduler.layouts import (
    COMPRESSED,
    DEEPSEEK_V4,
    FULL,
    FULL_WINDOW,
    GEMMA,
    MAMBA,
    MAMBA_WINDOW,
    MIXED_BLOCKS,
    TWO_FULL,
    WINDOW,
    Layout,
)
from support.scheduler.model_runner import NULL_BLOCK_ID, ReadCheck
from support.scheduler.options import EngineOptions, ExternalLoad, FailingLoads
from support.scheduler.random_workloads import random_workload, with_options
from support.scheduler.releases import deferred_blocks
from support.scheduler.run import Check, Run, run
from support.scheduler.transcript import Step
from support.scheduler.workload import RequestPlan, ResetPrefixCache, Workload
from vllm.v1.request import Request, RequestStatus

from vllm_ascend_kvext.patches.repairs.scheduler import _failed_request_ids

FEATURE = "failed-loads"
NUM_SEEDS = 4 if IS_LONG else 2
LAYOUTS = [
    WINDOW,
    FULL_WINDOW,
    GEMMA,
    MIXED_BLOCKS,
    TWO_FULL,
    DEEPSEEK_V4,
    DEEPSEEK_V4.with_eagle(1),
    MAMBA,
    MAMBA_WINDOW,
]
if family.IS_ASCEND:
    LAYOUTS = [COMPRESSED, COMPRESSED.with_eagle(3), FULL_WINDOW]

every_load = pytest.mark.parametrize(
    "load", [ExternalLoad.IN_STEP, ExternalLoad.BETWEEN_STEPS], ids=lambda load: load.value
)
every_scheduler = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


@pytest.fixture
def repaired() -> Iterator[None]:
    """The repairs are in effect, as in a process in which nothing is configured."""
    with repairs_installed():
        yield


def failing(layout: Layout, seed: int, load: ExternalLoad, is_async: bool, **how: Any) -> Workload:
    """A random workload, in a small pool, whose connector fails half of its loads."""
    workload = with_options(
        random_workload(layout, seed),
        external_load=load,
        is_async=is_async,
        failing_loads=FailingLoads(**{"seed": seed, "max_steps": 3, **how}),
    )
    if layout.has_mamba and load is ExternalLoad.IN_STEP:
        # vLLM 0.23.0 counts fewer blocks of loaded states than it allocates.
        workload = with_options(workload, num_blocks=3 * workload.options.num_blocks)
    # Upstream cannot preempt for a reset while a connector holds blocks.
    resets = tuple(ResetPrefixCache(reset.step, False) for reset in workload.resets)
    return replace(workload, resets=resets)


def run_checked(workload: Workload, *checks: Check) -> Run:
    """Run with all checks. At the end, no block may be held."""
    contents = CacheContents(checks_events=False)
    result = run(workload, [blocks_are_conserved, contents, *checks], ReadCheck.ALL)
    check_nothing_is_held(result.engine)
    return result


def check_nothing_is_held(engine: SchedulerEngine) -> None:
    pool = engine.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert not any(block.ref_cnt for block in pool.blocks if not block.is_null)
    assert not engine.scheduler.requests
    assert "schedule" not in vars(engine.scheduler), "`schedule` is still replaced after a failure"
    assert not engine.scheduler.failed_recving_kv_req_ids
    assert not engine.scheduler.finished_recving_kv_req_ids


@pytest.mark.parametrize(
    ("layout", "load"),
    [(FULL_WINDOW, ExternalLoad.IN_STEP), (WINDOW, ExternalLoad.BETWEEN_STEPS)],
    ids=lambda each: each.name,
)
def test_stock_ends_or_reads_what_is_wrong(layout: Layout, load: ExternalLoad) -> None:
    with pytest.raises((ValueError, AssertionError)):
        run(failing(layout, 0, load, is_async=False), [], ReadCheck.ALL)


REPLACED = [
    "_handle_invalid_blocks",
    "build_connector_meta",
    "get_num_new_matched_tokens",
    "update_from_output",
]
HYBRIDS = (GEMMA, DEEPSEEK_V4)
RUNS: dict[str, tuple[Sequence[Layout], Callable[[], Any], dict[str, Any]]] = {
    "repaired": (LAYOUTS, repairs_installed, {}),
    "named": ((DEEPSEEK_V4,), repairs_installed, {"names_requests": True}),
    "all": ((FULL_WINDOW,), repairs_installed, {"share": 1}),
    "retention": (HYBRIDS, retention_installed, {}),
    "adaptive": (HYBRIDS, adaptive_retention, {}),
}
"""Layouts, features in effect, and kinds of failure. Workers may report requests, not blocks."""


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name, (layouts, _, _) in RUNS.items() for layout in layouts],
    ids=lambda each: each if isinstance(each, str) else each.name,
)
@every_scheduler
@every_load
def test_outputs_are_those_of_a_run_without_failures(
    name: str, layout: Layout, load: ExternalLoad, is_async: bool
) -> None:
    """Retention keeps no block of a failed load.

    After a failure, the request loads nothing more.
    """
    _, in_effect, how = RUNS[name]
    interval = nullcontext() if in_effect is repairs_installed else retention_interval(0)
    counts: Counter[str] = Counter()
    with in_effect(), interval:
        for seed in range(NUM_SEEDS):
            workload = failing(layout, seed, load, is_async, **how)
            checks = [preemptions_are_reported_once] if name == "repaired" else []
            result = run_checked(workload, *checks)
            assert not result.wrong_outputs(workload), workload.name
            counts.update(result.transcript.counts)
            if name == "all":
                assert set(result.engine.runner._num_loads.values()) == {1}
    assert counts["failed loads"] >= NUM_SEEDS


def preemptions_are_reported_once(engine: SchedulerEngine, step: Step) -> None:
    """Connectors cannot tell an admission from a preemption if they hear of both at once."""
    scheduled = {request.request_id for request in step.scheduled}
    assert scheduled.isdisjoint(step.preempted)


@pytest.mark.usefixtures("repaired")
@every_scheduler
@every_load
@pytest.mark.parametrize("layout", HYBRIDS, ids=lambda layout: layout.name)
def test_with_the_policy_fail_requests_fail(
    layout: Layout, load: ExternalLoad, is_async: bool
) -> None:
    reasons: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        workload = failing(layout, seed, load, is_async, recomputes=False)
        result = run_checked(workload)
        reasons.update(result.finish_reasons.values())
        for request_id, output in result.wrong_outputs(workload).items():
            expected = next(p for p in workload.requests if p.request_id == request_id)
            assert result.finish_reasons[request_id] == "error"
            assert output == expected.expected_output()[: len(output)]
    assert reasons["error"] >= NUM_SEEDS
    assert reasons["length"] >= NUM_SEEDS


def test_methods_are_replaced_only_where_upstream_cannot_recover() -> None:
    """Upstream handles a model with one group of full attention, and one without a connector."""
    with installed(FEATURE):
        engine = Story(ExternalLoad.IN_STEP)
        assert engine.replaced_methods == REPLACED
        assert not Story(None).replaced_methods
        assert not Story(ExternalLoad.IN_STEP, layout=FULL).replaced_methods
    assert not engine.replaced_methods


LOCAL_BLOCKS = 5


def loaded(tables: tuple[list[int], ...]) -> set[int]:
    """The blocks of all groups that lie behind the local hit."""
    return {block_id for table in tables for block_id in table[LOCAL_BLOCKS:]}


class Story(SchedulerEngine):
    """An engine that is driven step by step. At the end, every output is checked.

    The default layout is `FULL_WINDOW`: blocks of 4 tokens, a window of 10. Even requests load.
    """

    def __init__(
        self,
        load: ExternalLoad | None,
        is_async: bool = False,
        layout: Layout = FULL_WINDOW,
        max_num_batched_tokens: int = 256,
    ) -> None:
        options = EngineOptions(
            num_blocks=400,
            max_num_batched_tokens=max_num_batched_tokens,
            is_async=is_async,
            external_load=load,
            failing_loads=FailingLoads(seed=0, share=0),
        )
        super().__init__(layout, options, ReadCheck.ALL)
        self.steps: list[Step] = []
        self._check_contents = CacheContents(checks_events=False)

    def add(self, number: int, prompt: range, max_tokens: int = 3) -> Request:
        return self.add_request(
            RequestPlan(
                request_id=f"request-{number}",
                arrival_step=0,
                prompt=tuple(token % 61 for token in prompt),
                max_tokens=max_tokens,
            )
        )

    def fail_next_load(
        self,
        which: Callable[[tuple[list[int], ...]], set[int]] = loaded,
        num_steps: int = 0,
        report_when_left: int = 0,
    ) -> None:
        """Let the next load fail, in blocks that are chosen from the tables.

        Later loads succeed.
        """
        fates = [lambda load: (which(load.block_ids), num_steps, report_when_left)]
        self.runner._fate = lambda load: fates.pop()(load) if fates else (set(), 0, 0)

    def step(self) -> Step:
        self.steps.append(super().step())
        blocks_are_conserved(self, self.steps[-1])
        self._check_contents(self, self.steps[-1])
        return self.steps[-1]

    def finish(self, max_steps: int = 100) -> list[Step]:
        """Run to the end. All outputs must be right, and no block may be held."""
        steps = super().finish(max_steps)
        outputs: dict[str, list[int]] = defaultdict(list)
        for step in self.steps:
            for request_id, tokens, _ in step.outputs:
                outputs[request_id] += tokens
        for request_id, request in self.requests.items():
            if request.status is not RequestStatus.FINISHED_ABORTED:
                assert outputs[request_id] == self.plans[request_id].expected_output(), request_id
        check_nothing_is_held(self)
        return steps

    def admissions(self, number: int) -> list[int]:
        """The computed tokens at each admission of a request."""
        return [
            request.num_computed_tokens
            for step in self.steps
            for request in step.scheduled
            if request.request_id == f"request-{number}" and request.is_new_or_resumed
        ]

    def preempted(self) -> list[str]:
        return [request_id for step in self.steps for request_id in step.preempted]


@pytest.mark.usefixtures("repaired")
class TestOneCaseAtATime:
    PROMPT_TOKENS = 64
    EXTERNAL_TOKENS = 48
    LOCAL_TOKENS = 4 * LOCAL_BLOCKS

    @every_scheduler
    @every_load
    def test_local_hits_are_used_again(self, load: ExternalLoad, is_async: bool) -> None:
        story = Story(load, is_async)
        story.add(1, range(self.LOCAL_TOKENS + 1))
        story.finish()
        story.fail_next_load()
        story.add(2, range(self.PROMPT_TOKENS))
        story.finish()
        in_step = load is ExternalLoad.IN_STEP
        assert story.admissions(2) == [self.EXTERNAL_TOKENS] * in_step + [self.LOCAL_TOKENS]

    @pytest.mark.parametrize(
        ("is_async", "num_steps"),
        [(False, 0), (True, 0), (True, 1)],
        ids=["sync", "async", "async, one step later"],
    )
    def test_who_hits_what_was_computed_from_it_is_computed_again(
        self, is_async: bool, num_steps: int
    ) -> None:
        """Request 3 holds none of the blocks that failed: they have left its window.

        An asynchronous scheduler admits request 3 before it hears of the failure.
        """
        story = Story(ExternalLoad.IN_STEP, is_async)
        story.fail_next_load(lambda tables: set(tables[1]))
        story.add(2, range(self.PROMPT_TOKENS))
        for _ in range(num_steps):
            story.step()
        story.add(3, range(self.PROMPT_TOKENS + 8))
        story.finish()
        assert story.admissions(3)[0] == self.PROMPT_TOKENS
        assert sorted(story.preempted()) == ["request-2", "request-3"]

    def test_who_loads_more_on_top_of_it_starts_again(self) -> None:
        """Between steps, request 4 loads tokens behind a local hit that becomes garbage."""
        story = Story(ExternalLoad.IN_STEP)
        story.fail_next_load()
        connector = story.scheduler.connector
        story.add(2, range(self.PROMPT_TOKENS))
        story.add(4, range(2 * self.PROMPT_TOKENS))
        ask = connector.get_num_new_matched_tokens
        hits = []

        def ask_between_steps(request: Request, num_computed_tokens: int) -> tuple[int, bool]:
            if request.request_id == "request-4":
                connector._external_load = ExternalLoad.BETWEEN_STEPS
                hits.append(num_computed_tokens)
            return ask(request, num_computed_tokens)

        connector.get_num_new_matched_tokens = ask_between_steps
        story.finish()
        assert hits[0] == self.PROMPT_TOKENS
        assert story.admissions(4) == hits[1:]

    @every_scheduler
    def test_the_null_block_and_unknown_ids_are_nobodys(self, is_async: bool) -> None:
        story = Story(ExternalLoad.IN_STEP, is_async)
        story.add(1, range(1000, 1064), max_tokens=12)
        for _ in range(3):
            story.step()
        story.fail_next_load(lambda tables: {NULL_BLOCK_ID, -1, 10**9, tables[0][3]})
        story.add(2, range(self.PROMPT_TOKENS))
        story.finish()
        assert story.preempted() == ["request-2"]

    @pytest.mark.parametrize("is_aborted", [False, True], ids=["preempted", "aborted"])
    def test_nothing_stays_cached_of_who_is_gone_before_the_report(self, is_aborted: bool) -> None:
        story = Story(ExternalLoad.IN_STEP, is_async=True)
        story.fail_next_load(lambda tables: {tables[0][LOCAL_BLOCKS]})
        request = story.add(2, range(self.PROMPT_TOKENS))
        story.step()
        scheduler = story.scheduler
        if is_aborted:
            story.abort("request-2")
        else:
            scheduler.running.remove(request)
            scheduler._preempt_request(request, 0)
            scheduler.prev_step_scheduled_req_ids.clear()
        assert any(block.block_hash for block in story.block_pool.blocks)
        # The next step hits this block, and is in flight when the report comes.
        story.add(3, range(self.PROMPT_TOKENS + 8))
        story.step()
        story.finish()
        assert story.admissions(3)[0] == self.PROMPT_TOKENS

    @pytest.mark.parametrize("num_steps", range(4))
    def test_a_request_that_is_aborted_while_it_receives(self, num_steps: int) -> None:
        story = Story(ExternalLoad.BETWEEN_STEPS)
        story.fail_next_load(num_steps=3, report_when_left=1)
        story.add(2, range(self.PROMPT_TOKENS))
        for _ in range(num_steps):
            story.step()
        assert story.abort("request-2")
        story.finish()

    @pytest.mark.parametrize("report_when_left", range(4))
    def test_blocks_are_held_until_they_are_received(self, report_when_left: int) -> None:
        """No other request may get blocks to which the worker still writes."""
        story = Story(ExternalLoad.BETWEEN_STEPS)
        story.fail_next_load(num_steps=3, report_when_left=report_when_left)
        story.add(2, range(self.PROMPT_TOKENS))
        for _ in range(3):
            story.step()
            assert len(story.managers[0].req_to_blocks["request-2"]) == 12
        story.finish()
        assert story.admissions(2) == [0]

    @pytest.mark.parametrize("num_steps", range(1, 5))
    @every_scheduler
    def test_a_reset_of_the_prefix_cache_meanwhile(self, is_async: bool, num_steps: int) -> None:
        """The reset also preempts the request, and counts outputs that must be discarded."""
        story = Story(ExternalLoad.IN_STEP, is_async)
        story.fail_next_load()
        story.add(2, range(self.PROMPT_TOKENS), max_tokens=8)
        for _ in range(num_steps):
            story.step()
        try:
            story.reset_prefix_cache(reset_running_requests=True)
        except RuntimeError:  # vLLM 0.30 cannot reset while it defers freeing blocks.
            assert [*deferred_blocks(story.scheduler)]
        story.finish()

    @every_load
    def test_prefill_statistics_are_those_of_the_second_admission(self, load: ExternalLoad) -> None:
        story = Story(load, max_num_batched_tokens=16)
        story.add(1, range(self.LOCAL_TOKENS + 1))
        story.finish()
        story.fail_next_load()
        request = story.add(2, range(2 * self.PROMPT_TOKENS))
        for _ in range(20):
            story.step()
            if story.admissions(2) and story.admissions(2)[-1] == self.LOCAL_TOKENS:
                break
        stats = request.prefill_stats
        assert (stats.num_local_cached_tokens, stats.num_external_cached_tokens) == (
            self.LOCAL_TOKENS,
            0,
        )
        story.finish()

    @every_load
    def test_the_connector_is_asked_again(self, load: ExternalLoad, mocker: MockerFixture) -> None:
        """If asked again, some connectors (LMCache, vLLM's offloading) renew a request's data."""
        asked = mocker.spy(ScriptedConnector, "get_num_new_matched_tokens")
        story = Story(load)
        story.fail_next_load()
        story.add(2, range(self.PROMPT_TOKENS))
        story.finish()
        assert [call.args[1].request_id for call in asked.call_args_list] == ["request-2"] * 2


def test_requests_that_one_of_several_connectors_names_have_failed() -> None:
    named = SimpleNamespace(failed_recving={"a", "b"})
    several = SimpleNamespace(metadata=(None, named, SimpleNamespace(failed_recving={"c"})))
    output = SimpleNamespace(kv_connector_worker_meta=several)
    assert _failed_request_ids(output) == {"a", "b", "c"}
    assert _failed_request_ids(SimpleNamespace(kv_connector_worker_meta=named)) == {"a", "b"}
    assert not _failed_request_ids(None)
