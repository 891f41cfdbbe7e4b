# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Graphs, task groups and external events. The C++ part records and replays (``csrc/graphs.h``)."""

from __future__ import annotations

import gc
from typing import Any

import torch

from torch_npu import _emulator
from torch_npu.npu.streams import Stream, current_stream, synchronize
from torch_npu.npu.streams import stream as within

Pool = tuple[int, int]

TaskGroup = _emulator.TaskGroup
"""The handle of a task group."""


def graph_pool_handle() -> Pool:
    """The handle of memory that graphs share: their replays overwrite each other's."""
    return (0, _emulator.new_graph_pool())


def is_current_stream_capturing() -> bool:
    return _emulator.is_capturing(*_place(None))


class NPUGraph:
    """Work that was recorded, and is queued again at each replay."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._graph = _emulator.Graph()

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global") -> None:
        """Record what the current stream is given from here on, and do not run it.

        Args:
            pool: Of `graph_pool_handle`, or of another graph.
            capture_error_mode: Without effect. What a capture cannot record is refused for the
                streams of the capture, and waits for the device for all threads.
        """
        _, number = graph_pool_handle() if pool is None else pool
        self._graph.begin(number)

    def capture_end(self) -> None:
        self._graph.end()

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self._graph.reset()

    def pool(self) -> Pool:
        return (0, self._graph.pool())


class graph:  # noqa: N801 (the name that torch gives it)
    """A context in which work is recorded in a graph.

    Args:
        npu_graph: The graph, which has not been captured.
        pool: As `NPUGraph.capture_begin` takes it.
        stream: The stream that is captured; without one, a stream that captures share.
    """

    _stream: Stream | None = None

    def __init__(
        self,
        npu_graph: NPUGraph,
        pool: Pool | None = None,
        stream: torch.Stream | None = None,
        capture_error_mode: str = "global",
        auto_dispatch_capture: bool = False,
    ) -> None:
        if auto_dispatch_capture:
            raise NotImplementedError("graph: auto_dispatch_capture is not emulated")
        if stream is None:
            stream = graph._stream = graph._stream or Stream()
        self._graph = npu_graph
        self._capture = (pool, capture_error_mode)
        self._within = within(stream)

    def __enter__(self) -> None:
        synchronize()
        gc.collect()
        self._within.__enter__()
        self._graph.capture_begin(*self._capture)

    def __exit__(self, *error: Any) -> None:
        try:
            self._graph.capture_end()
        finally:
            self._within.__exit__(*error)


class ExternalEvent:
    """An event whose waits and resets a capture records, and whose records come from outside."""

    def __init__(self) -> None:
        self._event = _emulator.ExternalEvent()

    def record(self, stream: torch.Stream | None = None) -> None:
        self._event.record(*_place(stream))

    def wait(self, stream: torch.Stream | None = None) -> None:
        self._event.wait(*_place(stream))

    def reset(self, stream: torch.Stream | None = None) -> None:
        self._event.reset(*_place(stream))


def graph_task_group_begin(stream: torch.Stream) -> None:
    """Make the work that a captured stream is given, until the end, a group."""
    _emulator.begin_task_group(*_place(stream))


def graph_task_group_end(stream: torch.Stream) -> TaskGroup:
    return _emulator.end_task_group(*_place(stream))


def graph_task_update_begin(stream: torch.Stream, handle: TaskGroup) -> None:
    """Record what a stream is given, until the end, in the place of the work of a group.

    The group changes when the stream comes to it. The new work is of the same kinds.
    """
    _emulator.begin_update(*_place(stream), handle)


def graph_task_update_end(stream: torch.Stream) -> None:
    _emulator.end_update(*_place(stream))


def _place(stream: torch.Stream | None) -> tuple[int, int]:
    stream = current_stream() if stream is None else stream
    return stream.stream_id, stream.device_index
