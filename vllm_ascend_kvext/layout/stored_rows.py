# SPDX-License-Identifier: Apache-2.0
"""Finds rows in row maps, and says which are in none.

Knows groups and maps; knows no planes, no block ids and no transfers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from vllm_ascend_kvext.layout.errors import RowMapError, TokenRangeError
from vllm_ascend_kvext.layout.model import LayoutGroup
from vllm_ascend_kvext.layout.row_map import StoredChunk, StoredRows
from vllm_ascend_kvext.layout.rows import TokenRange, has_state_at
from vllm_ascend_kvext.transfer.schema import HOST_ALIGNMENT_BYTES


class MissingRows(NamedTuple):
    """Rows that resuming needs and that are not there.

    Attributes:
        group: Index of the group in the layout.
        scheduler_group: Index of its KV cache group.
        tokens: What the rows hold, as far as it is needed.
    """

    group: int
    scheduler_group: int
    tokens: TokenRange


def find_rows(
    groups: Sequence[LayoutGroup],
    stored: Iterable[StoredChunk],
    needed: Sequence[range],
    boundary_tokens: int,
) -> list[StoredRows]:
    """The needed rows that some map has, each once, by group and row; offsets are the buffer's.

    Args:
        groups: Of the layout.
        stored: Where to look.
        needed: Rows of each group.
        boundary_tokens: Where the request is to resume.

    Raises:
        RowMapError: If a map has a group that the layout has not.
        TokenRangeError: If a chunk's place does not begin at a multiple of 64 bytes.
    """
    bounds = [
        (rows.start, rows.stop) if has_state_at(group, boundary_tokens) else (0, 0)
        for group, rows in zip(groups, needed, strict=True)
    ]
    found = []
    for row_map, place_bytes in stored:
        check_alignment(place_bytes)
        for rows in row_map:
            if rows.group >= len(bounds):
                raise RowMapError(
                    f"row map: found group {rows.group}, this layout has {len(bounds)}; it belongs "
                    "to another layout: drop the chunk"
                )
            first_row, end_row = bounds[rows.group]
            first_row, end_row = max(first_row, rows.first_row), min(end_row, rows.end_row)
            if first_row < end_row:
                found.append(
                    StoredRows(
                        rows.group,
                        first_row,
                        end_row,
                        rows.section_first_row,
                        rows.section_rows,
                        place_bytes + rows.host_offset_bytes,
                    )
                )
    found.sort()
    return list(_each_row_once(found))


def missing_rows(
    groups: Sequence[LayoutGroup],
    needed: Sequence[range],
    present: Iterable[tuple[int, int, int]],
    boundary_tokens: int,
) -> tuple[MissingRows, ...]:
    """What of the needed rows is not present.

    Args:
        groups: Of the layout.
        needed: Rows of each group.
        present: Group, first and end row: disjoint parts of what is needed, by group and row.
        boundary_tokens: Where the request is to resume.
    """
    next_row = [rows.start for rows in needed]
    gaps = []
    for index, first_row, end_row in present:
        if first_row > next_row[index]:
            gaps.append((index, next_row[index], first_row))
        next_row[index] = end_row
    for index, rows in enumerate(needed):
        if next_row[index] < rows.stop:
            gaps.append((index, next_row[index], rows.stop))
    missing = []
    for index, first_row, end_row in sorted(gaps):
        tokens_per_row = groups[index].tokens_per_row
        end_token = min(end_row * tokens_per_row, boundary_tokens)
        tokens = TokenRange(first_row * tokens_per_row, end_token)
        missing.append(MissingRows(index, groups[index].scheduler_group, tokens))
    return tuple(missing)


def check_alignment(host_offset_bytes: int) -> None:
    """Raise ``TokenRangeError`` unless a chunk can be placed at this offset."""
    if host_offset_bytes < 0 or host_offset_bytes % HOST_ALIGNMENT_BYTES:
        raise TokenRangeError(
            f"host offset: expected a multiple of {HOST_ALIGNMENT_BYTES} from 0 on, found "
            f"{host_offset_bytes}; place chunks at such offsets"
        )


def _each_row_once(found: Iterable[StoredRows]) -> Iterator[StoredRows]:
    group, next_row = -1, 0
    for rows in found:
        if rows.group != group:
            group, next_row = rows.group, 0
        if rows.end_row > next_row:
            yield rows if rows.first_row >= next_row else rows._replace(first_row=next_row)
            next_row = rows.end_row
