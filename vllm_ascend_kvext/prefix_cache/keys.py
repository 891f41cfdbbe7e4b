# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The keys under which a group's blocks are cached, made of a request's hashes.

A request is hashed once, at the smallest block size of all groups. Before vLLM 0.30, the key of a
larger block is all hashes that it spans, one after the other. Since vLLM 0.30, the key is only the
last of these hashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GROUP_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class GroupKeys:
    """The keys of one group.

    A key is the last ``hashes_in_key`` hashes of a block, and then the group id. ``hashes_in_key``
    is 1, or the number of all hashes of a block.
    """

    hashes_per_block: int
    suffix: bytes
    hashes_in_key: int

    @classmethod
    def of_group(cls, group_id: int, hashes_per_block: int, hashes_in_key: int = 0) -> GroupKeys:
        """The keys of a group. With ``hashes_in_key`` 0, all hashes of a block make its key."""
        suffix = group_id.to_bytes(GROUP_ID_BYTES, "big")
        return cls(hashes_per_block, suffix, hashes_in_key or hashes_per_block)

    def at(self, hashes: Sequence[bytes], block_index: int) -> bytes:
        """The key of one block.

        Raises:
            IndexError: If the hashes do not reach to the end of the block.
        """
        stop = (block_index + 1) * self.hashes_per_block
        last_hash = hashes[stop - 1]
        if self.hashes_in_key == 1:
            return last_hash + self.suffix
        return b"".join(hashes[stop - self.hashes_per_block : stop]) + self.suffix

    def of(self, hashes: Sequence[bytes], blocks: range) -> list[bytes]:
        """The keys of several blocks, in their order. The hashes must reach to the last block."""
        suffix = self.suffix
        per_block = self.hashes_per_block
        if self.hashes_in_key == 1:
            first, stop = ((index + 1) * per_block - 1 for index in (blocks.start, blocks.stop))
            lasts = hashes[_slice_of(range(first, stop, blocks.step * per_block))]
            return [hash_ + suffix for hash_ in lasts]
        return [
            b"".join(hashes[index * per_block : (index + 1) * per_block]) + suffix
            for index in blocks
        ]


def _slice_of(indices: range) -> slice:
    """The slice that takes exactly these indices, none of which is negative."""
    if indices.step > 0 or indices.stop >= 0:
        return slice(indices.start, indices.stop, indices.step)
    if not indices:
        return slice(0, 0)
    return slice(indices.start, None, indices.step)
