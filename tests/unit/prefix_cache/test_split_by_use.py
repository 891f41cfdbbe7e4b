# SPDX-License-Identifier: Apache-2.0
"""Cached and uncached blocks of one list are told apart, wherever they lie."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from vllm_ascend_kvext.patches.fast_prefix_cache.block_pool import split_by_use


@pytest.mark.parametrize("num_blocks", range(9))
def test_every_pattern(num_blocks: int) -> None:
    for pattern in itertools.product((None, b"key"), repeat=num_blocks):
        blocks = [SimpleNamespace(_block_hash=key) for key in pattern]
        cached, uncached = split_by_use(blocks)
        assert cached == [block for block in blocks if block._block_hash]
        assert uncached == [block for block in blocks if not block._block_hash]
        assert [id(b) for b in cached] == [id(b) for b in blocks if b._block_hash]
