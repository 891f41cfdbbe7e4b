# SPDX-License-Identifier: Apache-2.0
"""What both Ascend backends need from torch_npu, and the objects that its streams still use."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.transfer.backend import Transfer
from vllm_ascend_kvext.transfer.errors import BackendError

if TYPE_CHECKING:
    import torch


def npu() -> Any:
    """`torch.npu`; raises `BackendError` if torch_npu has not been imported."""
    import torch

    if not hasattr(torch, "npu"):
        raise BackendError(
            "torch.npu: expected it in this process, found none. Import torch_npu first, as "
            "vLLM-Ascend does."
        )
    return torch.npu


def npu_of(transfer: Transfer, backend: str) -> torch.device:
    """The one NPU that holds all pools; raises `BackendError` if there is none or several."""
    devices = {(pool.device.type, pool.device.index): pool.device for pool in transfer.pool_tensors}
    if len(devices) != 1 or next(iter(devices))[0] != "npu":
        found = ", ".join(f"{kind}:{index}" for kind, index in sorted(devices, key=str)) or "none"
        raise BackendError(
            f"{backend}: expected every pool on one npu device, found pools on {found}. Transfer "
            "each device's pools by itself, and pools in host memory with the CPU backend."
        )
    return next(iter(devices.values()))


class InFlight:
    """Keeps objects alive until a stream has finished its work. Threads may share it."""

    def __init__(self) -> None:
        self._held: list[tuple[Any, object]] = []
        self._lock = threading.Lock()

    def hold(self, what: object) -> None:
        """Hold ``what`` until the current stream has done all the work that it has so far."""
        event = npu().Event()
        event.record(npu().current_stream())
        with self._lock:
            self._held.append((event, what))

    def release_finished(self) -> None:
        """Release the objects whose streams have finished. Streams finish in any order."""
        with self._lock:
            self._held = [held for held in self._held if not held[0].query()]
