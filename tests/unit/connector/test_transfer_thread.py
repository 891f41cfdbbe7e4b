# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The queue of a worker's jobs and its thread. The jobs of these tests move nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest
from support.connector.gates import Gate, until

from vllm_ascend_kvext.connector.common.messages import LoadJob, StoreJob
from vllm_ascend_kvext.connector.worker import transfer_thread
from vllm_ascend_kvext.connector.worker.job_runner import Job, Moved
from vllm_ascend_kvext.connector.worker.transfer_thread import TransferThread
from vllm_ascend_kvext.token_range import TokenRange

TOKENS = TokenRange(0, 16)


def store(number: int) -> StoreJob:
    return StoreJob(number, (), ())


def load(request_id: str) -> LoadJob:
    return LoadJob(request_id, TOKENS, (), ())


def name(job: Job) -> int | str:
    return job.number if isinstance(job, StoreJob) else job.request_id


class Jobs:
    """Runs jobs by recording them. Jobs wait at a gate. Jobs that the test has named fail."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.begun: list[tuple[int | str, object]] = []
        self.failing: dict[int | str, BaseException] = {}
        self.threads: set[threading.Thread] = set()
        self.thread = TransferThread(self.run)
        self.ended: list[tuple[Job, Moved | None]] = []

    def run(self, job: Job, recorded: object) -> Moved:
        self.begun.append((name(job), recorded))
        self.threads.add(threading.current_thread())
        self.gate.pass_through()
        if error := self.failing.get(name(job)):
            raise error
        return Moved(10, 0.5)

    def hold(self, number: int) -> None:
        """Keep the thread busy with a store until the gate is opened."""
        self.gate.close()
        self.thread.submit([store(number)], None)
        self.gate.wait_for_arrival()

    @property
    def order(self) -> list[int | str]:
        return [job for job, _ in self.begun]

    def take(self, count: int) -> list[tuple[int | str, bool]]:
        """The names of the next jobs that end, and whether they succeeded."""

        def enough() -> bool:
            self.ended += self.thread.take_ended()
            return len(self.ended) >= count

        until(enough, f"{count} jobs")
        taken, self.ended = self.ended, []
        return [(name(job), moved is not None) for job, moved in taken]


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    jobs = Jobs()
    yield jobs
    jobs.gate.open()
    jobs.thread.shutdown()


def test_the_thread_starts_with_the_first_job(jobs: Jobs) -> None:
    before = set(threading.enumerate())
    jobs.thread.submit([], None)
    assert set(threading.enumerate()) <= before
    jobs.thread.submit([store(1)], None)
    assert jobs.take(1) == [(1, True)]
    (thread,) = jobs.threads
    assert thread.daemon and thread.name == "kvext-transfer"
    assert set(threading.enumerate()) - before == {thread}


def test_jobs_of_one_kind_are_in_order_and_get_what_was_recorded(jobs: Jobs) -> None:
    jobs.thread.submit([store(2), store(1)], "first step")
    jobs.thread.submit([store(3)], "second step")
    assert jobs.take(3) == [(2, True), (1, True), (3, True)]
    assert not jobs.thread.take_ended()
    assert jobs.begun == [(2, "first step"), (1, "first step"), (3, "second step")]


def test_loads_overtake_queued_stores(jobs: Jobs) -> None:
    jobs.hold(1)
    jobs.thread.submit([store(2), store(3)], None)
    jobs.thread.submit([load("a"), load("b")], None)
    jobs.gate.open()
    jobs.take(5)
    assert jobs.order == [1, "a", "b", 2, 3]


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(1)])
def test_a_job_that_raises_fails_alone(jobs: Jobs, error: BaseException) -> None:
    jobs.failing[1] = error
    jobs.thread.submit([store(1), store(2)], None)
    assert jobs.take(2) == [(1, False), (2, True)]
    assert len(jobs.threads) == 1


def test_failures_are_logged_once_per_burst(
    jobs: Jobs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.failing = {1: ValueError("broken pipe"), 2: ValueError("b"), "a": ValueError("c")}
    with caplog.at_level(logging.ERROR, logger="vllm.ascend_kvext.connector"):
        jobs.thread.submit([store(1), store(2)], None)
        jobs.take(2)
        (record,) = caplog.records
        assert "Store 1 failed: broken pipe" in record.message and record.exc_info
        monkeypatch.setattr(transfer_thread, "_QUIET_S", 0.0)
        jobs.thread.submit([load("a")], None)
        jobs.take(1)
    assert len(caplog.records) == 2
    assert (
        "request a failed (1 other transfers since the last message)" in caplog.records[1].message
    )


def test_waiting_for_an_end(jobs: Jobs) -> None:
    jobs.thread.wait_for_end(20)  # No job is under way.
    jobs.hold(1)
    jobs.thread.submit([store(2)], None)
    begun_s = time.monotonic()
    jobs.thread.wait_for_end(0.05)
    assert time.monotonic() - begun_s >= 0.05 and not jobs.thread.take_ended()
    threading.Timer(0.05, jobs.gate.open).start()
    jobs.thread.wait_for_end(20)
    jobs.ended += jobs.thread.take_ended()
    assert jobs.ended
    assert jobs.take(2) == [(1, True), (2, True)]
    jobs.thread.wait_for_end(20)


def test_an_interrupt_reaches_the_caller_and_the_job_has_failed(jobs: Jobs) -> None:
    jobs.failing[1] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        jobs.thread.run_now([store(1)], None)
    assert jobs.take(1) == [(1, False)]


def test_after_shutdown_jobs_fail(jobs: Jobs) -> None:
    jobs.thread.shutdown()
    jobs.thread.shutdown()
    jobs.thread.submit([store(1), load("a")], None)
    jobs.thread.run_now([store(2)], None)
    assert jobs.take(3) == [(1, False), ("a", False), (2, False)]
    assert not jobs.order


@pytest.mark.parametrize("error", [OSError("no such CPU"), SystemExit("no such CPU")])
def test_the_thread_is_prepared_for_each_job_and_a_failure_of_that_is_no_jobs(
    caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    calls: list[str] = []

    def prepare() -> None:
        calls.append(threading.current_thread().name)
        raise error

    thread = TransferThread(lambda job, recorded: Moved(0, 0.0), prepare)
    with caplog.at_level(logging.ERROR, logger="vllm.ascend_kvext.connector"):
        thread.submit([store(1), store(2)], None)
        ended: list[tuple[Job, Moved | None]] = []
        until(lambda: ended.extend(thread.take_ended()) or len(ended) == 2)
    thread.shutdown()
    assert calls == ["kvext-transfer"] * 2
    assert all(moved is not None for _, moved in ended)
    assert caplog.text.count("no such CPU") == 1
