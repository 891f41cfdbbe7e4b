# SPDX-License-Identifier: Apache-2.0
"""Which rows of which group a stored chunk has, and where in host memory they lie.

A store writes a map, and every load of the chunk is planned against it: what is not in the map is
not there. A *section* has room for consecutive rows of one group, plane after plane, each plane at
a multiple of 64 bytes. Rows whose page was null when the chunk was stored leave their room unused::

    section of rows 4 to 7     plane 0: row 4 row 5  ---  row 7 | plane 1: row 4 row 5  ---  row 7
    in the map                 rows 4 to 5 and row 7 of that section

A chunk that grows is stored in parts; each part has a map of its own, and a load takes all of them.
Knows no planes and no block ids.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from vllm_ascend_kvext.layout.errors import RowMapError
from vllm_ascend_kvext.transfer.schema import HOST_ALIGNMENT_BYTES


class StoredRows(NamedTuple):
    """Rows of one group that are there, and the section that has them. Sorts by group, then row.

    Attributes:
        group: Index of the group in the layout.
        first_row: Counted from the request's first token.
        end_row: Behind the last row.
        section_first_row: First row that the section has room for.
        section_rows: Rows that it has room for.
        host_offset_bytes: Where the section begins, from the start of the chunk's place.
    """

    group: int
    first_row: int
    end_row: int
    section_first_row: int
    section_rows: int
    host_offset_bytes: int

    @property
    def is_possible(self) -> bool:
        """Whether a store can have written this."""
        end_row = self.section_first_row + self.section_rows
        return (
            min(self) >= 0
            and self.section_first_row <= self.first_row < self.end_row <= end_row
            and self.host_offset_bytes % HOST_ALIGNMENT_BYTES == 0
        )


_ROWS = struct.Struct(f"<{len(StoredRows._fields)}q")


@dataclass(frozen=True, slots=True)
class RowMap:
    """The rows of one stored chunk, or of a part of it.

    Attributes:
        packed: Six little-endian 64-bit integers per `StoredRows`: plain data that can be kept,
            sent and compared.
    """

    packed: bytes = b""

    @classmethod
    def of(cls, rows: Iterable[StoredRows]) -> RowMap:
        return cls(b"".join([_ROWS.pack(*each) for each in rows]))

    @classmethod
    def parse(cls, packed: bytes) -> RowMap:
        """A map from elsewhere.

        Raises:
            RowMapError: If no store can have written it. Whether it fits a layout is for
                ``HostArrangement.check`` to say.
        """
        if len(packed) % _ROWS.size:
            raise RowMapError(
                f"row map: {len(packed)} bytes are not a multiple of {_ROWS.size}; it was cut off "
                "or is something else: drop the chunk"
            )
        row_map = cls(bytes(packed))
        for rows in row_map:
            if not rows.is_possible:
                raise RowMapError(
                    f"row map: found {rows}, expected rows within the section and an offset that "
                    f"is a multiple of {HOST_ALIGNMENT_BYTES}; drop the chunk"
                )
        return row_map

    def tuples(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """The fields of each `StoredRows`, for loops that have to be fast."""
        return _ROWS.iter_unpack(self.packed)

    def __iter__(self) -> Iterator[StoredRows]:
        return map(StoredRows._make, self.tuples())

    def __len__(self) -> int:
        return len(self.packed) // _ROWS.size


class StoredChunk(NamedTuple):
    """A map, and where the chunk's place begins in the host buffer: a multiple of 64 bytes."""

    rows: RowMap
    host_offset_bytes: int = 0
