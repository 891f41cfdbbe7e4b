# SPDX-License-Identifier: Apache-2.0
"""What keeps copies, kernels and host memory apart, and how to take each of it away.

Every fence, event and reference between the model and transfers of its pages is here, by name. That
copies have a stream of their own is not: without it nothing could be wrong, only slow.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm_ascend_kvext.blending.device_token_pages import DeviceTokenPages
from vllm_ascend_kvext.connector.block_references import BlockReferences
from vllm_ascend_kvext.connector.job_runner import JobRunner
from vllm_ascend_kvext.connector.messages import StoreJob
from vllm_ascend_kvext.connector.worker_side import WorkerSide
from vllm_ascend_kvext.holes.window_blocks import WindowBlocks
from vllm_ascend_kvext.store.entries import Entry, EntryState
from vllm_ascend_kvext.store.tier import HostTier
from vllm_ascend_kvext.transfer.ascend.device import InFlight, npu
from vllm_ascend_kvext.transfer.compute_fence import AscendFence

STORE, LOAD = "store", "load"


def _without_fence(
    *,
    waits: Callable[[str], bool] = lambda kind: True,
    ends: Callable[[str], bool] = lambda kind: True,
    ends_failed: bool = True,
) -> None:
    """`AscendFence.run` without some of what it does, by the kind of job."""
    of_thread = threading.local()
    run_job = JobRunner.run

    def note_kind_and_run(self: JobRunner, job: Any, recorded: Any) -> Any:
        of_thread.kind = STORE if isinstance(job, StoreJob) else LOAD
        return run_job(self, job, recorded)

    def run(self: AscendFence, recorded: Any, copy: Callable[[], None]) -> float:
        stream = self._stream()
        kind = of_thread.kind
        with npu().stream(stream):
            if waits(kind):
                stream.wait_event(recorded)
            try:
                copy()
            except Exception:
                if ends_failed:
                    stream.synchronize()
                raise
            if ends(kind):
                stream.synchronize()
        return 1e-3

    JobRunner.run = note_kind_and_run
    AscendFence.run = run


def _no_arrays_held() -> None:
    InFlight.hold = lambda self, what: None


def _stores_before_forward() -> None:
    def begin_step(self: WorkerSide, jobs: Any) -> None:
        if self._probe is not None:
            self._probe.begin_step(jobs.probes)
        self._submit((*jobs.loads, *jobs.stores))

    WorkerSide.begin_step = begin_step


def _swap_later() -> None:
    WorkerSide.run_before_step = lambda self, jobs: self._submit(tuple(jobs.stores_before))


def _wait_of_segments() -> None:
    # Of objects that are there already, too.
    DeviceTokenPages._wait = property(lambda self: lambda: None)


def _no_references(owner: str) -> None:
    """References that one function takes are not; as many are not released."""
    import sys

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


def _no_pins() -> None:
    Entry.is_evictable = property(lambda self: self.state is EntryState.STORED)
    release = HostTier._release_if_idle

    def release_pinned(self: HostTier, entry: Any) -> None:
        pins, entry.num_pins = entry.num_pins, 0
        release(self, entry)
        entry.num_pins = pins

    HostTier._release_if_idle = release_pinned


def _no_end_before_sleep() -> None:
    WorkerSide.end_transfers = lambda self: None


def _no_windows_held() -> None:
    WindowBlocks.hold = lambda self, request_id, cached: None


PROTECTIONS: dict[str, tuple[str, Callable[[], None]]] = {
    "loads wait": (
        "a load waits for the kernels before it (AscendFence.run, wait_event)",
        partial(_without_fence, waits=lambda kind: kind == STORE),
    ),
    "stores wait": (
        "a store waits for the kernels before it (AscendFence.run, wait_event)",
        partial(_without_fence, waits=lambda kind: kind == LOAD),
    ),
    "loads arrive": (
        "a load ends when its bytes have arrived (AscendFence.run, synchronize)",
        partial(_without_fence, ends=lambda kind: kind == STORE),
    ),
    "stores arrive": (
        "a store ends when its bytes have arrived (AscendFence.run, synchronize)",
        partial(_without_fence, ends=lambda kind: kind == LOAD),
    ),
    "failed copies are waited for": (
        "what a failed copy has enqueued is waited for (AscendFence.run, finally)",
        partial(_without_fence, ends_failed=False),
    ),
    "arrays held": (
        "pointer arrays live until the stream has read them (IN_FLIGHT.hold)",
        _no_arrays_held,
    ),
    "stores behind the forward": (
        "stores of a step begin when its kernels are enqueued (end_of_forward)",
        _stores_before_forward,
    ),
    "swap before the step": (
        "stores of preempted requests end before the step (run_before_step)",
        _swap_later,
    ),
    "segments wait": (
        "a copy of segments ends before staging is filled again (DeviceTokenPages._wait)",
        _wait_of_segments,
    ),
    "pages of stores": (
        "a store references its pages (Stores._store)",
        partial(_no_references, "Stores._store"),
    ),
    "pages of tails": (
        "pages that leave windows are referenced until a store takes them (Stores._hold_tails)",
        partial(_no_references, "Stores._hold_tails"),
    ),
    "pages of segments": (
        "the store of a segment references its pages (SegmentStores)",
        partial(_no_references, "SegmentStores.note_step"),
    ),
    "windows of segments": (
        "windows of a segment are referenced until it is stored (SegmentStores._hold_windows)",
        partial(_no_references, "SegmentStores._hold_windows"),
    ),
    "windows of holes": (
        "cached windows before a hole are held until it is planned (WindowBlocks.hold)",
        _no_windows_held,
    ),
    "no transfers in sleep": (
        "transfers end before memory is unmapped (WorkerSide.end_transfers)",
        _no_end_before_sleep,
    ),
    "pins": ("host memory that a load reads is not given away (Entry.num_pins)", _no_pins),
}


def take_away(name: str) -> None:
    PROTECTIONS[name][1]()
