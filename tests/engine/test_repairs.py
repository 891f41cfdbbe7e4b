# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Each repair, beside the upstream defect that it repairs, without retention.

A test named ``test_stock_...`` shows vLLM on its own. It fails as soon as upstream is right. Then
the repair can be removed. Failed loads are tested in `test_failed_loads`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture
from support import family
from support.installed import installed, repairs_installed
from support.retention.small_layouts import tokens_per_block, unit_of
from support.sample import sampled
from support.scheduler.block_manager import BlockManager, Layout, full, window
from support.scheduler.engine import SchedulerEngine
from support.scheduler.invariants import CacheContents, blocks_are_conserved
from support.scheduler.layouts import EAGLE_LAYOUTS, FULL_WINDOW, LAYOUTS, Attention, Group
from support.scheduler.layouts import Layout as EngineLayout
from support.scheduler.model_runner import ReadCheck
from support.scheduler.options import Drafter, EngineOptions, ExternalLoad
from support.scheduler.random_workloads import random_workload, with_options
from support.scheduler.releases import look_up
from support.scheduler.run import failure_of
from support.scheduler.workload import RequestPlan, ResetPrefixCache, Workload
from support.upstream_version import IS_SINCE_0_30
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from vllm_ascend_kvext.features import REPAIRS
from vllm_ascend_kvext.patches.repairs.async_scheduler import drafts_in_flight
from vllm_ascend_kvext.upstream_state import SchedulerState

if family.IS_ASCEND:
    import ascend_geometry

FULL_ONLY = EngineLayout("full-only", (Group(Attention.FULL, 16),))
WIDE_WINDOWS = EngineLayout(
    "wide-windows",
    (Group(Attention.FULL, 4), *(Group(Attention.WINDOW, 4, 40) for _ in range(3))),
)
WINDOW_LAYOUTS = [layout for layout in LAYOUTS + EAGLE_LAYOUTS if layout.has_window]
DRAFT_LAYOUTS = [layout for layout in LAYOUTS + EAGLE_LAYOUTS if layout.supports_drafts]
NUM_RESET_RUNS = sampled(200)
PRIORITY_SEEDS = range(sampled(8))


@pytest.fixture
def repaired(request: pytest.FixtureRequest) -> Iterator[None]:
    """Only the feature named by the class is in effect."""
    with installed(request.cls.FEATURE):
        yield


def with_loads() -> Iterator[Workload]:
    """Every other request is loaded from outside. The pool has room for little more.

    A load extends a local hit. The blocks of this hit are the next to be given away.
    """
    for seed in range(24):
        workload = random_workload(WIDE_WINDOWS, seed)
        # Upstream cannot reset the cache while a connector holds blocks.
        workload = replace(workload, resets=())
        yield with_options(workload, external_load=ExternalLoad.IN_STEP, drafter=None)


def with_drafts() -> Iterator[Workload]:
    """Asynchronous scheduling counts drafts as computed before they are accepted."""
    for layout in WINDOW_LAYOUTS:
        for seed in range(8):
            workload = random_workload(layout, seed)
            if workload.options.is_async and workload.options.drafter is Drafter.EAGLE:
                yield workload


def with_resets() -> Iterator[Workload]:
    """Drafts are in flight when a reset of the prefix cache preempts running requests."""
    for number in range(NUM_RESET_RUNS):
        layout = DRAFT_LAYOUTS[number % len(DRAFT_LAYOUTS)]
        workload = random_workload(layout, number // len(DRAFT_LAYOUTS))
        rng = random.Random(f"resets/{workload.name}")
        last_step = max(plan.arrival_step for plan in workload.requests) + 60
        resets = tuple(
            ResetPrefixCache(rng.randrange(last_step), reset_running_requests=True)
            for _ in range(rng.choice((1, 3, 9)))
        )
        options = replace(
            workload.options, is_async=True, drafter=Drafter.EAGLE, external_load=None, events=False
        )
        yield replace(workload, options=options, resets=resets)


def with_priorities() -> Iterator[Workload]:
    """A request is preempted, by priority, in the step that has scheduled it.

    Prompts are computed together and in chunks, in a small pool. A later request is more urgent.
    The earliest request is scheduled first, and is then preempted.
    """
    for layout in LAYOUTS:
        for seed in PRIORITY_SEEDS:
            workload = with_options(
                random_workload(layout, seed),
                max_num_seqs=16,
                max_num_batched_tokens=256,
                long_prefill_tokens=layout.unit_tokens + 1,
                reserve_full_prompt=False,
                by_priority=True,
                external_load=None,
                is_async=seed % 2 == 1,
                drafter=None,
                events=False,
            )
            requests = tuple(
                replace(plan, arrival_step=plan.arrival_step // 4, priority=-number)
                for number, plan in enumerate(workload.requests)
            )
            yield replace(workload, requests=requests, resets=())


RANDOM_RUNS: dict[str, tuple[Callable[[], Iterable[Workload]], int]] = {
    "two-phase-allocation": (with_loads, 0),
    "drafts-in-flight": (with_drafts, 3),
    "discarded-frames": (with_resets, NUM_RESET_RUNS // 3),
    "preempted-in-step": (with_priorities, len(PRIORITY_SEEDS) // 2),
}
"""By repair: workloads that run into the defect. More than this number of runs must fail."""


MENDED_SINCE_0_30 = ("two-phase-allocation", "drafts-in-flight", "discarded-frames")


def of_each(
    *own_managers: str, repairs: Iterable[str] = RANDOM_RUNS, vllm: Mapping[str, str] | None = None
) -> pytest.MarkDecorator:
    """Parametrize a test by repair. ``vllm`` has the versions for which a claim is true."""
    marks: dict[str, list[pytest.MarkDecorator]] = {repair: [] for repair in repairs}
    for repair in set(own_managers) & marks.keys():
        marks[repair].append(pytest.mark.own_managers)
    for repair, versions in (vllm or {}).items():
        marks[repair].append(pytest.mark.vllm(versions))
    return pytest.mark.parametrize(
        "repair", [pytest.param(repair, marks=each) for repair, each in marks.items()]
    )


def repairs_but(repair: str) -> AbstractContextManager[None]:
    return installed(*(each.name for each in REPAIRS if each.name != repair))


def failures(workloads: Iterable[Workload]) -> list[str]:
    """The failures of runs in which a request reads KV or gives answers that are not its own."""
    return [
        failure
        for each in workloads
        if (failure := failure_of(each, [blocks_are_conserved, CacheContents(False)]))
    ]


@of_each("discarded-frames", "preempted-in-step")
def test_random_runs_read_and_answer_right(repair: str) -> None:
    workloads, _ = RANDOM_RUNS[repair]
    with repairs_installed():
        assert not failures(workloads())


@of_each(
    *("discarded-frames", "preempted-in-step", "drafts-in-flight"),
    vllm=dict.fromkeys(MENDED_SINCE_0_30, "<0.30"),
)
def test_stock_random_runs_do_not(repair: str) -> None:
    workloads, num_failures = RANDOM_RUNS[repair]
    with repairs_but(repair):
        found = failures(workloads())
    print(*found[:3], sep="\n")
    assert len(found) > num_failures


@pytest.mark.vllm(">=0.30")
@of_each("discarded-frames", "drafts-in-flight", repairs=MENDED_SINCE_0_30)
def test_stock_random_runs_have_been_mended(repair: str) -> None:
    workloads, _ = RANDOM_RUNS[repair]
    with repairs_but(repair):
        assert not failures(workloads())


class TestTrimFullGroups:
    """A drafter's window that looks ahead shortens a hit after the full groups were looked up."""

    FEATURE = "trim-full-groups"
    LAYOUT = (
        replace(ascend_geometry.small_layout(frozenset({3})), has_connector=True)
        if family.IS_ASCEND
        else Layout((full(4), full(16), window(8, 12)), eagle_group_ids=frozenset({2}))
    )
    UNIT_TOKENS = unit_of(LAYOUT.specs)
    PROMPT = range(2 * UNIT_TOKENS + 4)

    def handed_out(self) -> tuple[int, list[int]]:
        """The tokens that a repeated prompt hits, and the tokens of each full group's blocks."""
        world = BlockManager(self.LAYOUT)
        world.prefill(world.request(self.PROMPT), 100)
        blocks, hit_tokens = look_up(world.manager, world.request(self.PROMPT))
        sizes = map(tokens_per_block, self.LAYOUT.specs[:2])
        return hit_tokens, [
            len(group) * size for group, size in zip(blocks.blocks, sizes, strict=False)
        ]

    @pytest.mark.vllm("<0.30")
    def test_stock_hands_out_more_than_it_hits(self) -> None:
        """The request writes into the blocks behind the hit, while others may read them."""
        assert self.handed_out() == (self.UNIT_TOKENS, [self.UNIT_TOKENS, 2 * self.UNIT_TOKENS])

    @pytest.mark.vllm(">=0.30")
    def test_stock_ends_every_full_group_where_the_hit_ends(self) -> None:
        assert self.handed_out() == (self.UNIT_TOKENS, [self.UNIT_TOKENS, self.UNIT_TOKENS])

    @pytest.mark.usefixtures("repaired")
    def test_every_full_group_ends_where_the_hit_ends(self) -> None:
        assert self.handed_out() == (self.UNIT_TOKENS, [self.UNIT_TOKENS, self.UNIT_TOKENS])


RANKS = pytest.mark.parametrize(
    "ranks",
    [
        pytest.param("dcp_world_size", marks=() if family.IS_ASCEND else pytest.mark.vllm("<0.30")),
        pytest.param("pcp_world_size", marks=pytest.mark.vllm("<0.30") if family.IS_ASCEND else ()),
    ],
)


class TestContextParallelWindows:
    """Two ranks share the tokens of each block. Upstream cannot look up windows then.

    vLLM's hybrid coordinator refuses this, so only models with nothing but sliding windows come as
    far as the first lookup. Since vLLM 0.30, ranks do not share blocks of windows.
    """

    FEATURE = "context-parallel-windows"
    LAYOUT = ascend_geometry.small_layout() if family.IS_ASCEND else Layout((window(4, 13),))
    UNIT_TOKENS = unit_of(LAYOUT.specs)
    NUM_TOKENS = 10 * UNIT_TOKENS

    def hit_tokens(self, **ranks: int) -> int:
        """The tokens that a repeated prompt hits."""
        (num_ranks,) = ranks.values()
        sizes = {}
        if not IS_SINCE_0_30:
            sizes["scheduler_block_size"] = num_ranks * self.UNIT_TOKENS
        if not (IS_SINCE_0_30 or family.IS_ASCEND):
            sizes["hash_block_size"] = num_ranks * self.UNIT_TOKENS
        world = BlockManager(self.LAYOUT, **sizes, **ranks)
        first = world.request(range(self.NUM_TOKENS))
        assert world.prefill(first, 16) == 0
        world.finish(first)
        return world.prefill(world.request(range(self.NUM_TOKENS)), 16)

    @RANKS
    def test_stock_asserts(self, ranks: str) -> None:
        with pytest.raises(AssertionError, match="not support sliding window"):
            self.hit_tokens(**{ranks: 2})

    @pytest.mark.own_managers
    @pytest.mark.vllm(">=0.30")
    def test_stock_hits_what_ranks_do_not_share(self) -> None:
        assert self.hit_tokens(dcp_world_size=2) == self.NUM_TOKENS - self.UNIT_TOKENS

    @pytest.mark.usefixtures("repaired")
    @RANKS
    def test_nothing_is_hit(self, ranks: str) -> None:
        assert self.hit_tokens(**{ranks: 2}) == 0

    @pytest.mark.usefixtures("repaired")
    def test_without_parallelism_hits_are_what_they_were(self) -> None:
        world = BlockManager(self.LAYOUT)
        world.prefill(world.request(range(self.NUM_TOKENS)), 16)
        assert world.hit_tokens(world.request(range(self.NUM_TOKENS))) == (
            self.NUM_TOKENS - self.UNIT_TOKENS
        )

    @pytest.mark.usefixtures("repaired")
    def test_one_warning(self, mocker: MockerFixture) -> None:
        warning = mocker.patch.object(logging.getLogger("vllm.ascend_kvext.repairs"), "warning")
        for _ in range(2):
            self.hit_tokens(**{"dcp_world_size" if family.IS_ASCEND else "pcp_world_size": 3})
        (call,) = warning.call_args_list
        assert "3 ranks" in call.args[0] % call.args[1:]


@pytest.mark.vllm("<0.30")
class TestDraftsInFlight:
    FEATURE = "drafts-in-flight"

    def engine(
        self, layout: EngineLayout, is_async: bool, drafter: Drafter | None
    ) -> SchedulerEngine:
        options = random_workload(layout, 0).options
        return SchedulerEngine(layout, replace(options, is_async=is_async, drafter=drafter))

    def test_nothing_is_left_of_it_once_it_is_reverted(self) -> None:
        with installed(self.FEATURE):
            engine = self.engine(WINDOW_LAYOUTS[0], is_async=True, drafter=Drafter.EAGLE)
            assert engine.replaced_methods == ["remove_skipped_blocks"]
        assert not engine.replaced_methods
        assert type(AsyncScheduler.__init__) is FunctionType

    @pytest.mark.usefixtures("repaired")
    @pytest.mark.parametrize(
        ("layout", "is_async", "drafter"),
        [
            (WINDOW_LAYOUTS[0], False, Drafter.EAGLE),
            (WINDOW_LAYOUTS[0], True, None),
            (FULL_ONLY, True, Drafter.EAGLE),
        ],
        ids=["synchronous", "without-drafts", "without-windows"],
    )
    def test_a_step_costs_nothing_where_nothing_waits(
        self, layout: EngineLayout, is_async: bool, drafter: Drafter | None
    ) -> None:
        """The function that is called per request and step is upstream's own."""
        assert not self.engine(layout, is_async, drafter).replaced_methods
        assert type(KVCacheCoordinator.remove_skipped_blocks) is FunctionType
        assert type(KVCacheManager.allocate_slots) is FunctionType

    @pytest.mark.parametrize(
        ("num_placeholders", "num_next_drafts", "expected"),
        [(0, 3, 0), (1, 3, 0), (4, 3, 3), (8, 3, 6), (5, 3, 3), (1, 0, 0), (2, 0, 0), (4, 0, 0)],
    )
    def test_of_each_step_all_but_one_token_are_drafts(
        self, num_placeholders: int, num_next_drafts: int, expected: int
    ) -> None:
        """The next step has as many drafts as a step in flight."""
        request = SimpleNamespace(
            num_output_placeholders=num_placeholders, spec_token_ids=[-1] * num_next_drafts
        )
        assert drafts_in_flight(request) == expected


@pytest.mark.own_managers
class TestDiscardedFrames:
    FEATURE = "discarded-frames"
    PLAN = RequestPlan(request_id="r", arrival_step=0, prompt=tuple(range(20)), max_tokens=24)

    @pytest.fixture
    def engine(self) -> Iterator[SchedulerEngine]:
        options = EngineOptions(
            num_blocks=200, is_async=True, drafter=Drafter.EAGLE, num_draft_tokens=3
        )
        with repairs_installed():
            yield SchedulerEngine(FULL_WINDOW, options, ReadCheck.ALL)

    def decode(self, engine: SchedulerEngine) -> list[int]:
        """All tokens that the scheduler returns from now on."""
        return [t for step in engine.finish() for _, new, _ in step.outputs for t in new]

    @pytest.mark.vllm("<0.30")
    def test_no_step_is_remembered_for_longer_than_it_is_in_flight(
        self, engine: SchedulerEngine
    ) -> None:
        engine.add_request(self.PLAN)
        self.decode(engine)
        assert not SchedulerState.of(engine.scheduler).steps_in_flight._steps

    def test_every_step_in_flight_is_dropped(self, engine: SchedulerEngine) -> None:
        """Pipeline parallelism has several steps in flight."""
        engine.add_request(self.PLAN)
        in_flight = []
        for _ in range(3):
            planned = engine.scheduler.schedule()
            in_flight.append((planned, engine.runner.execute(planned)))
        assert engine.reset_prefix_cache(reset_running_requests=True)
        for planned, output in in_flight:
            assert not engine.scheduler.update_from_output(planned, output)
        assert self.decode(engine) == self.PLAN.expected_output()

    @pytest.mark.vllm("<0.30")
    def test_prompt_logprobs_come_with_the_first_token_that_counts(
        self, engine: SchedulerEngine, mocker: MockerFixture
    ) -> None:
        """Workers compute them once. Without the repair, upstream's assertion ends the engine."""
        assert self.prompt_logprobs_after_reset(engine, mocker) == ["logprobs", None]

    @pytest.mark.vllm(">=0.30")
    def test_stock_loses_prompt_logprobs_of_a_frame_that_it_drops(
        self, engine: SchedulerEngine, mocker: MockerFixture
    ) -> None:
        """In this version, the defect ends no engine. We do not repair it."""
        assert self.prompt_logprobs_after_reset(engine, mocker) == [None, None]

    def prompt_logprobs_after_reset(
        self, engine: SchedulerEngine, mocker: MockerFixture
    ) -> list[Any]:
        """Prompt log-probabilities of the first two outputs. The step that had them is dropped."""
        engine.add_request(self.PLAN)
        engine.step()
        assert engine._in_flight[0][1].sampled_token_ids == [self.PLAN.expected_output()[:1]]
        engine._in_flight[0][1].prompt_logprobs_dict["r"] = "logprobs"
        assert engine.reset_prefix_cache(reset_running_requests=True)
        update = mocker.spy(engine.scheduler, "update_from_output")
        sent: list[Any] = []
        while engine.has_work():
            engine.step()
            sent += [each for one in update.spy_return.values() for each in one.outputs]
        tokens = [token for each in sent for token in each.new_token_ids]
        assert tokens == self.PLAN.expected_output()
        return [each.new_prompt_logprobs_tensors for each in sent[:2]]

    @pytest.mark.vllm("<0.30")
    def test_a_scheduler_that_processes_outputs_itself_is_left_alone(
        self, engine: SchedulerEngine
    ) -> None:
        class Own(AsyncScheduler):
            def update_from_output(self, *args: Any) -> Any:
                return AsyncScheduler.update_from_output(self, *args)

        engine.scheduler.__class__ = Own
        request = engine.add_request(self.PLAN)
        while request.num_output_placeholders < 2:
            engine.step()
        num_placeholders = request.num_output_placeholders
        assert engine.reset_prefix_cache(reset_running_requests=True)
        assert request.async_tokens_to_discard == num_placeholders
