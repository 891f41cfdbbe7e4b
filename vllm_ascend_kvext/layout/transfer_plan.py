# SPDX-License-Identifier: Apache-2.0
"""What is asked of a planner, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_ascend_kvext.layout.errors import TokenRangeError
from vllm_ascend_kvext.layout.row_map import RowMap
from vllm_ascend_kvext.layout.rows import TokenRange
from vllm_ascend_kvext.layout.stored_rows import MissingRows
from vllm_ascend_kvext.transfer.schema import Table


@dataclass(frozen=True, slots=True)
class TablePart:
    """Part of a block table: what a transfer needs of it, without the pages before.

    Attributes:
        first_page: Pages of the request before this part.
        ids: Block ids from there on, null blocks included.
    """

    first_page: int
    ids: tuple[int, ...]

    def __len__(self) -> int:
        """Pages of the request up to the end of this part."""
        return self.first_page + len(self.ids)

    def __getitem__(self, pages: slice) -> tuple[int, ...]:
        """Block ids of some pages, counted from the request's first.

        Raises:
            TokenRangeError: If some lie before this part.
        """
        if pages.start >= pages.stop:
            return ()
        if pages.start < self.first_page:
            raise TokenRangeError(
                f"block ids: expected pages from {self.first_page} on, found {pages.start}; pass "
                "the part of the table that the transfer needs"
            )
        return self.ids[pages.start - self.first_page : pages.stop - self.first_page]


BlockIds = Sequence[Sequence[int] | TablePart]
"""Of a request from its first token on, one table per KV cache group, null blocks included."""


class PlacedChunk(NamedTuple):
    """What to store, and where.

    Attributes:
        tokens: Counted from the request's first.
        host_offset_bytes: Where its place in the host buffer begins: a multiple of 64. It takes
            ``TransferPlanner.chunk_bytes`` from there.
        groups: Indices in the layout of the groups to store; all of them if None. Rows of full
            attention are of use wherever a later request resumes, tails only at one boundary: a
            connector keeps them apart.
    """

    tokens: TokenRange
    host_offset_bytes: int = 0
    groups: tuple[int, ...] | None = None


class StorePlan(NamedTuple):
    """A transfer from pages to host memory. Empty tables where there is nothing to move.

    Attributes:
        planes: See ``PlaneColumn``; a group of the tables is a section.
        runs: See ``RunColumn``.
        host_bytes: Where the last section ends: the least size of the host buffer.
        row_maps: What each chunk has in host memory once the transfer is done.
        missing: By chunk: what resuming at its end needs of its rows and its map lacks.
    """

    planes: Table
    runs: Table
    host_bytes: int
    row_maps: tuple[RowMap, ...]
    missing: tuple[tuple[MissingRows, ...], ...]

    @property
    def is_complete(self) -> bool:
        """Whether every chunk has what resuming at its end needs of it."""
        return not any(self.missing)


class LoadPlan(NamedTuple):
    """A transfer from host memory to pages. Empty tables where there is nothing to move.

    Attributes:
        planes: See ``PlaneColumn``; a group of the tables is a section.
        runs: See ``RunColumn``.
        host_bytes: Where the last section that is read ends.
        missing: What resuming at the end of the range needs, and no map has or no page takes.
    """

    planes: Table
    runs: Table
    host_bytes: int
    missing: tuple[MissingRows, ...]

    @property
    def is_complete(self) -> bool:
        """Whether a request can resume at the end of the range, in the groups asked for.

        What it needs of the tokens before the range must be in its pages already.
        """
        return not self.missing
