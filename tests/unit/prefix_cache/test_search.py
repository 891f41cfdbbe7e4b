# SPDX-License-Identifier: Apache-2.0
"""Searches against a literal reading of upstream's, block by block."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from unit.retention.lookup_model import find_in_group

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.prefix_cache.keys import GroupKeys
from vllm_ascend_kvext.prefix_cache.search import (
    leading_blocks,
    state_end,
    upper_bound_blocks,
    window_end,
    window_hit_blocks,
)
from vllm_ascend_kvext.retention.geometry import GroupGeometry

HASHES_PER_BLOCK = 2
PRESENT = st.lists(st.booleans(), max_size=90)
MOSTLY_PRESENT = st.lists(st.sampled_from((True,) * 7 + (False,)), max_size=90)
RARELY_PRESENT = st.lists(st.sampled_from((False,) * 7 + (True,)), max_size=90)
COLUMNS = st.one_of(PRESENT, MOSTLY_PRESENT, RARELY_PRESENT)


class CountingTable:
    """Cached blocks by key, and how often it was asked for each."""

    def __init__(self, keys: Sequence[GroupKeys], hashes: list[bytes], columns: list[list[bool]]):
        self.blocks: dict[bytes, object] = {}
        for group, column in zip(keys, columns, strict=True):
            for index, is_present in enumerate(column):
                if is_present:
                    name = f"{group.suffix!r}/{index}"
                    block: object = name if index % 5 else {1: name, 2: "another"}
                    self.blocks[group.at(hashes, index)] = block
        self.probes: list[bytes] = []

    def get(self, key: bytes) -> object | None:
        self.probes.append(key)
        return self.blocks.get(key)


def table_of(columns: list[list[bool]]) -> tuple[CountingTable, list, list]:
    num_blocks = max(map(len, columns))
    hashes = [index.to_bytes(4, "big") * 8 for index in range(num_blocks * HASHES_PER_BLOCK)]
    keys = [GroupKeys.of_group(n, HASHES_PER_BLOCK) for n in range(len(columns))]
    return CountingTable(keys, hashes, columns), keys, hashes


def in_all(columns: list[list[bool]]) -> list[bool]:
    return [all(row) for row in zip(*columns, strict=False)]


@given(
    st.lists(COLUMNS, min_size=1, max_size=3),
    st.integers(1, 12),
    st.integers(1, 6),
    st.booleans(),
)
def test_window_hit_is_that_of_upstream(columns, window_blocks, unit, drops):
    table, keys, hashes = table_of(columns)
    present = in_all(columns)
    need = window_blocks + drops
    end = window_end(table.get, keys, hashes, len(present), need, unit, int(drops))
    found = window_hit_blocks(end, need, unit, int(drops))
    group = GroupGeometry(GroupKind.WINDOW, 1, window_blocks + 1)
    cached = {index for index, is_present in enumerate(present) if is_present}
    assert found == find_in_group(group, cached, len(present), unit, drops)


@given(COLUMNS, st.integers(1, 12), st.integers(1, 6), st.booleans())
def test_window_search_costs_no_more_than_two_passes(column, window_blocks, unit, drops):
    table, keys, hashes = table_of([column])
    window_end(table.get, keys, hashes, len(column), window_blocks, unit, int(drops))
    assert len(table.probes) <= 2 * len(column) + 1


@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 400))
def test_a_window_that_is_lost_costs_one_probe_per_window(need, unit, num_blocks):
    table, keys, hashes = table_of([[False] * num_blocks])
    assert window_end(table.get, keys, hashes, num_blocks, need, unit, 0) == 0
    stride = -(-need // unit) * unit
    assert len(table.probes) <= num_blocks // stride + need + 1


@given(st.lists(COLUMNS, min_size=1, max_size=3))
def test_leading_blocks_are_the_first_copies_up_to_the_first_hole(columns):
    table, keys, hashes = table_of(columns)
    present = in_all(columns)
    found = leading_blocks(table.get, keys, hashes, len(present))
    count = [*present, False].index(False)
    assert found == [[f"{k.suffix!r}/{index}" for index in range(count)] for k in keys]


@given(COLUMNS)
def test_upper_bound_is_never_too_low(column):
    table, keys, hashes = table_of([column])
    bound = upper_bound_blocks(table.get, keys[0], hashes, len(column))
    assert [*column, False].index(False) <= bound <= len(column)


@given(st.integers(0, 300), st.integers(0, 300))
def test_upper_bound_is_exact_without_holes(num_cached, num_lost):
    table, keys, hashes = table_of([[True] * num_cached + [False] * num_lost])
    bound = upper_bound_blocks(table.get, keys[0], hashes, num_cached + num_lost)
    assert bound == num_cached
    assert len(table.probes) <= 11


@given(st.lists(COLUMNS, min_size=1, max_size=3), st.integers(1, 6))
def test_state_is_the_last_aligned_one_in_all_groups(columns, unit):
    table, keys, hashes = table_of(columns)
    present = in_all(columns)
    ends = [n + 1 for n, is_there in enumerate(present) if is_there and (n + 1) % unit == 0]
    assert state_end(table.get, keys, hashes, len(present), unit) == max(ends, default=0)
