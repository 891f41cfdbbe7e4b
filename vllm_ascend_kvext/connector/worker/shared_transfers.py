# SPDX-License-Identifier: Apache-2.0
"""What one worker gets from the shared tier into host memory, and puts there.

A request waits for gets, and nobody for puts: each kind has threads of its own.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterable
from functools import partial

from vllm_ascend_kvext.connector.common.messages import Direction, Traffic, WorkerOutput
from vllm_ascend_kvext.connector.common.options import ConnectorOptions
from vllm_ascend_kvext.connector.worker.host_buffer import HostBuffer
from vllm_ascend_kvext.shared_tier import open_tier
from vllm_ascend_kvext.shared_tier.backend import Answer, Call, SharedObject, TierThread

# What was queued while one call took longer is not begun: nobody waits for it any more.
MAX_CALL_S, MAX_FAILED_S = 5.0, 0.5  # One that has failed may take less.


class SharedTransfers:
    """Moves objects between the tier of the options and the memory of one worker.

    Args:
        num_equal: So many ranks, from 0 on, have the same KV: an object is put by one of them,
            another one each time, and got by all.

    Raises:
        SettingsError: If the tier cannot be used.
    """

    def __init__(
        self, options: ConnectorOptions, rank: int, num_equal: int, host: HostBuffer, on_start: Call
    ) -> None:
        assert options.shared_tier is not None
        self._rank, self._num_equal = rank, num_equal
        shared_rank = rank if num_equal == 1 else 0
        self._tier = open_tier(options.shared_tier, options.shared_tier_bytes, shared_rank)
        self._tier.register(memoryview(host.tensor.numpy()))
        self._threads: dict[Direction, TierThread] = {
            "get": TierThread("kvext-shared-gets", on_start, self._tier.num_get_threads),
            "put": TierThread("kvext-shared-puts", on_start),
        }
        self._stale_before_s: dict[Direction, float] = {"get": 0.0, "put": 0.0}
        self._changed = threading.Condition()  # Guards the rest.
        self._num_left = 0
        self._output = WorkerOutput()

    def submit(self, gets: Iterable[SharedObject], puts: Iterable[SharedObject]) -> None:
        """Move objects some time later; those of each kind begin in their order."""
        for (direction, thread), objects in zip(self._threads.items(), (gets, puts), strict=True):
            for each in objects:
                with self._changed:
                    self._num_left += 1
                thread.submit(partial(self._move, direction, each, time.monotonic()))

    def take_output(self) -> WorkerOutput:
        """What has ended, and come, since the last call."""
        with self._changed:
            output, self._output = self._output, WorkerOutput()
        return output

    def wait_for_end(self, timeout_s: float) -> bool:
        """Return when something has come or ended, or in time; False if nothing is under way."""
        with self._changed:
            if not self._num_left:
                return False
            self._changed.wait_for(lambda: self._output, timeout_s)
        return True

    def shutdown(self) -> None:
        """Begin nothing any more. Does not wait: the tier may hang, and is not closed then."""
        for thread in self._threads.values():
            thread.close()
        with self._changed:
            if not self._num_left:
                self._tier.close()

    def _move(self, direction: Direction, what: SharedObject, submitted_s: float) -> None:
        answer, began_s = Answer.UNREACHABLE, time.monotonic()
        try:
            if submitted_s >= self._stale_before_s[direction]:
                if direction == "get":
                    answer = self._tier.get_into(what, self._note_bytes)
                elif (zlib.crc32(what.name.encode()) - self._rank) % self._num_equal:
                    answer, what = Answer.WHOLE, what._replace(num_bytes=0)  # Another puts it.
                else:
                    answer = self._tier.put(what)
        finally:
            ended_s = time.monotonic()
            is_unreachable = answer is Answer.UNREACHABLE
            if ended_s - began_s > (MAX_FAILED_S if is_unreachable else MAX_CALL_S):
                self._stale_before_s[direction] = ended_s
            with self._changed:
                output, self._num_left = self._output, self._num_left - 1
                output.stores_ended[what.number] = 1
                if answer is Answer.WHOLE and what.num_bytes:
                    output.traffic[direction].add(Traffic(what.num_bytes, ended_s - began_s, 1))
                elif answer is not Answer.WHOLE:
                    output.failed_stores.add(what.number)
                    output.shared_failures[f"{direction}_{answer.value}"] += 1
                self._changed.notify_all()

    def _note_bytes(self, num_bytes: int) -> None:
        with self._changed:
            self._output.got_bytes += num_bytes
