# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Unique block hashes, for tokens whose KV no other request may find.

A block hash stands for exact KV. Caches, stores and events find KV by block hashes, and must not
take approximate KV for exact KV. So the hashes of a request are random numbers from its first
approximate token on. A request that stores a segment has random hashes behind the sink, too, so
that no cache has the segment.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

_HASH_BYTES = 32


class PrivateHashes:
    """Replaces the hashes of one ``vllm.v1.request.Request``, future hashes included.

    Blocks that end at ``first_tokens`` or before keep their hashes.
    """

    def __init__(self, request: Any, first_tokens: int, hash_block_size: int) -> None:
        self._request = request
        self._num_kept = first_tokens // hash_block_size
        self._hash_block_size = hash_block_size
        self._block_hasher: Callable[[Any], list[bytes]] | None = request._block_hasher
        if self._block_hasher is not None:
            hashes = request.block_hashes
            hashes[self._num_kept :] = [_new_hash() for _ in hashes[self._num_kept :]]
            request._block_hasher = self._hash_new_blocks

    def take_back(self) -> None:
        """Give the request the hashes of its tokens again."""
        if self._block_hasher is None:
            return
        request = self._request
        request._block_hasher = self._block_hasher
        del request.block_hashes[self._num_kept :]
        request.update_block_hashes()

    def _hash_new_blocks(self, request: Any) -> list[bytes]:
        num_blocks = request.num_tokens // self._hash_block_size
        return [_new_hash() for _ in range(num_blocks - len(request.block_hashes))]


def _new_hash() -> bytes:
    return os.urandom(_HASH_BYTES)
