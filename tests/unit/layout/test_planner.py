# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The form of plans, and refused arguments. `test_store_and_load` tests the bytes."""

from __future__ import annotations

import math

import pytest
from support.layout.byte_memory import make_group, make_layout

from vllm_ascend_kvext.errors import TokenRangeError
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.planner import TransferPlanner
from vllm_ascend_kvext.layout.row_map import StoredChunk
from vllm_ascend_kvext.layout.rows import kept_rows, needed_rows
from vllm_ascend_kvext.layout.transfer_plan import PlacedChunk, TablePart
from vllm_ascend_kvext.token_range import TokenRange

NUM_PAGES = 4000

DEEPSEEK = make_layout(
    (
        make_group(0, GroupKind.FULL, 32, 4, (24, 2), compress_ratio=4),
        make_group(1, GroupKind.FULL, 1024, 128, (24,), compress_ratio=128, first_storage=2),
        make_group(2, GroupKind.WINDOW, 16, 1, (24, 24), 20, first_storage=3),
        make_group(3, GroupKind.WINDOW, 2, 1, (100,), 8, holds_states=True, first_storage=5),
        make_group(4, GroupKind.WINDOW, 8, 1, (64,), 128, 128, holds_states=True, first_storage=6),
    ),
    NUM_PAGES,
)
"""The layout that vLLM-Ascend makes for DeepSeek-V4, but with smaller numbers."""

IDS = [[1, 2, 3], [4], [5] * 6, [6] * 48, [7] * 12]
"""Pages of 96 tokens, for `DEEPSEEK`."""


def test_a_block_table_that_is_too_short_is_refused() -> None:
    planner = TransferPlanner(DEEPSEEK)
    short = [[1, 2], *IDS[1:]]
    with pytest.raises(TokenRangeError, match="group 0: expected 3, found 2"):
        planner.plan_store([PlacedChunk(TokenRange(0, 96))], short)
    stored = StoredChunk(planner.plan_store([PlacedChunk(TokenRange(0, 96))], IDS).row_maps[0])
    with pytest.raises(TokenRangeError, match="group 0: expected 3, found 2"):
        planner.plan_load([stored], TokenRange(0, 96), short)


def test_ids_in_front_of_a_window_are_not_looked_at() -> None:
    """Only runs cost time. The window of a long prompt reads only the end of its list."""

    slices: list[slice] = []

    class Ids(list):
        def __getitem__(self, key):
            slices.append(key)
            return super().__getitem__(key)

    end = 8192
    ids = [Ids([1] * math.ceil(end / each.tokens_per_page)) for each in DEEPSEEK.groups]
    TransferPlanner(DEEPSEEK).plan_store([PlacedChunk(TokenRange(0, end))], ids)
    read = {(key.start, key.stop) for key in slices}
    assert read == {(0, 256), (0, 8), (510, 512), (4092, 4096)}


@pytest.mark.parametrize("tokens_per_row", [1, 128])
def test_as_many_runs_as_pages(tokens_per_row: int) -> None:
    """The number of tokens in a page does not change the number of runs."""
    group = make_group(0, GroupKind.FULL, 16 * tokens_per_row, tokens_per_row, (24,))
    tokens = TokenRange(0, 160 * tokens_per_row)
    planner = TransferPlanner(make_layout([group], NUM_PAGES))
    assert len(planner.plan_store([PlacedChunk(tokens)], [list(range(1, 11))]).runs) == 10


@pytest.mark.parametrize(
    ("tokens", "cut_tokens", "groups", "rows"),
    [
        (TokenRange(0, 1024), 128, (0, 1), [(0, 0, 256), (1, 0, 8)]),
        (TokenRange(8, 92), 16, (0,), [(0, 2, 4), (0, 4, 20), (0, 20, 23)]),
        (TokenRange(8, 16), 16, (0,), [(0, 2, 4)]),
    ],
)
def test_cuts_of_equal_size_are_one_span(
    tokens: TokenRange, cut_tokens: int, groups: tuple[int, ...], rows: list[tuple[int, int, int]]
) -> None:
    """The time of a plan grows with the spans of row maps, and so do messages to workers."""
    planner = TransferPlanner(DEEPSEEK)
    ids = [[1] * 1024 for _ in DEEPSEEK.groups]
    plan = planner.plan_store([PlacedChunk(tokens, 0, groups, cut_tokens)], ids)
    assert [each[:3] for each in plan.row_maps[0]] == rows
    num_cuts = -(-tokens.end_tokens // cut_tokens) - tokens.first_tokens // cut_tokens
    num_planes = sum(len(DEEPSEEK.groups[index].planes) for index in groups)
    assert len(plan.planes) == num_cuts * num_planes
    load = planner.plan_load([StoredChunk(plan.row_maps[0])], tokens, ids, groups)
    assert not load.missing
    assert load.host_bytes == plan.host_bytes


@pytest.mark.parametrize("bounds", [(3, 3), (4, 3), (-1, 3)])
def test_a_range_has_tokens(bounds: tuple[int, int]) -> None:
    tokens = TokenRange(*bounds)
    for rows_of in (needed_rows, kept_rows):
        with pytest.raises(TokenRangeError, match="token range"):
            rows_of(DEEPSEEK.groups[0], tokens)


def test_part_of_a_block_table_stands_for_the_whole() -> None:
    whole = tuple(range(100, 112))
    part = TablePart(4, whole[4:])
    assert len(part) == len(whole)
    assert part[3:3] == ()
    for first in range(4, 14):
        for end in range(14):
            assert part[first:end] == whole[first:end]
    with pytest.raises(TokenRangeError, match="expected pages from 4 on, found 3"):
        part[3:6]
