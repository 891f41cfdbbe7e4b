# SPDX-License-Identifier: Apache-2.0
"""What keeps copies, kernels and host memory apart, and how to take each of it away.

Here are the fences, events and references between the model and transfers of its pages of which
some seeds show that they are gone; of others unit tests show it. That copies have a stream of their
own is not here: without it nothing could be wrong, only slow.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm_ascend_kvext.blending.device_token_pages import DeviceTokenPages
from vllm_ascend_kvext.connector.common.block_references import BlockReferences
from vllm_ascend_kvext.connector.common.messages import StoreJob
from vllm_ascend_kvext.connector.worker.job_runner import JobRunner
from vllm_ascend_kvext.connector.worker.worker_side import WorkerSide
from vllm_ascend_kvext.transfer.ascend.device import InFlight, npu
from vllm_ascend_kvext.transfer.compute_fence import AscendFence


def _stores_do_not_wait() -> None:
    """A store waits for the kernels before it: ``wait_event`` in `AscendFence.run`."""
    of_thread = threading.local()
    run, run_job = AscendFence.run, JobRunner.run

    def note_kind_and_run(self: JobRunner, job: Any, recorded: Any) -> Any:
        of_thread.is_store = isinstance(job, StoreJob)
        return run_job(self, job, recorded)

    def run_without(self: AscendFence, recorded: Any, copy: Callable[[], None]) -> float:
        if not of_thread.is_store:
            return run(self, recorded, copy)
        stream = self._stream()
        with npu().stream(stream):
            try:
                copy()
            finally:
                stream.synchronize()
        return 1e-3

    JobRunner.run = note_kind_and_run
    AscendFence.run = run_without


def _arrays_are_not_held() -> None:
    """Pointer arrays live until the stream has read them: ``IN_FLIGHT.hold``."""
    InFlight.hold = lambda self, what: None


def _stores_begin_before_the_forward() -> None:
    """Stores of a step begin when its kernels are enqueued: `WorkerSide.end_of_forward`."""

    def begin_step(self: WorkerSide, jobs: Any) -> None:
        if self._probe is not None:
            self._probe.begin_step(jobs.probes)
        self._submit((*jobs.loads, *jobs.stores))

    WorkerSide.begin_step = begin_step


def _segments_do_not_wait() -> None:
    """A copy of segments ends before staging is filled again: ``DeviceTokenPages._wait``."""
    # Of objects that are there already, too.
    DeviceTokenPages._wait = property(lambda self: lambda: None)


def _no_references(owner: str) -> None:
    """References that one function takes are not; as many are not released."""
    take, release = BlockReferences.take, BlockReferences.release
    skipped: Counter[int] = Counter()

    def take_some(self: BlockReferences, blocks: Any) -> None:
        if sys._getframe(1).f_code.co_qualname == owner:
            skipped.update(block.block_id for block in blocks)
            self.num_references += len(blocks)
        else:
            take(self, blocks)

    def release_some(self: BlockReferences, blocks: Any) -> None:
        left = []
        for block in blocks:
            if skipped[block.block_id]:
                skipped[block.block_id] -= 1
                self.num_references -= 1
            else:
                left.append(block)
        release(self, left)

    BlockReferences.take, BlockReferences.release = take_some, release_some


def _transfers_go_on_in_sleep() -> None:
    """Transfers end before memory is unmapped: `WorkerSide.end_transfers`."""
    WorkerSide.end_transfers = lambda self: None


PROTECTIONS: dict[str, Callable[[], None]] = {
    "stores wait": _stores_do_not_wait,
    "arrays held": _arrays_are_not_held,
    "stores behind the forward": _stores_begin_before_the_forward,
    "segments wait": _segments_do_not_wait,
    # Pages of a store, and of a segment; windows of a segment until it is stored.
    "pages of stores": partial(_no_references, "Stores._store"),
    "pages of segments": partial(_no_references, "SegmentStores.note_step"),
    "windows of segments": partial(_no_references, "SegmentStores._hold_windows"),
    "no transfers in sleep": _transfers_go_on_in_sleep,
}


def take_away(name: str) -> None:
    PROTECTIONS[name]()
