# SPDX-License-Identifier: Apache-2.0
"""An NPU for code that enqueues work on streams: `torch.npu`, and vLLM-Ascend's batched copy.

Work given to a stream waits there until the stream is waited for, so that what happens too late
or is freed too early shows. Memory is the process's own; which of it counts as the device's is
said by the test.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

HOST_TO_DEVICE = 0
DEVICE_TO_HOST = 1


class Stream:
    """Runs nothing before ``synchronize``."""

    def __init__(self) -> None:
        self.pending: deque[Callable[[], None]] = deque()

    @property
    def npu_stream(self) -> int:
        """The handle that C code takes."""
        return id(self)

    def synchronize(self) -> None:
        while self.pending:
            self.pending.popleft()()


class Event:
    def __init__(self) -> None:
        self._is_done = False
        self._stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self._stream = stream
        stream.pending.append(self._finish)

    def query(self) -> bool:
        return self._is_done

    def _finish(self) -> None:
        self._is_done = True


@dataclass
class FakeNpu:
    """What code finds as `torch.npu`.

    Attributes:
        host: First address and size of what counts as host memory; the rest is the device's.
        directions: Of each batched copy so far.
    """

    Event = Event
    host: tuple[int, int] = (0, 0)
    directions: list[int] = field(default_factory=list)
    _streams: dict[int, Stream] = field(default_factory=dict)
    _device: int = 0

    @contextlib.contextmanager
    def device(self, device: SimpleNamespace) -> Iterator[None]:
        before, self._device = self._device, device.index
        try:
            yield
        finally:
            self._device = before

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._streams[self._device] = stream
        try:
            yield
        finally:
            self._streams[self._device] = before

    def current_stream(self) -> Stream:
        return self._streams.setdefault(self._device, Stream())

    def stream_of(self, index: int) -> Stream:
        """A device's current stream."""
        return self._streams.setdefault(index, Stream())

    def swap_blocks_batch(
        self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, direction: int
    ) -> None:
        """The contract of vLLM-Ascend 0.23.0, csrc/torch_binding.cpp, and what it leaves to us.

        It checks device, dtype and lengths. It reads raw pointers of dense arrays, gives all
        copies one direction, and hands the arrays to the runtime.
        """
        for name, tensor in (("src_ptrs", x), ("dst_ptrs", y), ("sizes", z)):
            if tensor.dtype != torch.int64:
                raise RuntimeError(f"{name} must be int64")
            if len(tensor) != len(x):
                raise RuntimeError(f"{name} length must match src_ptrs")
            assert tensor.dim() == 1 and tensor.is_contiguous(), f"{name} must be dense"
        if direction not in (HOST_TO_DEVICE, DEVICE_TO_HOST):
            raise RuntimeError(f"swap_blocks_batch: invalid direction {direction}")
        self.directions.append(direction)
        for source, destination, size in zip(x.tolist(), y.tolist(), z.tolist(), strict=True):
            assert size > 0
            ends = (source, destination) if direction == HOST_TO_DEVICE else (destination, source)
            in_host, on_device = (self._is_host(address, size) for address in ends)
            assert in_host and not on_device, "a copy goes against the direction of its batch"

        arrays = [weakref.ref(tensor) for tensor in (x, y, z)]

        def copy() -> None:
            alive = [array() for array in arrays]
            assert None not in alive, "an array was freed before the device had read it"
            for source, destination, size in zip(*(a.tolist() for a in alive), strict=True):
                ctypes.memmove(destination, source, size)

        self.current_stream().pending.append(copy)

    def _is_host(self, address: int, size: int) -> bool:
        first, num_bytes = self.host
        return first <= address and address + size <= first + num_bytes


@contextlib.contextmanager
def installed_npu() -> Iterator[FakeNpu]:
    """`torch.npu` and ``torch.ops._C_ascend`` for a while."""
    npu = FakeNpu()
    # Dispatched on CPU tensors, as upstream registers it: an array on a device finds no kernel.
    library = torch.library.Library("_C_ascend", "FRAGMENT")
    library.define("swap_blocks_batch(Tensor x, Tensor y, Tensor z, int direction) -> ()")
    library.impl("swap_blocks_batch", npu.swap_blocks_batch, "CPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "npu", npu, raising=False)
        try:
            yield npu
        finally:
            library._destroy()


def device_tensor(index: int = 0) -> SimpleNamespace:
    """Stands for a tensor on an NPU."""
    return SimpleNamespace(device=SimpleNamespace(type="npu", index=index))


def host_tensor(*, is_pinned: bool = True) -> SimpleNamespace:
    """Stands for a tensor in host memory."""
    device = SimpleNamespace(type="cpu", index=None)
    return SimpleNamespace(device=device, is_pinned=lambda: is_pinned)
