# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Transfers that wait until a test releases them, and that fail if the test says so.

With a script, the speed of threads does not decide in which step a transfer ends. Between two
steps, the transfer thread stands still.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_ascend_kvext.connector.worker.worker_side import WorkerSide
from vllm_ascend_kvext.transfer.errors import BackendError
from vllm_ascend_kvext.transfer.page_transfer import page_transfer
from vllm_ascend_kvext.transfer.schema import Direction

DEADLINE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferScript:
    """How the transfers of a worker behave.

    Attributes:
        seed: Decides which transfers fail, and how many of them end in a step.
        failing_stores: The share of stores that fail.
        failing_loads: The share of loads that fail.
        failing_load_numbers: The numbers of the loads that fail, counted from 1. If a load is
        repeated
            part by part, each part has its own number.
        max_per_step: The most begun transfers that end in a step. None means all.
        steps_per_transfer: The number of steps that each transfer takes, one after the other. None
            means that ``max_per_step`` decides.
    """

    seed: int = 0
    failing_stores: float = 0.0
    failing_loads: float = 0.0
    failing_load_numbers: frozenset[int] = frozenset()
    max_per_step: int | None = None
    steps_per_transfer: int | None = None


class ScriptedTransfers:
    """The ``move`` of one `WorkerSide`. Each rank has its own speed."""

    def __init__(self, script: TransferScript, rank: int = 0) -> None:
        self._script = script
        self._rng = random.Random(f"{script.seed}/{rank}")
        self.counts: Counter[str] = Counter()
        self._model_thread = threading.get_ident()
        self._changed = threading.Condition()
        self._num_waiting = 0
        self._num_passes = 0
        self._num_steps = 0  # Since the transfer that waits has begun.

    def move(
        self, pools: Any, host: Any, planes: Any, runs: Any, direction: Direction, **how: Any
    ) -> None:
        if self.is_to_fail(direction):
            some = np.ascontiguousarray(runs[: len(runs) // 2])
            page_transfer(pools, host, planes, some, direction, **how)
            raise BackendError("the script lets this transfer fail")
        page_transfer(pools, host, planes, runs, direction, **how)

    def is_to_fail(self, direction: Direction) -> bool:
        """Wait until a begun transfer is released. Return whether it then fails, half done."""
        if threading.get_ident() != self._model_thread:
            self._wait()
        is_store = direction is Direction.PAGES_TO_HOST
        name = "stores" if is_store else "loads"
        share = self._script.failing_stores if is_store else self._script.failing_loads
        self.counts[name] += 1
        is_named = not is_store and self.counts[name] in self._script.failing_load_numbers
        if is_named or (share and self._rng.random() < share):
            self.counts[f"failed {name}"] += 1
            return True
        return False

    def end_some(self, side: WorkerSide) -> None:
        """Let some begun transfers end. Return when the thread stands still again."""
        if self._script.steps_per_transfer is not None:
            self._end_slowly(side, self._script.steps_per_transfer)
            return
        most = self._script.max_per_step
        if most is None:
            while self._stands(side):
                self._let_one_pass()
            return
        for _ in range(self._rng.randint(0, most)):
            if not self._stands(side):
                break
            self._let_one_pass()
        self._stands(side)

    def _end_slowly(self, side: WorkerSide, steps_per_transfer: int) -> None:
        """Let the transfer that waits end if it has waited for its number of steps."""
        if not self._stands(side):
            return
        self._num_steps += 1
        if self._num_steps >= steps_per_transfer:
            self._num_steps = 0
            self._let_one_pass()
            self._stands(side)

    def open(self) -> None:
        """Release all transfers, including those that come later."""
        with self._changed:
            self._num_passes = 1 << 60
            self._num_waiting = 0
            self._changed.notify_all()

    def _wait(self) -> None:
        with self._changed:
            self._num_waiting += 1
            is_let_go = self._changed.wait_for(lambda: self._num_passes > 0, DEADLINE_S)
            assert is_let_go, "a transfer was never released"
            self._num_passes -= 1

    def _let_one_pass(self) -> None:
        with self._changed:
            self._num_passes += 1
            self._num_waiting -= 1
            self._changed.notify_all()

    def _stands(self, side: WorkerSide) -> bool:
        """Whether a transfer waits. Return as soon as one waits, or none is under way."""
        thread = side._thread
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            with self._changed:
                if self._num_waiting > 0:
                    return True
            with thread._changed:
                if not (thread._loads or thread._stores or thread._num_running):
                    return False
            time.sleep(0)
        raise AssertionError("the transfer thread neither waits nor ends in time")
