# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_kvext.prefix_cache.keys import GroupKeys

HASHES = [bytes([index]) * 3 for index in range(60)]


@st.composite
def ranges(draw: st.DrawFn, max_index: int) -> range:
    indices = range(max_index)
    part = indices[draw(st.integers(0, max_index)) : draw(st.integers(0, max_index))]
    step = draw(st.sampled_from((1, 2, 7)))
    return part[:: -step if draw(st.booleans()) else step]


@given(st.integers(1, 5), st.booleans(), st.data())
def test_keys_of_a_range_are_those_of_its_blocks(hashes_per_block, is_last, data):
    keys = GroupKeys.of_group(3, hashes_per_block, int(is_last))
    blocks = data.draw(ranges(len(HASHES) // hashes_per_block))
    assert keys.of(HASHES, blocks) == [keys.at(HASHES, index) for index in blocks]


def test_a_key_is_all_hashes_of_a_block_and_the_group_id():
    key = GroupKeys.of_group(258, 2).at(HASHES, 4)
    assert key == HASHES[8] + HASHES[9] + b"\0\0\1\2"


def test_a_key_may_be_the_last_of_them():
    assert GroupKeys.of_group(258, 2, hashes_in_key=1).at(HASHES, 4) == HASHES[9] + b"\0\0\1\2"


def test_a_block_whose_hashes_are_not_there_has_no_key():
    with pytest.raises(IndexError):
        GroupKeys.of_group(0, 7).at(HASHES, 8)
