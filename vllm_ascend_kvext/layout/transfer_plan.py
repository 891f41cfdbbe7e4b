# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The arguments of a planner, and its results."""

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
    """The part of a block table that a transfer needs. It begins at page ``first_page``."""

    first_page: int
    ids: tuple[int, ...]

    def __len__(self) -> int:
        """Pages of the request up to the end of this part."""
        return self.first_page + len(self.ids)

    def __getitem__(self, pages: slice) -> tuple[int, ...]:
        """The block ids of some pages, which are counted from the request's first page.

        Raises:
            TokenRangeError: If one of the pages lies before this part.
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
"""The block tables of a request, one per KV cache group. A table begins at the request's first
token, and has null blocks, too."""


class PlacedChunk(NamedTuple):
    """A chunk to store, and its place in the host buffer.

    A later request can use rows of full attention wherever it resumes. It can use tails only at
    their own boundary. So a connector stores rows and tails in separate chunks.

    Attributes:
        host_offset_bytes: Where the place begins, a multiple of 64.
        groups: Indices in the layout of the groups to store; None for all groups.
        cut_tokens: See ``HostArrangement.place``.
    """

    tokens: TokenRange
    host_offset_bytes: int = 0
    groups: tuple[int, ...] | None = None
    cut_tokens: int = 0


class TransferPlan(NamedTuple):
    """The plan of a store or a load. Its tables are empty if there is nothing to move.

    Attributes:
        planes: See ``PlaneColumn``. The groups of this table are sections.
        runs: See ``RunColumn``. The groups of this table are sections, too.
        host_bytes: Where the last section ends. The host buffer must have at least this size.
        missing: Rows that a resume needs and that the plan does not move. A store lists such rows
            of each chunk, for example rows without a page. A load lists rows that no map has, and
            rows that have no page to go to. A load does not list rows before its token range: these
            must be in the pages already.
        row_maps: For each chunk of a store, the rows in host memory once the transfer is done.
    """

    planes: Table
    runs: Table
    host_bytes: int
    missing: tuple[MissingRows, ...]
    row_maps: tuple[RowMap, ...] = ()
