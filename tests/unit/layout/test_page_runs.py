# SPDX-License-Identifier: Apache-2.0
"""Descriptors against a plan made token by token; where the rows lie in the host buffer."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.errors import TokenRangeError
from vllm_ascend_kvext.layout.host_layout import dense_host_bytes, host_layout
from vllm_ascend_kvext.layout.model import KVLayout, LayoutGroup, Plane, Pool, StatePolicy
from vllm_ascend_kvext.layout.rows import TokenRange, kept_rows
from vllm_ascend_kvext.layout.runs import PlacedChunk, RunPlanner
from vllm_ascend_kvext.transfer.schema import DTYPE, PlaneColumn, RunColumn

NUM_PAGES = 4000

MovedRow = tuple[int, int, int, int]
"""Group, page, row of the page, row of the host."""


def group(
    scheduler_group: int,
    kind: GroupKind,
    tokens_per_page: int,
    tokens_per_row: int,
    row_bytes: tuple[int, ...],
    window_tokens: int = 0,
    restart_tokens: int = 0,
    holds_states: bool = False,
) -> LayoutGroup:
    rows = tokens_per_page // tokens_per_row
    planes = tuple(
        Plane(f"{scheduler_group}.{index}", 0, index * 4096, rows * size, 0, size, "int8", False)
        for index, size in enumerate(row_bytes)
    )
    return LayoutGroup(
        scheduler_group,
        kind,
        tokens_per_page,
        tokens_per_row,
        window_tokens,
        restart_tokens,
        planes,
        holds_states,
    )


DEEPSEEK = KVLayout(
    pools=(Pool(4096, 1 << 40),),
    groups=(
        group(0, GroupKind.FULL, 32, 4, (24, 2)),
        group(1, GroupKind.FULL, 1024, 128, (24,)),
        group(2, GroupKind.WINDOW, 16, 1, (24, 24), window_tokens=20),
        group(3, GroupKind.WINDOW, 2, 1, (100,), window_tokens=8, holds_states=True),
        group(4, GroupKind.WINDOW, 8, 1, (64,), 128, 128, holds_states=True),
    ),
    num_pages=NUM_PAGES,
    num_scheduler_groups=5,
)

SPLIT = KVLayout(
    pools=(Pool(4096, 1 << 40),),
    groups=(
        group(0, GroupKind.FULL, 16, 2, (24, 3)),
        group(0, GroupKind.FULL, 16, 8, (5,)),
        group(2, GroupKind.STATE, 16, 16, (65,), holds_states=True),
    ),
    num_pages=NUM_PAGES,
    num_scheduler_groups=3,
)


def random_block_ids(layout: KVLayout, end: int, seed: int) -> list[list[int]]:
    """Pages in random order, some null; lists as long as vLLM's, or longer."""
    random = np.random.default_rng(seed)
    ids = iter(random.permutation(np.arange(1, NUM_PAGES)).tolist())
    lists: list[list[int]] = [[] for _ in range(layout.num_scheduler_groups)]
    for each in layout.groups:
        if not lists[each.scheduler_group]:
            num_pages = math.ceil(end / each.tokens_per_page) + int(random.integers(2))
            lists[each.scheduler_group] = [
                0 if random.random() < 0.2 else next(ids) for _ in range(num_pages)
            ]
    return lists


def plan_by_row(
    layout: KVLayout, tokens: TokenRange, block_ids: list[list[int]], states: StatePolicy
) -> list[MovedRow]:
    moved = []
    for index, each in enumerate(layout.groups):
        for host_row, row in enumerate(kept_rows(each, tokens, states)):
            page = block_ids[each.scheduler_group][row // each.rows_per_page]
            if page:
                moved.append((index, page, row % each.rows_per_page, host_row))
    return moved


def moved_rows(runs: np.ndarray) -> list[MovedRow]:
    return [
        (group, page, first + step, host + step)
        for group, page, first, count, host in runs.tolist()
        for step in range(count)
    ]


@st.composite
def chunks(draw: st.DrawFn) -> tuple[KVLayout, TokenRange]:
    layout = draw(st.sampled_from([DEEPSEEK, SPLIT]))
    first, length = draw(st.integers(0, 600)), draw(st.integers(1, 600))
    end = first + length
    if layout is SPLIT:
        end = -(-end // 16) * 16
    return layout, TokenRange(first, end)


@given(
    chunk=chunks(),
    seed=st.integers(0, 1000),
    states=st.sampled_from(StatePolicy),
)
def test_runs_move_each_kept_row_that_has_a_page(
    chunk: tuple[KVLayout, TokenRange], seed: int, states: StatePolicy
) -> None:
    layout, tokens = chunk
    block_ids = random_block_ids(layout, tokens.end, seed)
    descriptors = RunPlanner(layout, states).plan([PlacedChunk(tokens)], block_ids)
    expected = plan_by_row(layout, tokens, block_ids, states)
    assert moved_rows(descriptors.runs) == expected
    missing = [
        len(kept_rows(each, tokens, states)) - sum(row[0] == index for row in expected)
        for index, each in enumerate(layout.groups)
    ]
    assert descriptors.rows_missing.tolist() == [missing]
    assert descriptors.is_complete is not any(missing)


@given(chunk=chunks(), seed=st.integers(0, 1000))
def test_tables_have_the_form_that_the_op_takes(
    chunk: tuple[KVLayout, TokenRange], seed: int
) -> None:
    layout, tokens = chunk
    descriptors = RunPlanner(layout).plan(
        [PlacedChunk(tokens)], random_block_ids(layout, tokens.end, seed)
    )
    for table, columns in ((descriptors.planes, PlaneColumn), (descriptors.runs, RunColumn)):
        assert table.dtype == DTYPE and table.flags.c_contiguous
        assert table.ndim == 2 and table.shape[1] == len(columns)
    assert (np.diff(descriptors.runs[:, RunColumn.GROUP]) >= 0).all()


@given(chunk=chunks(), states=st.sampled_from(StatePolicy))
def test_planes_lie_in_the_host_buffer_one_after_the_other(
    chunk: tuple[KVLayout, TokenRange], states: StatePolicy
) -> None:
    """Aligned, disjoint, within the buffer, without more room than alignment takes."""
    layout, tokens = chunk
    placed = host_layout(layout, tokens, states)
    end = 0
    for each, rows, offsets in zip(
        layout.groups, placed.group_rows, placed.plane_offsets_bytes, strict=True
    ):
        assert rows == kept_rows(each, tokens, states)
        for plane, offset in zip(each.planes, offsets, strict=True):
            assert offset % 64 == 0 and end <= offset < end + 64
            end = offset + plane.row_bytes * len(rows)
    assert end <= placed.num_bytes < end + 64
    assert placed.num_bytes % 64 == 0
    assert placed.num_bytes <= dense_host_bytes(layout, tokens)


@given(chunk=chunks(), states=st.sampled_from(StatePolicy))
def test_descriptors_place_planes_as_the_host_layout_does(
    chunk: tuple[KVLayout, TokenRange], states: StatePolicy
) -> None:
    layout, tokens = chunk
    descriptors = RunPlanner(layout, states).plan(
        [PlacedChunk(tokens)], random_block_ids(layout, tokens.end, 0)
    )
    placed = host_layout(layout, tokens, states)
    offsets = [offset for offsets in placed.plane_offsets_bytes for offset in offsets]
    assert descriptors.planes[:, PlaneColumn.HOST_OFFSET_BYTES].tolist() == offsets
    assert descriptors.host_bytes == placed.num_bytes
    assert RunPlanner(layout, states).chunk_bytes(tokens) == placed.num_bytes


def test_planes_are_those_of_the_layout() -> None:
    descriptors = RunPlanner(DEEPSEEK).plan(
        [PlacedChunk(TokenRange(0, 32))], random_block_ids(DEEPSEEK, 32, 0)
    )
    listed = [(i, each, plane) for i, each in enumerate(DEEPSEEK.groups) for plane in each.planes]
    assert descriptors.planes[:, : PlaneColumn.HOST_OFFSET_BYTES].tolist() == [
        [
            index,
            plane.pool,
            plane.base_bytes,
            plane.page_stride_bytes,
            plane.region_offset_bytes,
            plane.row_bytes,
            each.rows_per_page,
            NUM_PAGES,
        ]
        for index, each, plane in listed
    ]


@given(
    layout=st.sampled_from([DEEPSEEK, SPLIT]),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    gaps=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    seed=st.integers(0, 1000),
)
def test_chunks_planned_together_are_the_chunks_one_by_one(
    layout: KVLayout, lengths: list[int], gaps: list[int], seed: int
) -> None:
    """Group numbers and host offsets apart."""
    planner = RunPlanner(layout)
    ends = np.cumsum(lengths) * 16
    chunks, place = [], 0
    for first, end, gap in zip([0, *ends.tolist()], ends.tolist(), gaps, strict=False):
        chunks.append(PlacedChunk(TokenRange(first, end), place))
        place += planner.chunk_bytes(TokenRange(first, end)) + 64 * gap
    block_ids = random_block_ids(layout, int(ends[-1]), seed)
    together = planner.plan(chunks, block_ids)
    num_groups = len(layout.groups)
    planes, runs, missing, host_bytes = [], [], [], []
    for index, chunk in enumerate(chunks):
        alone = planner.plan([PlacedChunk(chunk.tokens)], block_ids)
        alone.planes[:, PlaneColumn.GROUP] += index * num_groups
        alone.planes[:, PlaneColumn.HOST_OFFSET_BYTES] += chunk.host_offset_bytes
        alone.runs[:, RunColumn.GROUP] += index * num_groups
        planes += alone.planes.tolist()
        runs += alone.runs.tolist()
        missing += alone.rows_missing.tolist()
        host_bytes.append(chunk.host_offset_bytes + alone.host_bytes)
    assert together.planes.tolist() == planes
    assert together.runs.tolist() == runs
    assert together.rows_missing.tolist() == missing
    assert together.host_bytes == max(host_bytes)


def test_the_host_buffer_ends_with_the_last_place() -> None:
    """Whichever chunk has it."""
    planner = RunPlanner(SPLIT)
    first, second = TokenRange(0, 32), TokenRange(32, 64)
    behind = planner.chunk_bytes(second)
    chunks = [PlacedChunk(first, behind), PlacedChunk(second)]
    descriptors = planner.plan(chunks, random_block_ids(SPLIT, 64, 0))
    assert descriptors.host_bytes == behind + planner.chunk_bytes(first)


def test_no_chunks_no_work() -> None:
    descriptors = RunPlanner(DEEPSEEK).plan([], [[]] * 5)
    assert descriptors.planes.shape == (0, 9) and descriptors.runs.shape == (0, 5)
    assert descriptors.host_bytes == 0 and descriptors.is_complete


def test_a_null_page_moves_no_other_row() -> None:
    """The row behind a null page lies where it lies without it."""
    block_ids = [[1, 2, 3], [4], [5] * 6, [6] * 48, [7] * 12]
    with_null = [[1, 0, 3], *block_ids[1:]]
    planner = RunPlanner(DEEPSEEK)
    complete = planner.plan([PlacedChunk(TokenRange(0, 96))], block_ids)
    partial = planner.plan([PlacedChunk(TokenRange(0, 96))], with_null)
    assert complete.runs.tolist()[:3] == [[0, 1, 0, 8, 0], [0, 2, 0, 8, 8], [0, 3, 0, 8, 16]]
    assert partial.runs.tolist() == [run for run in complete.runs.tolist() if run[:2] != [0, 2]]
    assert complete.is_complete and not partial.is_complete
    assert partial.rows_missing.tolist() == [[8, 0, 0, 0, 0]]


def test_planes_of_one_plan_are_not_those_of_the_next() -> None:
    planner = RunPlanner(DEEPSEEK)
    first = planner.plan([PlacedChunk(TokenRange(0, 96))], random_block_ids(DEEPSEEK, 96, 0))
    before = first.planes.copy()
    planner.plan([PlacedChunk(TokenRange(0, 512))], random_block_ids(DEEPSEEK, 512, 0))
    assert (first.planes == before).all()


@pytest.mark.parametrize(
    ("block_ids", "message"),
    [
        ([[1]] * 4, "expected 5 lists.*found 4"),
        ([[1, 2], [4], [5] * 6, [6] * 48, [7] * 12], "group 0.*expected 3, found 2"),
        ([[1, 2, NUM_PAGES], [4], [5] * 6, [6] * 48, [7] * 12], f"group 0: found id {NUM_PAGES}"),
        ([[1, 2, 3], [4], [5] * 5 + [-1], [6] * 48, [7] * 12], "group 2: found id -1"),
    ],
)
def test_block_ids_that_do_not_fit_are_refused(block_ids: list[list[int]], message: str) -> None:
    with pytest.raises(TokenRangeError, match=message):
        RunPlanner(DEEPSEEK).plan([PlacedChunk(TokenRange(0, 96))], block_ids)


def test_ids_in_front_of_a_window_are_not_looked_at() -> None:
    """Cost grows with runs: a window of a long prompt reads the end of its list."""

    slices: list[slice] = []

    class Ids(list):
        def __getitem__(self, key):
            slices.append(key)
            return super().__getitem__(key)

    end = 8192
    ids = [Ids([1] * math.ceil(end / each.tokens_per_page)) for each in DEEPSEEK.groups]
    RunPlanner(DEEPSEEK).plan([PlacedChunk(TokenRange(0, end))], ids)
    read = [(key.start, key.stop) for key in slices]
    assert read == [(0, 256), (0, 8), (510, 512), (4092, 4096)]


@pytest.mark.parametrize("tokens_per_row", [1, 128])
def test_as_many_runs_as_pages(tokens_per_row: int) -> None:
    """Whatever a page stands for."""
    layout = KVLayout(
        (Pool(4096, 1 << 40),),
        (group(0, GroupKind.FULL, 16 * tokens_per_row, tokens_per_row, (24,)),),
        NUM_PAGES,
        1,
    )
    tokens = TokenRange(0, 160 * tokens_per_row)
    assert len(RunPlanner(layout).plan([PlacedChunk(tokens)], [list(range(1, 11))]).runs) == 10
