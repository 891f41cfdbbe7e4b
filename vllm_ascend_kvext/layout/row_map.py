# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Row maps say which rows of which group a stored chunk has, and where in host memory they lie.

A store writes a row map, and every load of the chunk is planned against it. A row that is not in
the map is not stored. A *section* has room for consecutive rows of one group, plane after plane.
Each plane begins at a multiple of 64 bytes. If the page of a row was null when the chunk was
stored, the room of that row stays unused::

    section of rows 4 to 7     plane 0: row 4 row 5  ---  row 7 | plane 1: row 4 row 5  ---  row 7
    in the map                 rows 4 to 5 and row 7 of that section

A chunk that grows is stored in parts. Each part has its own map, and a load takes all the maps.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_ascend_kvext.layout.model import LayoutGroup
from vllm_ascend_kvext.token_range import TokenRange


class StoredRows(NamedTuple):
    """Rows of one group that are stored, and the section that has room for them.

    The tuples sort by group, then by row. Rows behind the end of the section lie in sections of the
    same size, one for each cut.

    Attributes:
        host_offset_bytes: Where the section begins. A map counts from the start of the chunk's
            place; a plan counts from the start of the host buffer.
        cut_bytes: The distance between the sections of one cut and of the next.
    """

    group: int
    first_row: int
    end_row: int
    section_first_row: int
    section_rows: int
    host_offset_bytes: int
    cut_bytes: int


_ROWS = struct.Struct(f"<{len(StoredRows._fields)}q")


@dataclass(frozen=True, slots=True)
class RowMap:
    """The rows of one stored chunk, or of a part of it.

    The scheduler sends it to the workers with every load. Its form, seven little-endian 64-bit
    integers per `StoredRows`, is small and quick to pickle.
    """

    packed: bytes = b""

    @classmethod
    def of(cls, rows: Iterable[StoredRows]) -> RowMap:
        return cls(b"".join([_ROWS.pack(*each) for each in rows]))

    def __iter__(self) -> Iterator[StoredRows]:
        return map(StoredRows._make, _ROWS.iter_unpack(self.packed))


class StoredChunk(NamedTuple):
    """A row map, and where the chunk begins in the host buffer, a multiple of 64 bytes."""

    rows: RowMap
    host_offset_bytes: int = 0


class MissingRows(NamedTuple):
    """Tokens of one group that a resume needs and that are not stored."""

    group: int
    kv_cache_group_id: int
    tokens: TokenRange


def find_rows(stored: Iterable[StoredChunk], needed: Sequence[range]) -> list[StoredRows]:
    """The needed rows that are in some map, each row once, sorted by group and then by row.

    A map does not say after which token of its page a state was stored. So the caller passes no
    state but the one of the boundary at which the request is to resume.

    Args:
        needed: One range of rows per group.
    """
    bounds = [(rows.start, rows.stop) for rows in needed]
    found = []
    for row_map, place_bytes in stored:
        for group, first_row, end_row, row_0, num_rows, offset_bytes, cut_bytes in row_map:
            first_needed, end_needed = bounds[group]
            if first_row < end_needed and first_needed < end_row:
                found.append(
                    StoredRows(
                        group,
                        max(first_row, first_needed),
                        min(end_row, end_needed),
                        row_0,
                        num_rows,
                        place_bytes + offset_bytes,
                        cut_bytes,
                    )
                )
    found.sort()
    next_row = [rows.start for rows in needed]
    once = []
    for rows in found:
        next_of_group = next_row[rows.group]
        if rows.end_row > next_of_group:
            is_new = rows.first_row >= next_of_group
            once.append(rows if is_new else rows._replace(first_row=next_of_group))
            next_row[rows.group] = rows.end_row
    return once


def missing_rows(
    groups: Sequence[LayoutGroup],
    needed: Sequence[range],
    present: Iterable[StoredRows],
    boundary_tokens: int,
) -> tuple[MissingRows, ...]:
    """The parts of the needed rows that are not present, disjoint, sorted by group and row."""
    next_row = [rows.start for rows in needed]
    gaps = []
    for rows in present:
        if rows.first_row > next_row[rows.group]:
            gaps.append((rows.group, next_row[rows.group], rows.first_row))
        next_row[rows.group] = rows.end_row
    gaps += [
        (group, next_row[group], rows.stop)
        for group, rows in enumerate(needed)
        if next_row[group] < rows.stop
    ]
    missing = []
    for index, first_row, end_row in sorted(gaps):
        group = groups[index]
        end_token = min(end_row * group.tokens_per_row, boundary_tokens)
        tokens = TokenRange(first_row * group.tokens_per_row, end_token)
        missing.append(MissingRows(index, group.kv_cache_group_id, tokens))
    return tuple(missing)
