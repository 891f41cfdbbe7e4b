# SPDX-License-Identifier: Apache-2.0
"""A worker's jobs on real pages: what comes back, what stays untouched, what is reported.

torch is imported when a test runs: the tests are collected where there is none.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
from support.connector.gates import Gate, until
from support.connector.worker_configs import (
    AttentionLayer,
    parallel_config,
    vllm_config,
    worker_options,
)

from vllm_ascend_kvext.connector.common.errors import ConnectorError
from vllm_ascend_kvext.connector.common.messages import (
    ConnectorMetadata,
    LoadJob,
    StoreJob,
    WorkerOutput,
)
from vllm_ascend_kvext.connector.worker import worker_side
from vllm_ascend_kvext.connector.worker.job_runner import MAX_FAILED_IN_A_ROW
from vllm_ascend_kvext.connector.worker.worker_side import EndedJobs, WorkerSide
from vllm_ascend_kvext.layout.errors import LayoutError
from vllm_ascend_kvext.layout.model import StatePolicy
from vllm_ascend_kvext.layout.row_map import RowMap, StoredChunk
from vllm_ascend_kvext.layout.transfer_plan import PlacedChunk, TablePart
from vllm_ascend_kvext.settings import ASCEND_KERNEL_VARIABLE, BUNDLE_VARIABLE
from vllm_ascend_kvext.token_range import TokenRange
from vllm_ascend_kvext.transfer.errors import BackendError, DescriptorError, PlacementError
from vllm_ascend_kvext.transfer.page_transfer import page_transfer
from vllm_ascend_kvext.transfer.placement import CopyPlacement
from vllm_ascend_kvext.transfer.schema import Direction

LAYOUTS = ("single group", "gemma", "deepseek v4")
TOKENS = TokenRange(0, 128)
NUM_PAGES = 64
"""Of every small worker."""


class Move:
    """`page_transfer` behind a gate; numbers of loads, from 1, that fail can be named."""

    def __init__(self) -> None:
        self.gate = Gate()
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
        if direction is Direction.HOST_TO_PAGES and self.num_loads in self.failing_loads:
            raise BackendError("the device is on fire")
        page_transfer(*arguments, placement=placement)

    @property
    def num_loads(self) -> int:
        return self.directions.count(Direction.HOST_TO_PAGES)


class Case:
    """A small worker, with the first pages of `TOKENS` and a store of them.

    What it reports is collected, and may not be seen twice.
    """

    def __init__(self, layout: str, has_stored: bool, **arguments: Any) -> None:
        from support.connector import small_workers

        self.move = Move()
        arguments = {"move": self.move} | arguments
        if arguments["move"] is None:
            del arguments["move"]
        self.worker = small_workers.SmallWorker(small_workers.LAYOUTS[layout], **arguments)
        self.side, self.pages = self.worker.side, self.worker.pages
        self.loads: set[str] = set()
        self.failed_pages: set[int] = set()
        self.results = WorkerOutput()
        self.tables = self.worker.tables(TOKENS)
        self.job = self.worker.store(1, TOKENS, self.tables)
        self.content = self.worker.page_bytes(self.tables)
        if has_stored:
            self.run(self.job)

    def take(self) -> EndedJobs:
        ended = self.side.end_step()
        assert ended.loads.isdisjoint(self.loads)
        assert ended.results.stores_ended.keys().isdisjoint(self.results.stores_ended)
        assert ended.results.failed_loads <= ended.loads
        assert bool(ended.failed_pages) <= bool(ended.results.failed_loads)
        self.loads |= ended.loads
        self.failed_pages |= ended.failed_pages
        self.results.add(ended.results)
        return ended

    def begin(self, *jobs: StoreJob | LoadJob, has_forward: bool = False) -> None:
        stores = tuple(job for job in jobs if isinstance(job, StoreJob))
        loads = tuple(job for job in jobs if isinstance(job, LoadJob))
        self.side.begin_step(ConnectorMetadata(stores=stores, loads=loads, has_forward=has_forward))

    def wait_for(self, stores: set[int], loads: set[str]) -> None:
        """Take until these have ended as well, and no others."""
        stores, loads = stores | self.results.stores_ended.keys(), loads | self.loads

        def have_ended() -> bool:
            self.take()
            return self.results.stores_ended.keys() >= stores and self.loads >= loads

        until(have_ended, f"stores {stores} and loads {loads}")
        assert self.results.stores_ended == dict.fromkeys(stores, 1)
        assert self.loads == loads

    def run(self, *jobs: StoreJob | LoadJob) -> None:
        """Begin jobs in a step that computes nothing, and wait for their ends."""
        self.begin(*jobs)
        stores = {job.number for job in jobs if isinstance(job, StoreJob)}
        self.wait_for(stores, {job.request_id for job in jobs if isinstance(job, LoadJob)})

    def load(self, request_id: str = "a", **changes: Any) -> LoadJob:
        """A load of the store into its pages."""
        return dataclasses.replace(self.worker.load(request_id, self.job, self.tables), **changes)

    @property
    def page_ids(self) -> set[int]:
        return {id for table in self.tables for id in table.ids}


Make = Callable[..., Case]


@pytest.fixture
def case() -> Iterator[Make]:
    """Cases by the name of their layout; their threads end with the test."""
    pytest.importorskip("torch")
    made: list[Case] = []

    def make(layout: str = "gemma", has_stored: bool = True, **arguments: Any) -> Case:
        made.append(Case(layout, has_stored, **arguments))
        return made[-1]

    yield make
    for each in made:
        each.side.shutdown()


def same(some: Any, others: Any) -> bool:
    from support.connector import small_workers

    return small_workers.same(some, others)


# Bytes


@pytest.mark.parametrize("tokens", [TOKENS, TokenRange(64, 256)], ids=["start", "later"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_stored_is_loaded_into_other_pages(
    layout: str, tokens: TokenRange, case: Make
) -> None:
    made = case(layout, has_stored=False)
    worker, pages = made.worker, made.pages
    source, target = worker.tables(tokens), worker.tables(tokens, first_page=20)
    assert {id for table in source for id in table.ids}.isdisjoint({0})
    before, stored = pages.copy_of_storages(), worker.page_bytes(source)
    job = worker.store(1, tokens, source)
    made.run(job)
    assert same(pages.copy_of_storages(), before), "a store writes no page"

    pages.fill(seed=2)
    others = worker.others_bytes(target)
    made.run(worker.load("a", job, target))
    assert same(worker.page_bytes(target), stored)
    assert same(worker.others_bytes(target), others), "a load writes its pages only"
    assert not made.failed_pages and not made.results.failed_loads

    num_bytes = sum(page.nbytes for page in stored)
    for direction in ("store", "load"):
        traffic = made.results.traffic[direction]
        assert (traffic.num_bytes, traffic.transfers) == (num_bytes, 1)
        assert 0 < traffic.seconds < 5


# Steps


def test_stores_begin_when_the_forward_has_ended(case: Make) -> None:
    made = case(has_stored=False)
    made.side.end_of_forward()
    made.begin(made.job, has_forward=True)
    made.pages.fill(seed=3)  # the forward
    computed = made.worker.page_bytes(made.tables)
    made.side.wait_for_end(20)  # for what would have begun
    assert not made.take().results
    made.side.end_of_forward()
    made.wait_for({1}, set())
    made.pages.fill(seed=4)
    made.run(made.load())
    assert same(made.worker.page_bytes(made.tables), computed)


def test_stores_of_a_forward_that_raised_are_reported_as_failed(case: Make) -> None:
    made = case(has_stored=False)
    made.begin(made.job, has_forward=True)
    made.begin(made.worker.store(2, TOKENS, made.tables), has_forward=True)
    made.side.end_of_forward()
    made.wait_for({1, 2}, set())
    assert made.results.failed_stores == {1}
    assert len(made.move.directions) == 1


def test_stores_before_a_step_have_ended_before_it(case: Make) -> None:
    """Whatever is in the queue."""
    made = case(has_stored=False)
    worker, tables = made.worker, made.worker.tables(TOKENS, first_page=20)
    made.move.gate.close()
    made.begin(made.job)
    made.move.gate.wait_for_arrival()
    one, other = (worker.store(number, TOKENS, tables) for number in (2, 3))
    content = worker.page_bytes(tables)
    made.side.run_before_step(ConnectorMetadata(stores_before=(one, other), has_forward=True))
    made.pages.fill(seed=2)  # the step
    assert made.take().results.stores_ended == {2: 1, 3: 1}
    made.move.gate.open()
    made.wait_for({1}, set())
    for name, job in {"a": one, "b": other}.items():
        made.run(worker.load(name, job, tables))
        assert same(worker.page_bytes(tables), content)
    assert not made.results.failed_stores


def test_a_step_that_computes_nothing_can_wait_for_a_load(case: Make) -> None:
    made = case()
    made.side.wait_for_end(20)
    made.move.gate.close()
    made.begin(made.load())
    made.side.wait_for_end(0.01)
    assert not made.take().loads
    threading.Timer(0.05, made.move.gate.open).start()
    made.side.wait_for_end(20)
    assert made.take().loads == {"a"}


def test_copies_run_beside_the_model(case: Make) -> None:
    cpu = min(os.sched_getaffinity(0))
    move = case(options=worker_options(copy_cpus=(cpu,))).move
    assert move.threads[0].name == "kvext-transfer"
    assert move.cpus == {frozenset({cpu})}
    assert move.placements == [CopyPlacement((cpu,), 1)]


@pytest.mark.parametrize("digit", ["0", "1"])
def test_the_op_moves_as_the_settings_want_it(
    case: Make, monkeypatch: pytest.MonkeyPatch, digit: str
) -> None:
    moved: list[dict[str, Any]] = []
    monkeypatch.setenv(BUNDLE_VARIABLE, digit)
    monkeypatch.setenv(ASCEND_KERNEL_VARIABLE, digit)
    monkeypatch.setattr(worker_side, "page_transfer", lambda *_, **how: moved.append(how))
    case(move=None)
    assert moved == [{"placement": ANY, "is_bundled": digit == "1", "uses_kernel": digit == "1"}]


# Failures


def test_a_load_that_is_not_complete_fails_and_writes_nothing(case: Make) -> None:
    made = case()
    made.pages.fill(seed=2)
    before = made.pages.copy_of_storages()
    (chunk,) = made.load().stored
    part = StoredChunk(RowMap.of(list(chunk.rows)[:-1]), chunk.host_offset_bytes)
    made.run(made.load(stored=(part,)))
    assert made.results.failed_loads == {"a"}
    assert made.failed_pages == made.page_ids
    assert same(made.pages.copy_of_storages(), before)
    assert not made.results.traffic["load"].transfers


@pytest.mark.parametrize(
    ("failing", "may_lack", "unreadable", "has_failed"),
    [
        ({1, 3}, True, {1}, False),
        ({1, 3}, False, {1}, True),
        ({1}, False, set(), False),
        (set(range(9)), True, {0, 1, 2, 3}, True),
    ],
)
def test_of_a_load_that_fails_each_part_is_tried(
    failing: set[int], may_lack: bool, unreadable: set[int], has_failed: bool, case: Make
) -> None:
    made = case("single group", has_stored=False)
    worker = made.worker
    chunks = [TokenRange(first, first + 32) for first in range(0, 128, 32)]
    tables = [worker.tables(tokens, 1 + 8 * n) for n, tokens in enumerate(chunks)]
    stores = [worker.store(n, *each) for n, each in enumerate(zip(chunks, tables, strict=True))]
    contents = [worker.page_bytes(table) for table in tables]
    made.run(*stores)
    made.pages.fill(seed=2)
    parts = [worker.load("a", *each) for each in zip(stores, tables, strict=True)]
    stored = tuple(part.stored[0] for part in parts)
    whole = TablePart(0, tuple(id for (table,) in tables for id in table.ids))
    before = [worker.page_bytes(table) for table in tables]
    made.move.failing_loads = failing
    made.run(LoadJob("a", TOKENS, stored, (whole,), may_lack=may_lack))
    places = {stored[number].host_offset_bytes for number in unreadable}
    assert made.results.unreadable == ({"a": places} if places else {})
    assert made.results.failed_loads == ({"a"} if has_failed else set())
    assert made.failed_pages == (set(whole.ids) if has_failed else set())
    assert made.move.num_loads == 1 + (MAX_FAILED_IN_A_ROW if len(unreadable) == 4 else 4)
    for number, table in enumerate(tables):
        expected = before if number in unreadable else contents
        assert same(worker.page_bytes(table), expected[number])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_a_failed_load_are_those_it_should_have_filled(layout: str, case: Make) -> None:
    """Not those before its tokens, none that a window has left behind, and no null block."""
    made = case(layout, has_stored=False)
    tokens = TokenRange(64, 192)
    tables = made.worker.tables(tokens)
    job = made.worker.store(2, tokens, tables)
    made.run(job)
    made.move.failing_loads = {1, 2}
    # Whole tables of a request that goes on, with other pages before and behind.
    whole = tuple(TablePart(0, (60,) * part.first_page + part.ids + (61,)) for part in tables)
    made.run(made.worker.load("a", job, whole))
    assert made.results.failed_loads == {"a"}
    assert made.failed_pages == {id for table in tables for id in table.ids}


@pytest.mark.parametrize(
    ("tables", "pages"),
    [
        ((), set()),
        ((TablePart(7, (5, 6)),), {5}),  # 6 is behind the last token
        ((TablePart(9, (5, 6)),), set()),
        ((TablePart(1, (5, 6, 7)),), {5, 6, 7}),
        ((TablePart(0, (5, 6)),), {5, 6}),
        ((TablePart(0, (*range(1, 8), NUM_PAGES)),), {*range(1, 8), NUM_PAGES}),
        ((TablePart(0, (8, 7, 6, 0, 4, 3, 2, 1)),), {8, 7, 6, 4, 3, 2, 1}),  # a null page
    ],
)
def test_a_job_that_cannot_be_planned_fails(
    tables: tuple[TablePart, ...], pages: set[int], case: Make
) -> None:
    made = case("single group")
    before = made.pages.copy_of_storages()
    made.run(made.worker.store(2, TOKENS, tables), made.load(block_ids=tables))
    assert made.results.failed_stores == {2} and made.results.failed_loads == {"a"}
    assert made.failed_pages == pages
    assert same(made.pages.copy_of_storages(), before)


@pytest.mark.parametrize("host_bytes", [1 << 20, 4096])
def test_a_store_that_lacks_rows_or_memory_fails(host_bytes: int, case: Make) -> None:
    """Rows behind the last whole one of a chunk; host memory is never left."""
    made = case("single group", has_stored=False, options=worker_options(host_bytes=host_bytes))
    assert made.worker.chunk_bytes(TOKENS) > 4096
    job = made.job
    if host_bytes > 4096:
        short = (PlacedChunk(TokenRange(0, 64)), PlacedChunk(TokenRange(64, 120), 8192))
        job = StoreJob(1, short, made.tables)
    made.run(job)
    assert made.results.failed_stores == {1}


def test_skipped_states_are_not_missed(case: Make) -> None:
    options = worker_options(state_policy=StatePolicy.SKIP)
    made = case("deepseek v4", has_stored=False, options=options)
    tables = (*made.tables[:3], TablePart(0, ()))
    made.run(dataclasses.replace(made.job, block_ids=tables))
    made.run(made.load(block_ids=tables))
    assert not made.results.failed_stores and not made.results.failed_loads


# Beginning and end


def test_a_worker_describes_itself(case: Make) -> None:
    made = case(options=worker_options(host_bytes=(1 << 20) + 63))
    described = made.side.describe()
    assert described.layout == made.pages.layout()
    assert described.host_bytes == 1 << 20
    assert len(described.fingerprint) == 64


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("model_config", {"model": "other"}),
        ("model_config", {"revision": "other"}),
        ("model_config", {"quantization": "other"}),
        ("model_config", {"dtype": "torch.float16"}),
        ("cache_config", {"cache_dtype": "fp8_e5m2"}),
        ("", {"speculative_config": SimpleNamespace(model="draft")}),
        ("", {"parallel_config": parallel_config(tensor_parallel_size=2)}),
        ("compilation_config", {"static_forward_context": {"0.0.attn": AttentionLayer()}}),
    ],
)
def test_what_makes_another_fingerprint(part: str, values: dict[str, Any], case: Make) -> None:
    config = vllm_config()
    vars(getattr(config, part) if part else config).update(values)
    made = {case(vllm_config=each).side.describe().fingerprint for each in (vllm_config(), config)}
    assert len(made) == 2


def test_ranks_have_one_fingerprint(case: Make) -> None:
    ranks = [parallel_config(tensor_parallel_size=2, rank=rank) for rank in (1, 3)]
    configs = [vllm_config(parallel_config=each) for each in ranks]
    assert len({case(vllm_config=each).side.describe().fingerprint for each in configs}) == 1


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("decode_context_parallel_size", "context parallelism: found a size of 2"),
        ("prefill_context_parallel_size", "context parallelism: found a size of 2"),
        ("pipeline_parallel_size", "found pipeline_parallel_size 2, expected 1"),
    ],
)
def test_parallelism_that_is_refused(option: str, message: str, case: Make) -> None:
    with pytest.raises(LayoutError, match=message):
        case(vllm_config=vllm_config(parallel_config=parallel_config(**{option: 2})))


def test_cpus_that_nobody_has_are_refused(case: Make) -> None:
    with pytest.raises(PlacementError):
        case(options=worker_options(copy_cpus=(100_000,)))


def test_a_second_registration_takes_the_pages_where_they_are(case: Make) -> None:
    from support.connector import small_workers

    made = case()
    described = made.side.describe()
    old, made.worker.pages = made.pages, small_workers.gemma_like()
    before = old.copy_of_storages()
    made.side.register(made.worker.pages.kv_caches)
    made.run(made.load())
    assert same(made.worker.page_bytes(made.tables), made.content)
    assert same(old.copy_of_storages(), before)
    assert made.side.describe() == described, "the scheduler side is told once"


def test_a_registration_of_other_pages_is_refused(case: Make) -> None:
    from support.connector import small_workers

    made = case("single group", has_stored=False)
    other = small_workers.single_group()
    apart = {name: tensor.repeat(1, 2, 1, 1, 1)[:, :2] for name, tensor in other.kv_caches.items()}
    with pytest.raises(LayoutError, match="expected the pages registered first"):
        made.side.register(apart)
    made.run(made.job)
    assert not made.results.failed_stores


@pytest.mark.parametrize("end", ["shutdown", "end_transfers"])
def test_what_runs_ends_and_what_is_queued_fails(end: str, case: Make) -> None:
    """The memory of pages may go away then, and nobody calls `register` again."""
    made = case(has_stored=False)
    made.move.gate.close()
    made.begin(made.job, made.worker.store(2, TOKENS, made.tables))
    made.move.gate.wait_for_arrival()
    threading.Timer(0.1, made.move.gate.open).start()
    getattr(made.side, end)()
    assert made.take().results.stores_ended.keys() >= {1}, "what runs is waited for"
    assert len(made.move.directions) == 1
    assert made.move.threads[0].is_alive() is (end == "end_transfers")
    made.begin(made.worker.store(3, TOKENS, made.tables))
    made.wait_for({1, 2, 3}, set())
    assert made.results.failed_stores == ({2} if end == "end_transfers" else {2, 3})


def test_a_worker_without_caches() -> None:
    pytest.importorskip("torch")
    side = WorkerSide(vllm_config(), None, worker_options())
    with pytest.raises(ConnectorError, match="call register"):
        side.describe()
    side.begin_step(ConnectorMetadata(has_forward=True))
    side.end_of_forward()
    assert side.end_step() == EndedJobs(frozenset(), frozenset(), WorkerOutput())
    load = LoadJob("a", TOKENS, (), (TablePart(0, (1,)),))
    side.begin_step(ConnectorMetadata(loads=(load,)))
    assert until(lambda: side.end_step().results.failed_loads) == {"a"}
    side.end_transfers()
    side.shutdown()


def test_a_pool_that_has_moved_fails_its_jobs(case: Make) -> None:
    """Memory that was taken away without a word is not written to."""
    made = case(has_stored=False)
    pools = made.side._runner.pools
    pools.tensors = tuple(tensor.clone() for tensor in pools.tensors)
    with pytest.raises(DescriptorError):
        pools.require_current()
    made.run(made.job)
    assert made.results.failed_stores == {1}
