# SPDX-License-Identifier: Apache-2.0
"""The order between the kernels of the model and copies of the pages that they use.

On an NPU a step returns when its kernels are enqueued. A copy that began at once would read pages
that are not written yet, or write pages that are still read. So the thread that enqueues kernels
records an event, and whoever copies lets a stream of its own wait for it::

    model's thread    kernels enqueued, record() ....................... next step enqueued
    compute stream    kernels kernels kernels [event] kernels of the next step
    copy stream                               [wait_event] copies
    copying thread                run(): enqueued .............. synchronize, returns

Knows no pages and no jobs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from vllm_ascend_kvext.transfer.ascend.device import npu
from vllm_ascend_kvext.transfer.errors import BackendError

if TYPE_CHECKING:
    import torch


class ComputeFence(Protocol):
    """Lets copies wait for the kernels that have been enqueued so far."""

    def record(self) -> object:
        """Mark what the current stream of this thread has been given so far.

        Returns:
            For `run`, of any thread.
        """
        ...

    def run(self, recorded: object, copy: Callable[[], None]) -> float:
        """Copy after what was recorded, and return when the bytes have arrived.

        Args:
            recorded: What `record` has returned.
            copy: Copies, or enqueues copies on the current stream.

        Returns:
            Seconds that the copies took, without waiting for kernels.

        Raises:
            Exception: What ``copy`` raises; nothing that it has enqueued is under way any more.
        """
        ...


class HostFence:
    """Of a model that runs on CPUs: a step has computed when it returns."""

    def record(self) -> object:
        return None

    def run(self, recorded: object, copy: Callable[[], None]) -> float:
        begun_s = time.perf_counter()
        copy()
        return time.perf_counter() - begun_s


class AscendFence:
    """Of a model that runs on one NPU. It has not run on an NPU: tests use a stand-in.

    Every thread that copies has a stream of its own, so that none waits for copies of another.

    Args:
        device: The NPU that has the pages.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_thread = threading.local()

    def record(self) -> object:
        with npu().device(self._device):
            event = npu().Event()
            event.record(npu().current_stream())
        return event

    def run(self, recorded: object, copy: Callable[[], None]) -> float:
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
    """The fence for pages on a device.

    Raises:
        BackendError: If no backend serves the device.
    """
    if device.type == "cpu":
        return HostFence()
    if device.type == "npu":
        return AscendFence(device)
    raise BackendError(
        f"kv_caches: expected pages on cpu or npu, found some on {device}: no backend moves them. "
        "Leave the connector out."
    )
