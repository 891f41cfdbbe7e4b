# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The protections that keep copies, kernels and host memory apart, and how to remove each.

This module has the fences, events and references between the model and transfers of its pages
whose absence some seeds of late streams detect. Unit tests detect the absence of other protections.
The stream of the copies is not among them: without it transfers would be slow, but not wrong.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

from vllm_ascend_kvext.connector.common.block_references import BlockReferences
from vllm_ascend_kvext.connector.common.messages import StoreJob
from vllm_ascend_kvext.connector.scheduler.store_queue import StoreQueue
from vllm_ascend_kvext.connector.worker.job_runner import JobRunner
from vllm_ascend_kvext.connector.worker.worker_side import WorkerSide
from vllm_ascend_kvext.segments.scheduler.segment_stores import SegmentStores
from vllm_ascend_kvext.segments.worker.device_token_pages import DeviceTokenPages
from vllm_ascend_kvext.transfer.accelerator.device import InFlight, device_module

run_job = JobRunner.run


def _run_stores_at_once(self: JobRunner, job: Any, recorded: Any) -> Any:
    # A wait for an event that was never recorded returns at once.
    return run_job(
        self, job, device_module("npu").Event() if isinstance(job, StoreJob) else recorded
    )


def _begin_stores_with_loads(self: WorkerSide, jobs: Any) -> None:
    self._extension.begin_step(jobs.extras)
    self._submit((*jobs.loads, *jobs.stores))


def _no_references(owner: FunctionType) -> None:
    """Have one function take no references, and skip as many releases."""
    assert "take" in owner.__code__.co_names, f"{owner.__qualname__} takes no references"
    take = BlockReferences.take
    release = BlockReferences.release
    skipped: Counter[int] = Counter()

    def take_some(self: BlockReferences, blocks: Any) -> None:
        if sys._getframe(1).f_code is owner.__code__:
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

    BlockReferences.take = take_some
    BlockReferences.release = release_some


PROTECTIONS: dict[str, Callable[[], None]] = {
    # A store waits for the kernels before it: ``wait_event`` in `StreamFence.run`.
    "stores wait": partial(setattr, JobRunner, "run", _run_stores_at_once),
    # Pointer arrays stay in memory until the stream has read them.
    "arrays held": partial(setattr, InFlight, "hold", lambda self, module, what: None),
    # Stores of a step begin when its kernels are enqueued: `WorkerSide.end_of_forward`.
    "stores behind the forward": partial(
        setattr, WorkerSide, "begin_step", _begin_stores_with_loads
    ),
    # A copy of segments ends before staging is filled again, also if the objects exist already.
    "segments wait": partial(
        setattr, DeviceTokenPages, "_wait", property(lambda self: lambda: None)
    ),
    # Pages of a store and of a segment are referenced; windows of a segment until it is stored.
    "pages of stores": partial(_no_references, StoreQueue.add),
    "pages of segments": partial(_no_references, SegmentStores.note_step),
    "windows of segments": partial(_no_references, SegmentStores._hold_windows),
    # Transfers end before memory is unmapped.
    "no transfers in sleep": partial(setattr, WorkerSide, "end_transfers", lambda self: None),
}


def take_away(name: str) -> None:
    PROTECTIONS[name]()
