# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Lets the transfer thread of a worker continue only when a seed says so.

While the gate is closed, one thread runs at a time. The transfer thread stops before it takes a job
and where it waits for copies that it has enqueued. Between the calls of an engine's step, and while
the model's thread waits for it, the transfer thread continues to the next such place, once or
several times. So a seed gives the same run every time.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

from vllm_ascend_kvext.connector.worker.transfer_thread import TransferThread

PACES = ((0, 0, 1, 2, 6), (0, 0, 0, 1), (0,) * 11 + (1,))
"""Paces of seeds. The thread makes between two calls as many steps as one number of the pace says.

With the last pace a copy takes several steps of the engine.
"""
_HANGS_S = 120


class _GatedCondition(threading.Condition):
    """Replaces `TransferThread._changed`."""

    def __init__(self, gate: TransferGate) -> None:
        super().__init__()
        self._gate = gate

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        gate = self._gate
        is_in_thread = gate.is_in_thread()
        while gate.is_closed and (is_in_thread or not predicate()):
            self.release()
            try:
                has_gone_on = gate.stop_here() if is_in_thread else gate.go_on()
            finally:
                self.acquire()
            if not has_gone_on or (is_in_thread and predicate()):
                return predicate()
        return super().wait_for(predicate, timeout)


class TransferGate:
    """The gate of one worker. It replaces the transfer thread of the worker's connector.

    While the gate is open, threads run freely. Steps, copies and failures are counted from the time
    when the gate was closed.
    """

    def __init__(self, worker_side: Any) -> None:
        from torch_npu.npu import streams
        from torch_npu.operators import block_copies

        self.is_closed = False
        self.counted: Counter[str] = Counter()
        self._rng = random.Random()
        self._pace = PACES[0]
        worker_side._thread.shutdown()
        self._thread = TransferThread(worker_side._run, worker_side._place_thread)
        self._thread._changed = _GatedCondition(self)
        worker_side._thread = self._thread
        self._is_stopped, self._may_go_on = threading.Semaphore(0), threading.Semaphore(0)
        self._num_copies = 0
        self._failing: Collection[int] = ()
        for name in ("run_before_step", "begin_step", "end_of_forward", "end_step"):
            setattr(worker_side, name, self._after_steps(worker_side, name))
        synchronize = streams.Stream.synchronize

        def stop_and_synchronize(stream: Any) -> None:
            if self.is_closed and self.is_in_thread():
                self.stop_here()
            synchronize(stream)

        streams.Stream.synchronize = stop_and_synchronize
        self._enqueue_copies = block_copies._emulator.enqueue_copies
        block_copies._emulator = SimpleNamespace(enqueue_copies=self._enqueue)

    def close(self, rng: random.Random) -> None:
        """Have the thread, which has not begun, continue as ``rng`` says from now on."""
        self.counted.clear()
        self._rng = rng
        self._pace = rng.choice(PACES)
        self.is_closed = True

    def open(self) -> None:
        """Let threads run freely."""
        self.is_closed = False
        self._failing = ()
        self._may_go_on.release()

    def fail(self, numbers: Collection[int]) -> None:
        """Have the batched copies with some numbers fail. Copies are counted from this call on.

        A copy with an even number is refused at once. A copy with an odd number is enqueued first.
        """
        self._num_copies = 0
        self._failing = numbers

    def _enqueue(self, *arrays: Any) -> None:
        """Make a batched copy, or refuse it."""
        self._num_copies += 1
        self.counted["batched copies"] += 1
        is_refused = self._num_copies in self._failing
        if not is_refused or self._num_copies % 2:
            self._enqueue_copies(*arrays)
        if is_refused:
            self.counted["failed copies"] += 1
            raise RuntimeError("aclrtMemcpyBatchAsync failed: 507899 (emulated)")

    def is_in_thread(self) -> bool:
        return threading.current_thread() is self._thread._thread

    def stop_here(self) -> bool:
        """Wait in the transfer thread until it may continue. Return true."""
        self._is_stopped.release()
        return self._may_go_on.acquire()

    def go_on(self) -> bool:
        """Let the transfer thread make one step, and wait for its end in the model's thread.

        Return false if there is no step to make.
        """
        thread = self._thread
        if not (thread._loads or thread._stores or thread._num_running):
            return False
        self.counted["steps of the thread"] += 1
        self._wait_until_it_stops()
        self._may_go_on.release()
        self._wait_until_it_stops()
        self._is_stopped.release()
        return True

    def _wait_until_it_stops(self) -> None:
        if not self._is_stopped.acquire(timeout=_HANGS_S):
            raise RuntimeError("the transfer thread does not come to a place where it stops")

    def _after_steps(self, owner: Any, name: str) -> Callable[..., Any]:
        """Have a method of an object run after some steps of the thread.

        The class's method is looked up at each call, so it may change later.
        """

        def go_on_and_call(*args: Any, **more: Any) -> Any:
            if self.is_closed and not self.is_in_thread():
                for _ in range(self._rng.choice(self._pace)):
                    if not self.go_on():
                        break
            return getattr(type(owner), name)(owner, *args, **more)

        return go_on_and_call
