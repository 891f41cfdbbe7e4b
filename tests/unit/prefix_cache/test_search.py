# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""How often searches ask the table. ``test_block_lookup`` compares what they find."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_kvext.prefix_cache.keys import GroupKeys
from vllm_ascend_kvext.prefix_cache.search import window_end

COLUMNS = st.one_of(
    st.lists(st.sampled_from(values), max_size=90)
    for values in ((True, False), (True,) * 7 + (False,), (False,) * 7 + (True,))
)
"""Whether each block is cached."""


class CountingTable:
    """The cached blocks of one group by key, and the number of times that each was asked for."""

    def __init__(self, column: list[bool]) -> None:
        self.keys = GroupKeys.of_group(0, 2)
        self.hashes = [index.to_bytes(4, "big") * 8 for index in range(2 * len(column))]
        self.blocks = {
            self.keys.at(self.hashes, index): f"block {index}"
            for index, is_present in enumerate(column)
            if is_present
        }
        self.probes: list[bytes] = []

    def get(self, key: bytes) -> object | None:
        self.probes.append(key)
        return self.blocks.get(key)


@given(COLUMNS, st.integers(1, 12), st.integers(1, 6), st.booleans())
def test_window_search_costs_no_more_than_two_passes(column, window_blocks, unit, drops):
    table = CountingTable(column)
    window_end(table.get, [table.keys], table.hashes, len(column), window_blocks, unit, int(drops))
    assert len(table.probes) <= 2 * len(column) + 1


@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 400))
def test_a_window_that_is_lost_costs_one_probe_per_window(need, unit, num_blocks):
    table = CountingTable([False] * num_blocks)
    assert window_end(table.get, [table.keys], table.hashes, num_blocks, need, unit, 0) == 0
    stride = -(-need // unit) * unit
    assert len(table.probes) <= num_blocks // stride + need + 1
