# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Moves objects between the shared tier and the host memory of one worker.

One rank moves an object for all ranks that have the same host memory. The others end the job at
once, without bytes. The scheduler side counts a job as ended when all ranks have ended it, so no
rank loads what another one is still getting. A failure on any rank makes the job fail for all.

A request waits for gets, but no request waits for puts. So each kind has its own threads. A call
that hangs is left behind, and is reported when it ends, if ever. Until then, nothing else uses the
call's place in host memory.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial

from vllm_ascend_kvext.connector.common.messages import Direction, Traffic, WorkerOutput
from vllm_ascend_kvext.connector.common.options import ConnectorOptions
from vllm_ascend_kvext.shared_tier import open_tier
from vllm_ascend_kvext.shared_tier.backend import (
    MAX_HANG_S,
    Answer,
    Call,
    SharedObject,
    TierThread,
    UsedObjects,
)
from vllm_ascend_kvext.shared_tier.messages import SharedJobs, SharedOutput
from vllm_ascend_kvext.shared_tier.worker.object_ranks import ObjectRanks

logger = logging.getLogger("vllm.ascend_kvext.shared_tier")

MAX_CALL_S = 5.0
"""If a call takes longer, the calls queued behind it are dropped. No request waits for them any
more."""

MAX_FAILED_S = 0.5
"""The same limit for a call that has failed because the tier does not work."""


class SharedTransfers:
    """Moves objects between the tier of the options and the host memory of one worker.

    Args:
        options: The options with the tier.
        ranks: Which objects this worker moves, and which ones other ranks move.
        memory: The worker's host memory; dtype: uint8.
        before_move: Called in a thread each time before it moves an object.

    Raises:
        SettingsError: If the tier cannot be used.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        ranks: ObjectRanks,
        memory: memoryview,
        before_move: Call,
    ) -> None:
        assert options.shared_tier is not None
        self._before_move = before_move
        self._ranks = ranks
        self._tier = open_tier(options.shared_tier, options.shared_tier_bytes, ranks.of_objects)
        self._tier.register(memory)
        self._threads: dict[Direction, TierThread] = {
            "get": TierThread("kvext-shared-gets", self._tier.num_get_threads),
            "put": TierThread("kvext-shared-puts"),
        }
        self._stale_before_s: dict[Direction, float] = {"get": 0.0, "put": 0.0}
        self._dropped_before_s = 0.0
        self._changed = threading.Condition()  # Guards the rest.
        self._num_left = 0
        self._output = WorkerOutput()
        self._report = SharedOutput()

    def submit(self, jobs: SharedJobs) -> None:
        """Move objects at a later time. The calls of each kind begin in their order."""
        self._leave_hanging_behind()
        for what in jobs.gets:
            self._submit_move("get", what, self._ranks.gets(what.name))
        for what in jobs.puts:
            self._submit_move("put", what, self._ranks.puts(what.name))
        # Touches come behind puts, because a touch may concern an object that these puts store.
        for used in jobs.touches:
            self._submit("put", partial(self._touch, used, time.monotonic()))

    def _submit_move(self, direction: Direction, what: SharedObject, is_own: bool) -> None:
        if is_own:
            self._submit(direction, partial(self._move, direction, what, time.monotonic()))
            return
        with self._changed:  # Another rank moves the object.
            self._output.jobs_ended[what.number] = 1
            self._changed.notify_all()

    def drop(self) -> None:
        """Begin no get and no put that has been submitted. These jobs fail."""
        self._dropped_before_s = time.monotonic()

    def _submit(self, direction: Direction, call: Call) -> None:
        with self._changed:
            self._num_left += 1
        self._threads[direction].submit(call)

    def _leave_hanging_behind(self) -> None:
        if self._num_left:
            for direction, thread in self._threads.items():
                thread.leave_behind(partial(self._note_hanging, direction))

    def _note_hanging(self, direction: Direction, num_threads: int) -> None:
        if direction == "put" or num_threads >= self._tier.num_get_threads:
            # All threads of this kind hang. The calls in the queue have waited as long as these
            # threads.
            self._stale_before_s[direction] = time.monotonic()
        logger.warning(
            "Shared tier: %d %s(s) have taken more than %.0f s, and others go on without them. "
            "Host memory that a get may still write to is not used before it ends.",
            num_threads,
            direction,
            MAX_HANG_S,
        )

    def take_output(self) -> WorkerOutput:
        """The calls that have ended, and the bytes that have arrived, since the last call."""
        self._leave_hanging_behind()
        with self._changed:
            output = self._output
            if self._report:
                output.secondary = self._report
            self._output = WorkerOutput()
            self._report = SharedOutput()
        return output

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait until bytes have arrived or a call has ended, or until the timeout.

        Returns:
            False if no call is under way.
        """
        with self._changed:
            if not self._num_left:
                return False
            self._changed.wait_for(lambda: self._output or self._report, timeout_s)
        return True

    def shutdown(self) -> None:
        """Begin no further calls.

        The method does not wait, because the tier may hang. The tier is closed only if no call is
        under way.
        """
        for thread in self._threads.values():
            thread.close()
        with self._changed:
            if not self._num_left:
                self._tier.close()

    def _move(self, direction: Direction, what: SharedObject, submitted_s: float) -> None:
        answer = Answer.UNREACHABLE
        began_s = time.monotonic()
        is_dropped = submitted_s < self._dropped_before_s
        try:
            self._before_move()
            if not is_dropped and submitted_s >= self._stale_before_s[direction]:
                if direction == "get":
                    answer = self._tier.get_into(what, self._note_bytes)
                else:
                    answer = self._tier.put(what)
        finally:
            ended_s = time.monotonic()
            is_unreachable = answer is Answer.UNREACHABLE
            self._note_duration(direction, began_s, ended_s, is_unreachable)
            with self._changed:
                self._num_left -= 1
                output = self._output
                output.jobs_ended[what.number] = 1
                if answer is Answer.WHOLE:
                    output.traffic[direction].add(Traffic(what.num_bytes, ended_s - began_s, 1))
                else:
                    output.failed_jobs.add(what.number)
                    if not is_dropped:
                        self._report.failures[f"{direction}_{answer.value}"] += 1
                self._changed.notify_all()

    def _touch(self, used: UsedObjects, submitted_s: float) -> None:
        began_s = time.monotonic()
        own = [number for number, name in enumerate(used.names) if self._ranks.puts(name)]
        found: list[bool] | None = None
        try:
            if submitted_s >= self._stale_before_s["put"]:
                found = self._tier.touch([used.names[number] for number in own])
        finally:
            self._note_duration("put", began_s, time.monotonic(), found is None)
            with self._changed:
                self._num_left -= 1
                self._output.jobs_ended[used.number] = 1
                if found is None:
                    self._output.failed_jobs.add(used.number)
                    self._report.failures["touch_unreachable"] += 1
                elif not all(found):
                    self._report.absent_objects[used.number] = {
                        number for number, is_there in zip(own, found, strict=True) if not is_there
                    }
                self._changed.notify_all()

    def _note_duration(
        self, direction: Direction, began_s: float, ended_s: float, is_unreachable: bool
    ) -> None:
        """Note that a call has ended. After a slow call, the calls queued behind it are dropped."""
        max_s = MAX_FAILED_S if is_unreachable else MAX_CALL_S
        if ended_s - began_s > max_s and not self._threads[direction].is_left_behind():
            self._stale_before_s[direction] = ended_s

    def _note_bytes(self, num_bytes: int) -> None:
        with self._changed:
            self._report.got_bytes += num_bytes
