# SPDX-License-Identifier: Apache-2.0
"""Block hashes that nothing else has: for tokens whose KV nobody else is to find.

A block hash stands for exact KV. Where a request's KV is approximate, whoever stores, finds or
reports it by its hashes must not mix it up with the exact one. So from there on its hashes are
random numbers. And a segment that is to be stored is not to be found in a cache, behind its sink.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

_HASH_BYTES = 32


class PrivateHashes:
    """Replaces the hashes of one ``vllm.v1.request.Request``, those to come included.

    Blocks that end at ``first_tokens`` or before keep theirs.
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
        """Give the request the hashes of its tokens."""
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
