# SPDX-License-Identifier: Apache-2.0
"""The fence of a model on an NPU, by events and streams of torch_npu; see ``compute_fence``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.transfer.ascend.device import npu
from vllm_ascend_kvext.transfer.compute_fence import ComputeFence

if TYPE_CHECKING:
    import torch


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
