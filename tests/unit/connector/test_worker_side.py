# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A worker's jobs on real pages: what they bring, what they leave untouched, and their reports.

torch is imported when a test runs, so the tests can be collected without torch.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn
from unittest.mock import ANY

import pytest
from support.connector.gates import Gate, until
from support.connector.worker_configs import (
    vllm_config,
    worker_options,
)
from support.transfer.host_model import HostModel

from vllm_ascend_kvext.connector.common.messages import (
    ConnectorMetadata,
    HoleTails,
    LoadJob,
    StoreJob,
    WorkerOutput,
)
from vllm_ascend_kvext.connector.worker import job_runner, worker_side
from vllm_ascend_kvext.connector.worker.extension import WorkerExtension
from vllm_ascend_kvext.connector.worker.host_buffer import HostBuffer
from vllm_ascend_kvext.connector.worker.job_runner import MAX_FAILED_IN_A_ROW
from vllm_ascend_kvext.connector.worker.secondary_tier import SecondaryTierWorker
from vllm_ascend_kvext.connector.worker.worker_side import EndedJobs, WorkerSide
from vllm_ascend_kvext.errors import ConnectorError, LayoutError, SettingsError
from vllm_ascend_kvext.layout.model import StatePolicy
from vllm_ascend_kvext.layout.row_map import RowMap, StoredChunk
from vllm_ascend_kvext.layout.transfer_plan import PlacedChunk, TablePart
from vllm_ascend_kvext.settings import ASCEND_KERNEL_VARIABLE, BUNDLE_VARIABLE
from vllm_ascend_kvext.token_range import TokenRange
from vllm_ascend_kvext.transfer.devices import transfers_on
from vllm_ascend_kvext.transfer.errors import BackendError, DescriptorError
from vllm_ascend_kvext.transfer.page_transfer import page_transfer
from vllm_ascend_kvext.transfer.placement import CopyPlacement
from vllm_ascend_kvext.transfer.schema import Direction

if TYPE_CHECKING:
    from support.connector.small_workers import SmallWorker

TOKENS = TokenRange(0, 128)
NUM_PAGES, LAYER = 64, "model.layers.0.c4.attn"
"""The number of pages of every small worker, and its first layer."""


class Move:
    """`page_transfer` behind a gate. The loads in ``failing_loads`` fail.

    They are counted from 1.
    """

    def __init__(self) -> None:
        self.gate = Gate()
        self.failing_loads: set[int] = set()
        self.num_stores = self.num_loads = 0
        self.threads: list[threading.Thread] = []
        self.placements: list[tuple[set[int], CopyPlacement | None]] = []

    def __call__(self, *arguments: Any, placement: CopyPlacement | None) -> None:
        self.threads.append(threading.current_thread())
        self.placements.append((os.sched_getaffinity(0), placement))
        if threading.current_thread() is not threading.main_thread():
            self.gate.pass_through()
        is_load = arguments[-1] is Direction.HOST_TO_PAGES
        self.num_loads += is_load
        self.num_stores += not is_load
        if is_load and self.num_loads in self.failing_loads:
            raise BackendError("the device is on fire")
        page_transfer(*arguments, placement=placement)


Make = Callable[..., "SmallWorker"]


@pytest.fixture
def move() -> Move:
    return Move()


@pytest.fixture
def make(move: Move) -> Iterator[Make]:
    """Make workers by the name of their layout. Their threads end with the test."""
    pytest.importorskip("torch")
    from support.connector import small_workers

    made: list[SmallWorker] = []

    def make_worker(layout: str = "deepseek_v4_like", **arguments: Any) -> SmallWorker:
        arguments = {"move": move} | arguments
        made.append(small_workers.SmallWorker(getattr(small_workers, layout), **arguments))
        return made[-1]

    yield make_worker
    for each in made:
        each.side.shutdown()


@pytest.fixture
def worker(make: Make) -> SmallWorker:
    return make()


@pytest.fixture
def stored(worker: SmallWorker) -> SmallWorker:
    """A worker that has stored its job."""
    worker.run(worker.job)
    return worker


def same(some: Any, others: Any) -> bool:
    from support.connector import small_workers

    return small_workers.same(some, others)


# Bytes


@pytest.mark.parametrize("tokens", [TOKENS, TokenRange(64, 256)], ids=["start", "later"])
def test_what_is_stored_is_loaded_into_other_pages(tokens: TokenRange, worker: SmallWorker) -> None:
    source, target = worker.tables_of(tokens), worker.tables_of(tokens, first_page=30)
    before, content = worker.pages.copy_of_storages(), worker.page_bytes(source)
    job = worker.store(2, tokens, source)
    worker.run(job)
    assert same(worker.pages.copy_of_storages(), before), "a store has changed pages"
    worker.pages.fill(seed=2)
    worker.run(worker.load(job, target))
    assert same(worker.page_bytes(target), content)
    assert not worker.failed_pages and not worker.results.failed_loads
    num_bytes = sum(page.nbytes for page in content)
    for direction in ("store", "load"):
        traffic = worker.results.traffic[direction]
        assert (traffic.num_bytes, traffic.transfers) == (num_bytes, 1)
        assert 0 < traffic.seconds < 5


# Steps


def test_stores_begin_when_the_forward_has_ended(worker: SmallWorker) -> None:
    worker.side.end_of_forward()
    worker.begin(worker.job, has_forward=True)
    worker.pages.fill(seed=3)  # This is the forward pass.
    computed = worker.page_bytes()
    worker.side.wait_for_end(20)  # The store would have begun in this time.
    assert not worker.take().results
    worker.side.end_of_forward()
    worker.wait_for(1)
    worker.pages.fill(seed=4)
    worker.run(worker.load())
    assert same(worker.page_bytes(), computed)


def test_stores_of_a_forward_that_raised_are_reported_as_failed(
    worker: SmallWorker, move: Move
) -> None:
    worker.begin(worker.job, has_forward=True)
    worker.begin(worker.store(2, TOKENS, worker.tables), has_forward=True)
    worker.side.end_of_forward()
    worker.wait_for(1, 2)
    assert worker.results.failed_jobs == {1}
    assert move.num_stores == 1


def test_stores_before_a_step_have_ended_before_it(worker: SmallWorker, move: Move) -> None:
    """This holds whatever jobs are queued."""
    move.gate.close()
    worker.begin(worker.job)
    move.gate.wait_for_arrival()
    jobs = tuple(worker.store(number, TOKENS, worker.tables) for number in (2, 3))
    content = worker.page_bytes()
    worker.side.run_before_step(ConnectorMetadata(stores_before=jobs, has_forward=True))
    worker.pages.fill(seed=2)  # This is the step.
    assert worker.take().results.jobs_ended == {2: 1, 3: 1}
    move.gate.open()
    worker.wait_for(1)
    worker.run(worker.load(jobs[1]))
    assert same(worker.page_bytes(), content)
    assert not worker.results.failed_jobs


def test_a_step_that_computes_nothing_can_wait_for_a_load(stored: SmallWorker, move: Move) -> None:
    move.gate.close()
    stored.begin(stored.load())
    stored.side.wait_for_end(0.01)
    assert not stored.take().loads
    threading.Timer(0.05, move.gate.open).start()
    stored.side.wait_for_end(20)
    assert stored.take().loads == {"a"}


def test_copies_run_beside_the_model(make: Make, move: Move) -> None:
    cpu = min(os.sched_getaffinity(0))
    worker = make(options=worker_options(copy_cpus=(cpu,)))
    worker.run(worker.job)
    assert move.threads[0].name == "kvext-transfer"
    assert move.placements == [({cpu}, CopyPlacement((cpu,), 1))]


def bind_all_threads(cpus: Iterable[int]) -> None:
    """Do what ``taskset --all-tasks`` does."""
    for thread_id in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread_id), cpus)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_named_cpus_hold_when_all_threads_are_bound_later(make: Make, move: Move) -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    worker = make(options=worker_options(copy_cpus=(second,)))
    worker.run(worker.job)
    try:
        bind_all_threads({first})
        worker.run(worker.store(2, TOKENS, worker.tables))
        worker.run(worker.load())
    finally:
        bind_all_threads(before)
    assert move.placements == [({second}, CopyPlacement((second,), 1))] * 3
    assert not worker.results.failed_jobs and not worker.results.failed_loads


def test_copies_follow_the_cpus_of_the_worker(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is chosen before the first copy. Nothing is logged while nothing changes."""
    bound: list[set[int]] = []
    placements: list[CopyPlacement] = []
    monkeypatch.setattr(worker_side, "bind_thread", bound.append)
    monkeypatch.setattr(os, "environ", {})
    host = HostModel()
    caplog.set_level(logging.INFO, logger="vllm.ascend_kvext.transfer")

    def note(*_: Any, placement: CopyPlacement) -> None:
        placements.append(placement)

    worker = make(move=note, host_cpus=host)
    host.bind_all(range(50, 94))
    worker.run(worker.job)
    worker.run(worker.load())
    host.bind_all(range(100, 142))
    worker.run(worker.store(2, TOKENS, worker.tables))
    expected = [range(50, 94), range(50, 94), range(100, 142)]
    assert placements == [CopyPlacement(tuple(cpus), 4) for cpus in expected]
    assert bound == [set(cpus) for cpus in expected]
    assert caplog.text.count("Copies between pages and host memory run on CPUs") == 2


def test_a_thread_that_cannot_be_bound_copies_where_it_is(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(cpus: frozenset[int]) -> None:
        raise OSError("the cpuset has none of them")

    monkeypatch.setattr(worker_side, "bind_thread", refuse)
    worker = make()
    worker.run(worker.job)
    worker.run(worker.load())
    assert not worker.results.failed_jobs and not worker.results.failed_loads
    assert caplog.text.count("Copies run where their threads are: the cpuset has none") == 1


@pytest.mark.parametrize(
    ("bound", "copy_cpus", "node", "logged"),
    [
        (range(48, 96), None, 1, "taken from memory node 1"),
        # The model counts, not its copies.
        (range(145, 150), (0,), 3, "taken from memory node 3"),
        # vLLM-Ascend binds threads later. Until then, only named CPUs tell the node.
        (range(192), (0,), 0, "taken from memory node 0"),
        (range(192), None, None, "whichever of 4 memory nodes"),
    ],
)
def test_host_memory_is_on_the_node_of_the_worker(
    bound: range,
    copy_cpus: tuple[int, ...] | None,
    node: int | None,
    logged: str,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if copy_cpus is not None and 0 not in os.sched_getaffinity(0):
        pytest.skip("needs CPU 0")
    nodes: list[int | None] = []
    allocate = HostBuffer.allocate

    def note(num_bytes: int, device: Any, of_node: int | None, why_torch: None) -> HostBuffer:
        nodes.append(of_node)
        return allocate(num_bytes, device)

    monkeypatch.setattr(worker_side.HostBuffer, "allocate", note)
    monkeypatch.setattr(os, "environ", {})
    host = HostModel()
    host.bind_all(bound)
    caplog.set_level(logging.INFO, logger="vllm.ascend_kvext.connector")
    make(options=worker_options(copy_cpus=copy_cpus), host_cpus=host)
    assert nodes == [node]
    assert logged in caplog.text


@pytest.mark.parametrize("fails", ["extension", "secondary tier"])
def test_a_failed_start_keeps_no_memory(
    fails: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may go on: it may be that of a user who makes another engine."""
    unmapped: list[int] = []
    allocate = HostBuffer.allocate

    def note(num_bytes: int, device: Any, *_: Any) -> HostBuffer:
        tensor = allocate(num_bytes, device).tensor
        return HostBuffer(tensor, lambda: unmapped.append(tensor.numel()))

    def refuse(*_: Any) -> None:
        raise SettingsError("no such folder")

    monkeypatch.setattr(worker_side.HostBuffer, "allocate", note)
    part = WorkerExtension if fails == "extension" else SecondaryTierWorker
    register = part.register
    monkeypatch.setattr(part, "register", refuse)
    with pytest.raises(SettingsError, match="no such folder"):
        make()
    assert len(unmapped) == 1
    monkeypatch.setattr(part, "register", register)
    worker = make()
    with pytest.raises(LayoutError):  # Pages that do not fit leave a running worker as it is.
        worker.side.register({})
    assert len(unmapped) == 1
    worker.run(worker.job)
    worker.side.shutdown()
    worker.side.shutdown()
    assert len(unmapped) == 2


def test_a_secondary_tier_may_need_memory_of_torch(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str | None] = []
    allocate = HostBuffer.allocate

    def note(num_bytes: int, device: Any, _: Any, why_torch: str | None) -> HostBuffer:
        reasons.append(why_torch)
        return allocate(num_bytes, device)

    monkeypatch.setattr(worker_side.HostBuffer, "allocate", note)
    make()
    tier = SecondaryTierWorker()
    tier.why_torch = "another library reads it."

    def meet() -> NoReturn:
        raise AssertionError("workers share no memory of torch")

    side = make(secondary=tier, meet=meet).side
    assert reasons == [None, "another library reads it."]
    said = side.describe().no_sharing
    assert said == "torch does not share what it allocates: another library reads it"


@pytest.mark.parametrize(("device", "node"), [("npu:5", 2), ("cuda:5", None)])
def test_the_node_of_an_npu_is_that_to_which_its_worker_will_be_bound(
    device: str, node: int | None
) -> None:
    torch = pytest.importorskip("torch")
    planned = {5: frozenset(range(100, 120))}
    side = WorkerSide(
        None, None, worker_options(), host_cpus=HostModel(), planned_cpus=planned.__getitem__
    )
    kind, _, index = device.partition(":")
    assert side._memory_node(SimpleNamespace(type=kind, index=int(index))) == node
    bound = HostModel()
    bound.bind_all([3])
    side = WorkerSide(
        None, None, worker_options(), host_cpus=bound, planned_cpus=planned.__getitem__
    )
    assert side._memory_node(torch.device("cpu")) == 0


@pytest.mark.parametrize("digit", ["0", "1"])
def test_the_op_moves_as_the_settings_want_it(
    make: Make, monkeypatch: pytest.MonkeyPatch, digit: str
) -> None:
    moved: list[dict[str, Any]] = []
    monkeypatch.setenv(BUNDLE_VARIABLE, digit)
    monkeypatch.setenv(ASCEND_KERNEL_VARIABLE, digit)
    monkeypatch.setattr(worker_side, "page_transfer", lambda *_, **how: moved.append(how))
    worker = make(move=None)
    worker.run(worker.job)
    assert moved == [{"placement": ANY, "is_bundled": digit == "1", "uses_kernel": digit == "1"}]


# Failures


def test_a_load_that_is_not_complete_fails_and_writes_nothing(stored: SmallWorker) -> None:
    stored.pages.fill(seed=2)
    before = stored.pages.copy_of_storages()
    (chunk,) = stored.load().stored
    part = StoredChunk(RowMap.of(list(chunk.rows)[:-1]), chunk.host_offset_bytes)
    stored.run(stored.load(stored=(part,)))
    assert stored.results.failed_loads == {"a"}
    assert same(stored.pages.copy_of_storages(), before)
    assert not stored.results.traffic["load"].transfers


@pytest.mark.parametrize(
    ("failing", "may_lack", "unreadable", "has_failed"),
    [
        ({1, 3}, True, {1}, False),
        ({1, 3}, False, {1}, True),
        ({1}, False, set(), False),
        ({1, 2, 4, 5}, True, {0, 2, 3}, False),
        (set(range(9)), True, {0, 1, 2, 3, 4}, True),
    ],
)
def test_of_a_load_that_fails_each_part_is_tried(
    failing: set[int],
    may_lack: bool,
    unreadable: set[int],
    has_failed: bool,
    make: Make,
    move: Move,
) -> None:
    worker = make("single_group")
    chunks = [TokenRange(first, first + 32) for first in range(0, 160, 32)]
    tables = [worker.tables_of(tokens, 1 + 8 * n) for n, tokens in enumerate(chunks)]
    stores = [worker.store(n, *each) for n, each in enumerate(zip(chunks, tables, strict=True))]
    contents = [worker.page_bytes(table) for table in tables]
    worker.run(*stores)
    worker.pages.fill(seed=2)
    stored = tuple(worker.load(store).stored[0] for store in stores)
    whole = TablePart(0, tuple(id for (table,) in tables for id in table.ids))
    before = [worker.page_bytes(table) for table in tables]
    move.failing_loads = failing
    worker.run(LoadJob("a", TokenRange(0, 160), stored, (whole,), may_lack=may_lack))
    places = {stored[number].host_offset_bytes for number in unreadable}
    assert worker.results.unreadable == ({"a": places} if places else {})
    assert worker.results.failed_loads == ({"a"} if has_failed else set())
    assert worker.failed_pages == (set(whole.ids) if has_failed else set())
    assert move.num_loads == 1 + (MAX_FAILED_IN_A_ROW if len(unreadable) == 5 else 5)
    for number, table in enumerate(tables):
        expected = before if number in unreadable else contents
        assert same(worker.page_bytes(table), expected[number])


def test_each_entry_of_a_load_is_a_part() -> None:
    """Tails continue others, also where a hole begins."""
    chunks = [StoredChunk(RowMap(), 64 * number) for number in range(5)]
    tails = [
        HoleTails(16 * number, tuple(chunks[first:end]), (), ())
        for number, first, end in ((1, 2, 3), (2, 3, 5))
    ]
    job = LoadJob("a", TokenRange(0, 64), tuple(chunks[:2]), (), hole_tails=tuple(tails))
    assert job.places == {0, 64, 128, 192, 256}
    parts = list(job_runner._parts_of(job))
    assert [part.places for part in parts] == [{0}, {64}, {128}, {192}, {256}]
    assert [len(part.hole_tails) for part in parts] == [0, 0, 1, 1, 1]


def test_pages_of_a_failed_load_are_those_it_should_have_filled(
    worker: SmallWorker, move: Move
) -> None:
    """Pages before its tokens, pages that a window has left, and null blocks are not counted."""
    tokens = TokenRange(64, 192)
    tables = worker.tables_of(tokens)
    job = worker.store(2, tokens, tables)
    worker.run(job)
    move.failing_loads = {1, 2}
    # These are whole tables of a request that continues. It has other pages before and behind.
    whole = [TablePart(0, (60,) * part.first_page + part.ids + (61,)) for part in tables]
    worker.run(worker.load(job, whole))
    assert worker.results.failed_loads == {"a"}
    assert worker.failed_pages == {id for table in tables for id in table.ids}


@pytest.mark.parametrize(
    ("tables", "pages"),
    [
        ((), set()),
        ((TablePart(7, (5, 6)),), {5}),  # Page 6 is behind the last token.
        ((TablePart(9, (5, 6)),), set()),
        ((TablePart(1, (5, 6, 7)),), {5, 6, 7}),
        ((TablePart(0, (*range(1, 8), NUM_PAGES)),), {*range(1, 8), NUM_PAGES}),
        ((TablePart(0, (8, 7, 6, 0, 4, 3, 2, 1)),), {8, 7, 6, 4, 3, 2, 1}),  # One is a null page.
    ],
)
def test_a_job_that_cannot_be_planned_fails(
    tables: tuple[TablePart, ...], pages: set[int], make: Make
) -> None:
    worker = make("single_group")
    worker.run(worker.job)
    before = worker.pages.copy_of_storages()
    worker.run(replace(worker.job, number=2, block_ids=tables), worker.load(block_ids=tables))
    assert worker.results.failed_jobs == {2} and worker.results.failed_loads == {"a"}
    assert worker.failed_pages == pages
    assert same(worker.pages.copy_of_storages(), before)


@pytest.mark.parametrize("host_bytes", [1 << 20, 4096])
def test_a_store_that_lacks_rows_or_memory_fails(host_bytes: int, make: Make) -> None:
    """The rows that the store lacks lie behind the last whole row. No read leaves host memory."""
    worker = make("single_group", options=worker_options(host_bytes=host_bytes))
    job = worker.job
    if host_bytes > 4096:
        short = (PlacedChunk(TokenRange(0, 64)), PlacedChunk(TokenRange(64, 120), 8192))
        job = StoreJob(1, short, worker.tables)
    worker.run(job)
    assert worker.results.failed_jobs == {1}


def test_skipped_states_are_not_missed(make: Make) -> None:
    worker = make(options=worker_options(state_policy=StatePolicy.SKIP))
    tables = (*worker.tables[:3], TablePart(0, ()))
    worker.run(replace(worker.job, block_ids=tables))
    worker.run(worker.load(block_ids=tables))
    assert not worker.results.failed_jobs and not worker.results.failed_loads


# Beginning and end


def test_a_worker_describes_itself(make: Make) -> None:
    worker = make(options=worker_options(host_bytes=(1 << 20) + 63))
    described = worker.side.describe()
    assert described.layout == worker.pages.layout()
    assert described.host_bytes == 1 << 20


def test_cpus_that_nobody_has_are_refused(make: Make) -> None:
    given = min(os.sched_getaffinity(0))
    with pytest.raises(SettingsError) as raised:
        make(options=worker_options(copy_cpus=(given, *range(5_000, 100_000))))
    message = str(raised.value)
    assert "copy_cpus: expected CPUs that the kernel gives to this worker, which are " in message
    assert ", found 5000-99999 among them. Leave these out, or widen" in message


def on_a_gpu(extension: WorkerExtension | None = None, **options: Any) -> WorkerSide:
    side = WorkerSide(vllm_config(), None, worker_options(**options), extension=extension)
    side.register({"a": SimpleNamespace(device="cuda:0")})
    return side


def test_pages_on_a_gpu_are_refused_unless_an_option_allows_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(SettingsError, match=r"allow_cuda: expected true, .* found False"):
        on_a_gpu()


@pytest.mark.parametrize("allow_cuda", [False, True])
def test_gpus_of_another_maker_are_refused(
    allow_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message of the option would say that it can be tried."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.version, "hip", "7.2")
    transfers_on.cache_clear()
    with pytest.raises(BackendError, match=r"NVIDIA GPU, found ROCm 7\.2"):
        on_a_gpu(allow_cuda=allow_cuda)


@pytest.mark.parametrize("needs_token_rows", [False, True])
def test_a_layout_is_told_whether_an_extension_moves_tokens(
    needs_token_rows: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Extension(WorkerExtension):
        @property
        def needs_token_rows(self) -> bool:
            return needs_token_rows

    found = []

    def read(*_: Any, needs_token_rows: bool) -> None:
        found.append(needs_token_rows)
        raise LayoutError("the test ends here")

    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(worker_side, "build_layout", read)
    with pytest.raises(LayoutError, match="the test ends here"):
        on_a_gpu(Extension(), allow_cuda=True)
    assert found == [needs_token_rows]
    assert "has never run on a GPU (allow_cuda)" in caplog.text


def test_a_second_registration_takes_the_pages_where_they_are(
    stored: SmallWorker, make: Make
) -> None:
    content, described, old = stored.page_bytes(), stored.side.describe(), stored.pages
    stored.pages = make().pages
    stored.pages.fill(seed=3)
    before = old.copy_of_storages()
    stored.side.register(stored.pages.kv_caches)
    stored.run(stored.load())
    assert same(stored.page_bytes(), content)
    assert same(old.copy_of_storages(), before)
    assert stored.side.describe() == described, "the description has changed, but is sent only once"


def test_a_registration_of_other_pages_is_refused(worker: SmallWorker, make: Make) -> None:
    caches = worker.pages.kv_caches.items()
    apart = {name: tensor.repeat(1, 2, 1, 1)[:, : tensor.shape[1]] for name, tensor in caches}
    with pytest.raises(LayoutError, match="expected the pages registered first"):
        worker.side.register(apart)
    worker.run(worker.job)
    assert not worker.results.failed_jobs


def open_when_nothing_is_queued(worker: SmallWorker, gate: Gate) -> None:
    """Let the running job end once the call waits for it. `register` takes its time before that."""
    deadline_s = time.monotonic() + 20
    while worker.side._thread._stores and time.monotonic() < deadline_s:
        time.sleep(0.01)
    time.sleep(0.1)
    gate.open()


@pytest.mark.parametrize("end", ["shutdown", "end_transfers", "register"])
def test_what_runs_ends_and_what_is_queued_fails(end: str, worker: SmallWorker, move: Move) -> None:
    """The memory of pages may disappear then, and `register` is not called again."""
    move.gate.close()
    worker.begin(worker.job, worker.store(2, TOKENS, worker.tables))
    move.gate.wait_for_arrival()
    threading.Thread(target=open_when_nothing_is_queued, args=(worker, move.gate)).start()
    getattr(worker.side, end)(*([worker.pages.kv_caches] if end == "register" else []))
    assert worker.take().results.jobs_ended.keys() >= {1}, (
        "the call did not wait for the running job"
    )
    assert move.num_stores == 1
    assert move.threads[0].is_alive() is (end != "shutdown")
    worker.begin(worker.store(3, TOKENS, worker.tables))
    worker.wait_for(1, 2, 3)
    assert worker.results.failed_jobs == ({2, 3} if end == "shutdown" else {2})


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


def test_a_pool_that_has_moved_fails_its_jobs(worker: SmallWorker) -> None:
    """No transfer writes to memory that was taken away without notice."""
    pools = worker.side._runner.pools
    pools.tensors = tuple(tensor.clone() for tensor in pools.tensors)
    with pytest.raises(DescriptorError):
        pools.require_current()
    worker.run(worker.job)
    assert worker.results.failed_jobs == {1}
