# SPDX-License-Identifier: Apache-2.0
"""Each repair beside the upstream defect that it repairs, without retention.

A test named ``test_stock_...`` shows vLLM on its own: it fails as soon as upstream is right, and
then the repair can go.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from types import FunctionType, SimpleNamespace

import pytest
from pytest_mock import MockerFixture
from support import family
from support.installed import installed
from support.retention.small_layouts import tokens_per_block, unit_of
from support.scheduler.block_manager import BlockManager, Layout, full, window
from support.scheduler.engine import SchedulerEngine
from support.scheduler.invariants import blocks_are_conserved
from support.scheduler.layouts import EAGLE_LAYOUTS, LAYOUTS, Attention, Group
from support.scheduler.layouts import Layout as EngineLayout
from support.scheduler.model_runner import ReadCheck, WrongKVError
from support.scheduler.options import Drafter, ExternalLoad
from support.scheduler.random_workloads import (
    random_workload,
    without_upstream_defects,
)
from support.scheduler.run import run
from support.scheduler.workload import Workload
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from vllm_ascend_kvext.patches.repairs.async_scheduler import drafts_in_flight

if family.IS_ASCEND:
    import ascend_geometry

NUM_SEEDS = 8
FULL_ONLY = EngineLayout("full-only", (Group(Attention.FULL, 16),))
WINDOW_LAYOUTS = [layout for layout in LAYOUTS + EAGLE_LAYOUTS if layout.has_window]


@pytest.fixture
def repaired(request: pytest.FixtureRequest) -> Iterator[None]:
    """The feature named by the class is in effect, alone."""
    with installed(request.cls.FEATURE):
        yield


def workloads(layout: EngineLayout) -> Iterator[Workload]:
    for seed in range(NUM_SEEDS):
        yield without_upstream_defects(random_workload(layout, seed))


class TestTrimFullGroups:
    """A drafter's window that looks ahead shortens the hit after the full groups were looked up."""

    FEATURE = "trim-full-groups"
    LAYOUT = (
        ascend_geometry.small_layout(frozenset({3}))
        if family.IS_ASCEND
        else Layout((full(4), full(16), window(8, 12)), eagle_group_ids=frozenset({2}))
    )
    UNIT_TOKENS = unit_of(LAYOUT.specs)
    PROMPT = range(2 * UNIT_TOKENS + 4)

    def handed_out(self) -> tuple[int, list[int]]:
        """Tokens hit by a prompt that is sent again, and tokens handed out by each full group."""
        world = BlockManager(self.LAYOUT)
        world.prefill(world.request(self.PROMPT), 100)
        blocks, hit_tokens = world.manager.get_computed_blocks(world.request(self.PROMPT))
        sizes = map(tokens_per_block, self.LAYOUT.specs[:2])
        return hit_tokens, [
            len(group) * size for group, size in zip(blocks.blocks, sizes, strict=False)
        ]

    def written_and_shared(self) -> int:
        """Blocks of a running request into which another request is about to write."""
        world = BlockManager(self.LAYOUT)
        world.prefill(world.request(self.PROMPT), 100)
        again = world.request(self.PROMPT)
        hit_tokens = world.admit(again, 1)
        managers = world.manager.coordinator.single_type_managers
        return sum(
            block.ref_cnt > 1
            for spec, manager in zip(self.LAYOUT.specs, managers, strict=True)
            for block in manager.req_to_blocks[again.request_id][
                hit_tokens // tokens_per_block(spec) :
            ]
            if not block.is_null
        )

    def test_stock_hands_out_more_than_it_hits(self) -> None:
        assert self.handed_out() == (self.UNIT_TOKENS, [self.UNIT_TOKENS, 2 * self.UNIT_TOKENS])
        assert self.written_and_shared() == 1

    @pytest.mark.usefixtures("repaired")
    def test_every_full_group_ends_where_the_hit_ends(self) -> None:
        assert self.handed_out() == (self.UNIT_TOKENS, [self.UNIT_TOKENS, self.UNIT_TOKENS])
        assert self.written_and_shared() == 0


class TestTwoPhaseAllocation:
    """A connector extends a local hit, and the blocks hit are the next to be given away."""

    FEATURE = "two-phase-allocation"
    WIDE_WINDOWS = EngineLayout(
        "wide-windows",
        (Group(Attention.FULL, 4), *(Group(Attention.WINDOW, 4, 40) for _ in range(3))),
    )
    NUM_SEEDS = 24

    def violations(self) -> list[str]:
        """Random workloads, with a connector that extends local hits, in which one reads amiss."""
        violations = []
        num_loads = 0
        for seed in range(self.NUM_SEEDS):
            workload = tight_workload(self.WIDE_WINDOWS, seed)
            try:
                result = run(workload, [blocks_are_conserved], ReadCheck.ALL)
            except AssertionError as error:
                violations.append(f"{workload.name}: {type(error).__name__}: {error}")
            else:
                num_loads += result.transcript.counts["external loads"]
                assert not result.wrong_outputs(workload), workload.name
        assert num_loads > 100
        return violations

    def test_stock_reads_what_another_group_has_written(self) -> None:
        assert any(WrongKVError.__name__ in violation for violation in self.violations())

    @pytest.mark.usefixtures("repaired")
    def test_every_group_reads_its_own(self) -> None:
        assert not self.violations()


def tight_workload(layout: EngineLayout, seed: int) -> Workload:
    """Every other request is loaded from outside, into a pool with room for little more."""
    workload = random_workload(layout, seed)
    num_blocks = workload.options.num_blocks
    if workload.options.external_load is ExternalLoad.BETWEEN_STEPS:
        num_blocks //= 3  # such a workload is given three times the room
    options = replace(
        workload.options,
        num_blocks=num_blocks,
        external_load=ExternalLoad.IN_STEP,
        drafter=None,
    )
    # Upstream cannot reset the cache while a connector holds blocks.
    return replace(workload, options=options, resets=())


class TestContextParallelWindows:
    """Two ranks share the tokens of each block; upstream cannot look windows up then.

    The hybrid coordinator of vLLM refuses to be built: on it, only a model with nothing but sliding
    windows comes as far as the first lookup.
    """

    FEATURE = "context-parallel-windows"
    LAYOUT = ascend_geometry.small_layout() if family.IS_ASCEND else Layout((window(4, 13),))
    UNIT_TOKENS = unit_of(LAYOUT.specs)
    NUM_TOKENS = 10 * UNIT_TOKENS

    def hit_tokens(self, **ranks: int) -> int:
        """What a prompt that is sent again hits."""
        (num_ranks,) = ranks.values()
        sizes = {"scheduler_block_size": num_ranks * self.UNIT_TOKENS}
        if not family.IS_ASCEND:
            sizes["hash_block_size"] = num_ranks * self.UNIT_TOKENS
        world = BlockManager(self.LAYOUT, **sizes, manager_arguments=ranks)
        first = world.request(range(self.NUM_TOKENS))
        assert world.prefill(first, 16) == 0
        world.finish(first)
        return world.prefill(world.request(range(self.NUM_TOKENS)), 16)

    @pytest.mark.parametrize("ranks", ["dcp_world_size", "pcp_world_size"])
    def test_stock_asserts(self, ranks: str) -> None:
        with pytest.raises(AssertionError, match="not support sliding window"):
            self.hit_tokens(**{ranks: 2})

    @pytest.mark.usefixtures("repaired")
    @pytest.mark.parametrize("ranks", ["dcp_world_size", "pcp_world_size"])
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
            self.hit_tokens(dcp_world_size=3)
        (call,) = warning.call_args_list
        message = call.args[0] % call.args[1:]
        assert "3 ranks" in message


class TestDraftsInFlight:
    """Asynchronous scheduling counts drafts as computed before they are accepted."""

    FEATURE = "drafts-in-flight"

    def wrong_reads(self) -> tuple[int, int]:
        """Workloads with drafts in flight, and those in which a request reads what is not its."""
        num_wrong = num_workloads = 0
        for layout in WINDOW_LAYOUTS:
            for workload in workloads(layout):
                options = workload.options
                if options.is_async and options.drafter is Drafter.EAGLE:
                    num_workloads += 1
                    try:
                        result = run(workload, [blocks_are_conserved], ReadCheck.ALL)
                    except WrongKVError:
                        num_wrong += 1
                    else:
                        assert not result.wrong_outputs(workload), workload.name
        return num_workloads, num_wrong

    @pytest.mark.own_managers
    def test_stock_reads_what_others_have_written(self) -> None:
        num_workloads, num_wrong = self.wrong_reads()
        assert num_workloads > 20
        assert num_wrong > 3

    @pytest.mark.usefixtures("repaired")
    def test_every_request_reads_its_own(self) -> None:
        assert self.wrong_reads()[1] == 0

    def engine(
        self, layout: EngineLayout, is_async: bool, drafter: Drafter | None
    ) -> SchedulerEngine:
        options = random_workload(layout, 0).options
        return SchedulerEngine(layout, replace(options, is_async=is_async, drafter=drafter))

    def replaced_in(self, engine: SchedulerEngine) -> list[str]:
        """Methods of upstream that an engine's own objects have replaced."""
        manager = engine.scheduler.kv_cache_manager
        return [
            name
            for instance in (
                engine.scheduler,
                manager,
                manager.coordinator,
                *manager.coordinator.single_type_managers,
            )
            for name, value in vars(instance).items()
            if callable(value) and hasattr(type(instance), name)
        ]

    def test_nothing_is_left_of_it_once_it_is_reverted(self) -> None:
        with installed(self.FEATURE):
            engine = self.engine(WINDOW_LAYOUTS[0], is_async=True, drafter=Drafter.EAGLE)
            assert self.replaced_in(engine) == ["remove_skipped_blocks"]
        assert not self.replaced_in(engine)
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
        """What is called per request and step is upstream's own."""
        assert not self.replaced_in(self.engine(layout, is_async, drafter))
        assert type(KVCacheCoordinator.remove_skipped_blocks) is FunctionType
        assert type(KVCacheManager.allocate_slots) is FunctionType


@pytest.mark.parametrize(
    ("num_placeholders", "num_next_drafts", "expected"),
    [(0, 3, 0), (1, 3, 0), (4, 3, 3), (8, 3, 6), (5, 3, 3), (1, 0, 0), (2, 0, 0), (4, 0, 0)],
)
def test_drafts_in_flight(num_placeholders: int, num_next_drafts: int, expected: int) -> None:
    """A step in flight stands for a token and its drafts, of which the next step has as many."""
    request = SimpleNamespace(
        num_output_placeholders=num_placeholders, spec_token_ids=[-1] * num_next_drafts
    )
    assert drafts_in_flight(request) == expected
