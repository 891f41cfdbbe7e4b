# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The fence of a model on an accelerator, by events and streams; see ``compute_fence``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.transfer.accelerator.device import device_module
from vllm_ascend_kvext.transfer.compute_fence import ComputeFence

if TYPE_CHECKING:
    import torch


class StreamFence(ComputeFence):
    """The fence of a model that runs on one accelerator.

    Every copying thread has its own stream, so that no thread waits for the copies of another. The
    class has run neither on an NPU nor on a GPU; tests use a stand-in.
    """

    def __init__(self, device: torch.device) -> None:
        """Raise `BackendError` if torch has no module of the device."""
        self._device = device
        self._module = device_module(device.type)
        self._of_thread = threading.local()

    def record(self) -> Any:
        with self._module.device(self._device):
            event = self._module.Event()
            event.record(self._module.current_stream())
        return event

    def run(self, recorded: Any, copy: Callable[[], None]) -> float:
        stream = self._stream()
        begin, end = (self._module.Event(enable_timing=True) for _ in range(2))
        with self._module.stream(stream):
            stream.wait_event(recorded)
            begin.record(stream)
            try:
                copy()
                end.record(stream)
            finally:
                # This is needed after an error, too: some copies may have been enqueued.
                stream.synchronize()
        return float(begin.elapsed_time(end)) / 1000  # elapsed_time is in milliseconds.

    def wait(self) -> None:
        with self._module.device(self._device):
            self._module.current_stream().synchronize()

    def _stream(self) -> Any:
        stream = getattr(self._of_thread, "stream", None)
        if stream is None:
            # Each thread has its own current device. In a new thread it is the first device.
            self._module.set_device(self._device)
            stream = self._module.Stream(device=self._device)
            self._of_thread.stream = stream
        return stream
