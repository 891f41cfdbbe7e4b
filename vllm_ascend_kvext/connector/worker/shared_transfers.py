# SPDX-License-Identifier: Apache-2.0
"""What one worker gets from the shared tier into host memory, and puts there: on two threads.

A request waits for gets, and nobody for puts: each kind has a thread and is carried out in its
order. What takes long only delays others of its kind. What has waited too long to begin is not
begun: nobody waits for it any more.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from vllm_ascend_kvext.connector.common.messages import (
    Direction,
    SharedJobs,
    SharedOutput,
    Traffic,
)
from vllm_ascend_kvext.shared_tier.protocol import Answer, OnBytes, SharedObject, SharedTier

logger = logging.getLogger("vllm.ascend_kvext.shared_tier")

MAX_QUEUED_S = 5.0
"""What could not begin for so long is answered as unreachable."""

_QUIET_S = 10.0
"""After a failure was logged, others are not for so long."""


class _Job(NamedTuple):
    """One object; ``direction`` is "load" for a get."""

    number: int
    what: SharedObject
    direction: Direction
    submitted_s: float


class SharedTransfers:
    """Moves objects between a tier and the memory of one worker.

    Args:
        make: Makes the tier of a name space, with the memory registered; called once.
        on_start: Called in each thread before its first job.
    """

    def __init__(
        self, make: Callable[[str], SharedTier], on_start: Callable[[], None] = lambda: None
    ) -> None:
        self._make = make
        self._on_start = on_start
        self._making = threading.Lock()
        self._tier: SharedTier | None = None
        self._changed = threading.Condition()  # Guards all that follows.
        self._queues: dict[Direction, deque[_Job]] = {}
        self._num_left = 0
        self._output: SharedOutput | None = None
        self._namespace = ""
        self._is_closed = False
        self._logged_at_s = -math.inf

    def submit(self, jobs: SharedJobs) -> None:
        """Get and put objects some time later."""
        now_s = time.monotonic()
        gets = [_Job(number, what, "load", now_s) for number, what in jobs.gets]
        puts = [_Job(number, what, "store", now_s) for number, what in jobs.puts]
        with self._changed:
            self._namespace = jobs.namespace
            self._num_left += len(gets) + len(puts)
            self._enqueue("load", gets)
            self._enqueue("store", puts)
            self._changed.notify_all()

    def _enqueue(self, direction: Direction, jobs: Iterable[_Job]) -> None:
        if direction not in self._queues and jobs:
            self._queues[direction] = deque()
            name = f"kvext-shared-{direction}"
            threading.Thread(target=self._serve, args=(direction,), name=name, daemon=True).start()
        self._queues.get(direction, deque[_Job]()).extend(jobs)

    def take_output(self) -> SharedOutput | None:
        """What has ended, and come, since the last call; None if nothing."""
        with self._changed:
            output, self._output = self._output, None
        return output

    def wait_for_end(self, timeout_s: float) -> bool:
        """Return when something is to be reported, or in time; False if nothing is under way."""
        with self._changed:
            is_busy = self._num_left > 0
            if is_busy:
                self._changed.wait_for(lambda: self._output is not None, timeout_s)
        return is_busy

    def shutdown(self) -> None:
        """Begin nothing any more. Does not wait: the tier may hang."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _serve(self, direction: Direction) -> None:
        try:
            self._on_start()
        except Exception:
            logger.exception("A thread of the shared tier starts without its settings")
        queue = self._queues[direction]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: queue or self._is_closed)
                if self._is_closed:
                    return
                job = queue.popleft()
            began_s = time.monotonic()
            answer = Answer.UNREACHABLE
            try:
                if began_s - job.submitted_s < MAX_QUEUED_S:
                    answer = self._carry_out(job)
            except Exception as error:
                self._log(job, repr(error))
            if answer in (Answer.BROKEN, Answer.UNREACHABLE):
                self._log(job, answer.value)
            seconds = time.monotonic() - began_s
            with self._changed:
                output = self._output = self._output or SharedOutput()
                output.ended.setdefault(job.number, []).append(answer)
                if answer is Answer.WHOLE:
                    output.traffic[direction].add(Traffic(job.what.num_bytes, seconds, 1))
                self._num_left -= 1
                self._changed.notify_all()

    def _carry_out(self, job: _Job) -> Answer:
        with self._making:
            if self._tier is None:
                self._tier = self._make(self._namespace)
        if job.direction == "store":
            return self._tier.put([job.what])[0]
        on_bytes: OnBytes = self._note_bytes
        return self._tier.get_into([job.what], on_bytes)[0]

    def _note_bytes(self, num_bytes: int) -> None:
        with self._changed:
            self._output = self._output or SharedOutput()
            self._output.got_bytes += num_bytes

    def _log(self, job: _Job, found: str) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_at_s < _QUIET_S:
            return
        self._logged_at_s = now_s
        verb = "put into" if job.direction == "store" else "got from"
        error = getattr(self._tier, "last_error", None)
        logger.warning(
            "Object %s could not be %s the shared tier: %s%s. What a request lacks is computed.",
            job.what.name,
            verb,
            found,
            "" if error is None else f" (the last error: {error})",
        )
