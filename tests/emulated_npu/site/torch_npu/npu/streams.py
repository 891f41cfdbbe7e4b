# SPDX-License-Identifier: Apache-2.0
"""Streams and events of the device; `csrc/streams.h` says when their work runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torch_npu import _emulator

_PRIVATE_USE_1 = 20
"""The number of the device type in torch (``c10::DeviceType::PrivateUse1``)."""


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return int(_emulator.current_device()) if index is None else index


class Event:
    """A point in a stream. Never recorded, it counts as reached."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._event = _emulator.Event()

    def record(self, stream: Stream | None = None) -> None:
        self._event.record((stream or current_stream()).stream_id)

    def wait(self, stream: Stream | None = None) -> None:
        self._event.wait((stream or current_stream()).stream_id)

    def query(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()

    def reset(self, stream: Stream | None = None) -> None:
        pass

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds between two points that were reached."""
        return float(later._event.time_s - self._event.time_s) * 1000


ExternalEvent = Event


class Stream(torch.Stream):
    """An ordered queue of work."""

    def __new__(
        cls, device: Any = None, priority: int = 0, stream_id: int | None = None, **more: Any
    ) -> Stream:
        return super().__new__(
            cls,
            stream_id=_emulator.new_stream() if stream_id is None else stream_id,
            device_index=_index(device),
            device_type=_PRIVATE_USE_1,
        )

    @property
    def npu_stream(self) -> int:
        return self.stream_id

    def synchronize(self) -> None:
        _emulator.synchronize_stream(self.stream_id)

    def query(self) -> bool:
        return bool(_emulator.query_stream(self.stream_id))

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        event = Event()
        event.record(stream)
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._before = current_stream()
        set_stream(self)
        return self

    def __exit__(self, *error: object) -> None:
        set_stream(self._before)


def current_stream(device: Any = None) -> Stream:
    return Stream(device, stream_id=_emulator.current_stream())


def default_stream(device: Any = None) -> Stream:
    return Stream(device, stream_id=0)


def set_stream(stream: Stream) -> None:
    """Of this thread."""
    _emulator.set_current_stream(stream.stream_id)


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Make a stream the current one for a block; None changes nothing."""
    if stream is None:
        yield
        return
    before = current_stream()
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


def synchronize(device: Any = None) -> None:
    """Wait for all streams."""
    _emulator.synchronize_all()
