# SPDX-License-Identifier: Apache-2.0
"""A worker's jobs on real pages: what comes back, what stays untouched, what is reported.

torch is imported when a test runs: the tests are collected where there is none.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from support.connector.gates import Gate, until
from support.connector.worker_configs import (
    AttentionLayer,
    CompilationConfig,
    Options,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
)

from vllm_ascend_kvext.connector.errors import ConnectorError
from vllm_ascend_kvext.connector.messages import JobResults, LoadJob, StepJobs, StoreJob, Traffic
from vllm_ascend_kvext.connector.worker_side import EndedJobs, WorkerSide
from vllm_ascend_kvext.layout.errors import LayoutError
from vllm_ascend_kvext.layout.model import StatePolicy
from vllm_ascend_kvext.layout.row_map import RowMap, StoredChunk
from vllm_ascend_kvext.layout.rows import TokenRange
from vllm_ascend_kvext.layout.transfer_plan import PlacedChunk, TablePart
from vllm_ascend_kvext.transfer.errors import BackendError, DescriptorError, PlacementError
from vllm_ascend_kvext.transfer.page_transfer import page_transfer
from vllm_ascend_kvext.transfer.placement import CopyPlacement
from vllm_ascend_kvext.transfer.schema import Direction

if TYPE_CHECKING:
    from support.connector.small_workers import SmallWorker

LAYOUTS = ("single group", "gemma", "deepseek v4")
TOKENS = TokenRange(0, 128)
NUM_PAGES = 64
"""Of every small worker."""
MakeWorker = Callable[..., "SmallWorker"]


@pytest.fixture
def make_worker() -> Iterator[MakeWorker]:
    """A small worker by the name of its layout; its thread ends with the test."""
    pytest.importorskip("torch")
    from support.connector import small_workers

    made = []

    def make(layout: str = "gemma", **arguments: Any) -> SmallWorker:
        made.append(small_workers.SmallWorker(small_workers.LAYOUTS[layout], **arguments))
        return made[-1]

    yield make
    for worker in made:
        worker.side.shutdown()


def same(some: Any, others: Any) -> bool:
    from support.connector import small_workers

    return small_workers.same(some, others)


class Move:
    """`page_transfer` behind a gate; directions, and numbers of loads, that fail can be named."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.failing: set[Direction] = set()
        self.failing_loads: set[int] = set()
        self.directions: list[Direction] = []
        self.threads: list[threading.Thread] = []
        self.cpus: set[frozenset[int]] = set()
        self.placements: list[CopyPlacement | None] = []

    def __call__(self, *arguments: Any, placement: CopyPlacement | None) -> None:
        direction = arguments[-1]
        self.directions.append(direction)
        self.threads.append(threading.current_thread())
        self.cpus.add(frozenset(os.sched_getaffinity(0)))
        self.placements.append(placement)
        if threading.current_thread() is not threading.main_thread():
            self.gate.pass_through()
        num_loads = self.directions.count(Direction.HOST_TO_PAGES)
        is_failing_load = direction is Direction.HOST_TO_PAGES and num_loads in self.failing_loads
        if direction in self.failing or is_failing_load:
            raise BackendError("the device is on fire")
        page_transfer(*arguments, placement=placement)


class Ended:
    """Collects what a worker reports, and refuses to see anything twice."""

    def __init__(self, side: WorkerSide) -> None:
        self._side = side
        self.loads: set[str] = set()
        self.failed_pages: set[int] = set()
        self.results = JobResults()

    def take(self) -> EndedJobs:
        ended = self._side.end_step()
        assert ended.loads.isdisjoint(self.loads)
        assert ended.results.stores_ended.keys().isdisjoint(self.results.stores_ended)
        assert ended.results.failed_loads <= ended.loads
        assert bool(ended.failed_pages) <= bool(ended.results.failed_loads)
        self.loads |= ended.loads
        self.failed_pages |= ended.failed_pages
        self.results.add(ended.results)
        return ended

    def wait_for(self, *, stores: set[int] = frozenset(), loads: set[str] = frozenset()) -> None:
        """Take until these have ended, and no others."""

        def have_ended() -> bool:
            self.take()
            return self.results.stores_ended.keys() >= stores and self.loads >= loads

        until(have_ended, f"stores {stores} and loads {loads}")
        assert self.results.stores_ended == dict.fromkeys(stores, 1)
        assert self.loads == loads


def store_now(worker: SmallWorker, ended: Ended, *stores: StoreJob) -> None:
    worker.side.begin_step(StepJobs(stores=stores))
    ended.wait_for(stores={store.number for store in stores})


# Bytes


@pytest.mark.parametrize("tokens", [TOKENS, TokenRange(64, 256)], ids=["start", "later"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_stored_is_loaded_into_other_pages(
    layout: str, tokens: TokenRange, make_worker: MakeWorker
) -> None:
    worker = make_worker(layout)
    ended = Ended(worker.side)
    source, target = worker.tables(tokens), worker.tables(tokens, first_page=20)
    assert {id for table in source for id in table.ids}.isdisjoint({0})
    before, stored = worker.pages.copy_of_storages(), worker.page_bytes(source)
    job = worker.store(1, tokens, source)
    store_now(worker, ended, job)
    assert same(worker.pages.copy_of_storages(), before), "a store writes no page"

    worker.pages.fill(seed=2)
    others = worker.others_bytes(target)
    worker.side.begin_step(StepJobs(loads=(worker.load("a", job, target),)))
    ended.wait_for(stores={1}, loads={"a"})
    assert same(worker.page_bytes(target), stored)
    assert same(worker.others_bytes(target), others), "a load writes its pages only"
    assert not ended.failed_pages and not ended.results.failed_loads

    num_bytes = sum(page.numel() for page in stored)
    for direction in ("store", "load"):
        traffic = ended.results.traffic[direction]
        assert (traffic.num_bytes, traffic.transfers) == (num_bytes, 1)
        assert 0 < traffic.seconds < 5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_jobs_of_several_requests_keep_apart(layout: str, make_worker: MakeWorker) -> None:
    worker = make_worker(layout)
    ended = Ended(worker.side)
    tables = [worker.tables(TOKENS, first_page) for first_page in (1, 20)]
    stores = [worker.store(number, TOKENS, table) for number, table in enumerate(tables)]
    contents = [worker.page_bytes(table) for table in tables]
    assert not same(*contents)
    store_now(worker, ended, *stores)
    worker.pages.fill(seed=2)
    crosswise = zip(("a", "b"), stores, reversed(tables), strict=True)
    worker.side.begin_step(StepJobs(loads=tuple(worker.load(*each) for each in crosswise)))
    ended.wait_for(stores={0, 1}, loads={"a", "b"})
    assert same(worker.page_bytes(tables[1]), contents[0])
    assert same(worker.page_bytes(tables[0]), contents[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_of_a_table_stands_for_the_whole(layout: str, make_worker: MakeWorker) -> None:
    """The same host bytes and the same pages, whether the tables begin at the request or later."""
    tokens = TokenRange(64, 256)
    images, pages = [], []
    for is_whole in (False, True):
        worker = make_worker(layout)
        ended = Ended(worker.side)
        parts = worker.tables(tokens)
        assert any(part.first_page for part in parts)
        if is_whole:
            parts = tuple(TablePart(0, (0,) * part.first_page + part.ids) for part in parts)
        job = worker.store(1, tokens, parts)
        store_now(worker, ended, job)
        images.append([worker.side._host.tensor[: worker._host_end_bytes].clone()])
        worker.pages.fill(seed=2)
        worker.side.begin_step(StepJobs(loads=(worker.load("a", job, parts),)))
        ended.wait_for(stores={1}, loads={"a"})
        pages.append(worker.pages.copy_of_storages())
        assert not ended.results.failed_loads and not ended.results.failed_stores
    plans = [
        worker.planner.plan_store([PlacedChunk(tokens)], tables)
        for tables in (parts, [table.ids for table in parts])
    ]
    assert (plans[0].runs == plans[1].runs).all() and plans[0].row_maps == plans[1].row_maps
    assert same(*pages)
    assert len(images[0][0]) and same(*images)


def test_a_load_of_several_chunks(make_worker: MakeWorker) -> None:
    worker = make_worker("single group")
    ended = Ended(worker.side)
    whole = worker.tables(TOKENS)
    first = worker.store(1, TokenRange(0, 64), whole)
    second = worker.store(2, TokenRange(64, 128), whole)
    content = worker.page_bytes(whole)
    store_now(worker, ended, first, second)
    worker.pages.fill(seed=2)
    stored = worker.load("a", first, whole).stored + worker.load("a", second, whole).stored
    worker.side.begin_step(StepJobs(loads=(LoadJob("a", TOKENS, stored, whole),)))
    ended.wait_for(stores={1, 2}, loads={"a"})
    assert same(worker.page_bytes(whole), content)


# Steps


def test_stores_begin_when_the_forward_has_ended(make_worker: MakeWorker) -> None:
    worker = make_worker()
    ended = Ended(worker.side)
    tables = worker.tables(TOKENS)
    job = worker.store(1, TOKENS, tables)
    worker.side.begin_step(StepJobs(stores=(job,), has_forward=True))
    worker.pages.fill(seed=3)  # the forward
    computed = worker.page_bytes(tables)
    assert not ended.take().results
    worker.side.end_of_forward()
    ended.wait_for(stores={1})
    worker.pages.fill(seed=4)
    worker.side.begin_step(StepJobs(loads=(worker.load("a", job, tables),)))
    ended.wait_for(stores={1}, loads={"a"})
    assert same(worker.page_bytes(tables), computed)


def test_an_end_of_forward_without_stores_does_nothing(make_worker: MakeWorker) -> None:
    worker = make_worker()
    worker.side.end_of_forward()
    worker.side.begin_step(StepJobs(has_forward=True))
    worker.side.end_of_forward()
    worker.side.end_of_forward()
    assert worker.side.end_step() == EndedJobs(frozenset(), frozenset(), JobResults())


def test_stores_of_a_forward_that_raised_are_reported_as_failed(make_worker: MakeWorker) -> None:
    move = Move()
    worker = make_worker(move=move)
    ended = Ended(worker.side)
    tables = worker.tables(TOKENS)
    job, next_job = (worker.store(number, TOKENS, tables) for number in (1, 2))
    worker.side.begin_step(StepJobs(stores=(job,), has_forward=True))
    worker.side.begin_step(StepJobs(stores=(next_job,), has_forward=True))
    worker.side.end_of_forward()
    ended.wait_for(stores={1, 2})
    assert ended.results.failed_stores == {1}
    assert len(move.directions) == 1


def test_a_load_overtakes_queued_stores(make_worker: MakeWorker) -> None:
    move = Move()
    worker = make_worker(move=move)
    ended = Ended(worker.side)
    tables = worker.tables(TOKENS)
    job = worker.store(1, TOKENS, tables)
    store_now(worker, ended, job)
    move.gate.wait_for_arrival()
    move.gate.close()
    worker.side.begin_step(
        StepJobs(stores=tuple(worker.store(number, TOKENS, tables) for number in (2, 3)))
    )
    move.gate.wait_for_arrival()
    worker.side.begin_step(StepJobs(loads=(worker.load("a", job, tables),)))
    assert not ended.take().loads
    move.gate.open()
    ended.wait_for(stores={1, 2, 3}, loads={"a"})
    store, load = Direction.PAGES_TO_HOST, Direction.HOST_TO_PAGES
    assert move.directions == [store, store, load, store]


def test_stores_before_a_step_have_ended_before_it(make_worker: MakeWorker) -> None:
    """Whatever is in the queue."""
    move = Move()
    worker = make_worker(move=move)
    ended = Ended(worker.side)
    others, tables = worker.tables(TOKENS), worker.tables(TOKENS, first_page=20)
    move.gate.close()
    worker.side.begin_step(StepJobs(stores=(worker.store(1, TOKENS, others),)))
    move.gate.wait_for_arrival()
    one, other = (worker.store(number, TOKENS, tables) for number in (2, 3))
    content = worker.page_bytes(tables)
    worker.side.run_before_step(StepJobs(stores_before=(one, other), has_forward=True))
    worker.pages.fill(seed=2)  # the step
    assert ended.take().results.stores_ended == {2: 1, 3: 1}
    move.gate.open()
    ended.wait_for(stores={1, 2, 3})
    for name, job in {"a": one, "b": other}.items():
        worker.side.begin_step(StepJobs(loads=(worker.load(name, job, tables),)))
        until(lambda name=name: name in ended.take().loads)
        assert same(worker.page_bytes(tables), content)
    assert not ended.results.failed_stores


def test_a_step_that_computes_nothing_can_wait_for_a_load(make_worker: MakeWorker) -> None:
    move = Move()
    worker = make_worker(move=move)
    ended = Ended(worker.side)
    tables = worker.tables(TOKENS)
    job = worker.store(1, TOKENS, tables)
    store_now(worker, ended, job)
    worker.side.wait_for_end(20)
    move.gate.close()
    worker.side.begin_step(StepJobs(loads=(worker.load("a", job, tables),)))
    worker.side.wait_for_end(0.01)
    assert not ended.take().loads
    threading.Timer(0.05, move.gate.open).start()
    worker.side.wait_for_end(20)
    assert ended.take().loads == {"a"}


def test_copies_run_beside_the_model(make_worker: MakeWorker) -> None:
    move = Move()
    cpu = min(os.sched_getaffinity(0))
    worker = make_worker(move=move, options=Options(copy_cpus=(cpu,), copy_threads=1))
    store_now(worker, Ended(worker.side), worker.store(1, TOKENS, worker.tables(TOKENS)))
    assert move.threads[0].name == "kvext-transfer"
    assert move.cpus == {frozenset({cpu})}
    assert move.placements == [CopyPlacement((cpu,), 1)]


def test_threads_are_named_without_cpus(make_worker: MakeWorker) -> None:
    move = Move()
    worker = make_worker(move=move, options=Options(copy_threads=3))
    store_now(worker, Ended(worker.side), worker.store(1, TOKENS, worker.tables(TOKENS)))
    assert move.placements[0] is not None and move.placements[0].num_threads == 3


# Failures


def test_a_load_that_is_not_complete_fails_and_writes_nothing(make_worker: MakeWorker) -> None:
    worker = make_worker()
    ended = Ended(worker.side)
    tables = worker.tables(TOKENS)
    job = worker.store(1, TOKENS, tables)
    store_now(worker, ended, job)
    worker.pages.fill(seed=2)
    before = worker.pages.copy_of_storages()
    whole = worker.load("a", job, tables)
    (chunk,) = whole.stored
    part = StoredChunk(RowMap.of(list(chunk.rows)[:-1]), chunk.host_offset_bytes)
    worker.side.begin_step(StepJobs(loads=(dataclasses.replace(whole, stored=(part,)),)))
    ended.wait_for(stores={1}, loads={"a"})
    assert ended.results.failed_loads == {"a"}
    assert ended.failed_pages == {id for table in tables for id in table.ids}
    assert same(worker.pages.copy_of_storages(), before)
    assert not ended.results.traffic["load"].transfers


@pytest.mark.parametrize("may_lack", [True, False])
def test_of_a_load_that_fails_each_part_is_tried(may_lack: bool, make_worker: MakeWorker) -> None:
    move = Move()
    worker = make_worker("single group", move=move)
    ended = Ended(worker.side)
    chunks = [TokenRange(first, first + 32) for first in range(0, 128, 32)]
    tables = [worker.tables(tokens, 1 + 8 * n) for n, tokens in enumerate(chunks)]
    stores = [worker.store(n, *each) for n, each in enumerate(zip(chunks, tables, strict=True))]
    contents = [worker.page_bytes(table) for table in tables]
    store_now(worker, ended, *stores)
    worker.pages.fill(seed=2)
    parts = [worker.load("a", *each) for each in zip(stores, tables, strict=True)]
    stored = [part.stored[0] for part in parts]
    (group,) = zip(*tables, strict=True)
    whole = TablePart(0, tuple(id for table in group for id in table.ids))
    before = worker.page_bytes(tables[1])
    load = LoadJob("a", TOKENS, tuple(stored), (whole,), may_lack=may_lack)
    move.failing_loads = {1, 3}
    worker.side.begin_step(StepJobs(loads=(load,)))
    ended.wait_for(stores=set(range(4)), loads={"a"})
    assert ended.results.unreadable == {"a": {stored[1].host_offset_bytes}}
    assert ended.results.failed_loads == (set() if may_lack else {"a"})
    assert ended.failed_pages == (set() if may_lack else set(whole.ids))
    for number, table in enumerate(tables):
        expected = before if number == 1 else contents[number]
        assert same(worker.page_bytes(table), expected)


def test_a_load_whose_parts_can_all_be_read_has_not_failed(make_worker: MakeWorker) -> None:
    move = Move()
    move.failing_loads = {1}
    worker = make_worker(move=move)
    ended = Ended(worker.side)
    tables = worker.tables(TOKENS)
    store = worker.store(1, TOKENS, tables)
    store_now(worker, ended, store)
    content = worker.page_bytes(tables)
    worker.pages.fill(seed=2)
    worker.side.begin_step(StepJobs(loads=(worker.load("a", store, tables),)))
    ended.wait_for(stores={1}, loads={"a"})
    assert not ended.results.failed_loads and not ended.results.unreadable
    assert same(worker.page_bytes(tables), content)


def test_a_load_of_which_no_part_can_be_read_fails(make_worker: MakeWorker) -> None:
    move = Move()
    move.failing = {Direction.HOST_TO_PAGES}
    worker = make_worker("single group", move=move)
    ended = Ended(worker.side)
    tables = worker.tables(TOKENS)
    store = worker.store(1, TOKENS, tables)
    store_now(worker, ended, store)
    whole = worker.load("a", store, tables)
    load = dataclasses.replace(whole, stored=whole.stored * 2, may_lack=True)
    worker.side.begin_step(StepJobs(loads=(load,)))
    ended.wait_for(stores={1}, loads={"a"})
    assert ended.results.failed_loads == {"a"}
    assert ended.results.unreadable == {"a": load.places}
    assert move.directions.count(Direction.HOST_TO_PAGES) == 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_a_failed_load_are_those_it_should_have_filled(
    layout: str, make_worker: MakeWorker
) -> None:
    """Not those before its tokens, none that a window has left behind, and no null block."""
    move = Move()
    move.failing = {Direction.HOST_TO_PAGES}
    worker = make_worker(layout, move=move)
    ended = Ended(worker.side)
    tokens = TokenRange(64, 192)
    tables = worker.tables(tokens)
    job = worker.store(1, tokens, tables)
    store_now(worker, ended, job)
    # Whole tables of a request that goes on, with other pages before and behind.
    whole = tuple(TablePart(0, (60,) * part.first_page + part.ids + (61,)) for part in tables)
    worker.side.begin_step(StepJobs(loads=(worker.load("a", job, whole),)))
    ended.wait_for(stores={1}, loads={"a"})
    assert ended.results.failed_loads == {"a"}
    assert ended.failed_pages == {id for table in tables for id in table.ids}


def test_null_pages_of_a_failed_load_are_not_reported(make_worker: MakeWorker) -> None:
    worker = make_worker("single group")
    ended = Ended(worker.side)
    (table,) = worker.tables(TOKENS)
    job = worker.store(1, TOKENS, (table,))
    store_now(worker, ended, job)
    holed = TablePart(0, (*table.ids[:3], 0, *table.ids[4:]))
    worker.side.begin_step(StepJobs(loads=(worker.load("a", job, (holed,)),)))
    ended.wait_for(stores={1}, loads={"a"})
    assert ended.results.failed_loads == {"a"}
    assert ended.failed_pages == {*holed.ids} - {0}


@pytest.mark.parametrize(
    "tables, pages",
    [
        ((), set()),
        ((TablePart(7, (5, 6)),), {5}),  # 6 is behind the last token
        ((TablePart(9, (5, 6)),), set()),
        ((TablePart(1, (5, 6, 7)),), {5, 6, 7}),
        ((TablePart(0, (5, 6)),), {5, 6}),
        ((TablePart(0, (*range(1, 8), NUM_PAGES)),), {*range(1, 8), NUM_PAGES}),
    ],
)
def test_a_job_that_cannot_be_planned_fails(
    tables: tuple[TablePart, ...], pages: set[int], make_worker: MakeWorker
) -> None:
    worker = make_worker("single group")
    ended = Ended(worker.side)
    right = worker.store(1, TOKENS, worker.tables(TOKENS))
    store_now(worker, ended, right)
    before = worker.pages.copy_of_storages()
    store = worker.store(2, TOKENS, tables)
    load = dataclasses.replace(worker.load("a", right, worker.tables(TOKENS)), block_ids=tables)
    worker.side.begin_step(StepJobs(stores=(store,), loads=(load,)))
    ended.wait_for(stores={1, 2}, loads={"a"})
    assert ended.results.failed_stores == {2} and ended.results.failed_loads == {"a"}
    assert ended.failed_pages == pages
    assert same(worker.pages.copy_of_storages(), before)


def test_a_store_of_a_null_page_fails(make_worker: MakeWorker) -> None:
    move = Move()
    worker = make_worker("single group", move=move)
    ended = Ended(worker.side)
    (table,) = worker.tables(TOKENS)
    holed = TablePart(0, (*table.ids[:3], 0, *table.ids[4:]))
    store_now(worker, ended, worker.store(1, TOKENS, (holed,)))
    assert ended.results.failed_stores == {1} and not move.directions


def test_one_chunk_that_lacks_rows_fails_its_store(make_worker: MakeWorker) -> None:
    move = Move()
    worker = make_worker("single group", move=move)
    ended = Ended(worker.side)
    (table,) = worker.tables(TOKENS)
    chunks = (PlacedChunk(TokenRange(0, 64)), PlacedChunk(TokenRange(64, 120), 8192))
    store_now(worker, ended, StoreJob(1, chunks, (table,)))
    assert ended.results.failed_stores == {1} and not move.directions


@pytest.mark.parametrize("direction", Direction)
def test_a_device_that_refuses(direction: Direction, make_worker: MakeWorker) -> None:
    move = Move()
    worker = make_worker(move=move)
    ended = Ended(worker.side)
    tables = worker.tables(TOKENS)
    job = worker.store(1, TOKENS, tables)
    store_now(worker, ended, job)
    move.failing = {direction}
    worker.side.begin_step(
        StepJobs(stores=(worker.store(2, TOKENS, tables),), loads=(worker.load("a", job, tables),))
    )
    ended.wait_for(stores={1, 2}, loads={"a"})
    is_store = direction is Direction.PAGES_TO_HOST
    assert ended.results.failed_stores == ({2} if is_store else set())
    assert ended.results.failed_loads == (set() if is_store else {"a"})
    assert ended.results.traffic["store"].transfers == (1 if is_store else 2)


def test_host_memory_is_never_left(make_worker: MakeWorker) -> None:
    worker = make_worker("single group", options=Options(host_memory_bytes_per_worker=4096))
    ended = Ended(worker.side)
    assert worker.planner.chunk_bytes(TOKENS) > 4096
    store_now(worker, ended, worker.store(1, TOKENS, worker.tables(TOKENS)))
    assert ended.results.failed_stores == {1}


def test_skipped_states_are_not_missed(make_worker: MakeWorker) -> None:
    worker = make_worker("deepseek v4", options=Options(state_policy=StatePolicy.SKIP))
    ended = Ended(worker.side)
    tables = (*worker.tables(TOKENS)[:3], TablePart(0, ()))
    job = worker.store(1, TOKENS, tables)
    store_now(worker, ended, job)
    worker.side.begin_step(StepJobs(loads=(worker.load("a", job, tables),)))
    ended.wait_for(stores={1}, loads={"a"})
    assert not ended.results.failed_stores and not ended.results.failed_loads


# Beginning and end


def test_a_worker_describes_itself(make_worker: MakeWorker) -> None:
    worker = make_worker(options=Options(host_memory_bytes_per_worker=(1 << 20) + 63))
    described = worker.side.describe()
    assert described.layout == worker.pages.layout()
    assert described.host_bytes == 1 << 20
    assert len(described.fingerprint) == 64


def test_another_worker_has_the_same_fingerprint(make_worker: MakeWorker) -> None:
    one, other = (make_worker().side.describe().fingerprint for _ in range(2))
    assert one == other


@pytest.mark.parametrize(
    "change",
    [
        lambda config: setattr(config.model_config, "model", "other"),
        lambda config: setattr(config.model_config, "revision", "other"),
        lambda config: setattr(config.model_config, "quantization", "other"),
        lambda config: setattr(config.model_config, "dtype", "torch.float16"),
        lambda config: setattr(config.cache_config, "cache_dtype", "fp8_e5m2"),
        lambda config: setattr(config, "speculative_config", SpeculativeConfig("draft")),
        lambda config: setattr(config, "parallel_config", ParallelConfig(2)),
        lambda config: setattr(config, "parallel_config", ParallelConfig(2, rank=1)),
        lambda config: setattr(
            config, "compilation_config", CompilationConfig({"0.0.attn": AttentionLayer()})
        ),
    ],
)
def test_what_makes_another_fingerprint(
    change: Callable[[VllmConfig], None], make_worker: MakeWorker
) -> None:
    config = VllmConfig()
    change(config)
    fingerprints = {
        make_worker(vllm_config=each).side.describe().fingerprint
        for each in (VllmConfig(), VllmConfig(parallel_config=ParallelConfig(2, rank=3)), config)
    }
    is_rank_one_of_two = config.parallel_config.rank == 1
    assert len(fingerprints) == (2 if is_rank_one_of_two else 3)


def test_parallelism_that_is_refused(make_worker: MakeWorker) -> None:
    for wrong in (
        ParallelConfig(decode_context_parallel_size=2),
        ParallelConfig(prefill_context_parallel_size=2),
    ):
        with pytest.raises(LayoutError, match="context parallelism: found a size of 2"):
            make_worker(vllm_config=VllmConfig(wrong))
    with pytest.raises(ConnectorError, match="found pipeline_parallel_size 2, expected 1"):
        make_worker(vllm_config=VllmConfig(ParallelConfig(pipeline_parallel_size=2)))


def test_cpus_that_nobody_has_are_refused(make_worker: MakeWorker) -> None:
    with pytest.raises(PlacementError):
        make_worker(options=Options(copy_cpus=(100_000,)))


def test_a_second_registration_takes_the_pages_where_they_are(make_worker: MakeWorker) -> None:
    from support.connector import small_workers

    worker = make_worker()
    ended = Ended(worker.side)
    tables = worker.tables(TOKENS)
    job = worker.store(1, TOKENS, tables)
    content = worker.page_bytes(tables)
    store_now(worker, ended, job)
    described = worker.side.describe()

    old, worker.pages = worker.pages, small_workers.gemma_like()
    before = old.copy_of_storages()
    worker.side.register(worker.pages.kv_caches)
    worker.side.begin_step(StepJobs(loads=(worker.load("a", job, tables),)))
    ended.wait_for(stores={1}, loads={"a"})
    assert same(worker.page_bytes(tables), content)
    assert same(old.copy_of_storages(), before)
    assert worker.side.describe() == described, "the scheduler side is told once"


def test_a_registration_of_other_pages_is_refused(make_worker: MakeWorker) -> None:
    from support.connector import small_workers

    worker = make_worker("single group")
    other = small_workers.single_group()
    apart = {name: tensor.repeat(1, 2, 1, 1, 1)[:, :2] for name, tensor in other.kv_caches.items()}
    with pytest.raises(LayoutError, match="expected the pages registered first"):
        worker.side.register(apart)
    ended = Ended(worker.side)
    store_now(worker, ended, worker.store(1, TOKENS, worker.tables(TOKENS)))
    assert not ended.results.failed_stores


def test_shutdown_waits_for_what_runs_and_drops_what_is_queued(make_worker: MakeWorker) -> None:
    move = Move()
    worker = make_worker(move=move)
    tables = worker.tables(TOKENS)
    jobs = [worker.store(number, TOKENS, tables) for number in (1, 2)]
    move.gate.close()
    worker.side.begin_step(StepJobs(stores=tuple(jobs)))
    move.gate.wait_for_arrival()
    threading.Timer(0.1, move.gate.open).start()
    worker.side.shutdown()
    assert not move.threads[0].is_alive()
    assert len(move.directions) == 1
    results = worker.side.end_step().results
    assert results.stores_ended == {1: 1, 2: 1} and results.failed_stores == {2}
    assert results.traffic["store"].transfers == 1
    worker.side.shutdown()
    assert not worker.side.end_step().results


def test_a_worker_without_caches(make_worker: MakeWorker) -> None:
    side = WorkerSide(VllmConfig(), None, Options())
    with pytest.raises(ConnectorError, match="call register"):
        side.describe()
    side.begin_step(StepJobs(has_forward=True))
    side.end_of_forward()
    assert side.end_step() == EndedJobs(frozenset(), frozenset(), JobResults())
    load = LoadJob("a", TOKENS, (), (TablePart(0, (1,)),))
    side.begin_step(StepJobs(loads=(load,)))
    ended = Ended(side)
    ended.wait_for(loads={"a"})
    assert ended.results.failed_loads == {"a"}
    side.end_transfers()
    side.shutdown()
    side.shutdown()


def test_no_transfer_runs_when_they_are_to_end(make_worker: MakeWorker) -> None:
    """The memory of pages may go away then, and nobody calls `register` again."""
    move = Move()
    worker = make_worker(move=move)
    ended = Ended(worker.side)
    tables = worker.tables(TOKENS)
    jobs = [worker.store(number, TOKENS, tables) for number in (1, 2, 3)]
    move.gate.close()
    worker.side.begin_step(StepJobs(stores=tuple(jobs[:2])))
    move.gate.wait_for_arrival()
    threading.Timer(0.1, move.gate.open).start()
    worker.side.end_transfers()
    assert len(move.directions) == 1
    worker.side.begin_step(StepJobs(stores=(jobs[2],)))
    ended.wait_for(stores={1, 2, 3})
    assert ended.results.failed_stores == {2}


def test_traffic_of_several_workers_adds_up(make_worker: MakeWorker) -> None:
    total = JobResults()
    for _ in range(2):
        worker = make_worker()
        ended = Ended(worker.side)
        store_now(worker, ended, worker.store(1, TOKENS, worker.tables(TOKENS)))
        total.add(ended.results)
    assert total.stores_ended == {1: 2}
    assert total.traffic["store"].transfers == 2
    assert total.traffic["load"] == Traffic()


def test_a_pool_that_has_moved_fails_its_jobs(make_worker: MakeWorker) -> None:
    """Memory that was taken away without a word is not written to."""
    worker = make_worker()
    ended = Ended(worker.side)
    worker.side._runner.pools.retire()
    with pytest.raises(DescriptorError):
        worker.side._runner.pools.require_current()
    store_now(worker, ended, worker.store(1, TOKENS, worker.tables(TOKENS)))
    assert ended.results.failed_stores == {1}
