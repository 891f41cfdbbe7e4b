# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A shadow of the KV cache: the content of every row of every physical block.

The module knows blocks, rows and digests, but neither requests nor vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence


class KVMemory:
    """The content of physical blocks. A block belongs to one KV cache group at a time.

    If a block is written through another group's block table, it is overwritten. A device does the
    same, because the groups share one pool of bytes.
    """

    def __init__(self) -> None:
        self._owner: dict[int, int] = {}
        self._rows: dict[int, list[int | None]] = {}

    def write(
        self,
        block_id: int,
        group_id: int,
        block_tokens: int,
        first_row: int,
        digests: Sequence[int],
    ) -> None:
        """Put ``digests`` into consecutive rows, beginning with ``first_row``."""
        if self._owner.get(block_id) != group_id:
            self._owner[block_id] = group_id
            self._rows[block_id] = [None] * block_tokens
        self._rows[block_id][first_row : first_row + len(digests)] = digests

    def read(self, block_id: int, group_id: int, first_row: int, num_rows: int) -> list[int | None]:
        """The content of consecutive rows.

        It is ``None`` for rows that this group has not written.
        """
        if self._owner.get(block_id) != group_id:
            return [None] * num_rows
        return self._rows[block_id][first_row : first_row + num_rows]

    def copy(self, source: int, target: int) -> None:
        """Copy the content of one block to another block."""
        if source in self._owner:
            self._owner[target] = self._owner[source]
            self._rows[target] = list(self._rows[source])

    def swap(self, one: int, other: int) -> None:
        """Exchange the contents of two blocks. The checks must find this corruption."""
        for table in (self._owner, self._rows):
            table[one], table[other] = table[other], table[one]
