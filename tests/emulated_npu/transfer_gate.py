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
        if gate.is_in_thread():
            while True:
                if not predicate():
                    gate.note_idle()
                    super().wait_for(predicate)
                if not gate.is_closed:
                    return True
                self.release()
                gate.stop_here()
                self.acquire()
                if predicate():
                    return True
        if not gate.is_closed:
            return super().wait_for(predicate, timeout)
        while not predicate():
            self.release()
            try:
                has_gone_on = gate.go_on()
            finally:
                self.acquire()
            if not has_gone_on:
                return predicate()
        return True


class TransferGate:
    """The gate of one worker, whose side of the connector gets another thread.

    While it is not closed, threads run as they are. Steps, copies and failures are counted from
    then on.
    """

    def __init__(self, worker_side: Any) -> None:
        from torch_npu.custom_operators import block_copies
        from torch_npu.npu import streams

        self.is_closed = False
        self.counted: Counter[str] = Counter()
        self._rng = random.Random()
        self._pace = PACES[0]
        worker_side._thread.shutdown()
        self._thread = TransferThread(worker_side._run, worker_side._move_to_copy_cpus)
        self._thread._changed = _GatedCondition(self)
        worker_side._thread = self._thread
        self._state = threading.Condition()  # Guards what follows.
        self._is_stopped = False
        self._is_idle = True
        self._may_go_on = False
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
        block_copies._emulator = _Copies(self, block_copies._emulator.enqueue_copies)

    def close(self, rng: random.Random) -> None:
        """From now on the thread goes on as ``rng`` says. Nothing is under way."""
        self.counted.clear()
        self._rng = rng
        self._pace = rng.choice(PACES)
        self._is_idle, self._is_stopped, self._may_go_on = True, False, False
        self.is_closed = True

    def open(self) -> None:
        """Let threads run as they are."""
        with self._state:
            self.is_closed = False
            self._failing = ()
            self._state.notify_all()
        with self._thread._changed:
            self._thread._changed.notify_all()

    def fail(self, numbers: Collection[int]) -> None:
        """Let batched copies fail behind these many others.

        Those of an even number are refused at once; others are enqueued first.
        """
        self._num_copies, self._failing = 0, numbers

    def enqueue(self, enqueue: Callable[[], None]) -> None:
        """Have the device make batched copies, or refuse them."""
        self._num_copies += 1
        self.counted["batched copies"] += 1
        is_refused = self._num_copies in self._failing
        if not is_refused or self._num_copies % 2:
            enqueue()
        if is_refused:
            self.counted["failed copies"] += 1
            raise RuntimeError("aclrtMemcpyBatchAsync failed: 507899 (emulated)")

    def is_in_thread(self) -> bool:
        return threading.current_thread() is self._thread._thread

    # In the transfer thread.

    def stop_here(self) -> None:
        """Return when the thread may go on."""
        with self._state:
            self._is_stopped, self._is_idle = True, False
            self._state.notify_all()
            self._state.wait_for(lambda: self._may_go_on or not self.is_closed)
            self._is_stopped = self._may_go_on = False

    def note_idle(self) -> None:
        """The thread is about to wait for jobs."""
        with self._state:
            self._is_idle = True
            self._state.notify_all()

    # In the model's thread.

    def go_on(self) -> bool:
        """Let the thread make one step, and return when it is made; False if there is none."""
        if self._is_idle and not (self._thread._loads or self._thread._stores):
            return False
        with self._state:
            self._wait_until(lambda: self._is_stopped)
            self._may_go_on, self._is_stopped, self._is_idle = True, False, False
            self.counted["steps of the thread"] += 1
            self._state.notify_all()
            self._wait_until(lambda: self._is_stopped or self._is_idle)
        return True

    def _wait_until(self, predicate: Callable[[], bool]) -> None:
        if not self._state.wait_for(predicate, _HANGS_S):
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


class _Copies:
    """What the batched copy calls of the emulated device."""

    def __init__(self, gate: TransferGate, enqueue: Callable[..., None]) -> None:
        self._gate = gate
        self._enqueue = enqueue

    def enqueue_copies(self, *arrays: Any) -> None:
        self._gate.enqueue(lambda: self._enqueue(*arrays))
