# SPDX-License-Identifier: Apache-2.0
"""A stand-in for `torch.npu` that writes down what it is asked for, and by which thread.

Times are those of a clock of its own: every call takes a millisecond, waiting for an event 100.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Device:
    """As much of a ``torch.device`` as is read."""

    type: str
    index: int


class RecordingNpu:
    """What code finds as `torch.npu`; ``calls`` has the names of calls, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.clock_ms = 0.0
        self._of_thread = threading.local()
        self._names = itertools.count()

    def note(self, what: str) -> None:
        thread = "model" if threading.current_thread() is threading.main_thread() else "copying"
        self.clock_ms += 1
        self.calls.append(f"{thread}: {what}")

    def set_device(self, device: Device) -> None:
        self.note(f"set_device {device.index}")

    @contextlib.contextmanager
    def device(self, device: Device) -> Iterator[None]:
        self.note(f"device {device.index}")
        yield

    def current_stream(self) -> RecordingStream:
        return getattr(self._of_thread, "stream", None) or RecordingStream(self, "compute")

    @contextlib.contextmanager
    def stream(self, stream: RecordingStream) -> Iterator[None]:
        self._of_thread.stream = stream
        try:
            yield
        finally:
            self._of_thread.stream = None

    def Stream(self, device: Device) -> RecordingStream:  # noqa: N802
        return RecordingStream(self, f"copies {next(self._names)} on {device.index}")

    def Event(self, enable_timing: bool = False) -> RecordingEvent:  # noqa: N802
        return RecordingEvent(self, enable_timing)


@dataclass
class RecordingStream:
    npu: RecordingNpu
    name: str

    def wait_event(self, event: RecordingEvent) -> None:
        self.npu.note(f"{self.name} waits for {event.recorded_on}")
        self.npu.clock_ms += 100

    def synchronize(self) -> None:
        self.npu.note(f"synchronize {self.name}")


@dataclass
class RecordingEvent:
    npu: RecordingNpu
    enable_timing: bool
    recorded_on: str = field(default="nothing", init=False)
    at_ms: float = field(default=0, init=False)

    def record(self, stream: RecordingStream) -> None:
        self.recorded_on = stream.name
        self.at_ms = self.npu.clock_ms
        if not self.enable_timing:
            self.npu.note(f"record on {stream.name}")

    def elapsed_time(self, end: RecordingEvent) -> float:
        assert self.enable_timing and end.enable_timing
        return end.at_ms - self.at_ms
