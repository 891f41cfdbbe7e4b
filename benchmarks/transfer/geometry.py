# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The measured layouts, and cold memory for them.

The module knows only sizes. `vllm_ascend_kvext.layout` finds the layout of a real model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from vllm_ascend_kvext.transfer.pools import Pools
from vllm_ascend_kvext.transfer.schema import Direction, PlaneColumn, Table

ARENA_BYTES = 1600 << 20
HOST_BYTES = 256 << 20
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class PlaneShape:
    """One plane: a page has ``rows_per_page`` rows of ``row_bytes``, and nothing else."""

    row_bytes: int
    rows_per_page: int

    @property
    def page_bytes(self) -> int:
        return self.row_bytes * self.rows_per_page


@dataclass(frozen=True)
class Layout:
    """The planes in the order of layers, and the pages of a chunk.

    Attributes:
        name: The printed name.
        planes_of_layer: The planes of one layer. All layers have the same planes.
        num_layers: The number of layers.
        pages_per_chunk: The pages of each plane that one chunk fills.
    """

    name: str
    planes_of_layer: tuple[PlaneShape, ...]
    num_layers: int
    pages_per_chunk: int

    @cached_property
    def planes(self) -> tuple[PlaneShape, ...]:
        return self.planes_of_layer * self.num_layers

    @cached_property
    def num_pages(self) -> int:
        """The pages per pool, null page included. All pools together then fill the arena."""
        return ARENA_BYTES // sum(plane.page_bytes for plane in self.planes)

    @cached_property
    def host_offsets(self) -> tuple[int, ...]:
        """The host offset of each plane: first planes of all layers, then second planes, ..."""
        offsets = {}
        end = 0
        width = len(self.planes_of_layer)
        for index in sorted(range(len(self.planes)), key=lambda index: (index % width, index)):
            offsets[index] = end
            end += -(-self.planes[index].page_bytes * self.pages_per_chunk // 64) * 64
        return tuple(offsets[index] for index in range(len(self.planes)))

    @cached_property
    def chunk_bytes(self) -> int:
        return self.pages_per_chunk * sum(plane.page_bytes for plane in self.planes)

    @cached_property
    def host_bytes(self) -> int:
        return max(
            offset + plane.page_bytes * self.pages_per_chunk
            for offset, plane in zip(self.host_offsets, self.planes, strict=True)
        )


LAYOUTS = (
    Layout("llama-like, blocks of 32 KB", (PlaneShape(2048, 16),) * 2, 32, 16),
    Layout(
        "DeepSeek-V4 pages",
        (PlaneShape(2048, 64), PlaneShape(1024, 64), PlaneShape(132, 64), PlaneShape(128, 64)),
        22,
        2,
    ),
    Layout(
        "DeepSeek-V4 compressed rows",
        (PlaneShape(1024, 64), PlaneShape(512, 64), PlaneShape(132, 64), PlaneShape(32, 2)),
        22,
        1,
    ),
    Layout("pages of 1 KB", (PlaneShape(64, 16),) * 2, 32, 64),
)


class ColdMemory:
    """Pools in one arena and host chunks, both many times larger than the caches."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.arena = torch.randint(0, 256, (ARENA_BYTES,), dtype=torch.uint8)
        self.host = torch.randint(0, 256, (HOST_BYTES,), dtype=torch.uint8)
        sizes = [plane.page_bytes * layout.num_pages for plane in layout.planes]
        self.starts = np.cumsum([0, *sizes[:-1]]).tolist()
        self.tensors = [
            self.arena[start : start + size] for start, size in zip(self.starts, sizes, strict=True)
        ]
        self.pools = Pools(self.tensors)
        self._next_chunk = 0
        self._random = np.random.default_rng(1)

    @cached_property
    def plane_table(self) -> Table:
        # The op needs one transfer group per number of rows in a page.
        numbers = sorted({plane.rows_per_page for plane in self.layout.planes})
        rows = []
        for index, plane in enumerate(self.layout.planes):
            rows.append(
                (
                    numbers.index(plane.rows_per_page),
                    index,
                    0,
                    plane.page_bytes,
                    0,
                    plane.row_bytes,
                    plane.rows_per_page,
                    self.layout.num_pages,
                    self.layout.host_offsets[index],
                )
            )
        return np.array(rows, np.int64)

    def run_table(self, pages: Table) -> Table:
        """The runs of whole pages, in the order of the chunk, for every group."""
        groups = {
            int(row[PlaneColumn.GROUP]): int(row[PlaneColumn.ROWS_PER_PAGE])
            for row in self.plane_table
        }
        rows = [
            (group, page, 0, num_rows, index * num_rows)
            for group, num_rows in sorted(groups.items())
            for index, page in enumerate(pages.tolist())
        ]
        return np.array(rows, np.int64)

    def next_pages(self, is_random: bool) -> Table:
        """The page ids of one chunk, independent of earlier chunks."""
        count = self.layout.pages_per_chunk
        last = self.layout.num_pages
        if is_random:
            return 1 + self._random.choice(last - 1, count, replace=False)
        first = int(self._random.integers(1, last - count))
        return np.arange(first, first + count)

    def next_host(self) -> torch.Tensor:
        """The host memory of the chunk that was used longest ago."""
        size = -(-self.layout.host_bytes // _PAGE) * _PAGE
        if self._next_chunk + size > HOST_BYTES:
            self._next_chunk = 0
        chunk = self.host[self._next_chunk : self._next_chunk + self.layout.host_bytes]
        self._next_chunk += size
        return chunk

    def contiguous(self) -> torch.Tensor:
        """A stretch of the arena with the bytes of a chunk, for memcpy."""
        first = int(self._random.integers(0, ARENA_BYTES - self.layout.chunk_bytes)) // 64 * 64
        return self.arena[first : first + self.layout.chunk_bytes]


@dataclass(frozen=True, slots=True)
class Job:
    """One copy of one chunk. Every method gets such a job."""

    memory: ColdMemory
    direction: Direction
    pages: Table
    runs: Table
    host: torch.Tensor
    contiguous: torch.Tensor
    num_threads: int

    @classmethod
    def next(
        cls, memory: ColdMemory, direction: Direction, is_random: bool, num_threads: int
    ) -> Job:
        pages = memory.next_pages(is_random)
        return cls(
            memory=memory,
            direction=direction,
            pages=pages,
            runs=memory.run_table(pages),
            host=memory.next_host(),
            contiguous=memory.contiguous(),
            num_threads=num_threads,
        )
