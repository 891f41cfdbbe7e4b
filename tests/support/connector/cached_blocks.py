# SPDX-License-Identifier: Apache-2.0
"""Whether each block of the local prefix cache holds what its hash says.

For layouts with one group of full attention: there a block holds the rows of its own tokens.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from support.connector.simulated_engine import SimulatedEngine
from support.scheduler.token_stream import TokenStream
from support.scheduler.workload import RequestPlan


class CachedBlocks:
    """The bytes that belong to each hash, known from the requests that have had it.

    Args:
        engine: Whose blocks are looked at.

    Attributes:
        num_checked: Blocks that were looked at so far.
    """

    def __init__(self, engine: SimulatedEngine) -> None:
        (group,) = engine.layout.groups
        assert group.block_tokens == engine.hash_block_size
        self._engine = engine
        self._block_tokens = group.block_tokens
        self._streams: dict[str, TokenStream] = {}
        self._num_known: Counter[str] = Counter()
        self._digests: dict[bytes, list[int]] = {}
        self.num_checked = 0

    def expect(self, plan: RequestPlan) -> None:
        """A request is added to the engine."""
        self._streams[plan.request_id] = plan.new_stream()

    def check(self) -> None:
        """Look at every block that has a hash.

        Raises:
            WrongBytesError: If one holds bytes of other tokens, or of none.
            AssertionError: If a block has a hash, but the cache does not know it by this hash.
        """
        self._learn()
        pool = self._engine.block_pool
        cached = [block for block in pool.blocks if block.block_hash is not None]
        for block in cached:
            assert not block.is_null
            found = pool.cached_block_hash_to_block._cache.get(block.block_hash)
            is_known = found is block or (isinstance(found, dict) and block.block_id in found)
            assert is_known, f"{block} has a hash by which the cache does not find it"
        if not cached:
            return
        # As if one request had all of these blocks, one behind the other.
        table = [block.block_id for block in cached]
        digests = [digest for block in cached for digest in self._digests[block.block_hash]]
        for worker in self._engine.workers:
            worker.contents.check_rows([table], np.array(digests, np.uint64), 0, len(digests))
        self.num_checked += len(cached)

    def _learn(self) -> None:
        """Take in the hashes that requests have got since the last check."""
        for request_id, stream in self._streams.items():
            request = self._engine.requests[request_id]
            hashes, first = request.block_hashes, self._num_known[request_id]
            if len(hashes) == first:
                continue
            stream.extend(request.all_token_ids[len(stream) :])
            for index in range(first, len(hashes)):
                of_block = slice(index * self._block_tokens, (index + 1) * self._block_tokens)
                key = make_block_hash_with_group_id(hashes[index], 0)
                self._digests[key] = stream.digests[of_block]
            self._num_known[request_id] = len(hashes)
