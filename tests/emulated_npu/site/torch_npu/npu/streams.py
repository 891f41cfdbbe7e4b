# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Streams and events. They are torch's classes, on top of the C++ part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from torch_npu import _emulator
from torch_npu.npu.devices import index_of

NPU = torch._C._autograd.DeviceType.PrivateUse1.value  # type: ignore[attr-defined]
DEFAULT_STREAM = 0


class Stream(torch.Stream):
    """A queue of work. It runs in order; two streams have no order between them."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Stream:
        if "stream_id" in known:
            return super().__new__(cls, priority=priority, **known)
        return super().__new__(cls, torch.device("npu", index_of(device)), priority=priority)

    @property
    def npu_stream(self) -> int:
        return self.stream_id

    def wait_stream(self, stream: torch.Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._within = stream(self)
        self._within.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._within.__exit__(*error)


class Event(torch.Event):
    """A point in a stream."""

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> Event:
        return super().__new__(cls, "npu", enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: Any = None) -> None:
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        super().wait(current_stream() if stream is None else stream)

    def elapsed_time(self, later: torch.Event) -> float:
        """Milliseconds until a later event. torch's own method takes no subclass."""
        return _emulator.elapsed_ms(self.event_id, later.event_id)


def _known_stream(stream_id: int, index: int) -> Stream:
    return Stream(stream_id=stream_id, device_index=index, device_type=NPU)


def current_stream(device: Any = None) -> Stream:
    """The current stream of this thread."""
    index = index_of(device)
    return _known_stream(_emulator.current_stream(index), index)


def default_stream(device: Any = None) -> Stream:
    return _known_stream(DEFAULT_STREAM, index_of(device))


def set_stream(stream: torch.Stream) -> None:
    _emulator.set_current_stream(stream.stream_id, stream.device_index)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """A context in which a stream is the current one of its device."""
    if stream is None:
        yield
        return
    before = current_stream(stream.device_index)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


def synchronize(device: Any = None) -> None:
    """Wait for all streams."""
    _emulator.synchronize_all()
