# SPDX-License-Identifier: Apache-2.0
"""Keeps the order between the model's kernels and copies of the pages that these kernels use.

On an NPU a step returns when its kernels are enqueued. A copy that began at once would read pages
that are not written yet, or write pages that kernels still read. So the thread that enqueues
kernels records an event, and the copying thread lets its own stream wait for that event::

    model's thread    kernels enqueued, record() ....................... next step enqueued
    compute stream    kernels kernels kernels [event] kernels of the next step
    copy stream                               [wait_event] copies
    copying thread                run(): enqueued .............. synchronize, returns
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.transfer.ascend.device import npu
from vllm_ascend_kvext.transfer.errors import BackendError

if TYPE_CHECKING:
    import torch


class ComputeFence:
    """Lets copies wait for the kernels that have been enqueued so far.

    This base class is the fence of a model on CPUs, whose step has computed when it returns.
    """

    def record(self) -> Any:
        """Mark the work that this thread's current stream has so far, for `run` of any thread."""
        return None

    def run(self, recorded: Any, copy: Callable[[], None]) -> float:
        """Copy after the recorded work, and return when the bytes have arrived.

        Returns:
            The seconds that the copies took, without the wait for kernels.

        Raises:
            Exception: Any error of ``copy``. Copies that it enqueued before the error have ended.
        """
        begun_s = time.perf_counter()
        copy()
        return time.perf_counter() - begun_s


class AscendFence(ComputeFence):
    """The fence of a model that runs on one NPU.

    Every copying thread has its own stream, so that no thread waits for the copies of another. The
    class has not run on an NPU; tests use a stand-in.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_thread = threading.local()

    def record(self) -> Any:
        with npu().device(self._device):
            event = npu().Event()
            event.record(npu().current_stream())
        return event

    def run(self, recorded: Any, copy: Callable[[], None]) -> float:
        stream = self._stream()
        begin, end = (npu().Event(enable_timing=True) for _ in range(2))
        with npu().stream(stream):
            stream.wait_event(recorded)
            begin.record(stream)
            try:
                copy()
                end.record(stream)
            finally:
                # This is needed after an error, too: some copies may have been enqueued.
                stream.synchronize()
        return float(begin.elapsed_time(end)) / 1000  # elapsed_time is in milliseconds.

    def _stream(self) -> Any:
        stream = getattr(self._of_thread, "stream", None)
        if stream is None:
            # Each thread has its own current device. In a new thread it is the first device.
            npu().set_device(self._device)
            stream = npu().Stream(device=self._device)
            self._of_thread.stream = stream
        return stream


def fence_of(device: torch.device) -> ComputeFence:
    """The fence for pages on a device; raises `BackendError` if no backend serves it."""
    if device.type == "cpu":
        return ComputeFence()
    if device.type == "npu":
        return AscendFence(device)
    raise BackendError(
        f"kv_caches: expected pages on cpu or npu, found some on {device}: no backend moves them. "
        "Leave the connector out."
    )
