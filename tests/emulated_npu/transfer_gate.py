# SPDX-License-Identifier: Apache-2.0
"""Has the transfer thread of a worker go on only when a seed says so.

While the gate is closed one thread runs at a time. The transfer thread stops before it takes a
job, and where it waits for copies that it has enqueued. It goes on by one such step, or some,
between the calls that a step of the engine makes, and when the model's thread waits for it. So what
happens is the same whenever a seed is run.
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
"""How many steps the thread makes between two calls: one of the numbers of a seed's pace. With the
last pace a copy takes several steps of the engine."""
_HANGS_S = 120


class _GatedCondition(threading.Condition):
    """`TransferThread._changed`."""

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
    """The gate of one worker, whose side of the connector gets another thread.

    Until it is closed, and once it is open again, threads run as they are. Steps, copies and
    failures are counted from when it is closed.
    """

    def __init__(self, worker_side: Any) -> None:
        from torch_npu.npu import streams
        from torch_npu.operators import block_copies

        self.is_closed = False
        self.counted: Counter[str] = Counter()
        self._rng = random.Random()
        self._pace = PACES[0]
        worker_side._thread.shutdown()
        self._thread = TransferThread(worker_side._run, worker_side._move_to_copy_cpus)
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
        """From now on the thread, which has not begun, goes on as ``rng`` says."""
        self.counted.clear()
        self._rng = rng
        self._pace = rng.choice(PACES)
        self.is_closed = True

    def open(self) -> None:
        """Let threads run as they are."""
        self.is_closed = False
        self._failing = ()
        self._may_go_on.release()

    def fail(self, numbers: Collection[int]) -> None:
        """Let batched copies fail behind these many others.

        Those of an even number are refused at once; others are enqueued first.
        """
        self._num_copies = 0
        self._failing = numbers

    def _enqueue(self, *arrays: Any) -> None:
        """Have the device make batched copies, or refuse them."""
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
        """In the transfer thread: return, with True, when it may go on."""
        self._is_stopped.release()
        return self._may_go_on.acquire()

    def go_on(self) -> bool:
        """In the model's: let the other make one step, and return when it is made.

        False if there is none to make.
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
        """A method of an object behind some steps of the thread; the class may change it later."""

        def go_on_and_call(*args: Any, **more: Any) -> Any:
            if self.is_closed and not self.is_in_thread():
                for _ in range(self._rng.choice(self._pace)):
                    if not self.go_on():
                        break
            return getattr(type(owner), name)(owner, *args, **more)

        return go_on_and_call
