# SPDX-License-Identifier: Apache-2.0
"""How the seconds of transfers are read inside an engine's process, by connector.

One clock for all: from the moment when a transfer is handed over until it is done. Where several
are under way at once, the time counts once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol

from offload.contenders import Tap
from offload.figures import overlaps, union_s
from offload.workload import Direction, Moved


class TransferTap(Protocol):
    def install(self) -> None:
        """Before the engine is made."""

    def is_idle(self) -> bool:
        """Whether nothing is on its way, as far as the tap sees."""

    def was_busy(self, start: float, end: float) -> bool:
        """Whether a transfer was under way between two readings of the clock.

        Of what has ended, only what was not taken is known.
        """

    def take(self) -> dict[Direction, Moved]:
        """What has ended since the last call."""


@dataclass(slots=True)
class _Ended:
    intervals: list[tuple[float, float]] = field(default_factory=list)
    num_tokens: int = 0
    failed: int = 0


class _Clock:
    """Gathers transfers from begin to end; threads may share it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._pending: dict[int, float] = {}
        self._next = 0
        self._ended = _by_direction()

    def begin(self) -> Callable[..., None]:
        """Returns what is to be called once, at the end."""
        started_s = time.perf_counter()
        with self._lock:
            number = self._next = self._next + 1
            self._pending[number] = started_s

        def end(direction: Direction, is_good: bool, num_tokens: int = 0) -> None:
            ended_s = time.perf_counter()
            with self._lock:
                del self._pending[number]
                ended = self._ended[direction]
                ended.intervals.append((started_s, ended_s))
                ended.num_tokens += num_tokens
                ended.failed += not is_good

        return end

    def is_idle(self) -> bool:
        return not self._pending

    def was_busy(self, start: float, end: float) -> bool:
        with self._lock:
            intervals = [(begun_s, math.inf) for begun_s in self._pending.values()]
            for ended in self._ended.values():
                intervals += ended.intervals
        return overlaps(intervals, start, end)

    def take(self) -> dict[Direction, Moved]:
        with self._lock:
            taken, self._ended = self._ended, _by_direction()
        return {
            direction: Moved(
                seconds=union_s(ended.intervals),
                num_tokens=ended.num_tokens,
                transfers=len(ended.intervals),
                failed=ended.failed,
            )
            for direction, ended in taken.items()
        }


def _by_direction() -> dict[Direction, _Ended]:
    return {"store": _Ended(), "load": _Ended()}


class NoTap:
    """Of an engine without a connector."""

    def install(self) -> None: ...

    def is_idle(self) -> bool:
        return True

    def was_busy(self, start: float, end: float) -> bool:
        return False

    def take(self) -> dict[Direction, Moved]:
        return {"store": Moved(), "load": Moved()}


class LMCacheTap:
    """From submitting a transfer until its future is done.

    The server copies after a call in mode ``lmcache_driven``; in ``engine_driven`` the call itself
    copies, and hands back a future that is done. On a CPU an answer means that the copy has ended.
    """

    def __init__(self) -> None:
        self._clock = _Clock()

    def install(self) -> None:
        from lmcache.v1.multiprocess.transfer_context import worker_transfer

        for context in (
            worker_transfer.LMCacheDrivenTransferContext,
            worker_transfer.EngineDrivenTransferContext,
        ):
            context.submit_store = self._timed(context.submit_store, "store")
            context.submit_retrieve = self._timed(context.submit_retrieve, "load")

    def is_idle(self) -> bool:
        return self._clock.is_idle()

    def was_busy(self, start: float, end: float) -> bool:
        return self._clock.was_busy(start, end)

    def take(self) -> dict[Direction, Moved]:
        return self._clock.take()

    def _timed(self, submit: Callable[..., Any], direction: Direction) -> Callable[..., Any]:
        def timed(context: Any, request_id: str, key: Any, *args: Any, **kwargs: Any) -> Any:
            end = self._clock.begin()

            def note(result: Any) -> None:
                # A server's answer is an event and whether it succeeded.
                is_good = result[1] if isinstance(result, (tuple, list)) else result
                end(direction, bool(is_good), key.end - key.start)

            future = submit(context, request_id, key, *args, **kwargs)
            raw = getattr(future, "raw_future_", future)
            set_result = raw.set_result

            def set_and_note(result: Any) -> None:
                note(result)
                set_result(result)

            # A transfer takes milliseconds: its answer does not come between these two lines.
            raw.set_result = set_and_note
            if raw.query():
                note(raw.result())
            return future

        return timed


class KvextTap:
    """From submitting a job to the transfer thread until it has run.

    Bytes and the seconds of the copies alone are those that the connector puts into its statistics;
    they are read from each job, because statistics come a second later.
    """

    def __init__(self) -> None:
        self._clock = _Clock()
        self._submitted: dict[int, Callable[..., None]] = {}
        self._copied = {"store": [0, 0.0], "load": [0, 0.0]}

    def install(self) -> None:
        from vllm_ascend_kvext.connector.job_runner import JobRunner
        from vllm_ascend_kvext.connector.transfer_thread import TransferThread

        submit, run = TransferThread.submit, JobRunner.run

        def timed_submit(thread: Any, jobs: Iterable[Any], recorded: object) -> None:
            jobs = tuple(jobs)
            for job in jobs:
                self._submitted[id(job)] = self._clock.begin()
            submit(thread, jobs, recorded)

        def timed_run(runner: Any, job: Any, recorded: object) -> Any:
            end = self._submitted.pop(id(job), None) or self._clock.begin()
            direction: Direction = "load" if hasattr(job, "request_id") else "store"
            is_good = False
            try:
                moved = run(runner, job, recorded)
                self._copied[direction][0] += moved.num_bytes
                self._copied[direction][1] += moved.seconds
                is_good = True
                return moved
            finally:
                end(direction, is_good)

        TransferThread.submit, JobRunner.run = timed_submit, timed_run

    def is_idle(self) -> bool:
        return self._clock.is_idle()

    def was_busy(self, start: float, end: float) -> bool:
        return self._clock.was_busy(start, end)

    def take(self) -> dict[Direction, Moved]:
        copied, self._copied = self._copied, {"store": [0, 0.0], "load": [0, 0.0]}
        taken = self._clock.take()
        for direction, moved in taken.items():
            moved.num_bytes, moved.copy_seconds = copied[direction]
        return taken


TAPS: dict[Tap, Callable[[], TransferTap]] = {
    "none": NoTap,
    "lmcache": LMCacheTap,
    "kvext": KvextTap,
}
