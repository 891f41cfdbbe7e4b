# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Carries out the jobs of a worker in one thread beside the model.

Loads come before stores, because a request waits for a load, but no request waits for a store. Jobs
of one kind keep their order. Every submitted job ends exactly once, as done or as failed. The
module knows nothing of pages; the caller passes the function that carries out a job.
"""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from vllm_ascend_kvext.connector.common.messages import LoadJob, StoreJob
from vllm_ascend_kvext.connector.worker.job_runner import Job, Moved

logger = logging.getLogger("vllm.ascend_kvext.connector")

_QUIET_S = 10.0
"""For this time after a logged failure, other failures are only counted."""

_MAX_END_S = 5.0
"""The end of a process waits for a running job no longer than this."""


class TransferThread:
    """Carries out jobs in a daemon thread, which starts with the first job.

    An engine that runs in the user's process is often not shut down before the process ends. The
    end of the process then waits for the running job. CPython ends a thread that asks for the
    interpreter's lock after that. If the thread is in compiled code, the whole process aborts.

    Args:
        run: Carries out one job after the recorded kernels (``ComputeFence``). The thread and a
            caller of `run_now` may call it at the same time.
        before_job: Called in the thread before each job. If it raises, the job is carried out all
            the same.
    """

    def __init__(
        self,
        run: Callable[[Job, object], Moved],
        before_job: Callable[[], None] = lambda: None,
    ) -> None:
        self._run = run
        self._before_job = before_job
        self._changed = threading.Condition()  # Guards all that follows.
        self._loads: deque[tuple[Job, object]] = deque()
        self._stores: deque[tuple[Job, object]] = deque()
        self._num_running = 0
        self._ended: list[tuple[Job, Moved | None]] = []
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._logged_at_s = -math.inf
        self._num_unlogged = 0
        self._has_warned = False  # Only the thread itself uses this.

    def submit(self, jobs: Iterable[Job], recorded: object) -> None:
        """Carry out jobs at a later time, in order. After `shutdown` they fail at once."""
        with self._changed:
            for job in jobs:
                if self._is_closed:
                    self._ended.append((job, None))
                else:
                    queue = self._loads if isinstance(job, LoadJob) else self._stores
                    queue.append((job, recorded))
            if self._loads or self._stores:
                self._start()
                self._changed.notify_all()

    def run_now(self, stores: Iterable[StoreJob], recorded: object) -> None:
        """Carry out stores on the calling thread, in order, without waiting for other jobs."""
        for store in stores:
            with self._changed:
                if self._is_closed:
                    self._ended.append((store, None))
                    continue
                self._num_running += 1
            self._carry_out(store, recorded)

    def fail(self, jobs: Iterable[Job], reason: str) -> None:
        """Report jobs as failed that were not submitted and cannot be carried out any more."""
        failed: list[tuple[Job, Moved | None]] = [(job, None) for job in jobs]
        with self._changed:
            self._ended += failed
        if failed:
            logger.warning("%d transfers are not carried out: %s", len(failed), reason)

    def take_ended(self) -> list[tuple[Job, Moved | None]]:
        """The jobs that have ended since the last call, in the order of their ends.

        Returns:
            Pairs of a job and what it has moved. The second part is None if the job failed.
        """
        with self._changed:
            ended = self._ended
            self._ended = []
        return ended

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait until an ended job can be taken, until no job is under way, or until the timeout."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or not (self._loads or self._stores or self._num_running),
                timeout_s,
            )

    def drop(self) -> None:
        """Fail the queued jobs, and wait for the running ones. The thread goes on."""
        with self._changed:
            self._ended += [(job, None) for job, _ in (*self._loads, *self._stores)]
            self._loads.clear()
            self._stores.clear()
            self._changed.wait_for(lambda: not self._num_running)

    def shutdown(self) -> None:
        """Call `drop`, and end the thread. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self.drop()
        with self._changed:
            thread = self._thread
            self._thread = None
        if thread is not None:
            thread.join()
        atexit.unregister(self._end_with_process)

    def _end_with_process(self) -> None:
        """Begin no further job, and wait for the running one, unless it hangs."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(_MAX_END_S)

    def _start(self) -> None:
        """Start the thread, if it does not run.

        The thread starts with the first job. So a process that forks earlier has no thread to lose.
        """
        if self._thread is None or not self._thread.is_alive():
            if self._thread is None:
                atexit.register(self._end_with_process)
            self._thread = threading.Thread(target=self._serve, name="kvext-transfer", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while self._serve_next():
            pass

    def _serve_next(self) -> bool:
        """Carry out one job; False if the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._loads or self._stores)
            if self._is_closed:
                return False
            job, recorded = (self._loads or self._stores).popleft()
            self._num_running += 1
        try:
            self._prepare()
            self._carry_out(job, recorded)
        except BaseException:
            # For example SystemExit. The job has ended as failed, and the thread serves other jobs.
            logger.exception("A transfer tried to end its thread")
        return True

    def _prepare(self) -> None:
        try:
            self._before_job()
        except BaseException:  # Otherwise the job would never end, and its request would wait.
            if not self._has_warned:
                logger.exception("The transfer thread goes on without its settings")
            self._has_warned = True

    def _carry_out(self, job: Job, recorded: object) -> None:
        moved = None
        try:
            moved = self._run(job, recorded)
            if moved.error is not None:
                self._log_failure(job, moved.error, len(moved.unreadable))
        except Exception as error:
            self._log_failure(job, error)
        finally:
            with self._changed:
                self._num_running -= 1
                self._ended.append((job, moved))
                self._changed.notify_all()

    def _log_failure(self, job: Job, error: Exception, num_unreadable: int | None = None) -> None:
        """Log that a job has failed, or that a load was made part by part.

        The first failure of a burst is logged with its cause. The others are only counted.

        Args:
            job: The job.
            error: The cause.
            num_unreadable: The number of parts that a load has left out; None if the whole job has
                failed.
        """
        now_s = time.monotonic()
        with self._changed:
            if now_s - self._logged_at_s < _QUIET_S:
                self._num_unlogged += 1
                return
            self._logged_at_s = now_s
            num_unlogged = self._num_unlogged
            self._num_unlogged = 0
        if isinstance(job, StoreJob):
            what = f"Store {job.number}"
        else:
            what = f"The load of request {job.request_id}"
            if num_unreadable is not None:
                what += f", made again without {num_unreadable} of its {len(job.places)} parts,"
        since = f" ({num_unlogged} other transfers since the last message)" if num_unlogged else ""
        logger.error("%s failed%s: %s", what, since, error, exc_info=error)
