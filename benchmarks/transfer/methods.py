# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Ways to move one chunk. Each prepares a function that copies; the preparation is not timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from transfer.geometry import ColdMemory, Job
from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.transfer.page_transfer import page_transfer
from vllm_ascend_kvext.transfer.placement import CALLING_THREAD
from vllm_ascend_kvext.transfer.schema import Direction

Copy = Callable[[], None]


class Method(Protocol):
    """A way to move a chunk. `name` is printed."""

    name: str

    def prepare(self, job: Job) -> Copy: ...


class PlainCopy:
    """Copies the same number of bytes in one piece. No scattered copy can be faster."""

    def __init__(self, name: str, is_streaming: bool) -> None:
        """Make a copy. With `is_streaming`, no byte of the destination enters the caches."""
        self.name = name
        self.is_streaming = is_streaming

    def prepare(self, job: Job) -> Copy:
        source = job.contiguous
        destination = job.host[: job.contiguous.numel()]
        if job.direction == Direction.HOST_TO_PAGES:
            source, destination = destination, source
        copy = native().copy
        num_bytes = source.numel()
        addresses = destination.data_ptr(), source.data_ptr()
        return lambda: copy(*addresses, num_bytes, job.num_threads, int(self.is_streaming))


class PageTransfer:
    """The op, from registered pools and descriptors to the last byte."""

    def __init__(self, name: str, is_bundled: bool = True, is_single: bool = False) -> None:
        """Make the method. With `is_single`, it uses one thread whatever the job says."""
        self.name = name
        self.is_bundled = is_bundled
        self.is_single = is_single

    def prepare(self, job: Job) -> Copy:
        num_threads = 1 if self.is_single else job.num_threads
        placement = CALLING_THREAD._replace(num_threads=num_threads)
        return lambda: page_transfer(
            job.memory.pools,
            job.host,
            job.memory.plane_table,
            job.runs,
            job.direction,
            placement=placement,
            is_bundled=self.is_bundled,
        )


class TorchPerPlane:
    """`index_select` or `index_copy_` per plane. The making of views is not timed."""

    name = "torch index_select / index_copy_ per plane"

    def prepare(self, job: Job) -> Copy:
        ids = torch.from_numpy(job.pages)
        pairs = [self._views(job, index) for index in range(len(job.memory.tensors))]
        if job.direction == Direction.PAGES_TO_HOST:

            def copy() -> None:
                for in_pages, in_host in pairs:
                    torch.index_select(in_pages, 0, ids, out=in_host)
        else:

            def copy() -> None:
                for in_pages, in_host in pairs:
                    in_pages.index_copy_(0, ids, in_host)

        return copy

    @staticmethod
    def _views(job: Job, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of both sides as pages of two-byte elements, as in KV caches."""
        page_bytes = job.memory.layout.planes[index].page_bytes
        offset = job.memory.layout.host_offsets[index]
        in_host = job.host[offset : offset + page_bytes * len(job.pages)]
        return tuple(
            side.view(torch.bfloat16).view(-1, page_bytes // 2)
            for side in (job.memory.tensors[index], in_host)
        )


def time_in_turns(
    methods: Sequence[Method],
    memory: ColdMemory,
    direction: Direction,
    is_random: bool,
    num_threads: int,
    rounds: int,
) -> dict[str, list[int]]:
    """The nanoseconds of every method, by round.

    One thread is timed by its CPU time, and two threads by the clock.

    Args:
        methods: The methods, which take turns.
        memory: The memory of pages and chunks.
        direction: The direction of the copies.
        is_random: Whether pages are in random order.
        num_threads: The number of threads of a copy.
        rounds: The number of rounds.
    """
    clock_ns = time.thread_time_ns if num_threads == 1 else time.perf_counter_ns
    torch.set_num_threads(num_threads)
    times_ns: dict[str, list[int]] = {method.name: [] for method in methods}
    for index in range(rounds):
        # The order alternates, so that no method always comes first.
        ordered = methods if index % 2 else methods[::-1]
        for method in ordered:
            copy = method.prepare(Job.next(memory, direction, is_random, num_threads))
            started_ns = clock_ns()
            copy()
            times_ns[method.name].append(clock_ns() - started_ns)
    return times_ns
