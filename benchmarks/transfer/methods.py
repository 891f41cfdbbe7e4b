# SPDX-License-Identifier: Apache-2.0
"""Ways to move one chunk. Each prepares, outside the clock, a function that copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from transfer.geometry import Job, Layout
from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.transfer.page_transfer import page_transfer
from vllm_ascend_kvext.transfer.schema import Direction

Copy = Callable[[], None]


class Method(Protocol):
    """A way to move a chunk.

    Attributes:
        name: As printed.
        is_plane_major: Whether its host bytes are those of `page_transfer`.
    """

    name: str
    is_plane_major: bool

    def serves(self, layout: Layout) -> bool: ...

    def prepare(self, job: Job) -> Copy: ...


class PlainCopy:
    """As many bytes from one place to another, in one piece: what no scattered copy beats."""

    is_plane_major = False

    def __init__(self, name: str, is_streaming: bool) -> None:
        """`is_streaming` writes past the caches, which no byte of the destination then enters."""
        self.name = name
        self.is_streaming = is_streaming

    def serves(self, layout: Layout) -> bool:
        return True

    def prepare(self, job: Job) -> Copy:
        source, destination = job.contiguous, job.host[: job.contiguous.numel()]
        if job.direction == Direction.HOST_TO_PAGES:
            source, destination = destination, source
        copy, num_bytes = native().copy, source.numel()
        addresses = destination.data_ptr(), source.data_ptr()
        return lambda: copy(*addresses, num_bytes, job.num_threads, int(self.is_streaming))


class PageTransfer:
    """The op, from registered pools and descriptors to the last byte."""

    is_plane_major = True

    def __init__(self, name: str, is_bundled: bool = True, is_single: bool = False) -> None:
        """`is_single` keeps to one thread, whatever the job says."""
        self.name = name
        self.is_bundled = is_bundled
        self.is_single = is_single

    def serves(self, layout: Layout) -> bool:
        return True

    def prepare(self, job: Job) -> Copy:
        return lambda: page_transfer(
            job.memory.pools,
            job.host,
            job.memory.plane_table,
            job.runs,
            job.direction,
            num_threads=1 if self.is_single else job.num_threads,
            is_bundled=self.is_bundled,
        )


class TorchPerPlane:
    """`index_select` or `index_copy_` per plane; the views are made outside the clock."""

    name = "torch index_select / index_copy_ per plane"
    is_plane_major = True

    def serves(self, layout: Layout) -> bool:
        return True

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
        """Both sides as pages of two-byte elements, as KV caches have them."""
        page_bytes = job.memory.layout.planes[index].page_bytes
        offset = job.memory.layout.host_offsets[index]
        in_host = job.host[offset : offset + page_bytes * len(job.pages)]
        return tuple(
            side.view(torch.bfloat16).view(-1, page_bytes // 2)
            for side in (job.memory.tensors[index], in_host)
        )
