# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What a worker gets and puts, and what it reports about it."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.connector.gates import until

from vllm_ascend_kvext.connector.common.messages import WorkerOutput
from vllm_ascend_kvext.connector.common.options import parse_options
from vllm_ascend_kvext.shared_tier import backend, files
from vllm_ascend_kvext.shared_tier.backend import Answer, SharedObject, UsedObjects
from vllm_ascend_kvext.shared_tier.files import FilesTier
from vllm_ascend_kvext.shared_tier.messages import SharedJobs, SharedOutput
from vllm_ascend_kvext.shared_tier.worker import shared_transfers
from vllm_ascend_kvext.shared_tier.worker.object_ranks import object_ranks
from vllm_ascend_kvext.shared_tier.worker.shared_transfers import SharedTransfers

NUM_BYTES = 3 << 20
WHAT = SharedObject(1, f"engine/R0-64-{'a' * 32}", 64, NUM_BYTES)


class Worker:
    """One rank with its memory. ``results`` has all of its reports."""

    def __init__(self, folder: Path, rank: int = 0, num_equal_ranks: int = 1) -> None:
        self.memory = np.arange(8 << 20, dtype=np.uint32).view(np.uint8)
        options = parse_options({"shared_tier": f"file://{folder}"}, 1)
        self.placed: list[str] = []
        self.transfers = SharedTransfers(
            options,
            object_ranks(rank, num_equal_ranks, None),
            memoryview(self.memory),
            self._place,
        )
        self.results = WorkerOutput()

    def _place(self) -> None:
        self.placed.append(threading.current_thread().name)

    def submit(
        self,
        gets: Sequence[SharedObject] = (),
        puts: Sequence[SharedObject] = (),
        touches: Sequence[UsedObjects] = (),
    ) -> None:
        self.transfers.submit(SharedJobs(tuple(gets), tuple(puts), tuple(touches)))

    def run(self, gets: Sequence[SharedObject] = (), puts: Sequence[SharedObject] = ()) -> None:
        self.submit(gets, puts)
        numbers = {each.number for each in (*gets, *puts)}

        def have_ended() -> bool:
            self.results.add(self.transfers.take_output())
            return self.results.jobs_ended.keys() >= numbers

        until(have_ended, "the end of all objects")


def told_in(results: WorkerOutput) -> SharedOutput:
    """What is reported in addition to the ends of jobs."""
    assert results.secondary is None or isinstance(results.secondary, SharedOutput)
    return results.secondary or SharedOutput()


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Worker]:
    return lambda *ranks: Worker(tmp_path, *ranks)


def hold_gets(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> list[int]:
    """Let gets wait. Return the list of the gets that have begun, by number."""
    begun: list[int] = []

    def get_into(tier: FilesTier, what: SharedObject, on_bytes: Any) -> Answer:
        begun.append(what.number)
        gate.wait(20)
        return Answer.WHOLE

    monkeypatch.setattr(FilesTier, "get_into", get_into)
    return begun


def test_what_moves_is_counted(make: Callable[..., Worker]) -> None:
    worker, other = make(), make()
    worker.run(puts=[WHAT])
    assert worker.results.traffic["put"].num_bytes == NUM_BYTES
    assert worker.results.jobs_ended == {1: 1} and not worker.results.failed_jobs
    other.memory[:] = 0
    other.run(gets=[WHAT])
    assert np.array_equal(other.memory[64:][:NUM_BYTES], worker.memory[64:][:NUM_BYTES])
    assert told_in(other.results).got_bytes == other.results.traffic["get"].num_bytes == NUM_BYTES
    assert not told_in(other.results).failures
    assert not other.transfers.wait_for_end(10)


def test_a_thread_is_placed_before_each_move(make: Callable[..., Worker]) -> None:
    """All threads may be bound elsewhere between two moves."""
    worker = make()
    assert not worker.placed
    worker.run(puts=[WHAT])
    worker.run(gets=[WHAT._replace(number=2)])
    worker.run(puts=[WHAT._replace(number=3)])
    assert worker.placed == ["kvext-shared-puts", "kvext-shared-gets", "kvext-shared-puts"]


def test_ranks_with_the_same_kv_put_it_once(make: Callable[..., Worker], tmp_path: Path) -> None:
    workers = [make(rank, 2) for rank in range(2)]
    whats = [SharedObject(n, f"engine/R0-64-{n:032x}", 64, 4096) for n in range(16)]
    for worker in workers:
        worker.run(puts=whats)
        assert 0 < worker.results.traffic["put"].transfers < len(whats)
    assert len(list(tmp_path.glob("kvext4/*/r0/objects/*/*"))) == len(whats)
    assert not list(tmp_path.glob("kvext4/*/r1"))
    assert sum(worker.results.traffic["put"].num_bytes for worker in workers) == 16 * 4096
    for worker in workers:
        worker.run(gets=[each._replace(number=100 + each.number) for each in whats])
        assert not worker.results.failed_jobs


def test_each_failure_is_told_by_its_kind(
    make: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make()
    worker.run(gets=[WHAT])
    monkeypatch.setattr(FilesTier, "put", lambda *_: Answer.UNREACHABLE)
    worker.run(puts=[WHAT._replace(number=2)])
    monkeypatch.setattr(FilesTier, "put", lambda *_: 1 / 0)
    worker.run(puts=[WHAT._replace(number=3)])
    assert worker.results.failed_jobs == {1, 2, 3}
    assert told_in(worker.results).failures == {"get_absent": 1, "put_unreachable": 2}
    assert worker.results.traffic["load"].transfers == 0


def test_reports_of_workers_are_joined() -> None:
    joined, other = WorkerOutput(), WorkerOutput()
    for results in (joined, other):
        results.jobs_ended[1] = 1
        results.secondary = SharedOutput(10, Counter(get_absent=1), absent_objects={7: {3}})
    joined.add(other)
    told = told_in(joined)
    assert (joined.jobs_ended, told.got_bytes) == ({1: 2}, 20)
    assert told.failures == {"get_absent": 2} and told.absent_objects == {7: {3}}
    joined.add(WorkerOutput(secondary=SharedOutput(absent_objects={7: {4}, 8: {1}})))
    assert told.absent_objects == {7: {3, 4}, 8: {1}}
    alone = WorkerOutput()
    alone.add(joined)
    assert told_in(alone) == told


def test_new_weights_of_one_worker_are_those_of_the_engine() -> None:
    results = WorkerOutput(secondary=SharedOutput(has_new_weights=True))
    results.add(WorkerOutput(secondary=SharedOutput(got_bytes=1)))
    assert results and told_in(results).has_new_weights
    results = WorkerOutput(secondary=SharedOutput(got_bytes=1))
    results.add(WorkerOutput(secondary=SharedOutput(has_new_weights=True)))
    assert told_in(results).has_new_weights


def test_what_has_waited_too_long_is_not_begun(
    make: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request waits for the get any more, and its place is needed."""
    monkeypatch.setattr(files, "_MAX_GET_THREADS", 1)
    worker, gate = make(), threading.Event()
    begun = hold_gets(monkeypatch, gate)
    worker.submit([WHAT._replace(number=2)], [])
    until(lambda: bool(begun), "the first get")
    monkeypatch.setattr(shared_transfers, "MAX_CALL_S", 0.0)
    worker.submit([WHAT._replace(number=3)], [])
    gate.set()
    monkeypatch.setattr(FilesTier, "put", lambda *_: Answer.WHOLE)
    worker.run(puts=[WHAT._replace(number=4)])
    until(lambda: not worker.transfers.wait_for_end(0.01), "the end")
    worker.results.add(worker.transfers.take_output())
    assert begun == [2]
    assert worker.results.failed_jobs >= {3} and 2 not in worker.results.failed_jobs


def test_what_was_queued_behind_a_slow_failure_is_not_begun(
    make: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each put would fail as slowly, and would keep its place until then."""
    worker, gate, begun = make(), threading.Event(), []

    def put(tier: FilesTier, what: SharedObject) -> Answer:
        begun.append(what.number)
        gate.wait(20)
        return Answer.UNREACHABLE

    monkeypatch.setattr(FilesTier, "put", put)
    monkeypatch.setattr(shared_transfers, "MAX_FAILED_S", 0.0)
    worker.submit([], [WHAT._replace(number=2)])
    until(lambda: bool(begun), "the first put")
    worker.submit([], [WHAT._replace(number=3)])
    gate.set()
    worker.run(puts=[WHAT._replace(number=4)])
    assert begun in ([2], [2, 4]) and worker.results.failed_jobs == {2, 3, 4}


# Calls that hang.


@pytest.fixture
def hangs_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "MAX_HANG_S", 0.05)


@pytest.mark.usefixtures("hangs_early")
@pytest.mark.parametrize("num_threads", [1, 3])
def test_gets_go_on_beside_those_that_hang(
    make: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    """As many gets hang as there are threads. A get that hangs is reported only after its end."""
    monkeypatch.setattr(files, "_MAX_GET_THREADS", num_threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(num_threads))
    worker, gate, get_into = make(), threading.Event(), FilesTier.get_into
    worker.run(puts=[WHAT])
    hanging = range(100, 100 + num_threads)
    begun: list[int] = []

    def get_or_hang(tier: FilesTier, what: SharedObject, on_bytes: Any) -> Answer:
        begun.append(what.number)
        if what.number in hanging:
            gate.wait(20)
        return get_into(tier, what, on_bytes)

    monkeypatch.setattr(FilesTier, "get_into", get_or_hang)
    worker.submit([WHAT._replace(number=number) for number in hanging], [])
    until(lambda: len(begun) == num_threads, "the gets that hang")
    time.sleep(0.1)
    for number in range(200, 210):
        worker.run(gets=[WHAT._replace(number=number)])
    assert not worker.results.failed_jobs
    assert worker.results.jobs_ended.keys().isdisjoint(hanging)
    gate.set()
    until(lambda: not worker.transfers.wait_for_end(0.01), "the end of those that hung")
    # The threads that were left behind do no more work.
    worker.run(gets=[WHAT._replace(number=300)])
    assert worker.results.jobs_ended.keys() >= {*hanging} and not worker.results.failed_jobs
    worker.transfers.shutdown()


@pytest.mark.usefixtures("hangs_early")
def test_what_was_queued_behind_gets_that_hang_is_not_begun(
    make: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place of the queued get is free at once."""
    monkeypatch.setattr(files, "_MAX_GET_THREADS", 1)
    worker, gate = make(), threading.Event()
    begun = hold_gets(monkeypatch, gate)
    worker.submit([WHAT._replace(number=number) for number in (2, 3)], [])
    until(lambda: begun == [2], "the first get")
    time.sleep(0.1)
    ended = until(lambda: worker.transfers.take_output().failed_jobs, "the end of the other")
    assert ended == {3} and begun == [2]
    gate.set()
    worker.transfers.shutdown()


@pytest.mark.usefixtures("hangs_early")
def test_puts_go_on_beside_one_that_hangs(
    make: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, gate, put = make(), threading.Event(), FilesTier.put
    hung = WHAT._replace(number=2, name=f"engine/R0-64-{'c' * 32}")

    def put_or_hang(tier: FilesTier, what: SharedObject) -> Answer:
        return put(tier, what) if what.number != 2 or gate.wait(20) else Answer.ABSENT

    monkeypatch.setattr(FilesTier, "put", put_or_hang)
    worker.submit([], [hung])
    time.sleep(0.1)
    worker.run(puts=[WHAT._replace(number=3)])
    assert worker.results.jobs_ended == {3: 1} and not worker.results.failed_jobs
    gate.set()
    worker.run(puts=[WHAT._replace(number=4)])
    worker.transfers.shutdown()


@pytest.mark.usefixtures("hangs_early")
def test_few_threads_are_left_behind(
    make: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_MAX_GET_THREADS", 1)
    worker, gate = make(), threading.Event()
    begun = hold_gets(monkeypatch, gate)
    for number in range(backend.MAX_LEFT_BEHIND + 4):
        worker.submit([WHAT._replace(number=number)], [])
        time.sleep(0.1)
    assert len(begun) == backend.MAX_LEFT_BEHIND + 1
    gate.set()
    worker.run(gets=[WHAT._replace(number=100)])
    worker.transfers.shutdown()


# Objects that are used.


def used(number: int, *names: str) -> UsedObjects:
    return UsedObjects(number, names)


def test_a_touch_says_what_is_absent(make: Callable[..., Worker]) -> None:
    worker, other = make(), WHAT.name.replace("a" * 32, "b" * 32)
    # The touch is queued behind the put.
    worker.submit([], [WHAT], [used(2, other, WHAT.name, other)])
    worker.run()
    until(lambda: not worker.transfers.wait_for_end(0.01), "the end")
    worker.results.add(worker.transfers.take_output())
    assert worker.results.jobs_ended == {1: 1, 2: 1} and not worker.results.failed_jobs
    assert told_in(worker.results).absent_objects == {2: {0, 2}}
    worker.transfers.shutdown()


def test_ranks_with_the_same_kv_touch_an_object_once(
    make: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[str] = []

    def touch(tier: FilesTier, names: Sequence[str]) -> list[bool]:
        touched.extend(names)
        return [False] * len(names)

    monkeypatch.setattr(FilesTier, "touch", touch)
    workers, joined = [make(rank, 2) for rank in range(2)], WorkerOutput()
    names = [f"engine/R0-64-{number:032x}" for number in range(16)]
    for worker in workers:
        worker.submit([], [], [used(1, *names)])
        until(lambda worker=worker: not worker.transfers.wait_for_end(0.01), "the end")
        joined.add(worker.transfers.take_output())
    assert sorted(touched) == names
    assert told_in(joined).absent_objects == {1: {*range(16)}} and joined.jobs_ended == {1: 2}


def test_a_touch_that_fails_is_told(
    make: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make()
    for answer in (lambda *_: None, lambda *_: 1 / 0):
        monkeypatch.setattr(FilesTier, "touch", answer)
        worker.submit([], [], [used(7, WHAT.name)])
        until(lambda: not worker.transfers.wait_for_end(0.01), "the end")
        results = worker.transfers.take_output()
        assert results.failed_jobs == {7} and results.jobs_ended == {7: 1}
        assert told_in(results).failures == {"touch_unreachable": 1}


def test_a_tier_is_closed_unless_it_is_at_a_call(
    make: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend may crash if it is closed during a call."""
    closed: list[FilesTier] = []
    monkeypatch.setattr(FilesTier, "close", lambda tier: closed.append(tier))
    worker, gate, begun = make(), threading.Event(), threading.Event()

    def put(tier: FilesTier, what: SharedObject) -> Answer:
        begun.set()
        gate.wait(20)
        return Answer.WHOLE

    monkeypatch.setattr(FilesTier, "put", put)
    worker.submit([], [WHAT])
    begun.wait(20)
    worker.transfers.shutdown()
    assert closed == []
    gate.set()
    until(lambda: not worker.transfers.wait_for_end(0.01), "the end")
    worker.transfers.shutdown()
    assert len(closed) == 1


def test_as_many_gets_at_once_as_are_faster_than_one(
    make: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    worker, gate = make(), threading.Event()
    begun = hold_gets(monkeypatch, gate)
    worker.submit([WHAT._replace(number=number) for number in range(5)], [])
    until(lambda: len(begun) == 3, "three gets")
    assert worker.transfers.wait_for_end(0.05) and sorted(begun) == [0, 1, 2]
    gate.set()
    worker.run(gets=[WHAT._replace(number=5)])
    assert sorted(begun[3:]) == [3, 4, 5]
    worker.transfers.shutdown()


def test_gets_do_not_wait_for_puts(
    make: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, gate = make(), threading.Event()
    worker.run(puts=[WHAT])
    monkeypatch.setattr(
        FilesTier, "put", lambda *_: Answer.WHOLE if gate.wait(20) else Answer.ABSENT
    )
    worker.submit([], [WHAT._replace(number=2)])
    worker.run(gets=[WHAT._replace(number=3)])
    assert 2 not in worker.results.jobs_ended
    gate.set()
    worker.run(gets=[WHAT._replace(number=4)])
    worker.transfers.shutdown()
