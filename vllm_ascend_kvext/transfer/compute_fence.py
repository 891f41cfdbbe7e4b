# SPDX-License-Identifier: Apache-2.0
"""The order between the kernels of the model and copies of the pages that they use.

On an NPU a step returns when its kernels are enqueued. A copy that began at once would read pages
that are not written yet, or write pages that are still read. So the thread that enqueues kernels
records an event, and whoever copies lets a stream of its own wait for it::

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

    As it is, for a model that runs on CPUs: a step has computed when it returns.
    """

    def record(self) -> Any:
        """Mark what this thread's current stream has been given so far, for `run` of any thread."""
        return None

    def run(self, recorded: Any, copy: Callable[[], None]) -> float:
        """Copy after what was recorded, and return when the bytes have arrived.

        Returns:
            Seconds that the copies took, without waiting for kernels.

        Raises:
            Exception: What ``copy`` raises; nothing that it has enqueued is under way any more.
        """
        begun_s = time.perf_counter()
        copy()
        return time.perf_counter() - begun_s


class AscendFence(ComputeFence):
    """Of a model that runs on one NPU. It has not run on an NPU: tests use a stand-in.

    Every thread that copies has a stream of its own, so that none waits for copies of another.
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
                # Also after a failure: some copies may have been enqueued.
                stream.synchronize()
        return float(begin.elapsed_time(end)) / 1000  # milliseconds

    def _stream(self) -> Any:
        stream = getattr(self._of_thread, "stream", None)
        if stream is None:
            # The current device is a thread's own; a new thread has the first one.
            npu().set_device(self._device)
            stream = self._of_thread.stream = npu().Stream(device=self._device)
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
