# SPDX-License-Identifier: Apache-2.0
"""How many checkpoints need each block, against a plain counter."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_kvext.retention.checkpoints import BlockNeeds, block_ids

NUM_BLOCKS = 10
tails = st.lists(st.sets(st.integers(0, NUM_BLOCKS - 1)).map(sorted), max_size=8)


@given(tails=tails)
def test_counts_are_those_of_a_counter(tails: list[list[int]]) -> None:
    needs, expected = BlockNeeds(NUM_BLOCKS), Counter[int]()
    for tail in tails:
        new = [i for i in tail if not expected[i]]
        assert needs.add(block_ids(tail)).tolist() == new
        expected.update(tail)
        assert [needs.count[i] for i in range(NUM_BLOCKS)] == [
            expected[i] for i in range(NUM_BLOCKS)
        ]
    for tail in tails:
        assert needs.only_here(block_ids(tail)).tolist() == [i for i in tail if expected[i] == 1]
        share = sum(1 / expected[i] for i in tail)
        assert needs.share(block_ids(tail)) == pytest.approx(share)
        expected.subtract(tail)
        last = [i for i in tail if not expected[i]]
        assert needs.remove(block_ids(tail)).tolist() == last
    assert not any(needs.count)


def test_nothing_is_needed_after_clear() -> None:
    needs = BlockNeeds(3)
    needs.add(block_ids([0, 2]))
    needs.forget(0)
    assert list(needs.count) == [0, 0, 1]
    needs.clear()
    assert not any(needs.count)
