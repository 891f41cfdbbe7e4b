# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Rows of single tokens, in the pages of a worker and in host memory.

A *row* holds the elements of one token in a plane, in the order in which the model writes them:
head by head, element by element. A *slot* is the place of a token in the pages of a KV cache group:
its page times the tokens per page, plus its row in the page. A *section* of host memory has room
for the rows of consecutive tokens, plane after plane. Each plane begins at a multiple of 64 bytes::

    section of 3 rows    keys of layer 0: row 0 row 1 row 2 | values of layer 0: row 0 ...

If the workers of a host share host memory, an entry has a section for each of their different
contents, one behind the other.

This module knows no requests, and imports no torch at run time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from vllm_ascend_kvext.errors import SegmentError
from vllm_ascend_kvext.layout.model import NULL_PAGE
from vllm_ascend_kvext.layout.transfer_plan import TablePart
from vllm_ascend_kvext.transfer.schema import HOST_ALIGNMENT_BYTES, RowDtype

if TYPE_CHECKING:
    import torch

    from vllm_ascend_kvext.segments.keys.rotary import RotarySignature

Slots = Mapping[int, npt.NDArray[np.int64]]
"""Slots of the same tokens, by KV cache group. shape: [num_tokens]. Each slot occurs once."""


@dataclass(frozen=True, slots=True)
class TokenPlane:
    """The keys, or the values, of one layer of a KV cache group.

    If heads share a latent, a row has one head. ``keys`` says how keys turn with their position; it
    is None for values.
    """

    layer_name: str
    group: int
    num_heads: int
    head_elements: int
    dtype: RowDtype
    keys: RotarySignature | None

    @property
    def row_bytes(self) -> int:
        return self.num_heads * self.head_elements * self.dtype.element_bytes


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """How one worker lays out its tokens in sections.

    ``row_bytes`` has the bytes of one token, by plane. ``window_tokens`` is the largest sliding
    window, the reading token included; it is 0 if the model has no window. ``num_sections`` is the
    number of sections of an entry, one for each different content of the workers that have the same
    host memory; ``section`` is that of this worker.
    """

    row_bytes: tuple[int, ...]
    window_tokens: int = 0
    num_sections: int = 1
    section: int = 0

    def plane_offsets_bytes(self, section_rows: int) -> list[int]:
        """The offsets at which the planes of a section begin, followed by the offset of its end."""
        sizes = (row_bytes * section_rows for row_bytes in self.row_bytes)
        aligned = (num_bytes + -num_bytes % HOST_ALIGNMENT_BYTES for num_bytes in sizes)
        return list(accumulate(aligned, initial=0))

    def section_bytes(self, section_rows: int) -> int:
        """Size of a section."""
        return self.plane_offsets_bytes(section_rows)[-1]

    def num_bytes(self, section_rows: int) -> int:
        """Size of an entry: of all its sections."""
        return self.num_sections * self.section_bytes(section_rows)


class SegmentRows(NamedTuple):
    """Consecutive tokens of a request, and their rows in one section.

    The entry begins at ``offset_bytes`` of the host buffer, a multiple of 64. Each of its sections
    has room for ``section_rows`` rows; ``first_row`` is the row of the first token. A load moves
    keys by ``shift_tokens`` positions. A store has ``token_ids``, with which the keys are checked.
    """

    first_tokens: int
    end_tokens: int
    offset_bytes: int
    section_rows: int
    first_row: int
    shift_tokens: int = 0
    token_ids: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        return self.end_tokens - self.first_tokens


class HostRows(NamedTuple):
    """Rows of consecutive tokens in host memory (dtype: uint8, contiguous), plane after plane.

    Row 0 of each plane lies at a multiple of 64 bytes. ``first_row`` is the row of the first token.
    """

    memory: torch.Tensor
    plane_offsets_bytes: Sequence[int]
    first_row: int = 0


class TokenPages(Protocol):
    """The pages of a worker. Methods may be called by several threads at once."""

    @property
    def planes(self) -> tuple[TokenPlane, ...]:
        """The planes in the order of the model's layers, keys before values."""
        ...

    @property
    def tokens_per_page(self) -> Mapping[int, int]:
        """The tokens per page, by KV cache group."""
        ...

    @property
    def num_pages(self) -> int:
        """The number of pages, page 0 included. Page 0 is the null page, and holds no slot."""
        ...

    def read(self, slots: Slots, rows: HostRows) -> None:
        """Copy the rows of the tokens in these slots out of pages, in every plane."""
        ...

    def write(self, slots: Slots, rows: HostRows) -> None:
        """Copy rows into pages. No other byte of the pages changes."""
        ...

    def read_plane(self, index: int, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """Return a copy of rows of one plane. shape: [num_tokens, row_bytes]."""
        ...


def slots_of(
    what: str,
    first_tokens: int,
    end_tokens: int,
    table: TablePart,
    tokens_per_page: int,
    num_pages: int,
) -> npt.NDArray[np.int64]:
    """The slots of consecutive tokens of a request in the pages of one KV cache group.

    ``table`` is a part of the request's block table; it must cover these tokens. In an error,
    ``what`` names the owner of the tokens and the table.

    Raises:
        SegmentError: The part does not cover the tokens, or a page is null or does not exist.
    """
    first_page, end_page = first_tokens // tokens_per_page, -(-end_tokens // tokens_per_page)
    end_of_table = table.first_page + len(table.ids)
    if first_page < table.first_page or end_page > end_of_table:
        raise SegmentError(
            f"{what}: expected pages {first_page} to {end_page - 1}, found {table.first_page} to "
            f"{end_of_table - 1}. Pass the part of the table that the tokens need."
        )
    ids = np.array(table.ids[first_page - table.first_page : end_page - table.first_page], np.int64)
    is_wrong = (ids <= NULL_PAGE) | (ids >= num_pages)
    if is_wrong.any():
        index = int(np.argmax(is_wrong))
        found = int(ids[index])
        null = ", the null page" if found == NULL_PAGE else ""
        raise SegmentError(
            f"{what}: expected pages 1 to {num_pages - 1}, found {found} for page "
            f"{first_page + index} of the request{null}. Leave out tokens whose pages are gone."
        )
    pages, in_page = np.divmod(np.arange(first_tokens, end_tokens, dtype=np.int64), tokens_per_page)
    slots: npt.NDArray[np.int64] = ids[pages - first_page] * tokens_per_page + in_page
    return slots
