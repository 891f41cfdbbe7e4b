# SPDX-License-Identifier: Apache-2.0
"""What is asked of a planner, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_ascend_kvext.errors import TokenRangeError
from vllm_ascend_kvext.layout.row_map import MissingRows, RowMap
from vllm_ascend_kvext.token_range import TokenRange
from vllm_ascend_kvext.transfer.schema import Table


@dataclass(frozen=True, slots=True)
class TablePart:
    """Part of a block table: what a transfer needs of it, from ``first_page`` on."""

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
    """What to store, and where: its place in the host buffer begins at a multiple of 64.

    ``groups`` are indices in the layout; None stores all. Rows of full attention are of use
    wherever a later request resumes, tails only at one boundary: a connector keeps them apart.
    """

    tokens: TokenRange
    host_offset_bytes: int = 0
    groups: tuple[int, ...] | None = None


class TransferPlan(NamedTuple):
    """A store or a load. Empty tables where there is nothing to move.

    Attributes:
        planes: See ``PlaneColumn``; a group of the tables is a section.
        host_bytes: Where the last section ends: the least size of the host buffer.
        missing: Of a store: what resuming at the end of each chunk needs of its tokens, and has no
            page. Of a load: what resuming at its end needs, and no map has or no page takes; what
            lies before its tokens must be in the pages already.
        row_maps: What each chunk of a store has in host memory once the transfer is done.
    """

    planes: Table
    runs: Table
    host_bytes: int
    missing: tuple[MissingRows, ...]
    row_maps: tuple[RowMap, ...] = ()
