# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""torch's module of an accelerator, and the objects that its streams still use."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.transfer.backend import Transfer
from vllm_ascend_kvext.transfer.errors import BackendError

if TYPE_CHECKING:
    import torch


def device_module(device_type: str) -> Any:
    """`torch.npu` or `torch.cuda`, by the type of the device.

    Raises:
        BackendError: torch has no such module. ``torch.npu`` exists once torch_npu is imported.
    """
    import torch

    module = getattr(torch, device_type, None)
    if module is None:
        raise BackendError(
            f"torch.{device_type}: expected it in this process, found none. Import torch_"
            f"{device_type} first, as the platform's vLLM does."
        )
    return module


def device_of(transfer: Transfer, device_type: str, backend: str) -> torch.device:
    """The one device of a type that holds all pools.

    Raises:
        BackendError: The pools are on no such device, or on several.
    """
    devices = {(pool.device.type, pool.device.index): pool.device for pool in transfer.pool_tensors}
    if len(devices) != 1 or next(iter(devices))[0] != device_type:
        found = ", ".join(f"{kind}:{index}" for kind, index in sorted(devices, key=str)) or "none"
        raise BackendError(
            f"{backend}: expected every pool on one {device_type} device, found pools on {found}. "
            "Transfer each device's pools by itself, and pools in host memory with the CPU backend."
        )
    return next(iter(devices.values()))


class InFlight:
    """Keeps objects alive until a stream has finished its work. Threads may share it."""

    def __init__(self) -> None:
        self._held: list[tuple[Any, object]] = []
        self._lock = threading.Lock()

    def hold(self, module: Any, what: object) -> None:
        """Hold ``what`` until the current stream has done all the work that it has so far.

        Args:
            module: torch's module of the device, see `device_module`.
        """
        event = module.Event()
        event.record(module.current_stream())
        with self._lock:
            self._held.append((event, what))

    def release_finished(self) -> None:
        """Release the objects whose streams have finished. Streams finish in any order."""
        with self._lock:
            self._held = [held for held in self._held if not held[0].query()]
