# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A GPU in host memory whose streams are late: work is done when something waits for it.

Tensors of the GPU are tensors in host memory that name another device. `StandInGpu.install` puts
streams, events, pinned memory and vLLM's batched copy in torch's place.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch


class GpuTensor(torch.Tensor):
    """A tensor in host memory that says it is on a GPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the GPU."""
    return tensor.as_subclass(GpuTensor)


class Stream:
    numbers = itertools.count(1)

    def __init__(self, device: object = None, *, is_default: bool = False) -> None:
        self.cuda_stream = 0 if is_default else next(self.numbers)
        self._work: deque[Callable[[], None]] = deque()
        self._lock = threading.RLock()

    def enqueue(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    def wait_event(self, event: Event) -> None:
        self.enqueue(event.synchronize)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        with self._lock:
            while self._work:
                self._work.popleft()()

    def run_until(self, event: Event) -> None:
        with self._lock:
            while self._work and not event.query():
                self._work.popleft()()


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self._stream: Stream | None = None
        self._is_done = True

    def record(self, stream: Stream) -> None:
        self._stream = stream
        self._is_done = False
        stream.enqueue(self._finish)

    def _finish(self) -> None:
        self._is_done = True

    def query(self) -> bool:
        return self._is_done

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.run_until(self)

    def elapsed_time(self, end: Event) -> float:
        assert self.query() and end.query()
        return 1.0


class StandInGpu:
    """The streams of the process, and vLLM's operator.

    Attributes:
        fails: Called before each batch is enqueued; may raise.
        num_batches: The batches that were enqueued.
    """

    def __init__(self) -> None:
        self.fails: Callable[[], None] = lambda: None
        self.num_batches = 0
        self._default = Stream(is_default=True)
        self._of_thread = threading.local()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("current_stream", "stream", "device", "set_device"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.version, "hip", None)
        operators = SimpleNamespace(swap_blocks_batch=self.swap_blocks_batch)
        monkeypatch.setattr(torch.ops, "_C_cache_ops", operators)
        pinned: list[torch.UntypedStorage] = []

        def is_pinned(tensor: torch.Tensor) -> bool:
            address = tensor.untyped_storage().data_ptr()
            return any(storage.data_ptr() == address for storage in pinned)

        monkeypatch.setattr(torch.Tensor, "is_pinned", is_pinned)
        empty = torch.empty

        def in_host_memory(
            *size: Any, pin_memory: bool = False, device: Any = None, **more: Any
        ) -> torch.Tensor:
            if torch.device(device or "cpu").type == "cuda":
                return on_gpu(empty(*size, **more))
            made = empty(*size, device=device, **more)
            if pin_memory:
                pinned.append(made.untyped_storage())
            return made

        monkeypatch.setattr(torch, "empty", in_host_memory)

    def current_stream(self) -> Stream:
        return getattr(self._of_thread, "stream", self._default)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._of_thread.stream = stream
        try:
            yield
        finally:
            self._of_thread.stream = before

    def device(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        assert device == torch.device("cuda", 0)
        return contextlib.nullcontext()

    def set_device(self, device: torch.device) -> None:
        assert device == torch.device("cuda", 0)

    def swap_blocks_batch(
        self,
        sources: torch.Tensor,
        destinations: torch.Tensor,
        sizes: torch.Tensor,
        is_src_access_order_any: bool,
    ) -> None:
        self.fails()
        stream = self.current_stream()
        if not stream.cuda_stream:
            raise RuntimeError("cuMemcpyBatchAsync failed: the legacy default stream")
        assert is_src_access_order_any is False
        self.num_batches += 1
        alive = [weakref.ref(array._base) for array in (sources, destinations, sizes)]
        parts = [(array.storage_offset(), len(array)) for array in (sources, destinations, sizes)]

        def copy() -> None:
            arrays = []
            for reference, (first, count) in zip(alive, parts, strict=True):
                array = reference()
                assert array is not None, "an array was freed before the GPU had read it"
                arrays.append(array[first : first + count].tolist())
            for source, destination, size in zip(*arrays, strict=True):
                ctypes.memmove(destination, source, size)

        stream.enqueue(copy)
