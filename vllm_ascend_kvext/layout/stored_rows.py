# SPDX-License-Identifier: Apache-2.0
"""Finds rows in row maps, and says which are in none.

Knows groups and maps; knows no planes, no block ids and no transfers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from vllm_ascend_kvext.layout.errors import RowMapError, TokenRangeError
from vllm_ascend_kvext.layout.model import LayoutGroup
from vllm_ascend_kvext.layout.row_map import StoredChunk
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
) -> list[tuple[int, int, int, int, int, int]]:
    """The needed rows that some map has, each once, by group and row.

    Returns:
        Fields as of ``StoredRows``; offsets are those in the host buffer.

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
    num_groups = len(bounds)
    found = []
    for row_map, place_bytes in stored:
        check_alignment(place_bytes)
        for index, first_row, end_row, section_first_row, section_rows, offset in row_map.tuples():
            if not 0 <= index < num_groups:
                raise RowMapError(
                    f"row map: found group {index}, this layout has {num_groups}; it belongs to "
                    "another layout: drop the chunk"
                )
            first_needed, end_needed = bounds[index]
            if first_row < end_needed and first_needed < end_row:
                found.append(
                    (
                        index,
                        first_row if first_row > first_needed else first_needed,
                        end_row if end_row < end_needed else end_needed,
                        section_first_row,
                        section_rows,
                        place_bytes + offset,
                    )
                )
    found.sort()
    return _each_row_once(found)


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


def _each_row_once(
    found: Sequence[tuple[int, int, int, int, int, int]],
) -> list[tuple[int, int, int, int, int, int]]:
    group, next_row = -1, 0
    once = []
    for rows in found:
        if rows[0] != group:
            group, next_row = rows[0], 0
        if rows[2] > next_row:
            once.append(rows if rows[1] >= next_row else (group, next_row, *rows[2:]))
            next_row = rows[2]
    return once
