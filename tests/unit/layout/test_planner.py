# SPDX-License-Identifier: Apache-2.0
"""Plans by example: the tables, the bytes of chunks, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.layout.byte_memory import make_group, make_layout

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout import page_runs, planner
from vllm_ascend_kvext.layout.errors import RowMapError, TokenRangeError
from vllm_ascend_kvext.layout.host_arrangement import HostArrangement, dense_chunk_bytes
from vllm_ascend_kvext.layout.model import KVLayout, StatePolicy
from vllm_ascend_kvext.layout.planner import TransferPlanner
from vllm_ascend_kvext.layout.row_map import RowMap, StoredChunk, StoredRows
from vllm_ascend_kvext.layout.rows import TokenRange, kept_rows
from vllm_ascend_kvext.layout.transfer_plan import PlacedChunk
from vllm_ascend_kvext.transfer.schema import DTYPE, PlaneColumn, RunColumn

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
"""What vLLM-Ascend makes of DeepSeek-V4, on a smaller scale."""

PACKED = make_layout([make_group(0, GroupKind.FULL, 16, 16, (48,))], NUM_PAGES)
"""A page is one row, as on a CPU."""

MAMBA = make_layout(
    (
        make_group(0, GroupKind.FULL, 16, 1, (8,)),
        make_group(1, GroupKind.STATE, 16, 16, (65,), holds_states=True, first_storage=1),
    ),
    NUM_PAGES,
)

IDS = [[1, 2, 3], [4], [5] * 6, [6] * 48, [7] * 12]
"""Of 96 tokens of `DEEPSEEK`."""


def store(layout: KVLayout, first: int, end: int, ids: list[list[int]]) -> StoredChunk:
    plan = TransferPlanner(layout).plan_store([PlacedChunk(TokenRange(first, end))], ids)
    return StoredChunk(plan.row_maps[0])


def full_ids(layout: KVLayout, end: int) -> list[list[int]]:
    fresh = iter(range(1, NUM_PAGES))
    lists: list[list[int]] = [[] for _ in range(layout.num_scheduler_groups)]
    for group in layout.groups:
        lists[group.scheduler_group] = [
            next(fresh) for _ in range(math.ceil(end / group.tokens_per_page))
        ]
    return lists


def test_a_null_page_moves_no_other_row() -> None:
    """The row behind a null page lies where it lies without it."""
    planner = TransferPlanner(DEEPSEEK)
    chunk = [PlacedChunk(TokenRange(0, 96))]
    complete = planner.plan_store(chunk, IDS)
    partial = planner.plan_store(chunk, [[1, 0, 3], *IDS[1:]])
    assert complete.runs.tolist()[:3] == [[0, 1, 0, 8, 0], [0, 2, 0, 8, 8], [0, 3, 0, 8, 16]]
    assert partial.runs.tolist() == [run for run in complete.runs.tolist() if run[:2] != [0, 2]]
    assert partial.planes.tolist() == complete.planes.tolist()
    assert complete.is_complete and not partial.is_complete
    assert partial.missing == (((0, 0, TokenRange(32, 64)),),)


def test_what_a_store_missed_its_load_misses() -> None:
    """Though the pages of the load are all there."""
    stored = store(DEEPSEEK, 0, 96, [[1, 0, 3], *IDS[1:]])
    plan = TransferPlanner(DEEPSEEK).plan_load([stored], TokenRange(0, 96), IDS)
    assert not plan.is_complete
    assert plan.missing == ((0, 0, TokenRange(32, 64)),)
    assert plan.runs[:, RunColumn.PAGE].tolist()[:2] == [1, 3]


def test_a_part_of_a_chunk_is_read_where_the_whole_was_stored() -> None:
    stored = store(PACKED, 0, 64, [[1, 2, 3, 4]])
    plan = TransferPlanner(PACKED).plan_load([stored], TokenRange(32, 48), [[0, 0, 9]])
    assert plan.is_complete
    assert plan.runs.tolist() == [[0, 9, 0, 1, 2]]  # row 2 of the section


def test_tokens_behind_the_last_whole_row_are_missing() -> None:
    """A store drops them; neither it nor a load calls that complete."""
    planner = TransferPlanner(PACKED)
    plan = planner.plan_store([PlacedChunk(TokenRange(0, 40))], [[1, 2, 3]])
    assert plan.missing == (((0, 0, TokenRange(32, 40)),),)
    stored = [StoredChunk(plan.row_maps[0])]
    assert planner.plan_load(stored, TokenRange(0, 40), [[1, 2, 3]]).missing == plan.missing[0]
    assert planner.plan_load(stored, TokenRange(0, 32), [[1, 2]]).is_complete


def test_tokens_that_have_no_compressed_entry_yet_are_in_the_states() -> None:
    """Token 96 to 98 of ratio 4: the compressor's states have them."""
    layout = make_layout(
        (
            make_group(0, GroupKind.FULL, 32, 4, (24,), compress_ratio=4),
            make_group(1, GroupKind.WINDOW, 2, 1, (8,), 8, holds_states=True, first_storage=1),
        ),
        NUM_PAGES,
    )
    ids = full_ids(layout, 99)
    stored = store(layout, 0, 99, ids)
    planner = TransferPlanner(layout)
    assert planner.plan_load([stored], TokenRange(0, 99), ids).is_complete
    assert not planner.plan_load([stored], TokenRange(0, 98), ids).is_complete  # no states there


def test_a_tail_serves_the_boundary_it_was_stored_for() -> None:
    ids = full_ids(DEEPSEEK, 1024)
    stored = store(DEEPSEEK, 0, 1024, ids)
    planner = TransferPlanner(DEEPSEEK)
    assert planner.plan_load([stored], TokenRange(0, 1024), ids).is_complete
    at_512 = planner.plan_load([stored], TokenRange(0, 512), ids)
    assert {missing.group for missing in at_512.missing} == {2, 3}


def test_a_chunk_that_grows_is_loaded_from_its_parts() -> None:
    """First stored to the end of a prompt; the next turn adds the rest."""
    ids = full_ids(DEEPSEEK, 1024)
    first = store(DEEPSEEK, 0, 640, ids)
    planner = TransferPlanner(DEEPSEEK)
    place_bytes = planner.chunk_bytes(TokenRange(0, 640))
    rest = StoredChunk(store(DEEPSEEK, 640, 1024, ids).rows, place_bytes)
    assert not planner.find_missing([first], TokenRange(0, 640))
    assert planner.find_missing([first], TokenRange(0, 1024))
    plan = planner.plan_load([rest, first], TokenRange(0, 1024), ids)
    assert plan.is_complete
    assert plan.host_bytes == place_bytes + planner.chunk_bytes(TokenRange(640, 1024))


def test_a_hole_that_another_chunk_fills_is_loaded() -> None:
    """Host bytes are named once: the op refuses a section that is named on both sides of a hole."""
    layout = make_layout([make_group(0, GroupKind.FULL, 4, 1, (16, 3))], NUM_PAGES)
    planner = TransferPlanner(layout)
    tokens = TokenRange(0, 12)
    (around,) = planner.plan_store([PlacedChunk(tokens)], [[1, 0, 3]]).row_maps
    (between,) = planner.plan_store([PlacedChunk(TokenRange(4, 8))], [[1, 2, 3]]).row_maps
    stored = [StoredChunk(around), StoredChunk(between, 1024)]
    plan = planner.plan_load(stored, tokens, [[11, 12, 13]])
    assert plan.is_complete
    assert plan.planes[:, PlaneColumn.HOST_OFFSET_BYTES].tolist() == [0, 192, 1024, 1088]
    assert plan.runs.tolist() == [[0, 11, 0, 4, 0], [0, 13, 0, 4, 8], [1, 12, 0, 4, 0]]


def test_a_load_of_many_chunks_moves_one_tail() -> None:
    """The tails of the chunks in between are of no use to it."""
    ids = full_ids(DEEPSEEK, 4096)
    planner = TransferPlanner(DEEPSEEK)
    chunks = [TokenRange(first, first + 1024) for first in range(0, 4096, 1024)]
    stored = [store(DEEPSEEK, chunk.first, chunk.end, ids) for chunk in chunks]
    plan = planner.plan_load(stored, TokenRange(0, 4096), ids)
    assert plan.is_complete
    tail = [page for page in plan.runs[:, RunColumn.PAGE].tolist() if page in ids[2]]
    assert tail == ids[2][4064 // 16 :]


def test_a_state_within_a_page_is_missing() -> None:
    """There is a state at the end of each page, and none at token 24."""
    ids = full_ids(MAMBA, 32)
    plan = TransferPlanner(MAMBA).plan_store([PlacedChunk(TokenRange(0, 24))], ids)
    assert plan.missing == (((1, 1, TokenRange(16, 24)),),)
    later = store(MAMBA, 0, 32, ids)
    planner = TransferPlanner(MAMBA)
    assert planner.plan_load([later], TokenRange(0, 32), ids).is_complete
    at_24 = planner.plan_load([later], TokenRange(0, 24), ids)
    assert at_24.missing == ((1, 1, TokenRange(16, 24)),)
    assert ids[1][1] not in at_24.runs[:, RunColumn.PAGE]


def test_a_load_that_takes_nothing_is_an_empty_plan() -> None:
    planner = TransferPlanner(DEEPSEEK)
    ids = full_ids(DEEPSEEK, 96)
    nothing_asked = planner.plan_load([store(DEEPSEEK, 0, 96, IDS)], TokenRange(0, 96), ids, ())
    nothing_stored = planner.plan_load([], TokenRange(0, 96), ids)
    no_chunks = planner.plan_store([], [[]] * 5)
    for plan in (nothing_asked, nothing_stored, no_chunks):
        assert plan.planes.shape == (0, 9) and plan.runs.shape == (0, 5)
        assert plan.planes.dtype == plan.runs.dtype == DTYPE
        assert plan.host_bytes == 0
    assert nothing_asked.is_complete and no_chunks.is_complete
    assert not nothing_stored.is_complete


def test_tables_have_the_form_that_the_op_takes() -> None:
    ids = full_ids(DEEPSEEK, 2048)
    planner = TransferPlanner(DEEPSEEK)
    chunks = [PlacedChunk(TokenRange(0, 1000)), PlacedChunk(TokenRange(1000, 2048), 1 << 20)]
    stored = planner.plan_store(chunks, ids)
    maps = [
        StoredChunk(row_map, chunk.host_offset_bytes)
        for row_map, chunk in zip(stored.row_maps, chunks, strict=True)
    ]
    for plan in (stored, planner.plan_load(maps, TokenRange(0, 2048), ids)):
        for table, columns in ((plan.planes, PlaneColumn), (plan.runs, RunColumn)):
            assert table.dtype == DTYPE and table.flags.c_contiguous
            assert table.ndim == 2 and table.shape[1] == len(columns)
        assert (np.diff(plan.runs[:, RunColumn.GROUP]) >= 0).all()
        assert set(plan.planes[:, PlaneColumn.GROUP]) == set(plan.runs[:, RunColumn.GROUP])


@given(seed=st.integers(0, 1000), num_spans=st.integers(1, 6))
def test_few_pages_and_many_are_planned_alike(seed: int, num_spans: int) -> None:
    random = np.random.default_rng(seed)
    spans, pages = [], []
    for section in range(num_spans):
        first_row, rows_per_page = int(random.integers(0, 40)), int(random.integers(1, 9))
        end_row = first_row + int(random.integers(1, 40))
        num_pages = -(-end_row // rows_per_page) - first_row // rows_per_page
        pages += random.integers(0, 5, num_pages).tolist()
        section_first_row = int(random.integers(0, first_row + 1))
        spans.append(
            page_runs.RowSpan(
                section, first_row, end_row, section_first_row, rows_per_page, num_pages
            )
        )
    by_page = page_runs._runs_by_page(spans, pages)
    assert by_page.tolist() == page_runs._runs_by_array(spans, pages).tolist()


@pytest.mark.parametrize("most_runs", [0, 30])
def test_runs_that_are_not_remembered_are_the_same(
    most_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [PlacedChunk(TokenRange(0, 200)), PlacedChunk(TokenRange(200, 1000), 1 << 30)]
    block_ids = full_ids(DEEPSEEK, 1000)
    expected = TransferPlanner(DEEPSEEK).plan_store(chunks, block_ids)
    monkeypatch.setattr(planner, "_MAX_REMEMBERED_RUNS", most_runs)
    forgetful = TransferPlanner(DEEPSEEK)
    for _ in range(2):
        assert forgetful.plan_store(chunks, block_ids).runs.tolist() == expected.runs.tolist()


def test_plans_share_no_memory() -> None:
    made = TransferPlanner(DEEPSEEK)
    chunks, block_ids = [PlacedChunk(TokenRange(0, 200))], full_ids(DEEPSEEK, 200)
    first = made.plan_store(chunks, block_ids)
    expected = first.runs.tolist(), first.planes.tolist()
    first.runs[:] = first.planes[:] = -1
    second = made.plan_store(chunks, block_ids)
    assert (second.runs.tolist(), second.planes.tolist()) == expected


def test_planes_are_those_of_the_layout() -> None:
    plan = TransferPlanner(DEEPSEEK).plan_store(
        [PlacedChunk(TokenRange(0, 1000))], full_ids(DEEPSEEK, 1000)
    )
    listed = [(i, each, plane) for i, each in enumerate(DEEPSEEK.groups) for plane in each.planes]
    assert plan.planes[:, : PlaneColumn.HOST_OFFSET_BYTES].tolist() == [
        [
            index,
            plane.storage,
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
    layout=st.sampled_from([DEEPSEEK, MAMBA]),
    first=st.integers(0, 600),
    length=st.integers(1, 600),
    states=st.sampled_from(StatePolicy),
)
def test_kept_rows_lie_in_the_host_buffer_plane_after_plane(
    layout: KVLayout, first: int, length: int, states: StatePolicy
) -> None:
    """Aligned, disjoint, and without more room than alignment takes."""
    tokens = TokenRange(first, first + length)
    planner = TransferPlanner(layout, states)
    plan = planner.plan_store([PlacedChunk(tokens)], full_ids(layout, tokens.end))
    rows_of = [kept_rows(group, tokens, states) for group in layout.groups]
    expected_bytes = [
        plane.row_bytes * len(rows)
        for group, rows in zip(layout.groups, rows_of, strict=True)
        for plane in group.planes
        if rows
    ]
    end = 0
    for offset, num_bytes in zip(
        plan.planes[:, PlaneColumn.HOST_OFFSET_BYTES].tolist(), expected_bytes, strict=True
    ):
        assert offset % 64 == 0 and end <= offset < end + 64
        end = offset + num_bytes
    assert end <= plan.host_bytes < end + 64
    assert plan.host_bytes == planner.chunk_bytes(tokens)
    assert plan.host_bytes <= dense_chunk_bytes(layout, tokens)


def test_planes_of_one_plan_are_not_those_of_the_next() -> None:
    planner = TransferPlanner(PACKED)
    first = planner.plan_store([PlacedChunk(TokenRange(0, 64))], full_ids(PACKED, 64))
    before = first.planes.copy()
    planner.plan_store([PlacedChunk(TokenRange(0, 64), 128)], full_ids(PACKED, 64))
    assert (first.planes == before).all()


@pytest.mark.parametrize(
    ("block_ids", "message"),
    [
        ([[1]] * 4, "expected 5 lists.*found 4"),
        ([[1, 2], [4], [5] * 6, [6] * 48, [7] * 12], "group 0: expected 3, found 2"),
        (
            [[1, 2, NUM_PAGES], [4], [5] * 6, [6] * 48, [7] * 12],
            f"found id {NUM_PAGES}, expected 0 to {NUM_PAGES - 1}",
        ),
        ([[1, 2, 3], [4], [5] * 5 + [-1], [6] * 48, [7] * 12], "found id -1"),
    ],
)
def test_block_ids_that_do_not_fit_are_refused(block_ids: list[list[int]], message: str) -> None:
    planner = TransferPlanner(DEEPSEEK)
    with pytest.raises(TokenRangeError, match=message):
        planner.plan_store([PlacedChunk(TokenRange(0, 96))], block_ids)
    with pytest.raises(TokenRangeError, match=message):
        planner.plan_load([store(DEEPSEEK, 0, 96, IDS)], TokenRange(0, 96), block_ids)


def test_places_that_are_not_aligned_are_refused() -> None:
    planner = TransferPlanner(PACKED)
    with pytest.raises(TokenRangeError, match=r"multiple of 64.*found 32"):
        planner.plan_store([PlacedChunk(TokenRange(0, 16), 32)], [[1]])
    stored = store(PACKED, 0, 16, [[1]])
    with pytest.raises(TokenRangeError, match=r"multiple of 64.*found -64"):
        planner.plan_load([StoredChunk(stored.rows, -64)], TokenRange(0, 16), [[1]])


def test_ids_in_front_of_a_window_are_not_looked_at() -> None:
    """Cost grows with runs: a window of a long prompt reads the end of its list."""

    slices: list[slice] = []

    class Ids(list):
        def __getitem__(self, key):
            slices.append(key)
            return super().__getitem__(key)

    end = 8192
    ids = [Ids([1] * math.ceil(end / each.tokens_per_page)) for each in DEEPSEEK.groups]
    TransferPlanner(DEEPSEEK).plan_store([PlacedChunk(TokenRange(0, end))], ids)
    read = [(key.start, key.stop) for key in slices]
    assert read == [(0, 256), (0, 8), (510, 512), (4092, 4096)]


@pytest.mark.parametrize("tokens_per_row", [1, 128])
def test_as_many_runs_as_pages(tokens_per_row: int) -> None:
    """Whatever a page stands for."""
    group = make_group(0, GroupKind.FULL, 16 * tokens_per_row, tokens_per_row, (24,))
    tokens = TokenRange(0, 160 * tokens_per_row)
    planner = TransferPlanner(make_layout([group], NUM_PAGES))
    assert len(planner.plan_store([PlacedChunk(tokens)], [list(range(1, 11))]).runs) == 10


ROWS = StoredRows(0, 8, 12, 8, 24, 64)


def test_a_row_map_survives_as_bytes() -> None:
    row_map = RowMap.of([ROWS, ROWS._replace(first_row=20, end_row=32)])
    assert RowMap.parse(row_map.packed) == row_map
    assert list(RowMap.parse(row_map.packed)) == [ROWS, ROWS._replace(first_row=20, end_row=32)]
    assert len(row_map) == 2 and len(row_map.packed) == 2 * 48
    assert hash(row_map) == hash(RowMap.parse(bytes(row_map.packed)))


@pytest.mark.parametrize(
    "packed",
    [
        RowMap.of([ROWS]).packed[:-1],
        RowMap.of([ROWS._replace(group=-1)]).packed,
        RowMap.of([ROWS._replace(end_row=8)]).packed,
        RowMap.of([ROWS._replace(end_row=33)]).packed,
        RowMap.of([ROWS._replace(first_row=7)]).packed,
        RowMap.of([ROWS._replace(host_offset_bytes=32)]).packed,
        RowMap.of([ROWS._replace(host_offset_bytes=-64)]).packed,
    ],
)
def test_bytes_that_no_store_wrote_are_refused(packed: bytes) -> None:
    with pytest.raises(RowMapError, match=r"row map: .*drop the chunk"):
        RowMap.parse(packed)


@pytest.mark.parametrize(
    ("rows", "num_bytes", "message"),
    [
        ([StoredRows(5, 0, 8, 0, 8, 0)], 1 << 20, "group 5, this layout has 5"),
        ([StoredRows(0, 0, 8, 0, 8, 0)], 192, "end at byte 256, the chunk's place has 192"),
        (
            [StoredRows(0, 0, 8, 0, 8, 0), StoredRows(1, 0, 1, 0, 1, 128)],
            1 << 20,
            "before byte 256",
        ),
    ],
)
def test_maps_of_another_layout_are_refused(
    rows: list[StoredRows], num_bytes: int, message: str
) -> None:
    """Group 0 has rows of 24 and 2 bytes: 8 of them take 192 and 64."""
    with pytest.raises(RowMapError, match=message):
        HostArrangement(DEEPSEEK).check(RowMap.of(rows), num_bytes)


@pytest.mark.parametrize("section_rows", [1 << 60, (1 << 62) // 3, 1 << 62, (1 << 63) - 1])
def test_a_section_of_more_bytes_than_63_bits_hold_is_refused(section_rows: int) -> None:
    """Offsets that wrap around would pass for small ones."""
    rows = StoredRows(0, 0, 8, 0, section_rows, 0)
    with pytest.raises(RowMapError, match=f"found {section_rows} rows .*drop the chunk"):
        HostArrangement(DEEPSEEK).check(RowMap.parse(RowMap.of([rows]).packed), 1 << 40)


@pytest.mark.parametrize("groups", [(1,), (-1,), (0, 7)])
def test_groups_to_move_are_those_of_the_layout(groups: tuple[int, ...]) -> None:
    """Nothing is needed of a group that does not exist: such a plan would say complete."""
    planner = TransferPlanner(PACKED)
    with pytest.raises(TokenRangeError, match="groups: expected indices in the layout, 0 to 0"):
        planner.plan_load([], TokenRange(0, 16), [[1]], groups)
    with pytest.raises(TokenRangeError, match="groups: expected indices in the layout, 0 to 0"):
        planner.find_missing([], TokenRange(0, 16), groups)
    for _ in range(2):  # a refusal is not remembered as an empty chunk
        with pytest.raises(TokenRangeError, match="groups: expected indices in the layout, 0 to 0"):
            planner.plan_store([PlacedChunk(TokenRange(0, 16), groups=groups)], [[1]])


def test_a_load_refuses_groups_that_the_layout_has_not() -> None:
    stored = StoredChunk(RowMap.of([StoredRows(3, 0, 8, 0, 8, 0)]))
    with pytest.raises(RowMapError, match="group 3, this layout has 1"):
        TransferPlanner(PACKED).plan_load([stored], TokenRange(0, 16), [[1]])
