# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_kvext.prefix_cache.keys import GroupKeys, KeyScheme

HASHES = [bytes([index]) * 3 for index in range(60)]


@st.composite
def ranges(draw: st.DrawFn, max_index: int) -> range:
    indices = range(max_index)
    part = indices[draw(st.integers(0, max_index)) : draw(st.integers(0, max_index))]
    step = draw(st.sampled_from((1, 2, 7)))
    return part[:: -step if draw(st.booleans()) else step]


@given(st.integers(1, 5), st.sampled_from(KeyScheme), st.data())
def test_keys_of_a_range_are_those_of_its_blocks(hashes_per_block, scheme, data):
    keys = GroupKeys.of_group(3, hashes_per_block, scheme)
    blocks = data.draw(ranges(len(HASHES) // hashes_per_block))
    assert keys.of(HASHES, blocks) == [keys.at(HASHES, index) for index in blocks]


def test_joined_keys_are_upstreams_and_short_ones_their_end():
    joined = GroupKeys.of_group(258, 2, KeyScheme.JOINED).at(HASHES, 4)
    short = GroupKeys.of_group(258, 2, KeyScheme.LAST).at(HASHES, 4)
    assert joined == HASHES[8] + HASHES[9] + b"\0\0\1\2"
    assert short == HASHES[9] + b"\0\0\1\2"


def test_a_block_whose_hashes_are_not_there_has_no_key():
    with pytest.raises(IndexError):
        GroupKeys.of_group(0, 7, KeyScheme.JOINED).at(HASHES, 8)
