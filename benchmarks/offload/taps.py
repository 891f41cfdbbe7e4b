# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Measures the seconds of transfers inside an engine's process, by connector.

All contenders have the same clock: from the moment when a transfer is submitted until it is done.
If several transfers are under way at once, the time counts once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from offload.contenders import TapName
from offload.workload import Direction, Moved


def union_s(intervals: Iterable[tuple[float, float]]) -> float:
    """The seconds that at least one of the intervals covers."""
    total_s = 0.0
    covered_until = -math.inf
    for start, end in sorted(intervals):
        start = max(start, covered_until)
        if end > start:
            total_s += end - start
            covered_until = end
    return total_s


@dataclass(slots=True)
class _Ended:
    intervals: list[tuple[float, float]] = field(default_factory=list)
    num_tokens: int = 0
    num_bytes: int = 0
    copy_seconds: float = 0.0
    failed: int = 0


class Tap:
    """Collects transfers from begin to end. Subclasses observe them. Threads may share it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._pending: dict[int, float] = {}
        self._next = 0
        self._ended = _by_direction()

    def install(self) -> None:
        """Begin to observe. It is called before the engine is made."""

    def begin(self) -> Callable[..., None]:
        """Note the begin of a transfer. Returns a function to call once, at its end."""
        started_s = time.perf_counter()
        with self._lock:
            self._next += 1
            number = self._next
            self._pending[number] = started_s

        def end(direction: Direction, is_good: bool, **counts: float) -> None:
            ended_s = time.perf_counter()
            with self._lock:
                del self._pending[number]
                ended = self._ended[direction]
                ended.intervals.append((started_s, ended_s))
                ended.failed += not is_good
                for name, count in counts.items():
                    setattr(ended, name, getattr(ended, name) + count)

        return end

    def is_idle(self) -> bool:
        """Whether the tap observes no transfer under way."""
        return not self._pending

    def was_busy(self, start: float, end: float) -> bool:
        """Whether a transfer was under way between two readings of the clock.

        Ended transfers that were taken do not count.
        """
        with self._lock:
            intervals = [(begun_s, math.inf) for begun_s in self._pending.values()]
            for ended in self._ended.values():
                intervals += ended.intervals
        return any(first < end and start < last for first, last in intervals)

    def take(self) -> dict[Direction, Moved]:
        """Return the transfers that have ended since the last call."""
        with self._lock:
            taken = self._ended
            self._ended = _by_direction()
        return {
            direction: Moved(
                seconds=union_s(ended.intervals),
                copy_seconds=ended.copy_seconds,
                num_bytes=ended.num_bytes,
                num_tokens=ended.num_tokens,
                transfers=len(ended.intervals),
                failed=ended.failed,
            )
            for direction, ended in taken.items()
        }


def _by_direction() -> dict[Direction, _Ended]:
    return {"store": _Ended(), "load": _Ended()}


class LMCacheTap(Tap):
    """Measures a transfer from its submission until its future is done.

    In mode ``lmcache_driven`` the server copies after the call. In mode ``engine_driven`` the call
    itself copies, and returns a future that is done. On a CPU, an answer means that the copy has
    ended.
    """

    def install(self) -> None:
        from lmcache.v1.multiprocess.transfer_context import worker_transfer

        for context in (
            worker_transfer.LMCacheDrivenTransferContext,
            worker_transfer.EngineDrivenTransferContext,
        ):
            context.submit_store = self._timed(context.submit_store, "store")
            context.submit_retrieve = self._timed(context.submit_retrieve, "load")

    def _timed(self, submit: Callable[..., Any], direction: Direction) -> Callable[..., Any]:
        def timed(context: Any, request_id: str, key: Any, *args: Any, **kwargs: Any) -> Any:
            end = self.begin()

            def note(result: Any) -> None:
                # The server answers with an event, and whether the transfer succeeded.
                is_good = result[1] if isinstance(result, (tuple, list)) else result
                end(direction, bool(is_good), num_tokens=key.end - key.start)

            future = submit(context, request_id, key, *args, **kwargs)
            raw = getattr(future, "raw_future_", future)
            set_result = raw.set_result

            def set_and_note(result: Any) -> None:
                note(result)
                set_result(result)

            # A transfer takes milliseconds, so its answer does not come between these two lines.
            raw.set_result = set_and_note
            if raw.query():
                note(raw.result())
            return future

        return timed


class KvextTap(Tap):
    """Measures a job from its submission to the transfer thread until it has run.

    Bytes and the seconds of copies are counted as in the connector's statistics. They are read from
    each job, because the statistics come a second later.
    """

    def install(self) -> None:
        from vllm_ascend_kvext.connector.worker.job_runner import JobRunner
        from vllm_ascend_kvext.connector.worker.transfer_thread import TransferThread

        submit = TransferThread.submit
        run = JobRunner.run
        submitted: dict[int, Callable[..., None]] = {}

        def timed_submit(thread: Any, jobs: Iterable[Any], recorded: object) -> None:
            jobs = tuple(jobs)
            for job in jobs:
                submitted[id(job)] = self.begin()
            submit(thread, jobs, recorded)

        def timed_run(runner: Any, job: Any, recorded: object) -> Any:
            end = submitted.pop(id(job), None) or self.begin()
            direction: Direction = "load" if hasattr(job, "request_id") else "store"
            try:
                moved = run(runner, job, recorded)
            except BaseException:
                end(direction, False)
                raise
            end(direction, True, num_bytes=moved.num_bytes, copy_seconds=moved.seconds)
            return moved

        TransferThread.submit = timed_submit
        JobRunner.run = timed_run


class OffloadingTap(Tap):
    """Measures a transfer of vLLM's OffloadingConnector from its submission until it is polled.

    It polls in each step. Bytes and the seconds of the copies are those that it measures itself, by
    events of the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ends: dict[tuple[int, int], Callable[..., None]] = {}
        self._handlers: dict[int, Any] = {}

    def install(self) -> None:
        from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler as Handler

        transfer_async = Handler.transfer_async
        get_finished = Handler.get_finished

        def timed_async(handler: Any, job_id: int, spec: Any) -> bool:
            self._handlers[id(handler)] = handler
            self._ends[id(handler), job_id] = self.begin()
            started: bool = transfer_async(handler, job_id, spec)
            return started

        def timed_finished(handler: Any) -> list[Any]:
            results: list[Any] = get_finished(handler)
            for each in results:
                direction: Direction = "load" if handler.transfer_type[0] == "CPU" else "store"
                end = self._ends.pop((id(handler), each.job_id))
                end(
                    direction,
                    each.success,
                    num_bytes=each.transfer_size,
                    copy_seconds=each.transfer_time,
                )
            return results

        Handler.transfer_async = timed_async
        Handler.get_finished = timed_finished

    def is_idle(self) -> bool:
        """Whether the device has done all transfers. Without requests, nothing polls them."""
        return all(
            transfer.end_event.query()
            for handler in self._handlers.values()
            for transfer in handler._transfers
        )


TAPS: dict[TapName, type[Tap]] = {
    "none": Tap,
    "lmcache": LMCacheTap,
    "kvext": KvextTap,
    "offloading": OffloadingTap,
}
